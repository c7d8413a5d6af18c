"""2^(c S) of Note [Probabilities]: the product is exact, f is rounded once."""

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest

from flamia.reference import attention_backward, attention_forward
from flamia.reference import probabilities as pr
from flamia.reference.exp2 import exp2_mantissa, fma

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
