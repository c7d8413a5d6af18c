"""Synchronisation through memory: who released what at an address.

All threads of this machine see accesses in one order. What a ``.release`` store or atomic hands on besides is knowledge
of earlier writes, which Note [Proxy order] needs; an ``.acquire`` at the same address takes it. Only threads of one
cluster are followed.
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

    def release(self, warp: Warp, space: Space, address: Any, mask: Any) -> None:
        """The lanes of ``mask`` release at their addresses."""
        knowledge = warp.order.release()
        for at in np.unique(address[mask]):
            key = (id(space), int(at))
            self.released[key] = knowledge.join(self.released.get(key))

    def acquire(self, warp: Warp, space: Space, address: Any, mask: Any) -> None:
        """The lanes of ``mask`` acquire at their addresses."""
        for at in np.unique(address[mask]):
            warp.order.acquire(self.released.get((id(space), int(at))))
