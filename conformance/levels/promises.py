"""Level 4: promises that hold without knowing the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flamia.conformance.cases import Case
from flamia.conformance.levels import containment, independence, invariants, leak, validation
from flamia.conformance.levels.check import Check, Context, Outcome, not_applicable
from flamia.conformance.targets.base import PROMISES

CHECKS: dict[str, Callable[[Context, Case], Outcome]] = {
    "leak": leak.check_leak,
    "containment": containment.check_containment,
    "pack": independence.check_pack,
    "suffix": independence.check_suffix,
    "prefix": independence.check_prefix,
    "edges": invariants.check_edges,
    "ones": invariants.check_ones,
    "heads": independence.check_heads,
    "shift": invariants.check_shift,
    "determinism": independence.check_determinism,
    "strides": independence.check_strides,
    "consistency": invariants.check_consistency,
    "zero_scale": invariants.check_zero_scale,
    "validation": validation.check_validation,
    "graph": independence.check_graph,
}
"""Promise -> how to check it on a case."""


def plan(context: Context, case: Case) -> list[Check]:
    """The checks that the case is made for; a promise that the target does not claim is not applicable."""
    return [Check(4, case.name, name, partial(_check, context, case, name)) for name in case.promises]


def _check(context: Context, case: Case, name: str) -> Outcome:
    if name not in context.target.promises:
        return not_applicable(f"{context.target.name} does not promise that {PROMISES[name]}")
    return CHECKS[name](context, case)
