"""2^(c S) of Note [Probabilities]: the product is exact, f is rounded once."""

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.reference import attention_backward, attention_forward
from flamia.reference import probabilities as pr
from flamia.reference.exp2 import exp2_mantissa, fma
from tests.reference.cases import random_inputs

F32 = np.float32


def scores_near_ties(rng: np.random.Generator, c: np.float32) -> np.ndarray:
    """Scores whose product with c lies beside an odd multiple of 2^-25 in (-2^-5, 0): where 1 + c S is nearly a tie."""
    ties = -(2 * rng.integers(1, 1 << 19, 20_000) + 1) * 2.0**-25
    near = (ties / c).astype(F32)
    return np.concatenate([near, np.nextafter(near, F32(0)), np.nextafter(near, F32(-1))])


@pytest.mark.parametrize("c", [F32(0.12751743), F32(1), F32(2**-3), F32(1.4426950408889634)])
def test_exponential_is_floor_and_one_fma(c) -> None:
    rng = np.random.default_rng(0)
    scores = np.concatenate(
        [
            rng.standard_normal(50_000, F32) * F32(40),
            (rng.standard_normal(50_000) * 2.0 ** rng.integers(-60, 20, 50_000)).astype(F32),
            scores_near_ties(rng, c),
            F32([0.0, -0.0, 2**-149, -(2**-149), 1 / c, -1 / c]),
        ]
    )
    scores = scores[np.abs(scores.astype(np.float64) * c) < pr.LARGE]
    r, p = pr.exponential(scores.copy(), c)
    expected = np.floor(scores.astype(np.float64) * c).astype(F32)
    np.testing.assert_array_equal(r, expected)
    f = fma(np.broadcast_to(c, scores.shape), scores, -expected)
    assert (f >= 0).all() and (f <= 1).all()
    np.testing.assert_array_equal(p, exp2_mantissa(f))
    for i in range(0, len(scores), 997):
        assert r[i] == floor(Fraction(float(scores[i])) * Fraction(float(c)))


def test_small_negative_scores_are_rounded_once() -> None:
    """c S = -(M 2^30 + 1) 2^-55, M odd: f lies below a tie of float32 by less than float64 can see."""
    rounded_twice, expected, got = [], [], []
    for a in range(2**23 + 1, 2**23 + 40_001, 2):
        b = pow(a, -1, 2**30)
        m = a * b >> 30
        if b < 2**24 and m & 1:
            c, score = F32(a * 2.0**-24), F32(-b * 2.0**-31)
            rounded_twice.append(F32(1 + float(c) * float(score)))
            expected.append(F32(1 - m * 2.0**-25 - 2.0**-40))
            got.append(pr.exponential(np.array([score]), c)[1][0])
    np.testing.assert_array_equal(np.array(got), exp2_mantissa(np.array(expected)))
    assert (np.array(got) != exp2_mantissa(np.array(rounded_twice))).sum() > 20


def test_large_scores_are_rounded_to_integers() -> None:
    scores = F32([2.0**40 + 2.0**17, -(2.0**40), 2.0**23 + 1, pr.LOWEST, np.inf, np.nan])
    c = F32(0.1275174)
    with np.errstate(invalid="ignore"):
        r, p = pr.exponential(scores.copy(), c)
    exact = scores.astype(np.float64) * c
    np.testing.assert_array_equal(r[:2], exact[:2].astype(F32))
    assert r[2] == np.floor(exact[2])
    assert r[3] == np.floor(np.float64(pr.LOWEST) * c).astype(F32)
    np.testing.assert_array_equal(p[:2], F32([1, 1]))
    assert np.isnan(p[4:]).all()


def test_ceiling_is_exact_and_keeps_what_is_not_finite() -> None:
    c = F32(1 / 3)
    largest = F32([3, 3.0000002, -0.5, -np.inf, np.nan, 2.0**30])
    got = pr.ceiling(largest, c)
    assert got[:3].tolist() == [ceil(Fraction(float(x)) * Fraction(float(c))) for x in largest[:3]]
    assert got[0] == 2  # fl(1/3) lies above 1/3, and the product is not rounded to 1
    assert got[3] == -np.inf and np.isnan(got[4])
    assert got[5] == F32(2.0**30 * float(c))


@pytest.mark.parametrize("profile", ["ideal", "blackwell", "hopper"])
def test_ones_give_one_in_float32(profile) -> None:
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((150, 1, 64), F32) for _ in "qk")
    out = attention_forward(q, k, np.ones_like(k), [0, 150], profile=profile).out
    np.testing.assert_array_equal(out, np.ones_like(out))


@pytest.mark.parametrize("profile", ["ideal", "blackwell", "hopper"])
def test_scaled_scores_saturate(profile) -> None:
    """c S beyond FP32 is the largest number of its sign: the row's other key takes all."""
    q = np.zeros((2, 1, 64), F32)
    k, v = q.copy(), q.copy()
    q[:, 0, 0], k[0, 0, 0], v[:, 0, 0] = 1, -10, [0, 1]
    f = attention_forward(q, k, v, [0, 2], softmax_scale=1e38, profile=profile)
    np.testing.assert_array_equal(f.out[:, 0, 0], [0, 1])
    np.testing.assert_array_equal(f.l, [[1, 1]])


@pytest.mark.parametrize("profile", ["ideal", "blackwell", "hopper"])
def test_scores_of_minus_infinity_count_as_the_lowest_number(profile) -> None:
    q = np.full((2, 1, 64), 2.0**100, F32)
    v = np.ones_like(q)
    f = attention_forward(q, -q, v, [0, 2], profile=profile)
    np.testing.assert_array_equal(f.out, v)
    np.testing.assert_array_equal(attention_backward(v, f).dv[:, 0, 0], [1.5, 0.5])


# --- Note [Own exponents] ---------------------------------------------------------------------------------------------


def own_p(score: float, c: float, top: int, bits: int) -> Fraction:
    """P by exact arithmetic, from the definition of its bits."""
    x = Fraction(score) * Fraction(c)
    r = floor(x)
    f = Fraction(float(fma(F32(c), F32(score), F32(-r))))
    t = Fraction(float(fma(F32(87 / 256), F32(float(f)), F32(169 / 256))))
    field = r - top + 127
    if field < 0:
        return Fraction(0)
    n = 2**bits * field + round(2**bits * t * f)  # round() of a Fraction ties to even
    field, fraction = divmod(n, 2**bits)
    if field == 0:
        return Fraction(fraction, 2**bits) * Fraction(2) ** -126
    return (1 + Fraction(fraction, 2**bits)) * Fraction(2) ** (field - 127)


@pytest.mark.parametrize("bits", [3, 7])
def test_p_with_an_own_exponent_is_its_bits(bits: int) -> None:
    rng = np.random.default_rng(9)
    c = F32(0.12751743)
    scores = np.concatenate(
        [rng.standard_normal(400, F32) * F32(60), -rng.random(200, F32) * F32(1100), F32([0, -(2.0**-20), -980, 3e4])]
    )
    top = np.ceil(np.abs(scores[:400]).max() * c)
    tops = np.concatenate([np.full(400, top), np.zeros(203), [4000]]).astype(F32)
    r, p = pr.exponential(scores.copy(), c, bits)
    got = pr.own_exponents(p, r, tops, bits)
    want = [own_p(float(s), float(c), int(t), bits) for s, t in zip(scores, tops, strict=True)]
    assert [Fraction(float(x)) for x in got] == want
    assert sum(x == 0 for x in want) > 5 and sum(0 < x < Fraction(2) ** -126 for x in want) > 0
    np.testing.assert_array_equal(got, got.astype(bfloat16).astype(F32))


def test_what_is_lost_or_inactive_has_no_p() -> None:
    p, r = F32([1.5, 1.5, 1.5, np.nan]), F32([0, 0, np.nan, 0])
    got = pr.own_exponents(p, r, F32([np.inf, np.nan, 0, 0]), 3)
    assert got[0] == 0 and np.isnan(got[1:]).all()


def test_gradients_are_rounded_to_nearest_and_ties_away_from_zero() -> None:
    x = F32([1 + 1 / 16, -(1 + 3 / 16), 1 + 1 / 16 - 2**-20, 1.9999, 2**-149, 2**-130 * 1.0625, 3.4e38, np.inf, np.nan])
    want = F32([1 + 1 / 8, -(1 + 2 / 8), 1, 2, 0, 2**-129, np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(pr.round_own(x, 3), want)
    rng = np.random.default_rng(10)
    y = (rng.standard_normal(1000) * 2.0 ** rng.integers(-100, 100, 1000)).astype(F32)
    quantum = 2.0 ** (np.floor(np.log2(np.abs(y.astype(np.float64)))) - 3)
    np.testing.assert_array_equal(pr.round_own(y, 3), np.sign(y) * np.floor(np.abs(y) / quantum + 0.5) * quantum)
    np.testing.assert_array_equal(pr.round_own(y, 7), y.astype(bfloat16).astype(F32))


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_p_of_both_passes_differ_by_a_power_of_two(recipe: str) -> None:
    q, k, v, dout = random_inputs(5, 300, 2, 1)
    q = q * np.array(4, q.dtype)
    cu = np.array([0, 290, 300])
    seen: dict[str, dict[tuple[int, int, int], np.ndarray]] = {"p": {}, "p_top": {}}

    def look(stage, document, heads, query_tile, key_tile, x):
        seen[stage][document.index, query_tile, key_tile] = x

    f = attention_forward(q, k, v, cu, recipe=recipe, profile="hopper", observer=look)
    compared = 0

    def compare(stage, document, heads, query_tile, key_tile, x):
        nonlocal compared
        if stage != "p":
            return
        key = document.index, query_tile, key_tile
        rows = slice(document.start + 128 * query_tile, min(document.start + 128 * (query_tile + 1), document.stop))
        count = rows.stop - rows.start
        change = np.exp2(seen["p_top"][key][heads, :count] - f.m[heads, rows])[:, None, :]
        ahead, back = seen["p"][key][heads, :, :count].astype(np.float64), x[..., :count].astype(np.float64)
        np.testing.assert_array_equal(
            np.where(back >= 2.0**-118, ahead * change, 0), np.where(back >= 2.0**-118, back, 0)
        )
        compared += (back >= 2.0**-118).sum()

    attention_backward(dout, f, observer=compare)
    assert compared > 50_000
