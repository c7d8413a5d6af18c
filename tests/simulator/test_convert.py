"""``cvt`` against rational numbers, rounded by definition."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from flamia.conformance.simulator import PtxError
from tests.simulator import exact
from tests.simulator.exact import BF16, E2M1, E4M3, E5M2, F16, F32, F64, NAN
from tests.simulator.single import apply, assert_bits, corners, random_bits, signed
from tests.simulator.test_float import BF16_CORNERS, F16_CORNERS, F32_CORNERS, MODES

E2M3 = exact.Binary(6, 4, 0, 2, 0x1F, False, Fraction(15, 2))
E3M2 = exact.Binary(6, 3, -2, 4, 0x1F, False, Fraction(28))
NARROW = {"e4m3x2": E4M3, "e5m2x2": E5M2, "e2m3x2": E2M3, "e3m2x2": E3M2, "e2m1x2": E2M1}
INTEGERS = [f"{k}{bits}" for bits in (8, 16, 32, 64) for k in "us"]


def limits(kind):
    width = int(kind[1:])
    return (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def as_kind(value, kind):
    width = int(kind[1:])
    return signed(value, width) if kind[0] == "s" else value % (1 << width)


def encode_all(bits, source, target, mode="rn", *, relu=False, finite=False):
    """Codes of the target for codes of the source, NaN canonical."""
    out = []
    for b in bits:
        value = exact.value_of(b, source)
        negative = exact.is_negative(b, source)
        if relu and value != NAN and negative:
            value, negative = Fraction(0), False
        out.append(exact.encode(value, target, mode, zero_sign=negative, finite=finite))
    return out


def around_midpoints(f):
    """FP32 codes of every number of a narrow format, every midpoint, and their neighbours."""
    values = {exact.value_of(c, f) for c in range(1 << f.width)}
    numbers = sorted(v for v in values if isinstance(v, Fraction) and v >= 0)
    middles = [(a + b) / 2 for a, b in pairwise(numbers)]
    beyond = [f.top * Fraction(n, 16) for n in (16, 17, 18, 20, 32)]
    codes = [exact.encode(v, F32) for v in (*numbers, *middles, *beyond)]
    near = [c + d for c in codes for d in (-1, 0, 1) if 0 <= c + d < 0x7F800000]
    return near + [c | 0x80000000 for c in near[::3]] + F32_CORNERS


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_to_integers(source):
    bits = corners(int(source[1:]))
    values = [as_kind(b, source) for b in bits]
    for target in INTEGERS:
        width = int(target[1:])
        if source == target:
            continue
        # A result of 8 bits is read through a 32-bit register, into which it is extended.
        wide = target if width > 8 else f"{target[0]}32"
        form = f"cvt.{target}.{source}"
        got = apply(form, wide, (source, bits))
        cut = [as_kind(v, target) % (1 << int(wide[1:])) for v in values]
        assert_bits(form, got, cut, bits)
        low, high = limits(target)
        form = f"cvt.sat.{target}.{source}"
        got = apply(form, wide, (source, bits))
        assert_bits(form, got, [max(low, min(high, v)) % (1 << int(wide[1:])) for v in values], bits)


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize(
    ("source", "f", "some"), [("f32", F32, F32_CORNERS), ("f16", F16, F16_CORNERS), ("bf16", BF16, [])]
)
def test_floats_to_integers(source, f, some, target):
    """Clamped to the range; NaN gives 0, or the top bit of a 64-bit integer."""
    ties = [Fraction(n, 2) for n in range(-9, 10)]
    ties += [Fraction(n) for n in (127, 128, 255, 256, -128, -129, 32767, 65535)]
    wide = [Fraction(2) ** n - d for n in (31, 32, 63, 64) for d in (0, 1)] if f is not F16 else []
    bits = [exact.encode(v, f) for v in ties + wide] + [exact.encode(-v, f) for v in wide] + list(some)
    low, high = limits(target)
    width = int(target[1:])
    register = target if width > 8 else f"{target[0]}32"
    for name, mode in (("rni", "rn"), ("rzi", "rz"), ("rmi", "rm"), ("rpi", "rp")):
        expected = []
        for b in bits:
            value = exact.value_of(b, f)
            if value == NAN:
                expected.append(1 << 63 if width == 64 else 0)
                continue
            if isinstance(value, str):
                number = high if value == exact.POSITIVE else low
            else:
                magnitude = exact.to_integer(abs(value), mode, value < 0)
                number = max(low, min(high, -magnitude if value < 0 else magnitude))
            expected.append(number % (1 << int(register[1:])))
        form = f"cvt.{name}.{target}.{source}"
        assert_bits(form, apply(form, register, (source, bits)), expected, bits)


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_to_floats(source):
    width = int(source[1:])
    bits = corners(width) + random_bits(width, 100, 3)
    # Numbers that lie at and beside ties of FP32.
    if width == 64:
        bits += [(1 << 62) + (1 << 38) + d for d in (-1, 0, 1)] + [(1 << 63) + (1 << 39) + d for d in (-1, 0, 1)]
    values = [Fraction(as_kind(b, source)) for b in bits]
    for mode in MODES:
        form = f"cvt.{mode}.f32.{source}"
        got = apply(form, "f32", (source, bits))
        assert_bits(form, got, [exact.encode(v, F32, mode) for v in values], bits)
    for target, f in (("f64", F64), ("f16", F16), ("bf16", BF16)):
        form = f"cvt.rn.{target}.{source}"
        got = apply(form, target, (source, bits))
        if target == "f64" or width < 64:
            assert_bits(form, got, [exact.encode(v, f) for v in values], bits)


@pytest.mark.parametrize(("target", "f"), [("f16", F16), ("bf16", BF16)])
def test_f32_to_halves(target, f):
    rng = np.random.default_rng(1)
    half = [exact.encode(exact.value_of(c, f), F32) for c in random_bits(16, 60, 5)]
    step = 1 << (23 - f.field)
    bits = F32_CORNERS + [h + d for h in half for d in (0, step // 2 - 1, step // 2, step // 2 + 1)]
    bits += [int(v) for v in rng.integers(0, 1 << 32, 200)]
    bits = [b % (1 << 32) for b in bits]
    for mode in MODES if target == "f16" else ("rn", "rz"):
        form = f"cvt.{mode}.{target}.f32"
        assert_bits(form, apply(form, target, ("f32", bits)), encode_all(bits, F32, f, mode), bits)
    for mode in ("rn", "rz"):
        for relu in (False, True):
            for finite in (False, True):
                flags = ".relu" * relu + ".satfinite" * finite
                expected = encode_all(bits, F32, f, mode, relu=relu, finite=finite)
                form = f"cvt.{mode}{flags}.{target}.f32"
                assert_bits(form, apply(form, target, ("f32", bits)), expected, bits)
                form = f"cvt.{mode}{flags}.{target}x2.f32"
                got = apply(form, f"{target}x2", ("f32", bits), ("f32", bits[::-1]))
                pairs = [a << 16 | b for a, b in zip(expected, expected[::-1], strict=True)]
                assert_bits(form, got, pairs, bits, bits[::-1])


def test_halves_to_f32_keep_every_number():
    bits = list(range(0, 1 << 16, 7)) + F16_CORNERS
    got = apply("cvt.f32.f16", "f32", ("f16", bits))
    assert_bits("cvt.f32.f16", got, encode_all(bits, F16, F32), bits)
    bits += BF16_CORNERS
    assert apply("cvt.f32.bf16", "f32", ("bf16", bits)) == [b << 16 for b in bits]


def test_doubles():
    bits = [exact.encode(exact.value_of(b, F32), F64) for b in F32_CORNERS]
    offsets = (0, 1, 1 << 28, (1 << 28) + 1, (1 << 29) - 1)
    bits = [b + d for b in bits for d in offsets if b & 0x7FF << 52 != 0x7FF << 52]
    for mode in MODES:
        form = f"cvt.{mode}.f32.f64"
        assert_bits(form, apply(form, "f32", ("f64", bits)), encode_all(bits, F64, F32, mode), bits)
    numbers = [b for b in F32_CORNERS if exact.value_of(b, F32) != NAN]
    assert apply("cvt.f64.f32", "f64", ("f32", numbers)) == encode_all(numbers, F32, F64)


@pytest.mark.parametrize(("name", "mode"), [("rni", "rn"), ("rzi", "rz"), ("rmi", "rm"), ("rpi", "rp")])
def test_rounding_to_integral_values(name, mode):
    bits = F32_CORNERS + [exact.encode(Fraction(n, 4), F32) for n in range(-17, 18)]
    bits += [exact.encode(2**23 + Fraction(n, 2), F32) for n in range(-3, 3)]
    expected = []
    for b in bits:
        value, negative = exact.value_of(b, F32), exact.is_negative(b, F32)
        if isinstance(value, Fraction):
            magnitude = exact.to_integer(abs(value), mode, negative)
            value = Fraction(-magnitude if negative else magnitude)
        expected.append(exact.encode(value, F32, zero_sign=negative))
    form = f"cvt.{name}.f32.f32"
    assert_bits(form, apply(form, "f32", ("f32", bits)), expected, bits)


def test_tf32():
    """The upper 19 bits of FP32, ties away from zero; NaN is 0x7FFFFFFF's."""
    tie = [0x3F801000, 0x3F802FFF, 0x3F803000, 0xBF801000, 0x3F801001, 0x00001000]
    expected = [(b + 0x1000) & 0xFFFFE000 for b in tie]
    got = apply("cvt.rna.tf32.f32", "b32", ("f32", tie))
    assert [g & 0xFFFFE000 for g in got] == expected
    got = apply("cvt.rz.tf32.f32", "b32", ("f32", tie))
    assert [g & 0xFFFFE000 for g in got] == [b & 0xFFFFE000 for b in tie]


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", NARROW)
def test_f32_to_narrow_pairs(kind, relu):
    """The first operand goes to the upper half; overflow saturates; NaN is canonical."""
    f = NARROW[kind]
    bits = around_midpoints(f)
    codes = encode_all(bits, F32, f, relu=bool(relu), finite=True)
    shift = 4 if kind == "e2m1x2" else 8
    back = bits[::-1]
    if shift == 4:
        form = f"{{.reg .b8 t; cvt.rn.satfinite{relu}.{kind}.f32 t, $a, $b; cvt.u16.u8 $d, t;}}"
    else:
        form = f"cvt.rn.satfinite{relu}.{kind}.f32"
    got = apply(form, "u16", ("f32", bits), ("f32", back))
    assert_bits(form, got, [a << shift | b for a, b in zip(codes, codes[::-1], strict=True)], bits, back)


@pytest.mark.parametrize("kind", ["e4m3x2", "e5m2x2"])
def test_f16_pairs_to_narrow_pairs(kind):
    f = NARROW[kind]
    halves = list(range(0, 1 << 16, 5)) + F16_CORNERS
    codes = encode_all(halves, F16, f, finite=True)
    words = [a << 16 | b for a, b in zip(halves, halves[::-1], strict=True)]
    form = f"cvt.rn.satfinite.{kind}.f16x2"
    got = apply(form, "b16", ("f16x2", words))
    assert_bits(form, got, [a << 8 | b for a, b in zip(codes, codes[::-1], strict=True)], words)


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_pairs_to_f16_pairs(kind):
    f = NARROW[kind]
    codes = list(range(1 << f.width))
    values = encode_all(codes, f, F16)
    shift = 4 if kind == "e2m1x2" else 8
    words = [a << shift | b for a, b in zip(codes, codes[::-1], strict=True)]
    expected = [a << 16 | b for a, b in zip(values, values[::-1], strict=True)]
    form = f"cvt.rn.f16x2.{kind}"
    if shift == 4:
        form = f"{{.reg .b8 t; cvt.u8.u16 t, $a; {form} $d, t;}}"
    assert_bits(form, apply(form, "f16x2", ("b16", words)), expected, words)


@pytest.mark.parametrize("mode", ["rp", "rz"])
@pytest.mark.parametrize("finite", ["", ".satfinite"])
def test_to_ue8m0(mode, finite):
    powers = [exact.encode(Fraction(2) ** n, F32) for n in (-149, -127, -126, -125, -1, 0, 1, 8, 126, 127)]
    bits = [p + d for p in powers for d in (-1, 0, 1)] + F32_CORNERS

    def byte(value):
        """The byte b of |value| in 2^(b - 127), rounded up or down to a power of two."""
        if isinstance(value, str):
            return 254 if finite and value != NAN else 255
        magnitude, out = abs(value), 0
        if mode == "rp":
            while out < 255 and Fraction(2) ** (out - 127) < magnitude:
                out += 1
        else:
            while out < 255 and Fraction(2) ** (out + 1 - 127) <= magnitude:
                out += 1
        return min(out, 254) if finite else out

    codes = [byte(exact.value_of(b, F32)) for b in bits]
    form = f"cvt.{mode}{finite}.ue8m0x2.f32"
    got = apply(form, "b16", ("f32", bits), ("f32", bits[::-1]))
    assert_bits(form, got, [a << 8 | b for a, b in zip(codes, codes[::-1], strict=True)], bits, bits[::-1])
    halves = BF16_CORNERS + random_bits(16, 100, 1)
    codes = [byte(exact.value_of(b, BF16)) for b in halves]
    words = [a << 16 | b for a, b in zip(halves, halves[::-1], strict=True)]
    form = f"cvt.{mode}{finite}.ue8m0x2.bf16x2"
    got = apply(form, "b16", ("bf16x2", words))
    assert_bits(form, got, [a << 8 | b for a, b in zip(codes, codes[::-1], strict=True)], words)


def test_from_ue8m0():
    codes = list(range(256))
    values = [BF16.nan if c == 255 else exact.encode(Fraction(2) ** (c - 127), BF16) for c in codes]
    words = [a << 8 | b for a, b in zip(codes, codes[::-1], strict=True)]
    got = apply("cvt.rn.bf16x2.ue8m0x2", "bf16x2", ("b16", words))
    assert got == [a << 16 | b for a, b in zip(values, values[::-1], strict=True)]


@pytest.mark.parametrize(
    ("form", "operands"),
    [
        ("cvt.e4m3x2.f32", 2),
        ("cvt.rn.ue8m0x2.f32", 2),
        ("cvt.rn.e4m3x2.f32", 2),
        ("cvt.f16.f32", 1),
        ("cvt.s32.f32", 1),
        ("cvt.rs.satfinite.e4m3x4.f32", 2),
    ],
)
def test_conversions_without_what_ptx_demands_are_refused(form, operands):
    with pytest.raises(PtxError, match=form):
        apply(form, "b16", *[("f32", [0])] * operands)
