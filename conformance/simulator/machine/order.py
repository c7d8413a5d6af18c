"""Who knows of whose writes.

Note [Proxy order]
~~~~~~~~~~~~~~~~~~
A generic store becomes visible to the async proxy only through a ``fence.proxy.async`` that lies on the path of
synchronisation from the store to the asynchronous operation (PTX, "Causality order": proxy-preserved base causality
order). The machine keeps vector clocks, one entry per warp of the cluster: ``known[w]`` is the last epoch of warp w
that this warp has synchronised with, ``fenced[w]`` the last one that also went through a proxy fence. A store is tagged
with its warp and epoch; an asynchronous read by a warp is in order if ``fenced`` covers the tag. Barriers hand both
vectors on. So do flags in memory (`machine.flags`): an acquiring access takes what a releasing one put there, and
likewise a fence behind a strong access takes what a fence before another strong access of the same address put there
("release pattern" and "acquire pattern"); strong are ``.relaxed``, ``.volatile`` and stronger accesses, and atomics.
Lanes of a warp are not told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine.asyncorder import AsyncOrder


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a release hands on: `known` and `fenced`, and `AsyncOrder.seen` where asynchronous operations are used."""

    known: NDArray[np.int64]
    fenced: NDArray[np.int64]
    seen: NDArray[np.int64] | None = None

    def join(self, other: Knowledge | None) -> Knowledge:
        """What both say."""
        if other is None:
            return self
        seen = self.seen if other.seen is None else other.seen
        if self.seen is not None and other.seen is not None:
            seen = np.maximum(self.seen, other.seen)
        return Knowledge(np.maximum(self.known, other.known), np.maximum(self.fenced, other.fenced), seen)


class Order:
    """The clocks of one warp.

    :param slot: index of the warp among ``warps`` of the cluster.
    """

    def __init__(self, slot: tuple[int, int]) -> None:
        self.slot, warps = slot
        self.epoch = 1
        self.known = np.zeros(warps, np.int64)
        self.fenced = np.zeros(warps, np.int64)
        self._asynchronous: AsyncOrder | None = None
        self.fence_release: Knowledge | None = None
        self._seen_at_flags: Knowledge | None = None

    @property
    def asynchronous(self) -> AsyncOrder:
        """The clocks of asynchronous operations, Note [Asynchronous order]; made when first asked for."""
        if self._asynchronous is None:
            self._asynchronous = AsyncOrder(self.slot, self.known.size)
        return self._asynchronous

    @property
    def tag(self) -> int:
        """Tag of a store made now."""
        return self.slot << 20 | self.epoch

    def release(self) -> Knowledge:
        """What this warp hands to whoever acquires it."""
        self.known[self.slot] = self.epoch
        seen = None if self._asynchronous is None else self._asynchronous.release()
        out = Knowledge(self.known.copy(), self.fenced.copy(), seen)
        self.epoch += 1
        return out

    def acquire(self, knowledge: Knowledge | None) -> None:
        """Learn what a release handed on."""
        if knowledge is not None:
            np.maximum(self.known, knowledge.known, out=self.known)
            np.maximum(self.fenced, knowledge.fenced, out=self.fenced)
            if knowledge.seen is not None:
                self.asynchronous.acquire(knowledge.seen)

    def fence(self, releases: bool = True, acquires: bool = True) -> None:
        """``fence`` or ``membar``: later strong stores hand on what is known now; learn what strong loads found."""
        if acquires and self._seen_at_flags is not None:
            self.acquire(self._seen_at_flags)
            self._seen_at_flags = None
        if releases:
            self.fence_release = self.release()

    def see(self, knowledge: Knowledge | None) -> None:
        """A strong load found a flag with this; it counts from the next fence on."""
        if knowledge is not None:
            self._seen_at_flags = knowledge.join(self._seen_at_flags)

    def proxy_fence(self) -> None:
        """Everything known so far is visible to the async proxy."""
        self.known[self.slot] = self.epoch
        np.maximum(self.fenced, self.known, out=self.fenced)
        self.epoch += 1

    def unfenced(self, tags: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these tags the async proxy need not see; tag 0 stands for what no generic store wrote."""
        late: NDArray[np.bool_] = self.fenced[(tags >> 20).astype(np.intp)] < (tags & 0xFFFFF)
        out: NDArray[np.bool_] = (tags != 0) & late
        return out
