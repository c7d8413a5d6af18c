"""Levels 0 to 5: each turns cases into checks, which the runner runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from flamia.conformance.cases import Case
from flamia.conformance.levels import accuracy, bits, promises
from flamia.conformance.levels.check import Check, Context, Outcome, Refused, not_applicable
from flamia.conformance.levels.probing import plan_probes

PER_CASE: dict[int, Callable[[Context, Case], list[Check]]] = {
    1: bits.plan_bytes,
    2: bits.plan_forward,
    3: bits.plan_backward,
    4: promises.plan,
    5: accuracy.plan,
}
"""Level -> the checks of one case. Level 0 has no cases."""


def plan_checks(context: Context, levels: Iterable[int], cases: Iterable[Case]) -> list[Check]:
    """All checks, case by case, so that the levels of a case share the results of one call.

    Illegal calls come last: where they are accepted, a kernel may write to memory that is not its own.
    """
    wanted = set(levels)
    probes = plan_probes(context) if 0 in wanted else []
    checks = [
        _for_target(context, case, check)
        for case in cases
        for level, plan in PER_CASE.items()
        if level in wanted and level in case.levels
        for check in plan(context, case)
    ]
    return probes + sorted(checks, key=lambda check: check.name == "validation")


def _for_target(context: Context, case: Case, check: Check) -> Check:
    """The check, not applicable if the target is not for its level, or does not take the dtype, or refuses the case."""

    def run() -> Outcome:
        if check.level not in context.target.levels:
            return not_applicable(f"the target is for levels {sorted(context.target.levels)} only")
        dtype = context.inputs(case).q.dtype.name
        if dtype not in context.target.dtypes:
            return not_applicable(f"the target does not take {dtype}")
        try:
            return check.run()
        except Refused as refusal:
            return not_applicable(f"refused: {refusal}")

    return replace(check, run=run)
