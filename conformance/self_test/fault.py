"""What a planted fault is, and which checks must catch it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flamia.conformance.cases import BUG_CLASSES
from flamia.conformance.self_test.copies import Edit
from flamia.conformance.targets import Target

Wrap = Callable[[Target], Target]
"""From a faultless target to a faulty one."""


@dataclass(frozen=True)
class Kill:
    """A check that must fail on a fault, and pass without it.

    :param level: 1 to 5.
    :param case: a name, not a pattern.
    :param check: such as ``"bytes"`` or ``"leak"``, see `results.CaseResult`.
    :param recipe: of the target.
    :param profile: of the target.
    """

    level: int
    case: str
    check: str
    recipe: str = "mxfp8"
    profile: str = "ideal"

    def __str__(self) -> str:
        under = [x for x, usual in ((self.recipe, "mxfp8"), (self.profile, "ideal")) if x != usual]
        return f"level {self.level} {self.case}:{self.check}" + (f" ({', '.join(under)})" if under else "")


@dataclass(frozen=True)
class Fault:
    """A mistake that someone could make, in a copy of the reference or around it.

    :param name: lower case, with hyphens.
    :param summary: what is wrong, and what it does.
    :param kills: checks that must catch it: all of them. Those of levels 4 and 5 catch it in any implementation, those
        of levels 1 to 3 where the reference's bits are promised.
    :param edits: changes of the reference's source.
    :param wrap: or a change of what is around it.
    :param bug_class: a key of `cases.BUG_CLASSES`, where it is one of them.
    """

    name: str
    summary: str
    kills: tuple[Kill, ...]
    edits: tuple[Edit, ...] = ()
    wrap: Wrap | None = None
    bug_class: str | None = None

    def __post_init__(self) -> None:
        if not self.kills or not (self.edits or self.wrap):
            raise ValueError(f"fault {self.name!r} must have edits or a wrapper, and checks that kill it")
        if self.bug_class is not None and self.bug_class not in BUG_CLASSES:
            raise ValueError(f"bug_class must be one of {sorted(BUG_CLASSES)}, got {self.bug_class!r}")


def bits(level: int, case: str, recipe: str = "mxfp8", profile: str = "ideal") -> Kill:
    """The check of level 1, 2 or 3."""
    return Kill(level, case, {1: "bytes", 2: "forward", 3: "backward"}[level], recipe, profile)


def promise(case: str, name: str, recipe: str = "mxfp8", profile: str = "ideal") -> Kill:
    """A check of level 4."""
    return Kill(4, case, name, recipe, profile)


def accuracy(case: str, recipe: str = "mxfp8") -> Kill:
    """The check of level 5."""
    return Kill(5, case, "accuracy", recipe)


def index_faults(faults: Iterable[Fault]) -> dict[str, Fault]:
    """Faults by name.

    :raises ValueError: for a name that occurs twice.
    """
    found: dict[str, Fault] = {}
    for fault in faults:
        if fault.name in found:
            raise ValueError(f"fault {fault.name!r} occurs twice")
        found[fault.name] = fault
    return found
