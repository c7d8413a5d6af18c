"""Atomics of other widths and vectors, packed moves, halves through approximations, and instructions without effect."""

import numpy as np
import pytest

from flamia.conformance.simulator import PtxError
from tests.simulator import exact
from tests.simulator.exact import BF16, F16
from tests.simulator.kernels import run
from tests.simulator.single import apply, random_bits, signed
from tests.simulator.test_memory import LANE


@pytest.mark.parametrize("name", ["add", "min", "max", "and", "or", "xor", "exch"])
def test_64_bit_atomics(name):
    """All lanes on one word: the result of the associative ones is known, of exch it is one lane's."""
    start = np.array([0xF0F0_1234_8000_0001], np.uint64)
    operand = np.array(random_bits(64, 32, 4), np.uint64)
    data = start.copy()
    kind = "b64" if name in ("and", "or", "xor", "exch") else "u64"
    run(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 8; add.u64 %rd1, %rd1, %rd101; ld.global.u64 %rd2, [%rd1];
{"atom.global.exch.b64 %rd3, [%rd100], %rd2;" if name == "exch" else f"red.global.{name}.{kind} [%rd100], %rd2;"}""",
        [data, operand],
    )
    values = [int(start[0]), *(int(v) for v in operand)]
    folds = {"add": sum, "min": min, "max": max}
    if name == "exch":
        assert int(data[0]) in values[1:]
    elif name in folds:
        assert int(data[0]) == folds[name](values) % 2**64
    else:
        ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
        assert data[0] == ufunc.reduce(np.array(values, np.uint64))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_compare_and_swap_of_each_width(width):
    """Lane i swaps word i: where the comparison holds the new value is stored; the old one comes back."""
    dtype = np.dtype(f"u{width // 8}")
    before = np.array(random_bits(width, 32, 1), dtype)
    compare = np.where(np.arange(32) % 3 == 0, before, before ^ dtype.type(1))
    data, out, new = before.copy(), np.zeros(32, dtype), np.array(random_bits(width, 32, 2), dtype)
    r = {16: "h", 32: "r", 64: "rd"}[width]
    names = [f"%{r}{n}" for n in (40, 41, 42)]
    run(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, {width // 8}; add.u64 %rd2, %rd100, %rd1;
add.u64 %rd3, %rd101, %rd1; add.u64 %rd4, %rd102, %rd1; add.u64 %rd5, %rd103, %rd1;
ld.global.b{width} {names[0]}, [%rd3];
ld.global.b{width} {names[1]}, [%rd4]; atom.global.cas.b{width} {names[2]}, [%rd2], {names[0]}, {names[1]};
st.global.b{width} [%rd5], {names[2]};""",
        [data, compare, new, out],
    )
    assert (out == before).all()
    assert (data == np.where(compare == before, new, before)).all()


def test_128_bit_compare_and_swap_and_exchange():
    data = np.array([[5, 6], [7, 8]], np.uint64)
    out = np.zeros(4, np.uint64)
    run(
        """.reg .b128 %q1, %q2, %q3; mov.u64 %rd1, 5; mov.u64 %rd2, 6; mov.b128 %q1, {%rd1, %rd2};
mov.b128 %q2, {%rd2, %rd2}; atom.global.cas.b128 %q3, [%rd100], %q1, %q2; st.global.b128 [%rd101], %q3;
atom.global.exch.b128 %q3, [%rd100+16], %q1; st.global.b128 [%rd101+16], %q3;""",
        [data, out],
        block=1,
    )
    assert data.tolist() == [[6, 6], [5, 6]] and out.tolist() == [5, 6, 7, 8]


def test_vector_atomics():
    """red.global.add.v2.f32, .v4.f32: each element on its own; atom returns the vector."""
    data, out = np.arange(8, dtype=np.float32), np.zeros(2, np.float32)
    run(
        """mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; red.global.add.v4.f32 [%rd100], {%f1, %f2, %f1, %f2};
atom.global.add.v2.f32 {%f3, %f4}, [%rd100+16], {%f2, %f1}; st.global.v2.f32 [%rd101], {%f3, %f4};""",
        [data, out],
        block=1,
    )
    assert data.tolist() == [1, 3, 3, 5, 6, 6, 6, 7] and out.tolist() == [4, 5]


def test_float_atomics_flush_in_global_memory_alone():
    """PTX, "atom": add.f32 flushes subnormals in global memory; in shared memory it keeps them."""
    data, out = np.array([1], np.uint32), np.zeros(1, np.uint32)
    run(
        """ld.global.u32 %r1, [%rd100]; st.shared.u32 [smem], %r1; mov.b32 %f1, 0x00000002;
atom.shared.add.f32 %f2, [smem], %f1; red.global.add.f32 [%rd100], %f1; ld.shared.u32 %r2, [smem];
st.global.u32 [%rd101], %r2;""",
        [data, out],
        block=1,
        shared=16,
    )
    assert data[0] == 0 and out[0] == 3


def test_generic_float_atomics_flush_by_the_space_of_their_address():
    data, out = np.array([1], np.uint32), np.zeros(1, np.uint32)
    run(
        """ld.global.u32 %r1, [%rd100]; st.shared.u32 [smem], %r1; mov.b32 %f1, 0x00000002;
mov.u64 %rd1, smem; cvta.shared.u64 %rd2, %rd1; atom.add.f32 %f2, [%rd2], %f1;
atom.add.f32 %f3, [%rd100], %f1; ld.shared.u32 %r2, [smem]; st.global.u32 [%rd101], %r2;""",
        [data, out],
        block=1,
        shared=16,
    )
    assert data[0] == 0 and out[0] == 3


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("pair", [(0x0000, 0x8000), (0x8000, 0x0000)])
def test_extremes_of_halves_order_the_zeros(kind, pair):
    """-0 is below +0, whichever is in memory."""
    data = np.array([pair[0] * 0x10001] * 2, np.uint32)
    run(
        f"""mov.b32 %r1, {pair[1] * 0x10001}; red.global.min.noftz.{kind} [%rd100], %r1;
red.global.max.noftz.{kind} [%rd100+4], %r1;""",
        [data],
        block=1,
    )
    assert data.tolist() == [0x80008000, 0]


def test_reductions_keep_the_order_of_the_seed():
    """FP32 sums of uneven numbers depend on the order, which PTX leaves open: seeds show it."""
    values = (np.float32(1.1) ** np.arange(-60, 36, 3, dtype=np.float32)).astype(np.float32)
    found = set()
    for seed in range(8):
        data = np.zeros(1, np.float32)
        run(
            f"{LANE} add.u64 %rd3, %rd101, %rd1; ld.global.f32 %f1, [%rd3]; red.global.add.f32 [%rd100], %f1;",
            [data, values],
            seed=seed,
        )
        found.add(float(data[0]))
    assert len(found) > 1 and max(found) - min(found) < 1e-5 * max(found)


def test_packed_moves():
    a, b = random_bits(32, 100, 1), random_bits(32, 100, 2)
    pairs = list(zip(a, b, strict=True))
    assert apply("mov.b64 $d, {$a, $b};", "b64", ("b32", a), ("b32", b)) == [x | y << 32 for x, y in pairs]
    form = "{.reg .b32 t, u; mov.b64 {t, u}, $a; sub.u32 $d, u, t;}"
    wide = [x | y << 32 for x, y in pairs]
    assert apply(form, "u32", ("b64", wide)) == [(y - x) % 2**32 for x, y in pairs]
    form = "{.reg .b16 p, q; mov.b32 {p, q}, $a; mov.b32 $d, {q, p};}"
    assert apply(form, "b32", ("b32", a)) == [x >> 16 | (x & 0xFFFF) << 16 for x in a]
    form = "{.reg .b16 p; mov.b32 {_, p}, $a; cvt.u32.u16 $d, p;}"
    assert apply(form, "b32", ("b32", a)) == [x >> 16 for x in a]
    form = "{.reg .b16 p, q, r, s; mov.b64 {p, q, r, s}, $a; mov.b64 $d, {s, r, q, p};}"
    words = [[v >> 16 * i & 0xFFFF for i in range(4)] for v in wide]
    assert apply(form, "b64", ("b64", wide)) == [s | r << 16 | q << 32 | p << 48 for p, q, r, s in words]
    assert apply("mov.b32 $d, {$a, 7};", "b32", ("b16", [5, 6])) == [5 | 7 << 16, 6 | 7 << 16]


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products_and_sums(kind):
    a, b, c = (random_bits(32, 100, s) for s in (1, 2, 3))

    def low(x):
        return signed(x, 24) if kind == "s32" else x % 2**24

    for part, shift in (("lo", 0), ("hi", 16)):
        got = apply(f"mad24.{part}.{kind}", kind, (kind, a), (kind, b), (kind, c))
        assert got == [((low(x) * low(y) >> shift) + z) % 2**32 for x, y, z in zip(a, b, c, strict=True)]


@pytest.mark.parametrize(("kind", "f"), [("f16", F16), ("bf16", BF16)])
def test_approximations_of_halves(kind, f):
    """Within two units in the last place of the exact value, at points where it is known."""
    from fractions import Fraction

    bits = [exact.encode(Fraction(n), f) for n in (-3, -1, 0, 1, 2, 5)]
    ftz = ".ftz" if kind == "bf16" else ""
    got = apply(f"ex2.approx{ftz}.{kind}", kind, (kind, bits))
    for g, n in zip(got, (-3, -1, 0, 1, 2, 5), strict=True):
        assert abs(g - exact.encode(Fraction(2) ** n, f)) <= 2
    words = [b | b << 16 for b in bits]
    pairs = apply(f"ex2.approx{ftz}.{kind}x2", f"{kind}x2", (f"{kind}x2", words))
    assert pairs == [g | g << 16 for g in got]
    near_one = apply(f"tanh.approx.{kind}", kind, (kind, [exact.encode(Fraction(9), f)]))
    assert abs(near_one[0] - exact.one(f)) <= 2


def test_instructions_without_effect_on_values():
    out = np.zeros(32, np.uint32)
    run(
        f"""{LANE} griddepcontrol.wait; nanosleep.u32 20; prefetch.global.L2 [%rd2]; prefetchu.L1 [%rd2];
st.global.u32 [%rd2], %r1; griddepcontrol.launch_dependents; pmevent 3;""",
        [out],
    )
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("form", ["atom.global.sub.u32", "red.global.add.s64.v2", "atom.global.mul.f32"])
def test_atomics_that_ptx_does_not_have(form):
    with pytest.raises(PtxError):
        run(f"{form} %r1, [%rd100], %r1;", [np.zeros(2, np.uint32)])
