"""CTAs and clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.barriers import NamedBarriers
from flamia.conformance.simulator.machine.memory import WRITTEN, Space
from flamia.conformance.simulator.machine.units import Units
from flamia.conformance.simulator.machine.warp import Warp
from flamia.conformance.simulator.machine.windows import RANK_SHIFT, RESERVED, SHARED_LIMIT

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.program import Program
    from flamia.conformance.simulator.machine.scheduler import Machine

Dim = tuple[int, int, int]


class Cluster(Units):
    """CTAs that run together and reach each other's shared memory.

    :param index: in the grid of clusters; ``shape``: CTAs along x, y and z.
    """

    def __init__(self, machine: Machine, index: Dim) -> None:
        self.machine, self.index, self.shape = machine, index, machine.cluster
        self.size = self.shape[0] * self.shape[1] * self.shape[2]
        self.ctas: list[Cta] = []
        self.notes: list[Callable[[], list[str]]] = []
        """More lines for the table of a deadlock."""
        self.diagnoses: list[Callable[[], None]] = []
        """Asked when nothing can run; may raise a fault that says more than a deadlock does."""
        super().__init__()
        for rank in range(self.size):
            x, y, _ = self.shape
            place = (rank % x, rank // x % y, rank // (x * y))
            at = tuple(i * s + p for i, s, p in zip(index, self.shape, place, strict=True))
            self.ctas.append(Cta(self, rank, place, (at[0], at[1], at[2])))
        for cta in self.ctas:
            cta.start()


class Cta(Units):
    """A CTA.

    :param rank: in the cluster; ``place``: its coordinates there; ``index``: ``%ctaid``.
    :param shared: its shared memory, at addresses ``rank << 24`` and up.
    """

    def __init__(self, cluster: Cluster, rank: int, place: Dim, index: Dim) -> None:
        self.cluster, self.machine, self.rank, self.place, self.index = cluster, cluster.machine, rank, place, index
        self.program: Program = self.machine.program
        self.block = self.machine.block
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.slot = self.machine.take_slot()
        self.barriers = NamedBarriers(self)
        self.warps: list[Warp] = []
        self.ended = False
        super().__init__()
        self._ends: list[Any] = []
        self._lay_out_shared()

    def __str__(self) -> str:
        return f"CTA {self.index}" if self.index[1:] != (0, 0) else f"CTA {self.index[0]}"

    def at_end(self, check: Any) -> None:
        """Call ``check()`` when every warp has ended."""
        self._ends.append(check)

    def start(self) -> None:
        """Make the warps."""
        for index in range(-(-self.threads // 32)):
            self.warps.append(Warp(self, index))

    def order_slot(self, index: int) -> tuple[int, int]:
        """Number of a warp within the cluster, and how many there are."""
        per_cta = -(-self.threads // 32)
        return self.rank * per_cta + index, self.cluster.size * per_cta

    def _lay_out_shared(self) -> None:
        """Addresses of shared variables: static ones first, then the dynamic memory."""
        program, offset = self.program, RESERVED
        self.addresses: dict[str, int] = {}
        dynamic = []
        align = 16
        for v in (*program.function.variables, *program.module.variables.values()):
            if v.space != "shared":
                continue
            if v.nbytes == 0:
                dynamic.append(v.name)
                align = max(align, v.align)
                continue
            offset = -(-offset // v.align) * v.align
            self.addresses[v.name] = offset
            offset += v.nbytes
        static_end = offset
        offset = -(-offset // align) * align
        for name in dynamic:
            self.addresses[name] = offset
        end = offset + self.machine.dynamic_shared
        self.shared_bytes = end - RESERVED
        if self.shared_bytes > SHARED_LIMIT:
            raise faults.Oversubscribed(
                f"{self.shared_bytes} bytes of shared memory ({static_end - RESERVED} static, "
                f"{self.machine.dynamic_shared} dynamic), of which a CTA may have {SHARED_LIMIT}"
            )
        base = self.rank << RANK_SHIFT
        self.addresses = {n: base + a for n, a in self.addresses.items()}
        self.shared = Space(f"shared memory of {self}", base, end + RESERVED)
        self.shared.allocate(base + RESERVED, end - RESERVED)
        if self.machine.zero_shared:
            self.shared.state[RESERVED:end] |= WRITTEN
        if program.uses_async_proxy:
            self.shared.writer = np.zeros(self.shared.data.size // 4, np.uint32)

    def address_of(self, name: str, warp: Warp) -> int:
        """Address of a variable or parameter, in its own space."""
        if name in self.addresses:
            return self.addresses[name]
        if name in self.machine.local_offsets:
            return self.machine.local_offsets[name]
        return self.machine.addresses[name]

    def warp_ended(self, warp: Warp) -> None:
        """A warp exited: barriers may open, and the CTA may be done."""
        self.machine.changed = True
        self.barriers.warp_ended()
        if self.done:
            self.ended = True
            for check in self._ends:
                check()
            self.barriers.check_end()
            self.machine.free_slot(self.slot)

    def check_running(self, address: int) -> None:
        """Called where a CTA of the cluster uses ``address`` of this one. :raises EndedCta: if this one ended."""
        if self.ended:
            raise asyncfaults.EndedCta(f"{self} has ended: its shared memory is no longer there", (), address)

    @property
    def done(self) -> bool:
        """Whether every warp ended."""
        return all(w.done for w in self.warps)
