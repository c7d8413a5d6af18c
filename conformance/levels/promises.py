"""Level 4: promises that hold bit for bit without knowing the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flamia.conformance.cases import Case
from flamia.conformance.levels.check import Check, Context, Outcome, not_applicable
from flamia.conformance.targets.base import PROMISES

CHECKS: dict[str, Callable[[Context, Case], Outcome]] = {}
"""Promise -> how to check it on a case."""


def plan(context: Context, case: Case) -> list[Check]:
    """The checks that the case is made for; a promise that the target does not claim is not applicable."""
    return [Check(4, case.name, name, partial(_check, context, case, name)) for name in case.promises if name in CHECKS]


def _check(context: Context, case: Case, name: str) -> Outcome:
    if name not in context.target.promises:
        return not_applicable(f"{context.target.name} does not promise that {PROMISES[name]}")
    return CHECKS[name](context, case)
