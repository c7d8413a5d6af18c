"""The Blackwell forward on inputs that nobody has, on the simulator: the reference's bits all the same.

Some by default, spread over recipes, targets and head dims; all with ``FLAMIA_THOROUGH=1``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flamia.conformance.simulator.attention import Build, Operands, run_forward
from flamia.kernels.targets import SM_100A, SM_103A
from flamia.reference.recipes import Recipe, get_recipe
from tests.blackwell.forward import Expected, draw

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"
F32 = np.float32
LARGEST = float(np.finfo(F32).max)

BUILDS = [
    Build(recipe=recipe, dim=dim, target=target)
    for dim in (64, 128)
    for recipe, target in (
        ("mxfp8", SM_100A),
        ("nvfp4_fp8", SM_103A),
        ("mxfp8", SM_103A),
        ("nvfp4_fp8", SM_100A),
    )
]

Inputs = dict[str, Any]
Make = Callable[[int], Inputs]


def inputs(
    lengths: tuple[int, ...], dim: int, heads: tuple[int, int] = (1, 1), seed: int = 0, padding: int = 0
) -> Inputs:
    """Normal numbers in float32; padding rows hold NaN and infinities."""
    x = draw((*lengths, padding), heads, dim, seed, F32)
    x["cu_seqlens"] = x["cu_seqlens"][:-1]
    for name, value in (("q", np.nan), ("k", np.inf), ("v", np.nan)):
        x[name][len(x[name]) - padding :] = value
    return x


def powers_per_token(dim: int) -> Inputs:
    """Each token of q, k and v its own power of two, over all of FP32: scores overflow both ways."""
    rng, x = np.random.default_rng(1), inputs((150,), dim)
    for name in "qkv":
        powers = np.exp2(rng.integers(-149, 128, (150, 1, 1)).astype(float))
        x[name] = np.clip(x[name] * powers, -LARGEST, LARGEST).astype(F32)
    return x


def powers_per_number(dim: int) -> Inputs:
    """Each number its own power of two."""
    rng, x = np.random.default_rng(2), inputs((140,), dim)
    for name in "qkv":
        x[name] = (x[name] * np.exp2(rng.integers(-126, 127, x[name].shape).astype(float))).astype(F32)
    return x


def largest(dim: int) -> Inputs:
    """Nothing but the largest number, of either sign."""
    return {n: x if n == "cu_seqlens" else np.copysign(F32(LARGEST), x) for n, x in inputs((140,), dim).items()}


def subnormal(dim: int) -> Inputs:
    """Nothing but the eight smallest numbers, and zeros of either sign."""
    rng, x = np.random.default_rng(4), inputs((140,), dim)
    for name in "qkv":
        x[name] = np.copysign(F32(2.0**-149) * rng.integers(0, 9, x[name].shape).astype(F32), x[name])
    return x


def lost_at_the_ends(dim: int) -> Inputs:
    """NaN and infinities in the first and the last tokens of documents."""
    x = inputs((5, 130, 1, 33), dim, (2, 1))
    x["q"][[0, 5, 135, 136], 0] = np.nan
    x["k"][[4, 134, 168]] = np.nan
    x["v"][[133, 167]] = np.inf
    return x


def lost_first_keys(dim: int) -> Inputs:
    """Documents whose first token, or all of them, are lost: rows without a number in their first tile."""
    x = inputs((130, 40, 3), dim)
    x["k"][[0, 170]] = np.nan
    for name in "qkv":
        x[name][130:170] = np.nan
    return x


def empty_documents_at_the_ends(dim: int) -> Inputs:
    """And more than a tile of padding, full of NaN."""
    return inputs((0, 0, 129, 0, 7, 0, 0), dim, padding=150)


def groups_of_five(dim: int) -> Inputs:
    """A group of query heads that is no power of two."""
    return inputs((20, 1), dim, (5, 1))


def groups_of_seven(dim: int) -> Inputs:
    """Likewise."""
    return inputs((20, 3), dim, (7, 1))


def overflowing_scores(dim: int) -> Inputs:
    """Every score is an infinity, of the sign of its key."""
    x = inputs((140,), dim)
    signs = np.random.default_rng(11).choice(F32([-1, 1]), (140, 1, 1))
    return {**x, "q": np.abs(x["q"]) * F32(2.0**100), "k": np.abs(x["k"]) * F32(2.0**100) * signs}


def scores_without_a_maximum(dim: int) -> Inputs:
    """Every score is -inf, which counts as the lowest number."""
    x = inputs((140,), dim)
    return {**x, "q": np.abs(x["q"]) * F32(2.0**100), "k": -np.abs(x["k"]) * F32(2.0**100)}


def zeros_of_both_signs(dim: int) -> Inputs:
    """Queries of -0, values of 0 and -0."""
    x = inputs((135,), dim)
    return {**x, "q": x["q"] * F32(-0.0), "v": np.copysign(F32(0), x["v"])}


def growing_maxima(dim: int, power: int) -> Inputs:
    """Maxima that grow from key tile to key tile, by less than `SLACK` together; values of one size."""
    x = inputs((300,), dim)
    growth = np.repeat(F32([0.5, 2.5, 3.5]) * F32(8 / dim**0.5), 128)[:300, None, None]
    return {**x, "q": np.abs(x["q"]), "k": np.abs(x["k"]) * growth, "v": x["v"] * F32(2.0**power)}


def values_near_the_largest(dim: int) -> Inputs:
    """Past `MAX_V_EXPONENT`: O would overflow in units that lag behind the maximum."""
    return growing_maxima(dim, 113)


def values_near_the_smallest(dim: int) -> Inputs:
    """Past `REACH`: O would keep bits that it must lose in units of the maximum."""
    return growing_maxima(dim, -126)


MADE: tuple[Make, ...] = (
    powers_per_token,
    lost_at_the_ends,
    values_near_the_largest,
    values_near_the_smallest,
    groups_of_five,
    scores_without_a_maximum,
    powers_per_number,
    largest,
    subnormal,
    lost_first_keys,
    empty_documents_at_the_ends,
    groups_of_seven,
    overflowing_scores,
    zeros_of_both_signs,
)


def check(build: Build, x: Inputs, recipe: Recipe | str, causal: bool, scale: float | None, seed: int) -> None:
    with np.errstate(all="ignore"):
        expected = Expected(x, recipe, causal, scale)
        operands = Operands.of(**x, recipe=recipe, causal=causal, softmax_scale=scale)
    wrong = expected.mismatch(run_forward(build, operands, seed=seed, ctas=1 + seed % 3))
    assert wrong is None, wrong


@pytest.mark.parametrize("i", range(len(MADE) if THOROUGH else 6), ids=lambda i: MADE[i].__name__)
def test_wild_inputs(i: int) -> None:
    """On every build with ``FLAMIA_THOROUGH=1``, causal and full."""
    for j, build in enumerate(BUILDS if THOROUGH else BUILDS[i % 4 : i % 4 + 1]):
        check(build, MADE[i](build.dim), build.recipe, causal=(i + j // 4) % 2 == 0, scale=None, seed=i + j)


SCALES = (1e-42, 1, LARGEST / 2, 0.0, -0.0, 1e-60, 1e30, 2.0**-101, 2.0**99.9)
"""Subnormal, huge, zero of either sign, below all numbers of FP32, at the borders of the fast path."""


@pytest.mark.parametrize("scale", SCALES if THOROUGH else SCALES[:3])
def test_wild_softmax_scales(scale: float) -> None:
    i = SCALES.index(scale)
    for build in (BUILDS[i % 8], BUILDS[(i + 5) % 8]) if THOROUGH else BUILDS[i : i + 1]:
        x = inputs((133,), build.dim, seed=i)
        x["q"] *= np.exp2(np.random.default_rng(i).integers(-80, 80, (133, 1, 1))).astype(F32)
        x["k"][::7] = 0
        check(build, x, build.recipe, causal=True, scale=scale, seed=i)


HEAD_SCALES = (0.75, 2.0**100, 2.0**-100, 2.0**63, 1 / 3)


@pytest.mark.parametrize("head_scale", HEAD_SCALES if THOROUGH else HEAD_SCALES[:1])
def test_head_scales_and_rotated_channels(head_scale: float) -> None:
    """Scores are multiplied by the square of the head scale, whether that is a number of FP32 or not."""
    recipe = dataclasses.replace(get_recipe("nvfp4_fp8"), head_scale=head_scale, hadamard=True)
    check(BUILDS[3], inputs((135, 7), 64, (2, 1)), recipe, causal=True, scale=None, seed=2)
