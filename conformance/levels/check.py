"""What a level plans and the runner runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from flamia.conformance.calls import Inputs, Results
from flamia.conformance.cases import Case
from flamia.conformance.comparison import Difference
from flamia.conformance.results import Status
from flamia.conformance.targets.base import Target
from flamia.reference.profiles import Profile
from flamia.reference.recipes import Recipe

KEPT_CALLS = 8


@dataclass(frozen=True)
class Outcome:
    """What a check found; see `results.CaseResult`."""

    status: Status = "passed"
    message: str = ""
    coordinate: tuple[int, ...] | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One check of one case, not yet run."""

    level: int
    case: str
    name: str
    run: Callable[[], Outcome]


def not_applicable(reason: str) -> Outcome:
    """The target cannot be asked."""
    return Outcome("not_applicable", reason)


def failed(difference: Difference, **arrays: NDArray[Any]) -> Outcome:
    """A failure from a difference."""
    return Outcome("failed", difference.message, difference.coordinate, difference.numbers, arrays)


def first_failure(differences: Iterable[Difference | None], numbers: Mapping[str, float] | None = None) -> Outcome:
    """Passed if there is no difference; else failed with the first, and how many there are."""
    found = [d for d in differences if d is not None]
    if not found:
        return Outcome(numbers=numbers or {})
    text = "\n".join(d.message for d in found[:3]) + ("" if len(found) <= 3 else f"\nand {len(found) - 3} more")
    return Outcome("failed", text, found[0].coordinate, {**(numbers or {}), **found[0].numbers})


class Context:
    """What the checks of one run share: the target, what it is held to, and the results of the latest cases."""

    def __init__(self, target: Target, recipe: Recipe, profile: Profile, size: str, seed: int) -> None:
        self.target, self.recipe, self.profile, self.size, self.seed = target, recipe, profile, size, seed
        self._kept: OrderedDict[tuple[str, ...], Any] = OrderedDict()

    def keep(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """``make()``, remembered for the next checks of the same case."""
        if key not in self._kept:
            self._kept[key] = make()
            while len(self._kept) > KEPT_CALLS:
                self._kept.popitem(last=False)
        return self._kept[key]

    def inputs(self, case: Case) -> Inputs:
        """The inputs of a case."""
        found: Inputs = self.keep((case.name, "inputs"), lambda: case.inputs(self.seed))
        return found

    def results(self, case: Case) -> Results:
        """What the target returns for a case, with everything it offers."""
        t = self.target
        found: Results = self.keep(
            (case.name, "target"), lambda: t.run(self.inputs(case), backward=t.backward, stages=t.stages)
        )
        return found
