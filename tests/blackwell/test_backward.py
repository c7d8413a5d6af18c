"""The Blackwell backward gives the reference's bits on the simulator, whatever the timing, the grid and the input.

A few cases by default; all with ``FLAMIA_THOROUGH=1``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flamia.conformance.simulator.attention import Build as Forward
from flamia.conformance.simulator.attention import Operands as ForwardOperands
from flamia.conformance.simulator.attention import run_forward
from flamia.conformance.simulator.attention_backward import OWNERS, STORED, Build, run_backward
from flamia.kernels.targets import SM_100A, SM_103A
from flamia.reference.formats import E4M3, decode
from tests.blackwell.backward import Expected, check, draw, expected

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"
SMALLEST_NORMAL = 8
"""The E4M3 code of 2^-6."""
SEEDS = 50 if THOROUGH else 2

TWICE, ONCE = OWNERS, ("keys", STORED)
"""The two ways to dQ: X is computed twice, or stored."""

CASES: dict[str, dict[str, Any]] = {
    "mxfp8 d128 gqa": {"build": Build("mxfp8", 128), "lengths": (0, 33, 1), "heads": (3, 1), "owners": ONCE},
    "nvfp4 d64 sm_103a": {
        "build": Build("nvfp4_fp8", 64, SM_103A),
        "lengths": (129,),
        "heads": (1, 1),
        "owners": TWICE,
    },
    "full, head by head": {
        "build": Build("mxfp8", 64),
        "lengths": (130, 20),
        "heads": (2, 2),
        "causal": False,
        "owners": ONCE,
        "heads_at_once": 1,
    },
}
THOROUGH_CASES: dict[str, dict[str, Any]] = {
    f"{recipe} d{dim} {target.name} {'causal' if causal else 'full'} {owners[1]}": {
        "build": Build(recipe, dim, target),
        "lengths": (0, 1, 31, 33, 127, 128, 129, 300),
        "heads": (2, 2),
        "causal": causal,
        "owners": owners,
    }
    for owners in (ONCE, TWICE)
    for recipe in ("mxfp8", "nvfp4_fp8")
    for dim in (64, 128)
    for target in (SM_100A, SM_103A)
    for causal in (True, False)
}
THOROUGH_CASES["eight query heads"] = {"build": Build("mxfp8", 128), "lengths": (140, 20), "heads": (8, 1)}


@pytest.mark.parametrize("case", CASES | (THOROUGH_CASES if THOROUGH else {}))
def test_gradients_and_tiles_have_the_bits_of_the_reference(case: str) -> None:
    outcome = check(**(CASES | THOROUGH_CASES)[case])
    assert all(not report.approximate for report in outcome.reports.values())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"] if THOROUGH else ["mxfp8"])
def test_lost_tokens_reach_what_the_contract_says_and_nothing_else(recipe: str) -> None:
    for owners in (ONCE, TWICE) if THOROUGH else (ONCE,):
        check(Build(recipe, 64), (160, 20), (1, 1), damaged=True, owners=owners)


def test_keys_past_a_document_have_no_part_in_scales() -> None:
    """All scores are far below 0, which is the score of a key that is not there."""
    inputs = draw((140,), (1, 1), 64)
    inputs["q"], inputs["k"] = abs(inputs["q"]), -abs(inputs["k"])
    reference = Expected(inputs, causal=False)
    got = run_backward(Build(dim=64), reference.operands, owners=ONCE)
    wrong = reference.mismatch(got, ONCE)
    assert wrong is None, wrong


@pytest.mark.parametrize("owners", [ONCE, ("queries",)], ids=["once", "twice"])
def test_neither_timing_nor_grid_shows(owners: tuple[str, ...]) -> None:
    for seed in range(SEEDS):
        check(Build(dim=64), (140, 33), (1, 1), owners=owners, seed=seed, ctas=1 + (seed + 2) % 4)


@pytest.mark.parametrize("owners", [ONCE, TWICE] if THOROUGH else [ONCE], ids=lambda owners: owners[1])
def test_the_order_of_work_does_not_show(owners: tuple[str, ...]) -> None:
    """Items from the last to the first, and shuffled; one CTA takes them all, or three share them."""
    reference = expected("mxfp8", 64, (140, 20, 33), (2, 1))
    rng = np.random.default_rng(0)
    for ctas, order in ((1, lambda n: np.arange(n)[::-1]), (3, rng.permutation)):
        arrays = dict(reference.operands.arrays)
        for name in ("keys_items", "queries_items"):
            arrays[name] = arrays[name][order(len(arrays[name]))]
        got = run_backward(Build(dim=64), replace(reference.operands, arrays=arrays), owners=owners, ctas=ctas)
        wrong = reference.mismatch(got, owners)
        assert wrong is None, wrong


def test_p_is_that_of_the_forward_kernel() -> None:
    """Where both hold P as a normal E4M3 number: Note [Probabilities]."""
    lengths, heads = (140,), (1, 1)
    reference = expected("mxfp8", 64, lengths, heads)
    inputs = {name: x for name, x in draw(lengths, heads, 64).items() if name != "dout"}
    forward = run_forward(Forward(dim=64), ForwardOperands.of(**inputs, recipe="mxfp8", causal=True))
    backward = run_backward(Build(dim=64), reference.operands, owners=("queries",)).tiles["queries"]
    assert forward.p is not None and forward.p_top is not None
    compared = 0
    for query_tile, key_tile in ((0, 0), (1, 0), (1, 1)):
        rows = min(128, 140 - 128 * query_tile)
        ours, theirs = backward.p[0, query_tile, key_tile][:rows], forward.p[0, query_tile, key_tile][:rows]
        e = np.repeat(np.repeat(backward.p_scale[0, query_tile, key_tile].astype(np.float64) - 127, 32, 0), 32, 1)[
            :rows
        ]
        top = reference.forward.m[0, 128 * query_tile :][:rows, None]
        above = forward.p_top[0, query_tile, key_tile, :rows, None] - 8
        normal = (ours >= SMALLEST_NORMAL) & (theirs >= SMALLEST_NORMAL)
        same = decode(ours, E4M3) * np.exp2(e + top) == decode(theirs, E4M3) * np.exp2(above)
        assert same[normal].all()
        compared += int(normal.sum())
    assert compared > 5000


def test_a_strict_build_relies_on_nothing_that_ptx_does_not_promise() -> None:
    outcome = check(Build(dim=64, strict=1, hooks=0), (140,), (1, 1), owners=ONCE, strict=True)
    assert all(not report.unpromised for report in outcome.reports.values())
