"""Level 5: error against float64, within the budget of Note [Budget]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from flamia.conformance.budget import FACTOR, Budget, Exact, exact_results, make_budgets
from flamia.conformance.calls import TENSORS, Inputs, Results
from flamia.conformance.cases import Case
from flamia.conformance.comparison import Difference, compare_within
from flamia.conformance.levels.bits import REFERENCE, expected_results
from flamia.conformance.levels.check import Check, Context, Outcome, first_failure

FEW_ROWS = 64
"""Below this many rows a mean says little."""


def plan(context: Context, case: Case) -> list[Check]:
    """One check per case."""
    return [] if case.plan is not None else [Check(5, case.name, "accuracy", partial(check_accuracy, context, case))]


def check_accuracy(context: Context, case: Case) -> Outcome:
    """All outputs of a case against their budgets."""
    inputs = context.inputs(case)
    got = context.results(case)
    exact: Exact = context.keep((case.name, "exact"), lambda: exact_results(inputs))
    budgets = make_budgets(exact, reference_for_budget(context, case), got.out.dtype)
    numbers: dict[str, float] = {}
    outcome = first_failure(_differences(inputs, got, exact, budgets, numbers))
    return Outcome(outcome.status, outcome.message, outcome.coordinate, numbers, outcome.arrays)


def reference_for_budget(context: Context, case: Case) -> Results:
    """The reference on a case, with the channels padded by zeros where it does not take the head_dim."""
    inputs = context.inputs(case)
    allowed = context.profile.head_dims
    dim = inputs.head_dim
    wanted = -(-dim // 32) * 32 if allowed is None else next((d for d in allowed if d >= dim), dim)
    if wanted == dim:
        return expected_results(context, case)
    wide = {name: np.pad(getattr(inputs, name), ((0, 0), (0, 0), (0, wanted - dim))) for name in TENSORS}
    scale = dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale
    padded = REFERENCE.run(inputs.replace(**wide, softmax_scale=scale), context.recipe, context.profile.name)
    assert padded.dq is not None and padded.dk is not None and padded.dv is not None
    dq, dk, dv = (x[..., :dim] for x in (padded.dq, padded.dk, padded.dv))
    return Results(padded.out[..., :dim], padded.lse, dq, dk, dv)


def _differences(
    inputs: Inputs, got: Results, exact: Exact, budgets: dict[str, Budget], numbers: dict[str, float]
) -> Iterator[Difference | None]:
    cu = inputs.cu_seqlens
    for name, x in got.outputs().items():
        budget = budgets[name]
        found, worst = compare_within(name, x, exact.values[name], budget.allowed, cu_seqlens=cu)
        numbers[f"{name}_worst_over_budget"] = worst
        yield found
        if not np.isfinite(worst):
            continue
        with np.errstate(invalid="ignore"):
            error = np.where(
                np.isfinite(exact.values[name]), (x.astype(np.float64) - exact.values[name]) / budget.unit, 0.0
            )
        yield _root_mean_square(name, error, budget, inputs, numbers)
        yield _bias(name, error, exact, budget, inputs, numbers)


def _root_mean_square(
    name: str, error: np.ndarray, budget: Budget, inputs: Inputs, numbers: dict[str, float]
) -> Difference | None:
    """Over each document and head."""
    worst, where = 0.0, (0, 0)
    for document, (start, stop) in enumerate(zip(inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:], strict=True)):
        if start == stop:
            continue
        mine, theirs, band = (
            np.sqrt(np.mean(np.square(y[start:stop]), axis=(0, 2)))
            for y in (error, budget.reference, budget.band / budget.unit)
        )
        ratio = mine / np.maximum(FACTOR * (theirs + band), 1e-300)
        head = int(np.argmax(ratio))
        if ratio[head] > worst:
            worst, where = float(ratio[head]), (document, head)
    numbers[f"{name}_rms_over_budget"] = worst
    if worst <= 1:
        return None
    text = f"{name}: the root mean square of the error in document {where[0]}, head {where[1]} is {worst:.3g} times"
    return Difference(f"{text} its budget", where, 1, {"rms_over_budget": worst})


def _bias(
    name: str, error: np.ndarray, exact: Exact, budget: Budget, inputs: Inputs, numbers: dict[str, float]
) -> Difference | None:
    """The mean of the error away from zero, over all documents."""
    last = int(inputs.cu_seqlens[-1])
    if last < FEW_ROWS or name == "lse":
        return None
    sign = np.sign(exact.values[name][:last])
    mine, theirs = (float(np.mean(y[:last] * sign)) for y in (error, budget.reference))
    deviation = 4 * float(np.sqrt(np.mean(np.square(budget.reference[:last])))) / np.sqrt(last)
    limit = FACTOR * (abs(theirs) + deviation + float(np.mean((budget.band / budget.unit)[:last])))
    ratio = abs(mine) / max(limit, 1e-300)
    numbers[f"{name}_bias_over_budget"] = ratio
    if ratio <= 1:
        return None
    direction = "away from" if mine > 0 else "towards"
    return Difference(f"{name}: errors lean {direction} zero, {ratio:.3g} times as much as allowed", None, 1)
