"""What a level plans and the runner runs.

Note [Refusals]
~~~~~~~~~~~~~~~
A target may refuse the cases that say so (`Case.may_refuse`): head dimensions other than those of training, FP32. A
refusal is a ``TypeError``, ``ValueError`` or ``NotImplementedError``, or exactly a ``RuntimeError``, which is what
PyTorch raises for what it has no kernel for; not another subclass of it, such as ``OutOfMemoryError``. The device must
have survived. Everything else that a target raises is an error, and so is all that it raises in other cases.

A check of a refused case is not applicable, at every level: nothing was computed that could be right.
"""

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

REFUSALS = (TypeError, ValueError, NotImplementedError)


class Refused(Exception):
    """The target refuses the case: Note [Refusals]."""


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
        """What the target returns for a case, with everything it offers.

        :raises Refused: see Note [Refusals].
        """
        t, inputs = self.target, self.inputs(case)
        backward = t.backward  # may be found out by another call, which must not raise
        try:
            found: Results = self.keep((case.name, "target"), lambda: t.run(inputs, backward=backward, stages=t.stages))
        except Exception as error:
            refuses = isinstance(error, REFUSALS) or type(error) is RuntimeError
            if case.may_refuse and refuses and t.is_alive():
                raise Refused(f"{type(error).__name__}: {error}".splitlines()[0]) from error
            raise
        return found
