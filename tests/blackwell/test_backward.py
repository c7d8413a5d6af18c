"""The Blackwell backward gives the reference's bits on the simulator, whatever the timing, the grid and the input.

A few cases by default; all with ``FLAMIA_THOROUGH=1``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from flamia.conformance.simulator.attention_backward import OWNERS, STORED, Build
from flamia.kernels.targets import SM_100A, SM_103A
from tests.blackwell.backward import check

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"
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
        "build": Build("mxfp8", 64, SM_103A),
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


@pytest.mark.parametrize("owners", [ONCE, ("queries",)], ids=["once", "twice"])
def test_neither_timing_nor_grid_shows(owners: tuple[str, ...]) -> None:
    for seed in range(SEEDS):
        check(Build(dim=64, hooks=0), (140, 33), (1, 1), owners=owners, seed=seed, ctas=1 + (seed + 2) % 4)


def test_a_strict_build_relies_on_nothing_that_ptx_does_not_promise() -> None:
    outcome = check(Build(dim=64, strict=1, hooks=0), (140,), (1, 1), owners=ONCE, strict=True)
    assert all(not report.unpromised for report in outcome.reports.values())
