"""Levels 0 to 5: each turns cases into checks, which the runner runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flamia.conformance.cases import Case
from flamia.conformance.levels import accuracy, bits, promises
from flamia.conformance.levels.check import Check, Context

PER_CASE: dict[int, Callable[[Context, Case], list[Check]]] = {
    1: bits.plan_bytes,
    2: bits.plan_forward,
    3: bits.plan_backward,
    4: promises.plan,
    5: accuracy.plan,
}
"""Level -> the checks of one case. Level 0 has no cases."""


def plan_checks(context: Context, levels: Iterable[int], cases: Iterable[Case]) -> list[Check]:
    """All checks, case by case, so that the levels of a case share the results of one call."""
    wanted = set(levels)
    return [
        check
        for case in cases
        for level, plan in PER_CASE.items()
        if level in wanted and level in case.levels
        for check in plan(context, case)
    ]
