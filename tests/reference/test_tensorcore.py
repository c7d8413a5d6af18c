"""The tensor-core step: hand-computed cases, an oracle in rational arithmetic, and the invariants of a chain."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

from flamia.reference import tensorcore as tc

F32 = np.float32
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
UNSCALED_E4M3 = replace(tc.MXF8F6F4, scale_block=0)
steps = pytest.mark.parametrize("step", tc.STEPS, ids=lambda s: s.name.replace(" ", "_"))


def bits(x):
    return np.asarray(x, F32).view(np.uint32)


def assert_same_bits(got, want):
    got, want = np.broadcast_arrays(np.asarray(got, F32), np.asarray(want, F32))
    differ = np.argwhere(bits(got.copy()) != bits(want.copy()))
    assert differ.size == 0, (
        f"{len(differ)} of {got.size} differ, first at {tuple(differ[0])}: "
        f"{float(got[tuple(differ[0])]).hex()} is not {float(want[tuple(differ[0])]).hex()}"
    )


def dot(step, pairs, acc=0.0, scale_a=127, scale_b=127):
    """One output: the products of ``pairs``, zero padded to whole steps, with one scale byte per side and block."""
    length = -(-max(len(pairs), 1) // step.k) * step.k
    a, b = np.zeros((2, 1, length), F32)
    a[0, : len(pairs)], b[0, : len(pairs)] = zip(*pairs, strict=True)
    scales = ()
    if step.scale_block:
        blocks = (1, length // step.scale_block)
        scales = tuple(np.broadcast_to(np.asarray(s, np.uint8), blocks).copy() for s in (scale_a, scale_b))
    return tc.mma(a, b, np.full((1, 1), acc, F32), step, *scales)[0, 0]


def dot_groups(step, groups, acc=0.0):
    """One output of a group step: ``(a, b, scale_a, scale_b)`` per group, one nonzero product each or lists."""
    a, b = np.zeros((2, 1, step.k), F32)
    scale_a, scale_b = np.zeros((2, 1, step.k // step.group), np.uint8)
    for index, (x, y, scale_x, scale_y) in enumerate(groups):
        x, y = np.atleast_1d(x), np.atleast_1d(y)
        a[0, index * step.group : index * step.group + x.size] = x
        b[0, index * step.group : index * step.group + y.size] = y
        scale_a[0, index], scale_b[0, index] = scale_x, scale_y
    return tc.mma(a, b, np.full((1, 1), acc, F32), step, scale_a, scale_b)[0, 0]


# --- the oracle -------------------------------------------------------------------------------------------------------
# Written from the note, in rationals, one output at a time.


def floor_log2(x: Fraction) -> int:
    guess = abs(x).numerator.bit_length() - x.denominator.bit_length()
    return guess - 1 if Fraction(2) ** guess > abs(x) else guess


def exponent_of(x: Fraction, emin: int) -> int:
    return max(floor_log2(x), emin)


def ue4m3(byte: int) -> tuple[Fraction, int]:
    """Significand and exponent."""
    field, mantissa = (byte & 0x7F) >> 3, byte & 7
    return Fraction(mantissa, 8) + (field > 0), max(field, 1) - 7


def oracle_step(a, b, acc, step, scale_a, scale_b) -> np.float32:
    numbers = [float(x) for x in (*a, *b, acc)]
    scales = [int(s) for s in (*scale_a, *scale_b)]
    nan_scale = 255 in scales if step.group == 1 else any(s & 0x7F == 0x7F for s in scales)
    if nan_scale or any(map(math.isnan, numbers)):
        return F32(math.nan)
    infinite = [x * y for x, y in zip(map(float, a), map(float, b), strict=True) if math.isinf(x) or math.isinf(y)]
    infinite += [float(acc)] if np.isinf(acc) else []
    if infinite:
        return F32(sum(infinite))

    terms = []  # (value, exponent)
    left, right = ([Fraction(float(x)) for x in side] for side in (a, b))
    products = [x * y for x, y in zip(left, right, strict=True)]
    if step.group == 1:
        scale = sum(scales) - 254 if scales else 0
        for x, y, product in zip(left, right, products, strict=True):
            if product:
                exponent = exponent_of(x, step.operand_emin) + exponent_of(y, step.operand_emin) + scale
                terms.append((product * Fraction(2) ** scale, exponent))
    else:
        for index in range(step.k // step.group):
            group = products[index * step.group : (index + 1) * step.group]
            (sig_a, exp_a), (sig_b, exp_b) = ue4m3(int(scale_a[index])), ue4m3(int(scale_b[index]))
            if any(group) and sig_a and sig_b:
                terms.append((sum(group) * sig_a * sig_b * Fraction(2) ** (exp_a + exp_b), exp_a + exp_b))
    if acc:
        terms.append((Fraction(float(acc)), exponent_of(Fraction(float(acc)), -126)))
    if not terms:
        return F32(0)
    quantum = Fraction(2) ** (max(exponent for _, exponent in terms) - step.fraction_bits)
    total = sum(math.trunc(value / quantum) * quantum for value, _ in terms)
    if total == 0:
        return F32(0)
    lowest = Fraction(2) ** (exponent_of(total, -126) - step.accumulator_bits + 1)
    kept = abs(math.trunc(total / lowest) * lowest)
    magnitude = math.inf if kept >= Fraction(2) ** 128 else float(kept)
    return F32(math.copysign(magnitude, total))


def oracle(a, b, acc, step, scale_a=None, scale_b=None):
    out = np.zeros((len(a), len(b)), F32) if acc is None else acc.copy()
    per_step = step.k // step.scale_block if step.scale_block else 0
    for index in range(a.shape[1] // step.k):
        k, s = slice(index * step.k, (index + 1) * step.k), slice(index * per_step, (index + 1) * per_step)
        for m, n in np.ndindex(out.shape):
            of_a, of_b = ((), ()) if scale_a is None else (scale_a[m, s], scale_b[n, s])
            out[m, n] = oracle_step(a[m, k], b[n, k], out[m, n], step, of_a, of_b)
    out.view(np.uint32)[np.isnan(out)] = 0x7FFFFFFF
    return out


def draw(rng, step, shape, kind):
    """Random element values of the step's format."""
    if step.group > 1:
        x = rng.choice(E2M1_VALUES, shape) * rng.choice(F32([-1, 1]), shape)
    elif step.operand_emin == -6:
        low, high = {"normal": (5, 6), "top": (7, 10)}.get(kind, (-12, 9))
        x = rng.standard_normal(shape) * np.exp2(rng.integers(low, high, shape))
        x = np.clip(x, -448, 448).astype(float8_e4m3fn).astype(F32)
    else:
        low, high = {"normal": (0, 1), "huge": (-133, 126), "tiny": (-133, -55)}.get(kind, (-20, 20))
        x = (rng.standard_normal(shape) * np.exp2(rng.integers(low, high, shape).astype(float))).astype(F32)
        x = x.astype(bfloat16).astype(F32)
    return np.where(rng.random(shape) < 0.3, x, F32(0)) if kind == "sparse" else x


def draw_scales(rng, step, rows, length, kind):
    shape = (rows, length // step.scale_block)
    if step.group > 1:
        byte = rng.integers(0, 256, shape)
        return np.where(byte & 0x7F == 0x7F, 0, byte).astype(np.uint8)
    low, high = {"normal": (120, 135), "huge": (0, 255), "tiny": (0, 60)}.get(kind, (90, 160))
    return rng.integers(low, high, shape).astype(np.uint8)


def random_case(rng, step, kind, acc_kind="normal", rows=6, columns=5, chain=2):
    length = chain * step.k
    a, b = draw(rng, step, (rows, length), kind), draw(rng, step, (columns, length), kind)
    scales = [draw_scales(rng, step, n, length, kind) if step.scale_block else None for n in (rows, columns)]
    b[0], b[1] = a[0], -a[0]
    if step.scale_block:
        scales[1][:2] = scales[0][0]
    if acc_kind == "none":
        return a, b, None, *scales
    exponent = rng.integers(-149, 120, (rows, columns)) if acc_kind == "wide" else np.full((rows, columns), 4)
    acc = (rng.standard_normal((rows, columns)) * np.exp2(exponent.astype(float))).astype(F32)
    return a, b, acc, *scales


@steps
@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "tiny", "sparse", "top"])
def test_agrees_with_rational_arithmetic(step, kind):
    rng = np.random.default_rng([*kind.encode(), step.k, step.fraction_bits])
    for acc_kind in ("none", "normal", "wide"):
        a, b, acc, *scales = random_case(rng, step, kind, acc_kind)
        if acc is not None:  # cancellation of the whole sum, and of all but the last bits
            acc[2] = -tc.mma(a, b, None, step, *scales)[2]
            acc[~np.isfinite(acc)] = 1
        assert_same_bits(tc.mma(a, b, acc, step, *scales), oracle(a, b, acc, step, *scales))


@steps
def test_agrees_with_rational_arithmetic_on_non_finite_values(step):
    rng = np.random.default_rng(step.k)
    for value in (np.nan, np.inf, -np.inf):
        a, b, acc, *scales = random_case(rng, step, "sparse", rows=7, columns=6, chain=3)
        acc[0, 0], acc[1, 1:3], acc[2, 2] = value, (np.inf, -np.inf), 3e38
        if np.isnan(value) or step.operand_emin == -126:
            a[3, step.k + 1] = b[4, 0] = value
            b[5, step.k + 1] = value
        if step.scale_block:
            scales[0][4, -1] = scales[1][3, 0] = 255
        assert_same_bits(tc.mma(a, b, acc, step, *scales), oracle(a, b, acc, step, *scales))


# --- by hand ----------------------------------------------------------------------------------------------------------


def with_fraction_bits(step, change):
    return replace(step, fraction_bits=step.fraction_bits + change)


@pytest.mark.parametrize("step", [tc.TCGEN05_F16, tc.WGMMA_BF16, tc.WGMMA_E4M3, tc.MXF8F6F4], ids=lambda s: s.name)
def test_the_last_fraction_bit(step):
    # big^2 - big^2 + small: a small product of one quantum survives, one of half a quantum does not.
    big = 2.0**8 if step.operand_emin == -6 else 1.0
    quantum = big * big * 2.0**-step.fraction_bits
    factor = 2.0 ** (floor_log2(Fraction(quantum)) // 2)

    def last(small, step):
        return dot(step, [(big, big), (-big, big), (factor, small / factor)])

    assert last(quantum, step) == quantum
    assert last(1.5 * quantum, step) == quantum
    assert last(quantum / 2, step) == 0
    assert last(quantum / 2, with_fraction_bits(step, 1)) == quantum / 2
    assert last(quantum, with_fraction_bits(step, -1)) == 0


def test_the_last_fraction_bit_of_groups():
    # UE4M3 byte 0x78 is 2^8, byte 1 is 2^-9 (exponent -6, significand 1/8): E = 16, quantum 2^(16 - 35) = 2^-19.
    step = tc.MXF4NVF4

    def last(value, step):
        return dot_groups(step, [(1, 1, 0x78, 0x78), (-1, 1, 0x78, 0x78), (value, 1, 1, 1)])

    assert last(0.5, step) == 2.0**-19
    assert dot_groups(step, [(1, 1, 0x78, 0x78), (-1, 1, 0x78, 0x78), (0.5, 0.5, 1, 1)]) == 0
    assert last(1.5, step) == 3 * 2.0**-19
    assert last(0.5, with_fraction_bits(step, -1)) == 0
    finer = with_fraction_bits(step, 1)
    assert dot_groups(finer, [(1, 1, 0x78, 0x78), (-1, 1, 0x78, 0x78), (0.5, 0.5, 1, 1)]) == 2.0**-20


@pytest.mark.parametrize("sign", [1, -1])
def test_truncation_is_toward_zero(sign):
    # 1 + 3/4 of the last place: to nearest would be 1 + 2^-23. The three parts are multiples of the quantum 2^-25.
    assert dot(tc.WGMMA_BF16, [(sign, 1), (sign, 2.0**-24), (sign, 2.0**-25)]) == sign
    # every term is truncated by itself: two halves of the quantum are nothing
    assert dot(tc.WGMMA_BF16, [(1, 1), (-1, 1), (sign, 2.0**-26), (sign, 2.0**-26)]) == 0


def test_products_are_not_renormalised():
    # 1.5 * 1.5 = 2.25 has exponent 0 + 0, so 2^-25 survives beside it; with exponent 1 it would not.
    assert dot(tc.WGMMA_BF16, [(1.5, 1.5), (-1.5, 1.5), (2.0**-12, 2.0**-13)]) == 2.0**-25


def test_subnormal_operands_have_the_smallest_normal_exponent():
    # E4M3 2^-9 has exponent -6: quantum 2^(-6 - 13) = 2^-19, not 2^-22.
    cancelled = [(2.0**-9, 1), (-(2.0**-9), 1)]
    assert dot(tc.WGMMA_E4M3, cancelled, acc=2.0**-19) == 2.0**-19
    assert dot(tc.WGMMA_E4M3, cancelled, acc=2.0**-20) == 0
    # bfloat16 2^-133 has exponent -126: quantum 2^(-126 + 60 - 25).
    tiny = [(2.0**-133, 2.0**60), (-(2.0**-133), 2.0**60)]
    assert dot(tc.WGMMA_BF16, tiny, acc=2.0**-91) == 2.0**-91
    assert dot(tc.WGMMA_BF16, tiny, acc=2.0**-92) == 0


def test_short_accumulator():
    # E8M13: 1 + 2^-13 has 14 bits; 2 + 2^-13 has 15.
    assert dot(tc.WGMMA_E4M3, [(1, 1), (2.0**-6, 2.0**-7)]) == 1 + 2.0**-13
    assert dot(tc.WGMMA_E4M3, [(1, 1), (1, 1), (2.0**-6, 2.0**-7)]) == 2
    assert dot(replace(tc.WGMMA_E4M3, accumulator_bits=15), [(1, 1), (1, 1), (2.0**-6, 2.0**-7)]) == 2 + 2.0**-13


def test_result_range():
    big = 2.0**127
    assert dot(tc.WGMMA_BF16, [(big, 1), (big, 0.99609375)]) == big * 1.99609375
    assert dot(tc.WGMMA_BF16, [(big, 1), (big, 1)]) == np.inf
    assert dot(tc.WGMMA_BF16, [(big, -1), (big, -1)]) == -np.inf
    assert dot(tc.WGMMA_BF16, [(big, 4), (big, -3)]) == big  # no overflow before the sum
    # 3 * 2^-150 is one and a half of FP32's smallest subnormal
    assert dot(tc.WGMMA_BF16, [(3 * 2.0**-75, 2.0**-75)]) == 2.0**-149
    assert_same_bits(dot(tc.WGMMA_BF16, [(-(2.0**-75), 2.0**-75)]), -0.0)
    # the short accumulator has short subnormals too: 2^-139 is the smallest
    scaled = replace(tc.MXF8F6F4, fraction_bits=13, accumulator_bits=14)
    assert dot(scaled, [(3, 1)], scale_a=57, scale_b=57) == 2.0**-139
    assert dot(scaled, [(1, 1)], scale_a=57, scale_b=57) == 0


def test_exact_zero_is_positive():
    for step in (tc.WGMMA_BF16, tc.MXF8F6F4):
        assert_same_bits(dot(step, [(-1, 0.0)], acc=-0.0), 0.0)
        assert_same_bits(dot(step, [(1, 1)], acc=-1), 0.0)
    assert_same_bits(dot(tc.WGMMA_BF16, [(1, 1), (-1, 1), (-(2.0**-15), 2.0**-15)], acc=-0.0), 0.0)
    assert_same_bits(tc.mma(np.zeros((2, 16), F32), -np.zeros((2, 16), F32), None, tc.WGMMA_BF16), 0.0)


def test_zeros_do_not_raise_the_largest_exponent():
    # the zero product carries 2^254 of scale; E stays that of C
    acc = F32(1 + 2.0**-23)
    assert dot(tc.MXF8F6F4, [(0, 1)], acc=acc, scale_a=254, scale_b=254) == acc
    assert dot(tc.WGMMA_BF16, [(0, 2.0**120), (2.0**-60, 2.0**-60)]) == 2.0**-120
    small = (0.5, 0.5, 1, 1)  # 2^-20
    assert dot_groups(tc.MXF4NVF4, [(0, 6, 0x78, 0x78), small]) == 2.0**-20
    assert dot_groups(tc.MXF4NVF4, [(6, 6, 0x00, 0x78), small]) == 2.0**-20
    # a group that cancels does count: quantum 2^-19
    assert dot_groups(tc.MXF4NVF4, [([1, -1], [1, 1], 0x78, 0x78), small]) == 0


def test_group_alignment_ignores_the_elements():
    # 16 products of 36 are one term of exponent 0, so 2^-20 (quantum 2^-35) survives beside it
    full = ([6] * 16, [6] * 16, 0x38, 0x38)
    minus = ([-6] * 16, [6] * 16, 0x38, 0x38)
    assert dot_groups(tc.MXF4NVF4, [full, minus, (0.5, 0.5, 1, 1)]) == 2.0**-20
    assert dot_groups(tc.MXF4NVF4, [full]) == 576


def test_scale_decoding():
    assert dot(tc.MXF8F6F4, [(1, 1)], scale_a=0, scale_b=254) == 1
    assert dot(tc.MXF8F6F4, [(3, 1)], scale_a=130, scale_b=126) == 12
    table = np.arange(127, dtype=np.uint8).view(float8_e4m3fn).astype(F32)
    for byte in range(127):
        assert dot_groups(tc.MXF4NVF4, [(2, 3, byte, 0x38)]) == 6 * table[byte]
        assert dot_groups(tc.MXF4NVF4, [(2, 3, 0x38, byte | 0x80)]) == 6 * table[byte]


# --- NaN and Inf ------------------------------------------------------------------------------------------------------


def test_nan_is_canonical():
    want = 0x7FFFFFFF
    negative_nan = np.array(0xFFC12345, np.uint32).view(F32)
    assert bits(dot(tc.WGMMA_BF16, [(1, 1)], acc=negative_nan)) == want
    assert bits(dot(tc.WGMMA_BF16, [(negative_nan, 0)])) == want
    assert bits(dot(tc.WGMMA_BF16, [(np.inf, 0)])) == want
    assert bits(dot(tc.WGMMA_BF16, [(np.inf, 1), (np.inf, -1)])) == want
    assert bits(dot(tc.WGMMA_BF16, [(np.inf, 1)], acc=-np.inf)) == want
    assert bits(dot(tc.MXF8F6F4, [(0, 0)], scale_a=255)) == want
    assert bits(dot(tc.MXF8F6F4, [(np.nan, 0)])) == want
    for byte in (0x7F, 0xFF):
        assert bits(dot_groups(tc.MXF4NVF4, [(0, 0, 0x38, byte)])) == want
        assert bits(dot_groups(tc.MXF4NVF4, [(0, 0, byte, 0)])) == want


def test_infinity_propagates():
    assert dot(tc.WGMMA_BF16, [(-np.inf, 2), (2.0**127, 2.0**127)]) == -np.inf
    assert dot(tc.WGMMA_BF16, [(-3, 2)], acc=np.inf) == np.inf
    # Inf by overflow in the first step is an infinite C of the second
    overflow = [(2.0**127, 2)] + [(0, 0)] * 15
    assert dot(tc.WGMMA_BF16, [*overflow, (-(2.0**127), 2)]) == np.inf


def test_nan_stays_in_its_row_and_column():
    rng = np.random.default_rng(11)
    a, b, acc, *scales = random_case(rng, tc.MXF8F6F4, "normal", rows=40, columns=30, chain=4)
    clean = tc.mma(a, b, acc, tc.MXF8F6F4, *scales)
    scales[0][7, 2] = 255
    b[9, 100] = np.nan
    got = tc.mma(a, b, acc, tc.MXF8F6F4, *scales)
    hit = np.zeros(got.shape, bool)
    hit[7], hit[:, 9] = True, True
    np.testing.assert_array_equal(np.isnan(got), hit)
    assert_same_bits(got[~hit], clean[~hit])


def unit_scales(step, rows, columns, length):
    if not step.scale_block:
        return ()
    one = 127 if step.group == 1 else 0x38
    return tuple(np.full((n, length // step.scale_block), one, np.uint8) for n in (rows, columns))


# --- invariants -------------------------------------------------------------------------------------------------------


@steps
@pytest.mark.parametrize("kind", ["normal", "wide", "huge"])
def test_swapping_operands_transposes(step, kind):
    rng = np.random.default_rng(12)
    a, b, acc, scale_a, scale_b = random_case(rng, step, kind, rows=70, columns=41, chain=3)
    got = tc.mma(a, b, acc, step, scale_a, scale_b)
    swapped = tc.mma(b, a, np.ascontiguousarray(acc.T), step, scale_b, scale_a)
    assert_same_bits(got, swapped.T)


@steps
def test_exact_where_nothing_is_truncated(step):
    rng = np.random.default_rng(13)
    length = 4 * step.k
    a, b = rng.choice(F32([0, 1, -2, 3, 4]), (50, length)), rng.choice(F32([0, -1, 2, 6]), (40, length))
    scales = unit_scales(step, 50, 40, length)
    acc = rng.integers(-100, 100, (50, 40)).astype(F32)
    want = acc + a.astype(np.float64) @ b.T
    assert np.abs(want).max() < 2 ** min(step.accumulator_bits, 13)
    assert_same_bits(tc.mma(a, b, acc, step, *scales), want)


@steps
def test_ones_sum_the_other_operand(step):
    rng = np.random.default_rng(14)
    length = 2 * step.k
    a = rng.choice(E2M1_VALUES, (9, length))
    ones = np.ones((1, length), F32)
    scales = unit_scales(step, 9, 1, length)
    assert_same_bits(tc.mma(a, ones, None, step, *scales)[:, 0], a.sum(axis=1))


def test_order_of_the_chain_matters():
    big, small = [(1, 1)] + [(0, 0)] * 15, [(2.0**-12, 2.0**-12)] + [(0, 0)] * 15
    assert dot(tc.WGMMA_BF16, big + small + small) == 1
    assert dot(tc.WGMMA_BF16, small + small + big) == 1 + 2.0**-23


@steps
def test_chain_is_repeated_steps(step):
    rng = np.random.default_rng(15)
    a, b, acc, *scales = random_case(rng, step, "wide", rows=20, columns=20, chain=4)
    got = acc
    for index in range(4):
        k = slice(index * step.k, (index + 1) * step.k)
        per_step = step.k // step.scale_block if step.scale_block else 0
        part = [None if s is None else s[:, index * per_step : (index + 1) * per_step] for s in scales]
        got = tc.mma(a[:, k], b[:, k], got, step, *part)
    assert_same_bits(tc.mma(a, b, acc, step, *scales), got)


def test_e8m0_scales_commute_with_powers_of_two():
    rng = np.random.default_rng(16)
    a, b, acc, scale_a, scale_b = random_case(rng, tc.MXF8F6F4, "wide", rows=20, columns=20, chain=4)
    want = tc.mma(a, b, acc, tc.MXF8F6F4, scale_a, scale_b)
    assert_same_bits(tc.mma(a, b, acc * F32(2.0**9), tc.MXF8F6F4, scale_a + np.uint8(9), scale_b), want * F32(2.0**9))
    assert_same_bits(tc.mma(a, b, acc, tc.MXF8F6F4, scale_a + np.uint8(5), scale_b - np.uint8(5)), want)
    # a scale of one row moves that row alone
    rows = scale_a + np.where(np.arange(20) == 3, 4, 0).astype(np.uint8)[:, None]
    scaled_acc = acc.copy()
    scaled_acc[3] *= 16
    got = tc.mma(a, b, scaled_acc, tc.MXF8F6F4, rows, scale_b)
    assert_same_bits(got[3], want[3] * 16)
    assert_same_bits(np.delete(got, 3, axis=0), np.delete(want, 3, axis=0))


def test_unit_scales_change_nothing():
    rng = np.random.default_rng(17)
    a, b, acc, *_ = random_case(rng, UNSCALED_E4M3, "wide", rows=20, columns=20, chain=4)
    ones = np.full((20, 4), 127, np.uint8)
    assert_same_bits(tc.mma(a, b, acc, tc.MXF8F6F4, ones, ones), tc.mma(a, b, acc, UNSCALED_E4M3))


@steps
@pytest.mark.parametrize("kind", ["normal", "huge"])
def test_blocking_changes_nothing(step, kind, monkeypatch):
    rng = np.random.default_rng(18)
    cases = [random_case(rng, step, kind, rows=9, columns=7, chain=3) for _ in range(6)]
    a, b, acc, scale_a, scale_b = (None if x[0] is None else np.stack(x) for x in zip(*cases, strict=True))
    want = np.stack([tc.mma(*case[:3], step, *case[3:]) for case in cases])
    assert_same_bits(tc.mma(a, b, acc, step, scale_a, scale_b), want)
    for outputs, pairs in ((1, 1), (20, 3), (130, 1000)):
        monkeypatch.setattr(tc, "BLOCK_OUTPUTS", outputs)
        monkeypatch.setattr(tc, "BLOCK_PAIRS", pairs)
        assert_same_bits(tc.mma(a, b, acc, step, scale_a, scale_b), want)


def test_leading_dimensions_broadcast_and_strides_are_free():
    rng = np.random.default_rng(19)
    step = tc.MXF8F6F4
    a, b = draw(rng, step, (3, 1, 8, 64), "wide"), draw(rng, step, (3, 2, 64, 5), "wide").swapaxes(-1, -2)
    scale_a = rng.integers(120, 130, (3, 1, 8, 2), dtype=np.uint8)
    scale_b = rng.integers(120, 130, (2, 5, 2), dtype=np.uint8)
    acc = rng.standard_normal((1, 5, 8)).astype(F32).swapaxes(-1, -2)
    got = tc.mma(a, b, acc, step, scale_a, scale_b)
    assert got.shape == (3, 2, 8, 5)
    for i, j in np.ndindex(3, 2):
        left, right = a[i, 0].copy(), b[i, j].copy()
        assert_same_bits(got[i, j], tc.mma(left, right, acc[0].copy(), step, scale_a[i, 0], scale_b[j]))


def test_empty_dimensions():
    none, some = np.zeros((0, 32), F32), np.ones((3, 32), F32)
    assert tc.mma(none, some, None, UNSCALED_E4M3).shape == (0, 3)
    assert tc.mma(np.zeros((2, 0, 5, 32), F32), some, None, UNSCALED_E4M3).shape == (2, 0, 5, 3)
    acc = np.arange(6, dtype=F32).reshape(2, 3)
    assert_same_bits(tc.mma(np.zeros((2, 0), F32), np.zeros((3, 0), F32), acc, UNSCALED_E4M3), acc)


def test_inputs_are_left_alone():
    rng = np.random.default_rng(20)
    case = random_case(rng, tc.MXF8F6F4, "wide")
    case[0][0, 0] = np.nan
    before = [x.copy() for x in case]
    tc.mma(*case[:3], tc.MXF8F6F4, *case[3:])
    for x, y in zip(case, before, strict=True):
        np.testing.assert_array_equal(x, y)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_errors_name_the_argument():
    a, b, byte = np.zeros((4, 32), F32), np.zeros((5, 32), F32), np.full((4, 1), 127, np.uint8)
    byte_b = np.full((5, 1), 127, np.uint8)
    with pytest.raises(TypeError, match="a must be a float32 array, got float64"):
        tc.mma(a.astype(float), b, None, tc.WGMMA_E4M3)
    with pytest.raises(TypeError, match="acc must be a float32 array"):
        tc.mma(a, b, np.zeros((4, 5)), tc.WGMMA_E4M3)
    with pytest.raises(TypeError, match="scale_b must be a uint8 array"):
        tc.mma(a, b, None, tc.MXF8F6F4, byte, byte_b.astype(int))
    with pytest.raises(ValueError, match="b must have at least two dimensions"):
        tc.mma(a, b[0], None, tc.WGMMA_E4M3)
    with pytest.raises(ValueError, match="multiple of 64"):
        tc.mma(a, b, None, tc.MXF4NVF4, byte, byte_b)
    with pytest.raises(ValueError, match="last dimensions of a and b must be equal"):
        tc.mma(a, np.zeros((5, 64), F32), None, tc.WGMMA_E4M3)
    with pytest.raises(ValueError, match=r"acc must have shape \(..., 4, 5\), got \(5, 4\)"):
        tc.mma(a, b, np.zeros((5, 4), F32), tc.WGMMA_E4M3)
    with pytest.raises(ValueError, match="scale_a must be given"):
        tc.mma(a, b, None, tc.MXF8F6F4)
    with pytest.raises(ValueError, match="scale_b must be None"):
        tc.mma(a, b, None, tc.WGMMA_E4M3, None, byte)
    with pytest.raises(ValueError, match=r"scale_b must have shape \(..., 5, 1\)"):
        tc.mma(a, b, None, tc.MXF8F6F4, byte, byte)
    with pytest.raises(ValueError, match="leading dimensions must broadcast"):
        tc.mma(np.zeros((2, 4, 32), F32), np.zeros((3, 5, 32), F32), None, tc.WGMMA_E4M3)
    with pytest.raises(ValueError, match="b must hold values of the operand format of wgmma e4m3, got 65536"):
        tc.mma(a, b + F32(65536), None, tc.WGMMA_E4M3)
    with pytest.raises(ValueError, match="scale_block must be one of"):
        tc.MmaStep("odd", 64, 25, 24, scale_block=32)


def test_the_contract_rows():
    rows = {s.name: (s.k, s.fraction_bits, s.accumulator_bits, s.scale_block, s.group) for s in tc.STEPS}
    assert rows == {
        "tcgen05.mma kind::mxf8f6f4": (32, 25, 24, 32, 1),
        "tcgen05.mma kind::mxf4nvf4": (64, 35, 24, 16, 16),
        "tcgen05.mma kind::f16": (16, 25, 24, 0, 1),
        "wgmma bf16": (16, 25, 24, 0, 1),
        "wgmma e4m3": (32, 13, 14, 0, 1),
    }
