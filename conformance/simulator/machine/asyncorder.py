"""What a warp knows of asynchronous operations: the vector clocks behind the faults of missing waits and fences.

Note [Asynchronous order]
~~~~~~~~~~~~~~~~~~~~~~~~~
A missing wait is found by what the waiting thread *knows*, not by the luck of timing. Every warp has counters of its
operations, and a vector of how far it knows those of every warp of the cluster:

* ``LS``: its ``tcgen05.ld`` and ``st``. They count as done once a ``tcgen05.wait`` covered them, and are handed on from
  the next ``tcgen05.fence::before_thread_sync`` on.
* ``PIPE``: its ``tcgen05.mma`` and ``cp``, and its ``wgmma``. A ``tcgen05.commit`` (or ``wgmma.wait_group``) hands
  on that they are done.
* ``ISSUED``: the same operations, but only that they were issued, for ``mma`` that follow ``mma`` of another
  thread; handed on from ``fence::before_thread_sync`` on.
* ``SYNC``: its ``tcgen05.ld`` and ``st`` that it issued before its last release, done or not: for messages only.
* one entry per mbarrier: phases whose completion was observed, which is how bulk copies are waited for.

Releases (arrivals) copy the vector ``seen``, acquires (successful waits) take the maximum. Accesses to tensor
memory look at ``after``, which is ``seen`` as of the last ``tcgen05.fence::after_thread_sync``. Warps stand for their
threads: lanes are not told apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MBARRIERS = 1024
"""Most mbarriers of a cluster."""
_FOREVER = np.iinfo(np.int64).max


class AsyncOrder:
    """The counters and vectors of one warp.

    :param slot: number of the warp in its cluster, of ``warps``.
    :param seen: int64; entry 2 w: LS of warp w, 2 w + 1: PIPE, 2 W + w: ISSUED, 3 W + w: SYNC,
        4 W + i: mbarrier i.
    :param after: int64, entries below 3 W likewise; the last entry stands for "nobody" and is always known.
    """

    def __init__(self, slot: int, warps: int) -> None:
        self.slot, self.warps = slot, warps
        self.seen: NDArray[np.int64] = np.zeros(4 * warps + MBARRIERS, np.int64)
        self.after: NDArray[np.int64] = np.zeros(3 * warps + 1, np.int64)
        self.after[-1] = _FOREVER
        self.moves = 0
        self.loading: list[int] = []
        self.storing: list[int] = []
        self.issued = 0

    @property
    def ls(self) -> int:
        """Entry of this warp's loads and stores."""
        return 2 * self.slot

    @property
    def pipe(self) -> int:
        """Entry of this warp's pipelined operations."""
        return 2 * self.slot + 1

    @property
    def settled(self) -> int:
        """Up to which of its loads and stores this warp has waited for all."""
        return min([*self.loading, *self.storing, self.moves + 1]) - 1

    def issued_entry(self, slot: int) -> int:
        """Entry ISSUED of a warp."""
        return 2 * self.warps + slot

    def sync_entry(self, slot: int) -> int:
        """Entry SYNC of a warp, in ``seen``."""
        return 3 * self.warps + slot

    def mbarrier_entry(self, number: int) -> int:
        """Entry of an mbarrier in ``seen``."""
        return 4 * self.warps + number

    # --- this warp's operations --------------------------------------------------------------------------------------

    def begin_move(self, stores: bool) -> int:
        """A ``tcgen05.ld`` or ``st`` is issued. :returns: its number."""
        self.moves += 1
        (self.storing if stores else self.loading).append(self.moves)
        return self.moves

    def wait_moves(self, stores: bool) -> None:
        """``tcgen05.wait::ld`` or ``wait::st`` returned."""
        (self.storing if stores else self.loading).clear()
        self.after[self.ls] = self.settled

    def issue(self) -> int:
        """A pipelined operation is issued. :returns: its number."""
        self.issued += 1
        return self.issued

    # --- fences and hand-over ----------------------------------------------------------------------------------------

    def fence_before(self) -> None:
        """``tcgen05.fence::before_thread_sync``."""
        self.seen[self.ls] = self.settled
        self.seen[self.issued_entry(self.slot)] = self.issued

    def fence_after(self) -> None:
        """``tcgen05.fence::after_thread_sync``."""
        known = self.after[:-1]
        np.maximum(known, self.seen[: known.size], out=known)

    def committed(self) -> NDArray[np.int64]:
        """What an arrival by ``tcgen05.commit`` hands on once all operations issued so far are done."""
        self.fence_before()
        out = self.seen.copy()
        out[self.pipe] = self.issued
        return out

    def finished(self, slot: int, number: int) -> None:
        """This warp waited for the pipelined operations of warp ``slot`` up to ``number`` (``wgmma.wait_group``)."""
        self.seen[2 * slot + 1] = max(self.seen[2 * slot + 1], number)

    def release(self) -> NDArray[np.int64]:
        """What an arrival hands on."""
        self.seen[self.sync_entry(self.slot)] = self.moves
        return self.seen.copy()

    def acquire(self, seen: NDArray[np.int64]) -> None:
        """Learn what a release handed on."""
        np.maximum(self.seen, seen, out=self.seen)
