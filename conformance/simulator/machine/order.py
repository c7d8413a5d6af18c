"""Who knows of whose writes.

Note [Proxy order]
~~~~~~~~~~~~~~~~~~
A generic store becomes visible to the async proxy only through a ``fence.proxy.async`` that lies on the path of
synchronisation from the store to the asynchronous operation (PTX, "Causality order": proxy-preserved base causality
order). The machine keeps vector clocks, one entry per warp of the cluster: ``known[w]`` is the last epoch of warp w that
this warp has synchronised with, ``fenced[w]`` the last one that also went through a proxy fence. A store is tagged
with its warp and epoch; an asynchronous read by a warp is in order if ``fenced`` covers the tag. Barriers
hand both vectors on. Lanes of a warp are not told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a release hands on: `known` and `fenced`."""

    known: NDArray[np.int64]
    fenced: NDArray[np.int64]

    def join(self, other: Knowledge | None) -> Knowledge:
        """What both say."""
        if other is None:
            return self
        return Knowledge(np.maximum(self.known, other.known), np.maximum(self.fenced, other.fenced))


class Order:
    """The clocks of one warp.

    :param slot: index of the warp among ``warps`` of the cluster.
    """

    def __init__(self, slot: tuple[int, int]) -> None:
        self.slot, warps = slot
        self.epoch = 1
        self.known = np.zeros(warps, np.int64)
        self.fenced = np.zeros(warps, np.int64)

    @property
    def tag(self) -> int:
        """Tag of a store made now."""
        return self.slot << 20 | self.epoch

    def release(self) -> Knowledge:
        """What this warp hands to whoever acquires it."""
        self.known[self.slot] = self.epoch
        out = Knowledge(self.known.copy(), self.fenced.copy())
        self.epoch += 1
        return out

    def acquire(self, knowledge: Knowledge | None) -> None:
        """Learn what a release handed on."""
        if knowledge is not None:
            np.maximum(self.known, knowledge.known, out=self.known)
            np.maximum(self.fenced, knowledge.fenced, out=self.fenced)

    def proxy_fence(self) -> None:
        """Everything known so far is visible to the async proxy."""
        self.known[self.slot] = self.epoch
        np.maximum(self.fenced, self.known, out=self.fenced)
        self.epoch += 1

    def unfenced(self, tags: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these tags the async proxy need not see; tag 0 stands for what no generic store wrote."""
        return (tags != 0) & (self.fenced[(tags >> 20).astype(np.intp)] < (tags & 0xFFFFF))
