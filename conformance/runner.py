"""The runner: plans the checks of the chosen levels and cases, runs them one after the other, and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from flamia import __version__
from flamia.conformance.cases import select_cases
from flamia.conformance.levels import plan_checks
from flamia.conformance.levels.check import Check, Context, Outcome
from flamia.conformance.results import LEVELS, CaseResult, Report
from flamia.conformance.targets import Target, resolve_target
from flamia.conformance.targets.base import describe_recipe
from flamia.reference.profiles import get_profile
from flamia.reference.recipes import Recipe, get_recipe

Progress = Callable[[CaseResult, int, int], None]
"""``progress(result, done, total)``: called after every check."""


def run(
    target: Any,
    levels: Iterable[int] | None = None,
    cases: Iterable[str] | None = None,
    size: str = "quick",
    recipe: Recipe | str | None = None,
    profile: str | None = None,
    *,
    device: str | None = None,
    promises: Iterable[str] | None = None,
    seed: int = 0,
    stop_on_failure: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Run the suite on a target.

    :param target: a `Target`, the name of a built-in one, ``"package.module:attribute"``, or any callable or object
        that `targets.callables` describes.
    :param levels: some of 0 to 5; default: all.
    :param cases: names of cases or patterns (``"documents/*"``); default: all of the size.
    :param size: ``"quick"``, ``"full"`` or ``"stress"``.
    :param recipe: what bits and budgets come from; default: what the target says.
    :param profile: likewise.
    :param device: where a torch target runs, such as ``"cuda"``; default: the CPU.
    :param promises: level-4 checks to run instead of those that the target claims.
    :param seed: of all cases.
    :param stop_on_failure: return at the first failure.
    :param progress: called after every check.
    :raises ValueError, TypeError: for an argument that is not allowed.
    :raises TargetUnavailableError: if the target is not installed here.
    """
    wanted = sorted(set(LEVELS if levels is None else levels))
    for level in wanted:
        if level not in LEVELS:
            raise ValueError(f"levels must be some of {sorted(LEVELS)}, got {level}")
    subject: Target = resolve_target(target, recipe=recipe, profile=profile, device=device, promises=promises)
    chosen, machine = get_recipe(subject.recipe), get_profile(subject.profile)
    started, clock = datetime.now(UTC), time.perf_counter()
    context = Context(subject, chosen, machine, size, seed)
    chosen_cases = select_cases(cases, size, machine.name)
    checks = plan_checks(context, wanted, chosen_cases)
    results: list[CaseResult] = []
    lost = ""
    for check in checks:
        results.append(_not_run(check, lost) if lost else run_check(check))
        if results[-1].status in ("failed", "error") and not subject.is_alive():
            lost = f"level {check.level} {results[-1].name}"
        if progress is not None:
            progress(results[-1], len(results), len(checks))
        if stop_on_failure and results[-1].status in ("failed", "error"):
            break
    results.sort(key=lambda r: r.level)
    return Report(
        target=subject.name,
        environment={"flamia": __version__, **subject.environment()},
        recipe=describe_recipe(subject.recipe),
        profile=machine.name,
        size=size,
        results=tuple(results),
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - clock,
    )


def _not_run(check: Check, lost: str) -> CaseResult:
    reason = f"not run: the device was lost in {lost}"
    return CaseResult(check.level, check.case, check.name, "not_applicable", reason)


def run_check(check: Check) -> CaseResult:
    """Run one check; an exception becomes the status ``error``."""
    clock = time.perf_counter()
    try:
        outcome = check.run()
    except Exception as error:
        outcome = Outcome("error", f"{type(error).__name__}: {error}")
    return CaseResult(
        check.level,
        check.case,
        check.name,
        outcome.status,
        outcome.message,
        outcome.coordinate,
        outcome.numbers,
        time.perf_counter() - clock,
        outcome.arrays,
    )
