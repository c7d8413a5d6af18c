"""The FMA exponential: same bits as two correctly rounded FMAs, error bound, monotonicity, range."""

from __future__ import annotations

import itertools
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from flamia.reference import exp2

F32 = np.float32
COEFFICIENTS = [Fraction(1), Fraction(169, 256), Fraction(87, 256)]


def bits(x):
    return np.asarray(x, F32).view(np.uint32)


def from_bits(x):
    return np.asarray(x, np.uint32).view(F32)


def round_to_float32(x: Fraction) -> np.float32:
    """Round to nearest, ties to even, with subnormals and overflow. Zero is +0."""
    if x == 0:
        return F32(0)
    exponent = max(abs(x).numerator.bit_length() - abs(x).denominator.bit_length(), -126)
    while abs(x) < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - 23)
    value = round(x / ulp) * ulp  # round() of a Fraction ties to even
    if abs(value) >= Fraction(2) ** 128:
        return F32(np.inf if value > 0 else -np.inf)
    return F32(float(value)) if value else F32(-0.0 if x < 0 else 0.0)


def unit_interval_samples(rng, count):
    """Floats of [0, 1]: ends, all binades with edges and random mantissas, random bits, uniform values."""
    exponent = np.arange(0, 127, dtype=np.uint32)[:, None] << 23
    edge = np.array([0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], np.uint32)
    binades = exponent + np.concatenate([edge, rng.integers(0, 1 << 23, 4096, dtype=np.uint32)])
    spread = rng.integers(0, 0x3F800001, count, dtype=np.uint32)
    uniform = bits(rng.random(count, dtype=F32))
    ends = np.array([0, 0x3F800000, 0x3F7FFFFF], np.uint32)
    return from_bits(np.concatenate([ends, binades.ravel(), spread, uniform]))


def chain(f):
    t = exp2.fma(F32(exp2.C2), f, F32(exp2.C1))
    return exp2.fma(t, f, F32(1))


# --- fma ------------------------------------------------------------------------------------------


def test_coefficients_are_the_documented_ones():
    assert [Fraction(c) for c in (1.0, exp2.C1, exp2.C2)] == COEFFICIENTS
    assert sum(COEFFICIENTS) == 2
    assert [int(bits(c)) for c in (exp2.C1, exp2.C2)] == [0x3F290000, 0x3EAE0000]


@pytest.mark.parametrize("kind", ["any bits", "cancelling", "subnormal", "midpoint"])
def test_fma_is_correctly_rounded(kind):
    rng = np.random.default_rng(1)
    n = 1500
    if kind == "any bits":
        a, b, c = (from_bits(rng.integers(0, 1 << 32, n, dtype=np.uint32)) for _ in range(3))
        keep = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        a, b, c = a[keep], b[keep], c[keep]
    elif kind == "cancelling":
        a, b = (rng.standard_normal(n).astype(F32) for _ in range(2))
        c = (-(a.astype(float) * b) * (1 + np.exp2(-rng.integers(0, 50, n).astype(float)))).astype(F32)
    elif kind == "subnormal":
        a = (rng.standard_normal(n) * 2.0**-75).astype(F32)
        b = (rng.standard_normal(n) * np.exp2(rng.integers(-76, -50, n).astype(float))).astype(F32)
        sign = rng.integers(0, 2, n, dtype=np.uint32) << 31
        c = from_bits(rng.integers(0, 1 << 24, n, dtype=np.uint32) | sign)
    else:  # c on the FP32 grid, the product half an ulp of it, give or take a hair: double rounding would err
        c = rng.integers(1 << 23, 1 << 24, n).astype(F32)
        a = (2 * rng.integers(0, 1 << 13, n) + 1).astype(F32) / F32(2)
        b = F32(1) + rng.integers(-4, 5, n).astype(F32) * F32(2.0**-23)
        b[::7] = 1
    want = np.array(
        [
            round_to_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            for x, y, z in zip(a, b, c, strict=True)
        ],
        F32,
    )
    got = exp2.fma(a, b, c)
    zero = want == 0
    np.testing.assert_array_equal(bits(got[~zero]), bits(want[~zero]))
    np.testing.assert_array_equal(got[zero], want[zero])


def test_fma_where_float64_lands_on_a_tie():
    a, b = F32(1 + 2.0**-15), F32(2.0**-24 * (1 - 2.0**-15))
    assert Fraction(float(a)) * Fraction(float(b)) == Fraction(2) ** -24 - Fraction(2) ** -54
    one, next_ = F32(1), F32(1 + 2.0**-23)
    # The tie between 1 and its successor is 1 + 2^-24; float64 cannot hold it plus or minus 2^-54.
    assert exp2.fma(-a, b, next_) == next_
    assert F32(float(-a) * float(b) + float(next_)) == one  # rounding twice
    assert exp2.fma(a, b, one) == one
    assert exp2.fma(a, -b, -one) == -one
    assert exp2.fma(a, b, -next_) == -next_


def test_fma_special_values():
    inf, nan = np.inf, np.nan
    cases = [
        (1, 1, nan, nan),
        (nan, 0, 1, nan),
        (inf, 0, 1, nan),
        (inf, 1, -inf, nan),
        (inf, 1, 1, inf),
        (inf, -2, inf, nan),
        (1, 1, -inf, -inf),
        (3e38, 2, 0, inf),
        (3e38, -2, 0, -inf),
        (3e38, 2, -3e38, 3e38),
    ]
    for a, b, c, want in cases:
        np.testing.assert_array_equal(exp2.fma(F32(a), F32(b), F32(c)), F32(want))
    signs = [(-1, 0, 0, 0), (1, -0.0, -0.0, 0x80000000), (1, 1, -1, 0), (-1e-30, 1e-30, 0, 0x80000000)]
    for a, b, c, want in signs:
        assert int(bits(exp2.fma(F32(a), F32(b), F32(c)))) == want


# --- the polynomial -------------------------------------------------------------------------------


def test_exp2_mantissa_has_the_bits_of_the_fma_chain():
    f = unit_interval_samples(np.random.default_rng(2), 1_000_000)
    got, want = exp2.exp2_mantissa(f), chain(f)
    differ = np.flatnonzero(bits(got) != bits(want))
    assert differ.size == 0, f"f={f[differ[0]].hex()}: {got[differ[0]].hex()} is not {want[differ[0]].hex()}"


@pytest.mark.parametrize("count", [3, 7])
def test_fewer_bits_are_rounded_once(count):
    f = unit_interval_samples(np.random.default_rng(8), 20_000)[::50]
    t = exp2.fma(F32(exp2.C2), f, F32(exp2.C1))
    exact = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(t, f, strict=True)]
    want = F32([1 + round(x * 2**count) / 2**count for x in exact])
    np.testing.assert_array_equal(exp2.exp2_mantissa(f, bits=count), want)


def test_fma_chain_has_the_bits_of_exact_arithmetic():
    f = unit_interval_samples(np.random.default_rng(3), 50)[::400]
    for x in f:
        value = COEFFICIENTS[2]
        for c in COEFFICIENTS[1::-1]:
            value = Fraction(float(round_to_float32(value * Fraction(float(x)) + c)))
        assert Fraction(float(chain(x))) == value


def test_ends_are_exact():
    f = np.array([0.0, -0.0, 1e-45, 2.0**-25, 1.0], F32)
    np.testing.assert_array_equal(exp2.exp2_mantissa(f), F32([1, 1, 1, 1, 2]))


def test_monotone():
    f = np.unique(unit_interval_samples(np.random.default_rng(4), 1_000_000))
    runs = [
        np.arange(start, start + 200_000, dtype=np.uint32)
        for start in (0x3F800001 - 200_000, int(bits(F32(0.3))) - 100_000, int(bits(F32(0.0625))) - 100_000)
    ]
    for x in (f, *map(from_bits, runs)):
        p = exp2.exp2_mantissa(x)
        assert (np.diff(x) > 0).all() and (np.diff(p) >= 0).all()
        assert p.min() >= 1 and p.max() <= 2


def test_error_bound_is_proven_and_tight():
    # Extrema of q(f) / 2^f - 1 are roots of the quadratic q' - q ln 2; two sign changes isolate them.
    with localcontext() as context:
        context.prec = 40
        ln2 = Decimal(2).ln()
        c = [Decimal(x.numerator) / Decimal(x.denominator) for x in COEFFICIENTS]

        def q(f):
            return (c[2] * f + c[1]) * f + c[0]

        def slope(f):
            return 2 * c[2] * f + c[1] - ln2 * q(f)

        grid = [Decimal(i) / 16 for i in range(17)]
        extrema = [Decimal(0)]
        for low, high in itertools.pairwise(grid):
            if (slope(low) > 0) == (slope(high) > 0):
                continue
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if (slope(middle) > 0) == (slope(low) > 0) else (low, middle)
            extrema.append(abs(q(low) / (low * ln2).exp() - 1))
        assert len(extrema) == 3
        worst = max(extrema)
    rounding = 2.0**-25 + 2.0**-24
    assert float(worst) + rounding <= exp2.MAX_RELATIVE_ERROR
    f = unit_interval_samples(np.random.default_rng(5), 500_000)
    measured = np.abs(exp2.exp2_mantissa(f) / np.exp2(f.astype(np.float64)) - 1).max()
    assert float(worst) - rounding <= measured <= exp2.MAX_RELATIVE_ERROR


def test_out_and_shapes():
    rng = np.random.default_rng(6)
    f = rng.random((3, 2 * exp2.CHUNK // 3 + 5), dtype=F32)
    want = chain(f)
    np.testing.assert_array_equal(exp2.exp2_mantissa(f), want)
    np.testing.assert_array_equal(exp2.exp2_mantissa(f.T), want.T)
    strided = np.zeros((*f.shape, 2), F32)[..., 0]
    assert exp2.exp2_mantissa(f, out=strided) is strided
    np.testing.assert_array_equal(strided, want)
    assert exp2.exp2_mantissa(F32(0.5).reshape(())).shape == ()
    assert exp2.exp2_mantissa(np.empty((0, 4), F32)).shape == (0, 4)
    assert np.isnan(exp2.exp2_mantissa(F32([np.nan])))[0]
    assert exp2.exp2_mantissa(f, out=f) is f
    np.testing.assert_array_equal(f, want)


def test_errors_name_the_argument():
    f = np.zeros(3, F32)
    with pytest.raises(TypeError, match="f must be a float32 array, got float64"):
        exp2.exp2_mantissa(np.zeros(3))
    with pytest.raises(TypeError, match="out must be a float32 array"):
        exp2.exp2_mantissa(f, out=np.zeros(3))
    with pytest.raises(ValueError, match="out must have the shape of f"):
        exp2.exp2_mantissa(f, out=np.zeros(4, F32))
    with pytest.raises(TypeError, match="x must be a float32 array"):
        exp2.exp2_parts(np.zeros(3))


# --- parts ----------------------------------------------------------------------------------------


def test_parts_reassemble_two_to_the_x():
    rng = np.random.default_rng(7)
    x = np.concatenate([rng.standard_normal(100_000) * 30, np.arange(-126, 128)]).astype(F32)
    r, p = exp2.exp2_parts(x)
    assert r.dtype == p.dtype == F32
    np.testing.assert_array_equal(r, np.floor(x))
    relative = p * np.exp2(r.astype(np.float64)) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(relative).max() <= exp2.MAX_RELATIVE_ERROR
    integer = x == np.floor(x)
    np.testing.assert_array_equal(p[integer], 1)


def test_parts_of_tiny_negative_x_give_two_halves():
    x = -from_bits([1, 0x00800000, int(bits(F32(2.0**-25)))])
    r, p = exp2.exp2_parts(x)
    np.testing.assert_array_equal(r, -1)
    np.testing.assert_array_equal(p, 2)  # f rounded to 1: 2 * 2^-1 = 1
    _, below = exp2.exp2_parts(F32([-(2.0**-22)]))
    assert below[0] < 2


def test_parts_of_special_values():
    r, p = exp2.exp2_parts(F32([np.inf, -np.inf, np.nan, -0.0]))
    np.testing.assert_array_equal(r, [np.inf, -np.inf, np.nan, 0])
    np.testing.assert_array_equal(p, [1, 1, np.nan, 1])
