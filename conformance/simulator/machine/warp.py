"""A warp: 32 lanes, their registers, and where each of them is.

Note [Divergence]
~~~~~~~~~~~~~~~~~
Lanes that are at the same place form a `Fragment`. Where a branch parts the lanes of a fragment, the two halves run on
their own and meet again at the branch's immediate post-dominator, as the compiler's convergence barriers make them on
the chip. PTX promises no such meeting, but promises that every lane makes progress: when nothing else on the machine
can run, lanes that wait for their meeting go on without it (`Warp.release_meeting`), and that is counted as unpromised.
An instruction that needs named lanes (``shfl.sync``, ``bar.warp.sync``, ...) waits for all of them (`NeedLanes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine.faults import Fault, NotUniform
from flamia.conformance.simulator.machine.order import Order
from flamia.conformance.simulator.machine.outcomes import Blocked, Exit, NeedLanes
from flamia.conformance.simulator.machine.registers import RowPlan
from flamia.conformance.simulator.machine.registeruse import Holder, check_in_flight
from flamia.conformance.simulator.machine.types import FULL, NO_LANES, Row, as_mask, lanes_of
from flamia.conformance.simulator.machine.units import Units

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.program import Segment
    from flamia.conformance.simulator.machine.scheduler import Machine


class Join:
    """A place where lanes meet: segment, the lanes that must come, those that came."""

    __slots__ = ("arrived", "members", "segment")

    def __init__(self, segment: int, members: NDArray[np.bool_]) -> None:
        self.segment, self.members, self.arrived = segment, members.copy(), np.zeros(32, np.bool_)


class Fragment:
    """Lanes at one place.

    :param at: segment.
    :param joins: where they will meet others, innermost last.
    :param blocked: why they wait, if they do; ``need``: the lanes they wait for.
    """

    __slots__ = ("anywhere", "at", "blocked", "joins", "mask", "need")

    def __init__(self, at: int, mask: NDArray[np.bool_], joins: tuple[Join, ...]) -> None:
        self.at, self.mask, self.joins = at, as_mask(mask), joins
        self.blocked: Blocked | None = None
        self.need: NDArray[np.bool_] | None = None
        self.anywhere = False


class Warp(Units):
    """A warp of a CTA.

    :param rows: operands as arrays of 32 lanes, see `Site`.
    :param live: lanes that exist and did not exit.
    :param executed: how often each segment was run.
    :param in_flight: registers that an asynchronous operation holds, by name, and which one; using them is a fault.
    :param log: segments run since the last ``wgmma.fence``; None in programs without wgmma.
    """

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.machine, self.index = cta, cta.machine, index
        self.program = cta.program
        threads = cta.threads
        self.live: NDArray[np.bool_] = as_mask(np.arange(32) + 32 * index < threads)
        self.executed = [0] * (len(self.program.segments) + 1)
        self.rows: list[Row] = self.machine.unit(_Plan).plan.build(self)
        self.order = Order(cta.order_slot(index))
        self.fragments = [Fragment(0, self.live, ())]
        self.in_flight: dict[str, Holder] = {}
        self.log: set[int] | None = set() if self.program.uses_wgmma else None
        super().__init__()

    def __str__(self) -> str:
        return f"{self.cta} warp {self.index}"

    # --- operands ----------------------------------------------------------------------------------------------------

    def uniform(self, row: int, mask: NDArray[np.bool_]) -> int:
        """The value that all lanes of ``mask`` have in a row.

        :raises NotUniform: if they differ.
        """
        values = self.rows[row] if mask is FULL else self.rows[row][mask]
        first = values[0]
        if (values != first).any():
            raise NotUniform(
                f"lanes hold {sorted({int(v) for v in values})[:4]} where one value is needed", lanes_of(mask)
            )
        return int(first)

    def is_converged(self, mask: NDArray[np.bool_]) -> bool:
        """Whether ``mask`` has every lane that did not exit."""
        return mask is self.live or mask.tobytes() == self.live.tobytes()

    # --- running -----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every lane exited."""
        return not self.fragments

    def runnable(self) -> bool:
        """Whether some lanes can run now; blocked ones are asked."""
        # A resumed fragment may reach its meeting or its end, which changes the list.
        for fragment in tuple(self.fragments):
            if fragment.blocked is not None and fragment.blocked.ready():
                resume = fragment.blocked.resume
                self.machine.trace.leave(self, fragment.blocked.reason)
                fragment.blocked = None
                if resume is not None:
                    resume()
                    self._go(fragment, fragment.at + 1)
        return any(f.blocked is None and f.need is None for f in self.fragments)

    def run(self, budget: int) -> int:
        """Run some lanes for about ``budget`` segments, or until they wait.

        :returns: segments run.
        """
        ready = [f for f in self.fragments if f.blocked is None and f.need is None]
        fragment = ready[0] if len(ready) == 1 else self.machine.random.choice(ready)
        segments, executed = self.program.segments, self.executed
        left = budget
        while left > 0 and fragment.blocked is None and fragment.need is None and fragment.mask is not None:
            left -= 1
            at = fragment.at
            segment = segments[at]
            executed[at] += 1
            if self.in_flight and not segment.touched.isdisjoint(self.in_flight):
                check_in_flight(self, segment)
            if self.log is not None:
                self.log.add(at)
            mask = fragment.mask
            if segment.control is not None:
                if not self._control(fragment, segment, segment.control):
                    break
                continue
            steps: Any = iter(segment.simple)
            try:
                for step in steps:
                    step(self, mask)
            except (Fault, ArithmeticError, ValueError, IndexError, TypeError) as error:
                done = len(segment.simple) - steps.__length_hint__()
                self._explain(error, segment, done - 1)
                raise
            if segment.target < 0:
                at += 1
            elif segment.predicate < 0:
                at = segment.target
            else:
                lanes = self.rows[segment.predicate]
                taken = np.greater(mask, lanes) if segment.negated else np.logical_and(mask, lanes)
                word = taken.tobytes()
                if word == NO_LANES:
                    at += 1
                elif word == mask.tobytes():
                    at = segment.target
                else:
                    self._part(fragment, segment, taken)
                    break
            if fragment.joins and fragment.joins[-1].segment == at:
                self._go(fragment, at)
                break
            fragment.at = at
            if at == len(segments):
                self._exit(fragment, mask)
                break
        return budget - left

    def _explain(self, error: Exception, segment: Segment, index: int) -> None:
        instruction = segment.instructions[index]
        if isinstance(error, Fault):
            error.place(instruction, str(self))
        else:
            error.add_note(f"at PTX line {instruction.line}: {instruction.opcode}, in {self}")

    def _control(self, fragment: Fragment, segment: Segment, control: Any) -> bool:
        """Execute a control instruction; whether the fragment runs on."""
        try:
            outcome = control(self, fragment.mask)
            if outcome is None:
                return self._go(fragment, fragment.at + 1)
            return self._wait(fragment, control, outcome)
        except Exception as error:
            self._explain(error, segment, 0)
            raise

    def _wait(self, fragment: Fragment, control: Any, outcome: Any) -> bool:
        match outcome:
            case Blocked():
                fragment.blocked = outcome
                self.machine.trace.enter(self, outcome.reason)
            case Exit(lanes):
                self._exit(fragment, lanes)
            case NeedLanes(lanes, anywhere):
                fragment.need, fragment.anywhere = lanes, anywhere
                self._meet_named(fragment.at, control, lanes)
            case _:
                raise TypeError(f"a control instruction answered {outcome!r}")
        return False

    def _meet_named(self, at: int, control: Any, lanes: NDArray[np.bool_]) -> None:
        """Execute for all, if every named lane is here."""
        here = [
            f
            for f in self.fragments
            if f.need is not None and (f.anywhere or f.at == at) and (f.need & self.live == lanes & self.live).all()
        ]
        anywhere = any(f.anywhere for f in here if f.at == at)
        here = [f for f in here if f.anywhere == anywhere]
        union = np.logical_or.reduce([f.mask for f in here])
        if (union != (lanes & self.live)).any():
            return
        for f in here:
            f.need = None
        outcome = control(self, as_mask(union))
        if outcome is not None:
            raise TypeError(f"an instruction that named its lanes answered {outcome!r}")
        for f in here:
            self._go(f, f.at + 1)

    # --- places ------------------------------------------------------------------------------------------------------

    def _go(self, fragment: Fragment, at: int) -> bool:
        """Move a fragment to segment ``at``, and into the meetings there; whether it runs on at once."""
        fragment.at = at
        if at == len(self.program.segments):
            self._exit(fragment, fragment.mask)
            return False
        if not fragment.joins or fragment.joins[-1].segment != at:
            return True
        join = fragment.joins[-1]
        join.arrived |= fragment.mask
        self.fragments.remove(fragment)
        fragment.blocked = fragment.need = None
        self._close(join, fragment.joins[:-1])
        return False

    def _close(self, join: Join, outer: tuple[Join, ...]) -> None:
        """Go on from a meeting, if everybody came."""
        missing = join.members & ~join.arrived & self.live
        if missing.any() or not join.arrived.any():
            self._waiting[id(join)] = (join, outer)
            return
        self._waiting.pop(id(join), None)
        merged = Fragment(join.segment, join.arrived, outer)
        self.fragments.append(merged)
        self._go(merged, join.segment)

    @property
    def _waiting(self) -> dict[int, tuple[Join, tuple[Join, ...]]]:
        return self.unit(_Meetings).open

    def _part(self, fragment: Fragment, segment: Segment, taken: NDArray[np.bool_]) -> None:
        """Split a fragment at a branch."""
        joins = fragment.joins
        # A loop that lanes leave one by one has one meeting, not one for each.
        if segment.join >= 0 and not (joins and joins[-1].segment == segment.join):
            joins = (*joins, Join(segment.join, fragment.mask))
        rest = fragment.mask & ~taken
        self.fragments.remove(fragment)
        for mask, at in ((taken, segment.target), (rest, fragment.at + 1)):
            part = Fragment(at, mask, joins)
            self.fragments.append(part)
            self._go(part, at)

    def _exit(self, fragment: Fragment, lanes: NDArray[np.bool_]) -> None:
        """End some lanes of a fragment."""
        self.live = self.live & ~lanes
        rest = fragment.mask & ~lanes
        if rest.any():
            fragment.mask = as_mask(rest)
            self._go(fragment, fragment.at + 1)
        else:
            self.fragments.remove(fragment)
        for join, outer in list(self._waiting.values()):
            self._close(join, outer)
        for f in list(self.fragments):
            if f.need is not None and f in self.fragments:
                segment = self.program.segments[f.at]
                self._meet_named(f.at, segment.control, f.need)
        if self.done:
            self.cta.warp_ended(self)

    def release_meeting(self) -> str | None:
        """Let lanes that wait for a meeting go on without it, Note [Divergence]; where, or None without any."""
        for key, (join, outer) in list(self._waiting.items()):
            if join.arrived.any():
                del self._waiting[key]
                join.members &= ~join.arrived
                lanes = join.arrived.copy()
                join.arrived[:] = False
                released = Fragment(join.segment, lanes, outer)
                self.fragments.append(released)
                self._go(released, join.segment)
                instruction = self.program.segments[join.segment].instructions[0]
                return f": PTX line {instruction.line}, {self}"
        return None

    def describe(self) -> list[str]:
        """One line for each group of lanes: where it is, and what it waits for."""
        out = []
        for f in self.fragments:
            segment = self.program.segments[f.at]
            instruction = segment.instructions[0]
            if f.blocked is not None:
                why = f.blocked.reason
            elif f.need is not None:
                why = f"lanes {lanes_of(f.need & self.live & ~f.mask)} at a .sync instruction"
            else:
                why = "nothing"
            source = f" ({instruction.source})" if instruction.source else ""
            out.append(f"{self} lanes {lanes_of(f.mask)[0]}.. at PTX line {instruction.line}{source}: waits for {why}")
        for join, _ in self._waiting.values():
            out.append(
                f"{self} lanes {lanes_of(join.arrived)}: wait for lanes {lanes_of(join.members & ~join.arrived)}"
            )
        return out


class _Plan:
    """The program's rows, planned once for all warps of a launch."""

    def __init__(self, machine: Machine) -> None:
        self.plan = RowPlan(machine.program)


class _Meetings:
    """Meetings of a warp that some lanes reached."""

    def __init__(self, warp: Warp) -> None:
        self.open: dict[int, tuple[Join, tuple[Join, ...]]] = {}
