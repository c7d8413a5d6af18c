"""The sixteen named barriers of a CTA (PTX ISA, "bar, barrier")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.order import Knowledge

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.warp import Warp

COUNT = 16


class Phase:
    """One use of a barrier, from its first arrival until it opens.

    :param expected: threads, a multiple of 32; None for all of the CTA.
    :param count: true predicates so far, for reductions; ``all`` and ``any`` likewise.
    """

    def __init__(self, expected: int | None) -> None:
        self.expected = expected
        self.arrived = 0
        self.open = False
        self.knowledge: Knowledge | None = None
        self.count, self.all, self.any = 0, True, False
        self.reduction = ""


class NamedBarriers:
    """The barriers of one CTA."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.phases: dict[int, Phase] = {}

    def arrive(
        self,
        number: int,
        expected: int | None,
        warp: Warp,
        threads: int,
        votes: tuple[int, int] | None = None,
        kind: str = "",
    ) -> Phase:
        """``threads`` threads of ``warp`` arrive.

        :param votes: for a reduction of that ``kind``: how many threads hold a true predicate, of how many that vote.
        :raises BarrierMisuse: for a number above 15, or counts that disagree.
        """
        if not 0 <= number < COUNT:
            raise faults.BarrierMisuse(f"barrier {number}: there are barriers 0 to {COUNT - 1}")
        if expected is not None and (expected % 32 or expected <= 0):
            raise faults.BarrierMisuse(f"barrier {number}: {expected} threads are no positive multiple of 32")
        phase = self.phases.setdefault(number, Phase(expected))
        if phase.arrived == 0:
            phase.reduction = kind
        if phase.expected != expected:
            raise faults.BarrierMisuse(
                f"barrier {number} was opened for {phase.expected or 'all'} threads, this arrival says "
                f"{expected or 'all'}"
            )
        if phase.reduction != kind:
            raise faults.BarrierMisuse(f"barrier {number}: .red and other arrivals in one phase")
        phase.arrived += threads
        phase.knowledge = warp.order.release().join(phase.knowledge)
        if votes is not None:
            true, voters = votes
            phase.count += true
            phase.all &= true == voters
            phase.any |= true > 0
        self._try_open(number, phase)
        return phase

    def _try_open(self, number: int, phase: Phase) -> None:
        wanted = phase.expected if phase.expected is not None else self._threads()
        if phase.arrived > wanted:
            raise faults.BarrierMisuse(f"barrier {number}: {phase.arrived} threads arrived where {wanted} are expected")
        if phase.arrived == wanted:
            phase.open = True
            del self.phases[number]
            self.cta.machine.changed = True

    def _threads(self) -> int:
        """Threads that a barrier for all waits for: of warps that did not end, 32 each, as the chip counts them."""
        return sum(32 for w in self.cta.warps if not w.done)

    def warp_ended(self) -> None:
        """Fewer threads are left to come."""
        for number, phase in list(self.phases.items()):
            if phase.expected is None and phase.arrived:
                self._try_open(number, phase)

    def check_end(self) -> None:
        """A barrier that is half full when the CTA ends is worth a remark; PTX allows it."""
        for number, phase in self.phases.items():
            wanted = phase.expected if phase.expected is not None else self._threads()
            self.cta.machine.remark(f"a CTA ended with barrier {number} at {phase.arrived} of {wanted} threads")
