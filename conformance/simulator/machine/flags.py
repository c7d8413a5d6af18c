"""Synchronisation through memory: who released what at an address.

All threads of this machine see accesses in one order. What a ``.release`` store or atomic hands on besides is knowledge
of earlier writes, which Note [Proxy order] needs; an ``.acquire`` at the same address takes it. Fences do the same with
strong accesses. Only threads of one cluster are followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cluster
    from flamia.conformance.simulator.machine.memory import Space
    from flamia.conformance.simulator.machine.order import Knowledge
    from flamia.conformance.simulator.machine.warp import Warp


class Flags:
    """Released addresses of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.released: dict[tuple[int, int], Knowledge] = {}

    def write(self, warp: Warp, space: Space, address: Any, mask: Any, releases: bool) -> None:
        """The lanes of ``mask`` make a strong store or atomic at their addresses."""
        knowledge = warp.order.release() if releases else warp.order.fence_release
        if knowledge is None:
            return
        for at in np.unique(address[mask]):
            key = (id(space), int(at))
            self.released[key] = knowledge.join(self.released.get(key))

    def read(self, warp: Warp, space: Space, address: Any, mask: Any, acquires: bool) -> None:
        """The lanes of ``mask`` make a strong load or atomic at their addresses."""
        if not self.released:
            return
        for at in np.unique(address[mask]):
            found = self.released.get((id(space), int(at)))
            if acquires:
                warp.order.acquire(found)
            else:
                warp.order.see(found)
