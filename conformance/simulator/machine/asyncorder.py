"""What a warp knows of asynchronous operations: the vector clocks behind the faults of missing waits and fences.

Note [Asynchronous order]
~~~~~~~~~~~~~~~~~~~~~~~~~
A missing wait is found by what the waiting thread *knows*, not by the luck of timing. Every warp counts its operations
of three kinds, and keeps a vector of how far it knows those of every warp of the cluster to be done:

* ``LOAD`` and ``STORE``: its ``tcgen05.ld`` and ``st``. They are done once the ``tcgen05.wait`` of their kind returned;
  that is handed on from the next ``tcgen05.fence::before_thread_sync`` on.
* ``PIPE``: its ``tcgen05.mma`` and ``cp``, and its ``wgmma``. A ``tcgen05.commit`` (or ``wgmma.wait_group``) hands
  on that they are done.

Beside these the vector has, for each warp, how many pipelined operations it *issued*, which is what an ``mma`` of
another thread needs to be pipelined behind them (handed on from ``fence::before_thread_sync`` on), and how many loads
and stores it had issued when it last released, which serves messages only; and for each mbarrier, how many phases of
it were seen complete, which is how bulk copies are waited for.

Releases (arrivals) copy the vector ``seen``, acquires (successful waits) take the maximum. Accesses to tensor
memory look at ``after``, which is ``seen`` as of the last ``tcgen05.fence::after_thread_sync``. Warps stand for their
threads: lanes are not told apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LOAD, STORE, PIPE = 0, 1, 2
KINDS = 3
MBARRIERS = 1024
"""Most mbarriers of a cluster."""
_FOREVER = np.iinfo(np.int64).max


class AsyncOrder:
    """The counters and vectors of one warp.

    :param slot: number of the warp in its cluster, of ``warps``.
    :param seen: int64; `entry` and its siblings say what stands where.
    :param after: int64, the entries of `entry` and `issued_entry`; the last one stands for "nobody": always known.
    :param issued: operations of each kind so far.
    """

    def __init__(self, slot: int, warps: int) -> None:
        self.slot, self.warps = slot, warps
        self.seen: NDArray[np.int64] = np.zeros(6 * warps + MBARRIERS, np.int64)
        self.after: NDArray[np.int64] = np.zeros(4 * warps + 1, np.int64)
        self.after[-1] = _FOREVER
        self.issued = [0] * KINDS
        self._waited = [0] * KINDS

    # --- where things stand in the vectors ---------------------------------------------------------------------------

    def entry(self, kind: int, slot: int | None = None) -> int:
        """Operations of a kind, of this warp or that of ``slot``, that are done."""
        return KINDS * (self.slot if slot is None else slot) + kind

    def issued_entry(self, slot: int) -> int:
        """Pipelined operations that a warp issued."""
        return KINDS * self.warps + slot

    def synced_entry(self, kind: int, slot: int) -> int:
        """Loads or stores that a warp had issued when it last released."""
        return (KINDS + 1) * self.warps + 2 * slot + kind

    def mbarrier_entry(self, number: int) -> int:
        """Complete phases of an mbarrier."""
        return (KINDS + 3) * self.warps + number

    # --- this warp's operations --------------------------------------------------------------------------------------

    def issue(self, kind: int) -> int:
        """An operation is issued. :returns: its number among those of its kind, from 1."""
        self.issued[kind] += 1
        return self.issued[kind]

    def wait(self, kind: int) -> None:
        """``tcgen05.wait::ld`` or ``wait::st`` returned."""
        self._waited[kind] = self.issued[kind]
        self.after[self.entry(kind)] = self.issued[kind]

    def has_waited(self, kind: int, number: int) -> bool:
        """Whether the warp waited for its load or store of that number."""
        return self._waited[kind] >= number

    # --- fences and hand-over ----------------------------------------------------------------------------------------

    def fence_before(self) -> None:
        """``tcgen05.fence::before_thread_sync``."""
        for kind in (LOAD, STORE):
            self.seen[self.entry(kind)] = self._waited[kind]
        self.seen[self.issued_entry(self.slot)] = self.issued[PIPE]

    def fence_after(self) -> None:
        """``tcgen05.fence::after_thread_sync``."""
        known = self.after[:-1]
        np.maximum(known, self.seen[: known.size], out=known)

    def committed(self) -> NDArray[np.int64]:
        """What an arrival by ``tcgen05.commit`` hands on once all operations issued so far are done."""
        self.fence_before()
        out = self.release()
        out[self.entry(PIPE)] = self.issued[PIPE]
        return out

    def finished(self, slot: int, number: int) -> None:
        """This warp waited for the pipelined operations of warp ``slot`` up to ``number`` (``wgmma.wait_group``)."""
        entry = self.entry(PIPE, slot)
        self.seen[entry] = max(self.seen[entry], number)

    def release(self) -> NDArray[np.int64]:
        """What an arrival hands on."""
        for kind in (LOAD, STORE):
            self.seen[self.synced_entry(kind, self.slot)] = self.issued[kind]
        return self.seen.copy()

    def acquire(self, seen: NDArray[np.int64]) -> None:
        """Learn what a release handed on."""
        np.maximum(self.seen, seen, out=self.seen)
