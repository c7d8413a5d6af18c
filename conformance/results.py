"""Results of a run: one `CaseResult` per check, and the `Report` that holds them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

SUITE_VERSION = "2"
"""Raised whenever a case or a check is added or becomes stricter: certificates of an older suite are then not valid."""

Status = Literal["passed", "failed", "not_applicable", "error"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "not_applicable", "error")

LEVELS: dict[int, str] = {
    0: "probes",
    1: "bytes",
    2: "forward bits",
    3: "backward bits",
    4: "promises",
    5: "accuracy",
}
"""Level -> name."""


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one check of one case.

    :param level: 0 to 5, see `LEVELS`.
    :param case: name of the case.
    :param check: what was checked: ``"bytes"``, ``"leak"``, ``"accuracy"``.
    :param status: ``not_applicable`` says that the target cannot be asked; it is never a pass. ``error``: the target
        raised where it must not.
    :param message: one or a few lines for people; empty for a plain pass.
    :param coordinate: where the first or worst difference lies, in the array that the message names.
    :param numbers: measured numbers by name.
    :param seconds: wall time.
    :param arrays: arrays for figures by name, such as ``"leak_map"``.
    """

    level: int
    case: str
    check: str
    status: Status
    message: str = ""
    coordinate: tuple[int, ...] | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """``case:check``."""
        return f"{self.case}:{self.check}"


@dataclass(frozen=True)
class Report:
    """Everything that one run found.

    :param target: name of the target.
    :param environment: versions and machine by name: ``flamia``, ``numpy``, ``python``, ``platform``, and what the
        target adds, such as ``torch``, ``device``, ``compute capability``.
    :param recipe: name of the recipe that bits and budgets come from.
    :param profile: name of its machine profile.
    :param size: ``quick``, ``full`` or ``stress``.
    :param results: in the order of levels, then cases.
    :param started: UTC, ISO 8601.
    :param seconds: wall time of the run.
    """

    target: str
    environment: Mapping[str, str]
    recipe: str
    profile: str
    size: str
    results: tuple[CaseResult, ...]
    started: str
    seconds: float
    suite_version: str = SUITE_VERSION

    @property
    def passed(self) -> bool:
        """True if something was checked and nothing failed."""
        return self.count("passed") > 0 and self.count("failed") == self.count("error") == 0

    def count(self, status: Status, level: int | None = None) -> int:
        """How many results have a status, of one level or of all."""
        return sum(r.status == status and level in (None, r.level) for r in self.results)

    def level_status(self, level: int) -> Status | None:
        """The verdict of a level: failed or error if any check is, else passed if any is, else not applicable.

        None if the level was not asked for.
        """
        for status in ("error", "failed", "passed", "not_applicable"):
            if self.count(status, level):
                return status
        return None

    def failures(self) -> Iterator[CaseResult]:
        """The results that failed or raised."""
        return (r for r in self.results if r.status in ("failed", "error"))
