"""Instruction forms that compilers seldom emit, against values written down or computed apart from the simulator."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from flamia.conformance.simulator.machine import faults
from tests.simulator.kernels import ONE, run
from tests.simulator.single import apply, crossed
from tests.simulator.tensor_kernel import tensor_image, tensor_kernel
from tests.simulator.test_bulk_tensor import launch


def bits64(x: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def float64(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def bits32(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


TINY, SMALL = 5e-324, 2.0**-1022
VALUES = [0.0, -0.0, 1.5, -2.25, 3.0, TINY, -TINY, SMALL, -1e308, math.inf, -math.inf, math.nan]
A, B = crossed([bits64(x) for x in VALUES], [bits64(x) for x in VALUES])


def is_nan(bits):
    return math.isnan(float64(bits))


def smaller(x, y, sign):
    """min of PTX, or max for ``sign`` -1: a number rather than NaN, -0 below 0."""
    if math.isnan(x) or math.isnan(y):
        return y if math.isnan(x) else x
    if x == y == 0:
        return x if math.copysign(1, x) * sign < 0 else y
    return x if (x < y) == (sign > 0) else y


@pytest.mark.parametrize(("form", "sign"), [("min.f64", 1), ("max.f64", -1)])
def test_extrema_of_doubles(form, sign):
    for a, b, got in zip(A, B, apply(form, "f64", ("f64", A), ("f64", B)), strict=True):
        want = smaller(float64(a), float64(b), sign)
        assert is_nan(got) if math.isnan(want) else got == bits64(want), (float64(a), float64(b), float64(got))


def test_signs_of_doubles():
    got = apply("copysign.f64", "f64", ("f64", A), ("f64", B))
    assert got == [(b & (1 << 63) - 1) | (a & 1 << 63) for a, b in zip(A, B, strict=True)]
    numbers = [a for a in A if not is_nan(a)]
    assert apply("abs.f64", "f64", ("f64", numbers)) == [a & (1 << 63) - 1 for a in numbers]
    assert apply("neg.f64", "f64", ("f64", numbers)) == [a ^ 1 << 63 for a in numbers]


KINDS = {
    "finite": math.isfinite,
    "infinite": math.isinf,
    "number": lambda x: not math.isnan(x),
    "notanumber": math.isnan,
    "normal": lambda x: math.isfinite(x) and abs(x) >= SMALL,
    "subnormal": lambda x: 0 < abs(x) < SMALL,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_doubles(kind):
    bits = [bits64(x) for x in VALUES]
    assert apply(f"testp.{kind}.f64", "pred", ("f64", bits)) == [int(KINDS[kind](x)) for x in VALUES]


COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x < y or x > y,
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "equ": lambda x, y: not (x < y or x > y),
    "neu": lambda x, y: x != y,
    "ltu": lambda x, y: not x >= y,
    "geu": lambda x, y: not x < y,
    "num": lambda x, y: x == x and y == y,
    "nan": lambda x, y: x != x or y != y,
}


@pytest.mark.parametrize("kind", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name, kind):
    codes = {
        "f64": [bits64(x) for x in VALUES],
        "f16": [0, 0x8000, 1, 0x8001, 0x3C00, 0xBC00, 0x4000, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFFFF],
        "bf16": [0, 0x8000, 1, 0x8001, 0x3F80, 0xBF80, 0x4000, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF],
    }[kind]

    def value(code):
        if kind == "f64":
            return float64(code)
        if kind == "f16":
            return struct.unpack("<e", struct.pack("<H", code))[0]
        return struct.unpack("<f", struct.pack("<I", code << 16))[0]

    a, b = crossed(codes, codes)
    want = [int(COMPARISONS[name](value(x), value(y))) for x, y in zip(a, b, strict=True)]
    assert apply(f"setp.{name}.{kind}", "pred", (kind, a), (kind, b)) == want


def test_square_roots_and_reciprocals_of_doubles():
    """Round to nearest: twice the error is at most a unit in the last place, in integers."""
    numbers = [2.0, 3.0, 1e-300, 7.5e200, SMALL, 4.0, 0.1]
    bits = [bits64(x) for x in numbers]
    for x, got in zip(numbers, apply("sqrt.rn.f64", "f64", ("f64", bits)), strict=True):
        root, up, down = (Fraction(float64(got + d)) for d in (0, 1, -1))
        assert ((root + down) / 2) ** 2 <= Fraction(x) <= ((root + up) / 2) ** 2
    for x, got in zip(numbers, apply("rcp.rn.f64", "f64", ("f64", bits)), strict=True):
        near = min((got - 1, got, got + 1), key=lambda c: abs(Fraction(float64(c)) - 1 / Fraction(x)))
        assert near == got
    assert apply("rcp.rn.f64", "f64", ("f64", [bits64(-0.0), bits64(math.inf)])) == [bits64(-math.inf), 0]
    assert is_nan(apply("sqrt.rn.f64", "f64", ("f64", [bits64(-1.0)]))[0])


@pytest.mark.parametrize(
    ("mode", "up", "down"), [("rn", 1.0, -1.0), ("rz", 1.0, -1.0), ("rm", 1.0, None), ("rp", None, -1.0)]
)
def test_mad_of_floats(mode, up, down):
    """1 + 2^-30, and its negative: what is not exact goes up or down by 2^-23 where it is rounded away from 0."""
    rounded = 1 + 2.0**-23
    a, b, c = ([bits32(x)] * 2 for x in (2.0**-15, 2.0**-15, 1.0))
    a[1], c[1] = bits32(-(2.0**-15)), bits32(-1.0)
    got = apply(f"mad.{mode}.f32", "f32", ("f32", a), ("f32", b), ("f32", c))
    assert got == [bits32(up if up is not None else rounded), bits32(down if down is not None else -rounded)]


def test_carry_of_the_high_half():
    """(2^32 - 1)^2 = (2^32 - 2) 2^32 + 1: the high word plus 2 carries, plus 1 does not."""
    text = "{.reg .b32 t; mad.hi.cc.u32 t, $a, $b, $c; addc.u32 $d, t, 0;}"
    got = apply(text, "u32", ("u32", [2**32 - 1] * 2), ("u32", [2**32 - 1] * 2), ("u32", [2, 1]))
    assert got == [0 + 1, 2**32 - 1]


@pytest.mark.parametrize(("name", "want"), [("and.pred", 0), ("or.pred", 1)])
@pytest.mark.parametrize("barrier", ["barrier.red", "barrier.cta.red", "bar.red", "bar.cta.red"])
def test_votes_at_a_barrier(barrier, name, want):
    out = np.zeros(64, np.uint32)
    body = f"""mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 40;
{barrier}.{name} %p2, 1, 64, %p1;
selp.u32 %r2, 1, 0, %p2;
{barrier}.popc.u32 %r4, 2, 64, !%p1;
shl.b32 %r4, %r4, 8;
or.b32 %r2, %r2, %r4;
mul.wide.u32 %rd1, %r1, 4;
add.u64 %rd2, %rd100, %rd1;
st.global.u32 [%rd2], %r2;"""
    run(body, [out], block=64)
    assert (out == 63 << 8 | want).all()


@pytest.mark.parametrize("arrive", ["barrier.arrive", "barrier.cta.arrive", "bar.cta.arrive"])
def test_arrivals_at_a_barrier(arrive):
    """The second warp reads what the first wrote before it arrived."""
    out = np.zeros(32, np.uint32)
    sync = arrive.replace("arrive", "sync")
    body = f"""mov.u32 %r1, %tid.x;
mov.u32 %r2, smem;
and.b32 %r3, %r1, 31;
mad.lo.u32 %r2, %r3, 4, %r2;
setp.lt.u32 %p1, %r1, 32;
@%p1 st.shared.u32 [%r2], %r1;
@%p1 {arrive} 3, 64;
@%p1 bra END;
{sync} 3, 64;
ld.shared.u32 %r4, [%r2];
mul.wide.u32 %rd1, %r3, 4;
add.u64 %rd2, %rd100, %rd1;
st.global.u32 [%rd2], %r4;
END:"""
    for seed in range(4):
        run(body, [out], block=64, shared=128, seed=seed)
        assert np.array_equal(out, np.arange(32))


def test_hints_change_nothing():
    """Prefetches, policies and discards of caches, loads of uniform addresses, breakpoints; an old name of a fence."""
    out = np.arange(1, 65, dtype=np.uint32)
    body = f"""{ONE}
cp.async.bulk.prefetch.L2.global [%rd100], 256;
applypriority.global.L2::evict_normal [%rd100], 128;
createpolicy.fractional.L2::evict_first.b64 %rd7;
membar.proxy.async;
brkpt;
ldu.global.u32 %r3, [%rd100+12];
@%p1 st.global.u32 [%rd100], %r3;"""
    run(body, [out])
    assert out[0] == 4 and np.array_equal(out[1:], np.arange(2, 65))


def test_boxes_of_four_and_five_dimensions():
    source = np.arange(3 * 4 * 6 * 32, dtype=np.uint16).reshape(3, 4, 6, 32)
    out = launch(source, (16, 3, 2, 2), "none", (8, 2, 1, 1)).view(np.uint16)
    assert np.array_equal(out.reshape(2, 2, 3, 16), source[1:3, 1:3, 2:5, 8:24])
    source = np.arange(2 * 3 * 2 * 3 * 16, dtype=np.uint16).reshape(2, 3, 2, 3, 16)
    out = launch(source, (8, 2, 1, 2, 2), "none", (8, 1, 1, 0, 0)).view(np.uint16)
    assert np.array_equal(out.reshape(2, 2, 1, 2, 8), source[0:2, 0:2, 1:2, 1:3, 8:16])


@pytest.mark.parametrize("count", [64, 128])
def test_wide_loads_of_tensor_memory(count):
    words = np.random.default_rng(count).integers(0, 1 << 32, (128, count), dtype=np.uint32)
    registers = ", ".join(f"%r{200 + i}" for i in range(count))
    read = f"add.u32 %r31, %r24, 256;\ntcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [%r31];\n"
    read += "tcgen05.wait::ld.sync.aligned;\n"
    read += "\n".join(f"st.global.u32 [%rd8+{4 * i}], %r{200 + i};" for i in range(count))
    assert np.array_equal(tensor_kernel("", tensor_image(16), columns=count, words=words, read=read), words)


@pytest.mark.parametrize(
    ("release", "acquire"), [("release", "acquire"), ("acq_rel", "acq_rel"), ("relaxed", "relaxed")]
)
def test_atomics_that_synchronise(release, acquire):
    """Initialisation of an mbarrier is known to those alone who acquired what its thread released."""
    body = f"""{ONE}
mov.u32 %r2, smem;
setp.ge.u32 %p2, %r1, 32;
@%p2 bra SECOND;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 atom.{release}.cta.global.exch.b32 %r3, [%rd100], 1;
bra END;
SECOND:
atom.{acquire}.cta.global.or.b32 %r3, [%rd100], 0;
setp.eq.u32 %p3, %r3, 0;
@%p3 bra SECOND;
setp.eq.u32 %p4, %r1, 32;
@%p4 mbarrier.arrive.shared::cta.b64 _, [%r2];
END:"""
    for seed in range(4):
        if release == "relaxed":
            with pytest.raises(faults.Fault, match="without synchronisation with its initialisation"):
                run(body, [np.zeros(1, np.uint32)], block=64, shared=64, seed=seed)
        else:
            run(body, [np.zeros(1, np.uint32)], block=64, shared=64, seed=seed)
