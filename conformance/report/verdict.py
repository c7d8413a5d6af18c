"""The verdict of a run in a word, and as the exit code of the command."""

from __future__ import annotations

from flamia.conformance.results import Report

EXIT_CODES = {
    0: "something was checked and nothing failed",
    1: "a check failed, or the target raised where it must not; or a planted fault survived the self-test",
    2: "the command line is wrong",
    3: "the target is not available here: a package or a device is missing",
    4: "nothing was checked: no level applies to the target",
}
"""Exit code of ``flamia conform`` -> what it says."""

UNAVAILABLE = 3
NOTHING_CHECKED = 4


def verdict(report: Report) -> str:
    """``"passed"``, ``"failed"`` or ``"nothing checked"``."""
    if report.passed:
        return "passed"
    return "failed" if any(report.failures()) else "nothing checked"


def exit_code(report: Report) -> int:
    """The exit code of a run, see `EXIT_CODES`."""
    return {"passed": 0, "failed": 1, "nothing checked": NOTHING_CHECKED}[verdict(report)]
