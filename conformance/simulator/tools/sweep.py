"""Many seeds: the same launch under many orders of warps and delays of asynchronous operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flamia.conformance.simulator.case import Data, Simulated
from flamia.conformance.simulator.machine.faults import Fault
from flamia.conformance.simulator.machine.launch import Report


@dataclass
class Sweep:
    """What came of every seed.

    :param faults: seed -> the fault that was raised. :param mismatches: seed -> the first wrong coordinate.
    :param unpromised: reliances on orderings that PTX does not promise, over all seeds.
    """

    passed: list[int] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)
    mismatches: dict[int, str] = field(default_factory=dict)
    unpromised: Counter[str] = field(default_factory=Counter)

    @property
    def right(self) -> bool:
        """Every seed gave the expected bytes and no fault."""
        return not self.faults and not self.mismatches

    def found(self) -> Counter[str]:
        """Names of what was found -> in how many seeds: kinds of faults, and ``wrong bytes``."""
        out = Counter(f.kind for f in self.faults.values())
        if self.mismatches:
            out["wrong bytes"] = len(self.mismatches)
        return out


def sweep(
    case: Simulated,
    seeds: Iterable[int],
    *,
    stop: bool = False,
    progress: Callable[[int], Any] = lambda seed: None,
    inspect: Callable[[int, Report, Data], Any] | None = None,
    **options: Any,
) -> Sweep:
    """Simulate a case for every seed; a seed fixes the inputs and the schedule.

    :param stop: at the first seed that fails.
    :param inspect: called with every report.
    :param options: of `simulate`.
    """
    out = Sweep()
    for seed in seeds:
        progress(seed)
        try:
            report, data = case.simulate(seed, **options)
        except Fault as fault:
            out.faults[seed] = fault
        else:
            out.unpromised += report.unpromised
            wrong = data.mismatch()
            if wrong is None:
                out.passed.append(seed)
            else:
                out.mismatches[seed] = wrong
            if inspect is not None:
                inspect(seed, report, data)
        if stop and not out.right:
            break
    return out
