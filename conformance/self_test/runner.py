"""Running the suite against its planted faults.

Note [Self-test]
~~~~~~~~~~~~~~~~
Each fault names the checks that must catch it (`Fault.kills`). First every one of these checks runs against a copy of
the reference without a fault, and must pass, or be refused where the case allows that (Note [Refusals] of
`levels.check`): a check that always fails catches nothing. Then each fault is planted, and each of its checks must
fail. A check that raises does not count: a crash is noticed without a suite. A fault that passes one of its checks has
*survived*, and the self-test fails; likewise one that can no longer be planted, because the reference has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flamia.conformance.cases import CASES
from flamia.conformance.results import CaseResult
from flamia.conformance.runner import run
from flamia.conformance.self_test.copies import EditError, planted
from flamia.conformance.self_test.fault import Fault, Kill
from flamia.conformance.self_test.faults import FAULTS
from flamia.conformance.self_test.wrappers import Replaying
from flamia.conformance.targets import Target


@dataclass(frozen=True)
class Attempt:
    """One check against a fault, or against none.

    :param status: of the check, see `results.CaseResult`.
    :param message: what the check said.
    """

    kill: Kill
    status: str
    message: str

    @property
    def refused(self) -> bool:
        """Not applicable, in a case that may be refused."""
        return self.status == "not_applicable" and CASES[self.kill.case].may_refuse


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    :param attempts: in the order of `Fault.kills`.
    """

    fault: Fault
    attempts: tuple[Attempt, ...]
    seconds: float

    @property
    def killed(self) -> bool:
        """True if every check that must catch the fault did."""
        return all(a.status == "failed" for a in self.attempts)


@dataclass(frozen=True)
class SelfTest:
    """Everything that a self-test found.

    :param controls: checks against the reference without a fault that neither passed nor were refused; must be empty.
    """

    verdicts: tuple[Verdict, ...]
    controls: tuple[Attempt, ...]
    seconds: float
    checks: int = field(default=0)

    @property
    def survivors(self) -> list[Verdict]:
        """Faults that some check let through."""
        return [v for v in self.verdicts if not v.killed]

    @property
    def passed(self) -> bool:
        """True if every fault was killed by every one of its checks, none of which fails without a fault."""
        return bool(self.verdicts) and not self.survivors and not self.controls


Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``."""


def run_self_test(faults: Iterable[str] | None = None, progress: Progress | None = None) -> SelfTest:
    """Note [Self-test].

    :param faults: names; default: all.
    :param progress: called after the control and after every fault.
    :raises ValueError: for an unknown name.
    """
    chosen = _choose(faults)
    clock = time.perf_counter()
    kills = list(dict.fromkeys(k for fault in chosen for k in fault.kills))
    with planted(()) as package:
        attempts = [_attempt(kill, _target(kill, package), kill.case) for kill in kills]
    controls = [a for a in attempts if a.status != "passed" and not a.refused]
    if progress is not None:
        progress("no fault", 0, len(chosen))
    verdicts = []
    for fault in chosen:
        verdicts.append(try_fault(fault))
        if progress is not None:
            progress(fault.name, len(verdicts), len(chosen))
    return SelfTest(tuple(verdicts), tuple(controls), time.perf_counter() - clock, len(kills))


def try_fault(fault: Fault) -> Verdict:
    """Plant one fault and run the checks that must catch it."""
    clock = time.perf_counter()
    attempts = []
    try:
        with planted(fault.edits) as package:
            for kill in fault.kills:
                target = _target(kill, package)
                attempts.append(_attempt(kill, target if fault.wrap is None else fault.wrap(target), fault.name))
    except EditError as error:
        attempts = [Attempt(kill, "error", str(error)) for kill in fault.kills]
    return Verdict(fault, tuple(attempts), time.perf_counter() - clock)


def _target(kill: Kill, package: str) -> Target:
    return Replaying(kill.recipe, kill.profile, package=package, name="planted")


def _attempt(kill: Kill, target: Target, what: str) -> Attempt:
    report = run(
        target,
        levels=[kill.level],
        cases=[kill.case],
        promises=[kill.check] if kill.level == 4 else None,
    )
    found = [r for r in report.results if r.check == kill.check]
    if len(found) != 1:
        raise ValueError(f"{what}: {kill} must be one check of the quick class, got {[r.name for r in report.results]}")
    result: CaseResult = found[0]
    return Attempt(kill, result.status, result.message)


def _choose(names: Iterable[str] | None) -> list[Fault]:
    if names is None:
        return list(FAULTS.values())
    chosen = []
    for name in names:
        if name not in FAULTS:
            raise ValueError(f"fault must be one of {sorted(FAULTS)}, got {name!r}")
        chosen.append(FAULTS[name])
    return chosen
