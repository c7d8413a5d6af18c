"""The barrier of a cluster (PTX ISA, "barrier.cluster")."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.order import Knowledge
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.ops.registry import Run, op


class ClusterBarrier:
    """One barrier: threads arrive, and wait for the phase that they arrived at.

    :param arrived: lanes that arrived in this phase, by warp.
    """

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.phase = 0
        self.knowledge: list[Knowledge | None] = [None, None]
        self.arrived: dict[Any, Any] = {}
        self.waits: dict[Any, Any] = {}  # lanes that arrived and did not wait yet, by warp
        for cta in cluster.ctas:
            cta.at_end(self.check_end)

    def arrive(self, warp: Any, mask: Any) -> None:
        """Some lanes arrive.

        :raises BarrierMisuse: for lanes that did not wait since their last arrival.
        """
        waiting = self.waits.setdefault(warp, np.zeros(32, np.bool_))
        if (waiting & mask).any():
            raise faults.BarrierMisuse(
                "two arrivals at barrier.cluster without a wait between", lanes_of(waiting & mask)
            )
        waiting |= mask
        here = self.arrived.setdefault(warp, np.zeros(32, np.bool_))
        here |= mask
        slot = self.phase % 2
        self.knowledge[slot] = warp.order.release().join(self.knowledge[slot])
        self.try_open()

    def try_open(self) -> None:
        """Begin the next phase if every thread that did not exit has arrived."""
        for cta in self.cluster.ctas:
            for warp in cta.warps:
                here = self.arrived.get(warp)
                missing = warp.live if here is None else warp.live & ~here
                if not warp.done and missing.any():
                    return
        self.arrived.clear()
        self.phase += 1
        self.knowledge[self.phase % 2] = None
        self.cluster.machine.changed = True

    def check_end(self) -> None:
        """An ended CTA no longer counts."""
        if self.arrived:
            self.try_open()


@op("barrier.cluster.arrive")
def compile_arrive(site: Site) -> Run:
    """``barrier.cluster.arrive{.release,.relaxed}{.aligned}``."""
    site.flag("cluster")
    site.flag("arrive")
    site.take("release", "relaxed")
    aligned = site.flag("aligned")
    site.expect_operands(0)

    def run(warp: Any, mask: Any) -> None:
        if aligned and not warp.is_converged(mask):
            raise faults.Divergent("an aligned barrier without some lanes of the warp", lanes_of(mask))
        warp.cta.cluster.unit(ClusterBarrier).arrive(warp, mask)

    return run


@op("barrier.cluster.wait", control=True)
def compile_wait(site: Site) -> Run:
    """``barrier.cluster.wait{.acquire}{.aligned}``."""
    site.flag("cluster")
    site.flag("wait")
    site.flag("acquire")
    aligned = site.flag("aligned")
    site.expect_operands(0)

    def run(warp: Any, mask: Any) -> Blocked | None:
        if aligned and not warp.is_converged(mask):
            raise faults.Divergent("an aligned barrier without some lanes of the warp", lanes_of(mask))
        barrier = warp.cta.cluster.unit(ClusterBarrier)
        waiting = barrier.waits.get(warp)
        if waiting is None or not waiting[mask].all():
            raise faults.BarrierMisuse("a wait at barrier.cluster without an arrival", lanes_of(mask))
        waiting &= ~mask
        here = barrier.arrived.get(warp)
        phase = barrier.phase + 1 if here is not None and here[mask].all() else barrier.phase

        def resume() -> None:
            warp.order.acquire(barrier.knowledge[(phase - 1) % 2])

        if barrier.phase >= phase:
            resume()
            return None
        return Blocked("barrier.cluster", lambda: barrier.phase >= phase, resume)

    return run
