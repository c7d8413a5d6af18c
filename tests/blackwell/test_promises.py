"""Promises that compare calls, on packs small enough for the simulator: forward and backward, host code and kernels.

``flamia conform`` asks for the same of cases that are in its quick class for a bit-accurate machine; those of suffix,
heads, determinism and shift are larger. Suffix by default; all with ``FLAMIA_THOROUGH=1``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from flamia.conformance.calls import Inputs  # noqa: E402
from flamia.conformance.cases import CASES, Case  # noqa: E402
from flamia.conformance.cases.draw import gaussian, scaled  # noqa: E402
from flamia.conformance.levels.check import Context  # noqa: E402
from flamia.conformance.levels.promises import CHECKS  # noqa: E402
from flamia.conformance.targets.simulator import SimulatorTarget  # noqa: E402
from flamia.kernels.targets import SM_100A, SM_103A, Target  # noqa: E402
from flamia.reference.profiles import get_profile  # noqa: E402
from flamia.reference.recipes import get_recipe  # noqa: E402

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"


def idle_rows(rng: np.random.Generator) -> Inputs:
    """As the case ``leak/idle_rows``: P of the rows up to the cut is tiny beside that of rows without a gradient."""
    inputs = gaussian(rng, [64, 64, 140], (1, 1)).copied()
    inputs.q[...] = scaled(inputs.q, 0.25)
    inputs.q[..., 0] = 8
    inputs.k[..., 0] = 0
    first = np.concatenate([np.arange(64), np.arange(64), np.arange(140)]) < 32
    inputs.k[first, :, 0] = -12
    return inputs


def small(rng: np.random.Generator) -> Inputs:
    """Two KV heads of two query heads each, a document of two tiles and one of 33 tokens."""
    return gaussian(rng, [140, 33], (4, 2))


WANTED: dict[str, tuple[str, Callable[[np.random.Generator], Inputs]]] = {"suffix": ("suffix", idle_rows)}
if THOROUGH:
    WANTED |= {name: (name, small) for name in ("heads", "determinism", "shift", "consistency", "prefix")}
    WANTED["suffix of grouped heads"] = "suffix", small
CHIPS: list[tuple[Target, str]] = [(SM_100A, "mxfp8"), (SM_103A, "nvfp4_fp8")]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("chip", "recipe"), CHIPS if THOROUGH else CHIPS[:1], ids=lambda x: getattr(x, "name", x))
def test_a_promise_holds(wanted: str, chip: Target, recipe: str) -> None:
    promise, build = WANTED[wanted]
    case: Case = replace(CASES["arguments/repeated"], name=f"small/{promise}", build=build)
    target = SimulatorTarget(chip)
    target.recipe = recipe
    context = Context(target, get_recipe(recipe), get_profile("blackwell"), "quick", 0)
    outcome = CHECKS[promise](context, case)
    assert outcome.status == "passed", outcome.message
    assert outcome.numbers.get("compared", 5001) > 5000
