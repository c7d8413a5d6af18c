"""mbarrier objects (PTX 9.7.13.15).

Note [mbarrier phases]
~~~~~~~~~~~~~~~~~~~~~~
An object counts pending arrivals and a *tx-count*, the bytes that asynchronous copies still owe. A phase is complete
when both are zero; at once the next begins, with the expected number of arrivals pending. ``wait.parity P`` succeeds
when the phase of parity P is complete, that is while the current phase has the other parity. The bits of the object
are opaque: its memory holds a mark here, so that a store over it is noticed when it is next used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.asyncorder import MBARRIERS
from flamia.conformance.simulator.machine.memory import WRITTEN
from flamia.conformance.simulator.machine.order import Knowledge
from flamia.conformance.simulator.machine.windows import RANK_SHIFT

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cluster, Cta
    from flamia.conformance.simulator.machine.warp import Warp

MOST_ARRIVALS = (1 << 20) - 1
MOST_TX = (1 << 20) - 1


class Mbarrier:
    """One object.

    :param address: in shared::cluster; ``number``: among the mbarriers of the cluster.
    :param phase: complete phases so far; ``observed``: how many of them some warp has waited for.
    :param ready: knowledge handed to those who see the last complete phase; ``arriving``: of arrivals in this one.
    """

    def __init__(self, address: int, number: int, expected: int, warp: Warp) -> None:
        self.address, self.number, self.expected = address, number, expected
        self.machine = warp.machine
        self.pending, self.tx, self.phase, self.observed = expected, 0, 0, 0
        self.ready: Knowledge | None = None
        self.arriving: Knowledge | None = None
        self.waiting: dict[Warp, int] = {}
        self.init_slot, self.init_epoch = warp.order.slot, warp.order.epoch
        self.for_async_proxy = False

    def __str__(self) -> str:
        return f"mbarrier {self.address:#x}"

    def describe(self) -> str:
        """State, for the table of a deadlock."""
        return (
            f"{self}: phase {self.phase} (parity {self.phase & 1}) lacks {self.pending} of {self.expected} arrivals, "
            f"tx-count {self.tx} bytes"
        )

    def arrive(self, count: int, knowledge: Knowledge | None, may_complete: bool = True) -> None:
        """``count`` arrivals.

        :raises MbarrierOverrun: if fewer are pending.
        """
        if count > self.pending:
            raise asyncfaults.MbarrierOverrun(
                f"{self}: {count} arrivals where phase {self.phase} waits for {self.pending} of {self.expected}",
                (),
                self.address,
            )
        self.pending -= count
        if knowledge is not None:
            self.arriving = knowledge.join(self.arriving)
        if not may_complete and self.pending == 0 and self.tx == 0:
            raise asyncfaults.MbarrierMisuse(f"{self}: an arrival with .noComplete completes phase {self.phase}")
        self._try_complete()

    def expect(self, nbytes: int) -> None:
        """The expect-tx operation. :raises ExpectTxMismatch: if the tx-count leaves its range."""
        self._add_tx(nbytes)
        self._try_complete()

    def complete(self, nbytes: int) -> None:
        """The complete-tx operation. :raises ExpectTxMismatch: if the tx-count leaves its range."""
        self._add_tx(-nbytes)
        self._try_complete()

    def _add_tx(self, nbytes: int) -> None:
        self.tx += nbytes
        if abs(self.tx) > MOST_TX:
            raise asyncfaults.ExpectTxMismatch(
                f"{self}: tx-count {self.tx} is outside {-MOST_TX}..{MOST_TX}", (), self.address
            )

    def _try_complete(self) -> None:
        if self.pending or self.tx:
            return
        late = [str(warp) for warp, phase in self.waiting.items() if phase < self.phase]
        if late:
            raise asyncfaults.MbarrierOverrun(
                f"{self}: phase {self.phase} completed before {', '.join(late)} saw phase {self.phase - 1}",
                (),
                self.address,
            )
        self.phase += 1
        self.pending = self.expected
        if self.arriving is not None:
            self.ready = self.arriving.join(self.ready)
            self.arriving = None
        self.machine.changed = True

    def is_complete(self, parity: int) -> bool:
        """Whether the phase of this parity is."""
        return (self.phase & 1) != (parity & 1)

    def observe(self, warp: Warp) -> None:
        """A warp saw that the last phase is complete."""
        self.waiting.pop(warp, None)
        self.observed = self.phase
        warp.order.acquire(self.ready)
        clock = warp.order.asynchronous
        entry = clock.mbarrier_entry(self.number)
        clock.seen[entry] = max(clock.seen[entry], self.phase)


class Mbarriers:
    """The mbarriers of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.live: dict[int, Mbarrier] = {}
        self._numbers: dict[int, int] = {}
        self._watched: set[int] = set()
        cluster.notes.append(self._describe)
        cluster.diagnoses.append(self._diagnose)

    def init(self, address: int, expected: int, warp: Warp) -> None:
        """``mbarrier.init``: at ``address`` in shared::cluster."""
        if not 1 <= expected <= MOST_ARRIVALS:
            raise asyncfaults.MbarrierMisuse(
                f"the count of mbarrier.init must be in 1..{MOST_ARRIVALS}, got {expected}", (), address
            )
        if address % 8:
            raise faults.Misaligned(f"mbarrier at {address:#x}: it needs 8-byte alignment", (), address)
        if address in self.live:
            raise asyncfaults.MbarrierMisuse(f"mbarrier {address:#x} is live: mbarrier.inval comes first", (), address)
        self._mark(address)
        number = self._numbers.setdefault(address, len(self._numbers))
        if number >= MBARRIERS:
            raise asyncfaults.MbarrierMisuse(f"more than {MBARRIERS} mbarriers in one cluster", (), address)
        self.live[address] = Mbarrier(address, number, expected, warp)
        rank = address >> RANK_SHIFT
        if rank not in self._watched:
            self._watched.add(rank)
            self.cluster.ctas[rank].at_end(lambda: self._check_end(rank))

    def invalidate(self, address: int, warp: Warp) -> None:
        """``mbarrier.inval``: its memory may be used for anything."""
        self.find(address, warp)
        del self.live[address]

    def find(self, address: int, warp: Warp | None, async_proxy: bool = False) -> Mbarrier:
        """The object at an address.

        :param warp: that uses it; None for an asynchronous operation that has been checked before.
        :param async_proxy: whether an asynchronous copy is going to signal it.
        :raises MbarrierMisuse: if there is none, or ``warp`` has not synchronised with its initialisation.
        :raises MissingProxyFence: if the async proxy may not see the initialisation.
        """
        found = self.live.get(address)
        if found is None:
            raise asyncfaults.MbarrierMisuse(f"no mbarrier was initialised at {address:#x}", (), address)
        space = self.cluster.ctas[address >> RANK_SHIFT].shared
        at = address - space.base
        if space.data[at : at + 8].tobytes() != _mark_bytes(address):
            raise asyncfaults.MbarrierMisuse(f"{found} was overwritten by a store", (), address)
        if warp is not None:
            order = warp.order
            if order.slot != found.init_slot and order.known[found.init_slot] < found.init_epoch:
                raise asyncfaults.MbarrierMisuse(
                    f"{found} is used without synchronisation with its initialisation", (), address
                )
            if async_proxy and not found.for_async_proxy:
                raise faults.MissingProxyFence(
                    f"{found} is signalled by the async proxy, and its initialisation was not followed by "
                    "fence.mbarrier_init or fence.proxy.async",
                    (),
                    address,
                )
        return found

    def fence_init(self, warp: Warp) -> None:
        """A ``fence.mbarrier_init`` or ``fence.proxy.async`` of ``warp``: covers the initialisations it knows of."""
        known = warp.order.known
        for found in self.live.values():
            if found.init_slot == warp.order.slot or known[found.init_slot] >= found.init_epoch:
                found.for_async_proxy = True

    def _mark(self, address: int) -> None:
        space = self.cluster.ctas[address >> RANK_SHIFT].shared
        where = space.where(address, 8)
        space.check_range(where, writes=True)
        space.data[where] = np.frombuffer(_mark_bytes(address), np.uint8)
        space.state[where] |= WRITTEN

    def _check_end(self, rank: int) -> None:
        """A phase that is half full, or lacks bytes, when its CTA ends is worth a remark; PTX allows it."""
        for m in self.live.values():
            if m.address >> RANK_SHIFT == rank and (m.pending != m.expected or m.tx):
                self.cluster.machine.remark(
                    f"a CTA ended with {m} lacking {m.pending} of {m.expected} arrivals, tx-count {m.tx} bytes"
                )

    def _describe(self) -> list[str]:
        return [m.describe() for m in self.live.values() if m.waiting or m.pending != m.expected or m.tx]

    def _diagnose(self) -> None:
        """Called when nothing can run. :raises ExpectTxMismatch: if all that is wrong with a phase is its bytes."""
        for m in self.live.values():
            if m.tx and not m.pending and m.waiting:
                raise asyncfaults.ExpectTxMismatch(
                    f"{m}: all arrivals of phase {m.phase} came, but the copies "
                    + (f"brought {m.tx} bytes less" if m.tx > 0 else f"brought {-m.tx} bytes more")
                    + f" than expected\n{self.cluster.machine.table()}",
                    (),
                    m.address,
                )


def _mark_bytes(address: int) -> bytes:
    return b"mbar" + address.to_bytes(4, "little")


def find_cta(cluster: Cluster, address: int) -> Cta:
    """The CTA whose shared memory holds a shared::cluster address.

    :raises OutOfBounds: for no such CTA.
    :raises EndedCta: if it ended.
    """
    rank = address >> RANK_SHIFT
    if not 0 <= rank < cluster.size:
        raise faults.OutOfBounds(f"no CTA of rank {rank} in a cluster of {cluster.size}", (), address)
    cluster.ctas[rank].check_running(address)
    return cluster.ctas[rank]
