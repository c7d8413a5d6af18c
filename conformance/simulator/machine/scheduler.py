"""The machine: clusters of CTAs on it, a seeded interleaving of their warps, and asynchronous events."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.cta import Cluster, Dim
from flamia.conformance.simulator.machine.memory import Space
from flamia.conformance.simulator.machine.taint import Taint
from flamia.conformance.simulator.machine.trace import Trace
from flamia.conformance.simulator.machine.units import Units

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.program import Program
    from flamia.conformance.simulator.machine.warp import Warp


PATIENCE = 20_000
"""Segments after which the latest asynchronous operations complete, unless nothing else is left to do before."""
MOST_SEGMENTS = 20_000_000
"""Length at which a run counts as a livelock: minutes, and many times the longest run of a kernel of this project."""


class Machine(Units):
    """One launch.

    :param global_memory: the arena; ``addresses``: of variables, constants and parameters in it.
    :param local_offsets: of local variables within a thread's local memory.
    :param resident: clusters that run at the same time; further ones start as others end, in order.
        CTAs that wait for each other through global memory need as many as there are.
    :param longest_delay: of an asynchronous operation, in segments; time goes on at once when no warp can run.
    :param instruction_limit: segments after which the run is stopped as a livelock.
    :param strict: whether reliance on orderings that PTX does not promise is an error.
    :param fast_mma: whether products are accumulated in float64 instead of bit for bit.
    :param zero_shared: whether shared memory counts as written from the start.
    """

    def __init__(
        self,
        program: Program,
        global_memory: Space,
        addresses: dict[str, int],
        grid: Dim,
        block: Dim,
        *,
        cluster: Dim = (1, 1, 1),
        dynamic_shared: int = 0,
        seed: int = 0,
        strict: bool = False,
        fast_mma: bool = False,
        trace: bool = False,
        resident: int = 4,
        longest_delay: int = PATIENCE,
        instruction_limit: int = MOST_SEGMENTS,
        zero_shared: bool = False,
    ) -> None:
        self.program, self.global_memory, self.addresses = program, global_memory, addresses
        self.grid, self.block, self.cluster, self.dynamic_shared = grid, block, cluster, dynamic_shared
        self.seed, self.strict, self.fast_mma, self.zero_shared = seed, strict, fast_mma, zero_shared
        self.random = random.Random(seed)
        self.taint = Taint(program.function)
        self.trace = Trace(trace)
        self.multiprocessors = 132
        self.longest_delay, self.instruction_limit = longest_delay, instruction_limit
        self.resident = resident
        self.changed = True
        self.time = 0
        self.unpromised: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self._released: list[str] = []
        self.executed: dict[str, list[int]] = {}
        self.local_offsets, self.local_bytes = _lay_out_local(program)
        super().__init__()
        self._events: list[tuple[int, int, Callable[[], Any]]] = []
        self._event_count = 0
        self._engine_time: dict[str, int] = {}
        self._slots: set[int] = set()
        self._running: list[Warp] = []
        self._clusters: list[Cluster] = []
        self._started = 0
        self._pending = self._indices()

    def _indices(self) -> Iterator[Dim]:
        x, y, z = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))

    def take_slot(self) -> int:
        """A multiprocessor for a CTA."""
        slot = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots.add(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        """Give a multiprocessor back."""
        self._slots.discard(slot)

    # --- for instruction families ------------------------------------------------------------------------------------

    def after_random_delay(self, engine: str, action: Callable[[], Any], label: str = "", ordered: bool = True) -> None:
        """Call ``action`` later.

        :param engine: track of the timeline, for example ``CTA 0 tensor core``.
        :param ordered: whether it must come after all earlier actions of the same engine.
        """
        at = self.time + self._draw_delay()
        if ordered:
            at = self._engine_time[engine] = max(at, self._engine_time.get(engine, 0) + 1)
        self._event_count += 1
        heapq.heappush(self._events, (at, self._event_count, action))
        self.trace.asynchronous(engine, label, self.time, at)

    def _draw_delay(self) -> int:
        """A third at once, a third after a while, a third so late that every warp waits by then."""
        kind = self.random.random()
        if kind < 1 / 3:
            return 1
        if kind < 2 / 3:
            return self.random.randint(1, max(1, self.longest_delay // 100))
        return self.random.randint(1, self.longest_delay)

    def remark(self, what: str) -> None:
        """Something legal that may not be meant: it is in the report."""
        self.remarks[what] += 1

    def count_unpromised(self, what: str, warp: Warp | None = None) -> None:
        """Reliance on an ordering that PTX does not promise: counted, and an error in strict mode.

        :raises Unpromised: in strict mode.
        """
        self.unpromised[what] += 1
        if self.strict:
            raise faults.Unpromised(what)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run every CTA to its end.

        :raises Fault: the first one.
        """
        while True:
            self._fill()
            if self.changed:
                self._refresh()
            if self._running:
                self._step()
            elif self._events:
                self.time = self.trace.time = max(self.time, self._events[0][0])
                self._complete()
            elif self._clusters:
                self._release_or_die()
            else:
                break
        for where in self._released:
            self.count_unpromised(f"lanes that ran on before the rest of their warp met them{where}")

    def _fill(self) -> None:
        """Start clusters while there is room."""
        if len(self._clusters) < self.resident:
            for index in self._pending:
                self._clusters.append(Cluster(self, index))
                self._started += 1
                self.changed = True
                if len(self._clusters) >= self.resident:
                    break

    def _refresh(self) -> None:
        """Find who can run."""
        self.changed = False
        ended = [c for c in self._clusters if all(cta.done for cta in c.ctas)]
        for c in ended:
            self._clusters.remove(c)
            for cta in c.ctas:
                for warp in cta.warps:
                    self.executed[str(warp)] = warp.executed
        if ended:
            self.changed = True
        warps = [w for c in self._clusters for cta in c.ctas for w in cta.warps if not w.done]
        self._running = [w for w in warps if w.runnable()]

    def _step(self) -> None:
        """Let one warp run for a while; mostly short runs, at times long ones."""
        choose = self.random
        warp = self._running[int(choose.random() * len(self._running))]
        start = self.time
        self.time += warp.run(1 << int(choose.random() * 7))
        self.trace.time = self.time
        self.trace.ran(warp, start, self.time)
        if warp.done or not any(f.blocked is None and f.need is None for f in warp.fragments):
            self.changed = True
        if self._events and self._events[0][0] <= self.time:
            self._complete()
        if self.time > self.instruction_limit:
            raise faults.Livelock(f"{self.time} segments were run and the grid has not ended\n{self.table()}")

    def _waiting_clusters(self) -> list[str]:
        """A line for those that have not started: others may wait for them."""
        total = math.prod(self.grid) // math.prod(self.cluster)
        left = total - self._started
        if not left:
            return []
        return [
            f"{left} of {total} clusters have not started, as resident={self.resident} run at the same time; "
            f"if others wait for them, simulate with resident={total}"
        ]

    def _complete(self) -> None:
        """Do what is due."""
        while self._events and self._events[0][0] <= self.time:
            _, _, action = heapq.heappop(self._events)
            action()
        self.changed = True

    def _release_or_die(self) -> None:
        warps = [w for c in self._clusters for cta in c.ctas for w in cta.warps if not w.done]
        for warp in warps:
            place = warp.release_meeting()
            if place is not None:
                # Counted when the run got on with it: it may still end in a deadlock.
                self._released.append(place)
                self.changed = True
                return
        if not warps:
            self.changed = True
            return
        for c in self._clusters:
            for diagnose in c.diagnoses:
                diagnose()
        raise faults.Deadlock(f"no warp can run and nothing is under way\n{self.table()}")

    def table(self) -> str:
        """Who waits on what."""
        lines = self._waiting_clusters()
        for c in self._clusters:
            for cta in c.ctas:
                for warp in cta.warps:
                    lines += warp.describe()
            for note in c.notes:
                lines += note()
        return "\n".join(lines)


def _lay_out_local(program: Program) -> tuple[dict[str, int], int]:
    """Offsets of local variables in a thread's local memory, and its size; offset 0 stays free."""
    offset, out = 16, {}
    for v in program.function.variables:
        if v.space in ("local", "param"):
            offset = -(-offset // v.align) * v.align
            out[v.name] = offset
            offset += v.nbytes
    return out, -(-offset // 16) * 16
