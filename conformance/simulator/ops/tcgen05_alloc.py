"""``tcgen05.alloc``, ``dealloc`` and ``relinquish_alloc_permit`` (PTX 9.7.16.7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flamia.conformance.simulator.machine import asyncfaults
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.tensormemory import TensorMemory
from flamia.conformance.simulator.machine.tensorpipe import TensorCores
from flamia.conformance.simulator.ops.asynchronous import Mask, compile_shared_address, line_of, need_converged
from flamia.conformance.simulator.ops.registry import Run, op

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cluster, Cta
    from flamia.conformance.simulator.machine.warp import Warp


def take_group(site: Site) -> int:
    """The number of ``.cta_group``."""
    group = site.take("cta_group::1", "cta_group::2")
    if not group:
        raise site.refuse("a .cta_group is missing")
    return int(group[-1])


def take_aligned(site: Site) -> None:
    """``.sync.aligned``."""
    if not (site.flag("sync") and site.flag("aligned")):
        raise site.refuse("it is spelled .sync.aligned")


@dataclass
class _Request:
    """An allocation that waits for room, or for the other CTA of a pair."""

    columns: int
    ctas: list[Cta]
    came: set[int] = field(default_factory=set)
    first: int | None = None

    def grant(self) -> bool:
        """Allocate in every CTA at the same column, if all came and there is room."""
        if self.first is None and len(self.came) == len(self.ctas):
            memories = [cta.unit(TensorMemory) for cta in self.ctas]
            firsts = {m.allocate(self.columns) for m in memories}
            if len(firsts) > 1:
                raise asyncfaults.TmemAllocation("the two CTAs of a pair have different columns free")
            (self.first,) = firsts
        return self.first is not None


class _Requests:
    """Open allocations of a cluster, by the rank of the first CTA."""

    def __init__(self, cluster: Cluster) -> None:
        self.open: dict[int, _Request] = {}


@op("tcgen05.alloc", control=True)
def compile_alloc(site: Site) -> Run:
    """``tcgen05.alloc.cta_group::N.sync.aligned{.shared::cta}.b32 [dst], nCols``: waits until there is room."""
    site.flag("alloc")
    site.take_type("b32")
    group = take_group(site)
    take_aligned(site)
    target = compile_shared_address(site, 0, site.take("shared::cta", "shared"))
    count = site.row(1, "u32")
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> Blocked | None:
        need_converged(warp, mask, what)
        cluster, memory = warp.cta.cluster, warp.cta.unit(TensorMemory)
        cores = cluster.unit(TensorCores)
        cores.use_group(group, what)
        columns = warp.uniform(count, mask)
        if not 32 <= columns <= 512 or columns & (columns - 1):
            raise asyncfaults.TmemAllocation(f"{what}: the columns must be a power of two in 32..512, got {columns}")
        if not memory.may_allocate:
            raise asyncfaults.TmemAllocation(f"{what} after tcgen05.relinquish_alloc_permit")
        ctas = cores.ctas(warp, group)
        requests = cluster.unit(_Requests).open
        request = requests.setdefault(ctas[0].rank, _Request(columns, ctas))
        if request.columns != columns:
            raise asyncfaults.TmemAllocation(f"{what}: {columns} columns, the other CTA asks for {request.columns}")
        request.came.add(warp.cta.rank)
        at = int(target(warp, mask)[np.argmax(mask)])

        def deliver() -> None:
            assert request.first is not None
            requests.pop(ctas[0].rank, None)
            lane = np.zeros(32, np.bool_)
            lane[0] = True
            value = np.full(32, request.first, np.uint32)
            warp.cta.shared.store(np.full(32, at, np.int64), value, 4, 1, lane, warp.order.tag)

        if request.grant():
            warp.machine.changed = True
            deliver()
            return None
        return Blocked(f"tcgen05.alloc of {columns} columns", request.grant, deliver)

    return run


@op("tcgen05.dealloc", control=True)
def compile_dealloc(site: Site) -> Run:
    """``tcgen05.dealloc.cta_group::N.sync.aligned.b32 taddr, nCols``."""
    site.flag("dealloc")
    site.take_type("b32")
    group = take_group(site)
    take_aligned(site)
    address, count = site.row(0, "u32"), site.row(1, "u32")
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, what)
        cores = warp.cta.cluster.unit(TensorCores)
        cores.use_group(group, what)
        warp.cta.unit(TensorMemory).free(warp.uniform(address, mask), warp.uniform(count, mask), cores.using(warp.cta))

    return run


@op("tcgen05.relinquish_alloc_permit", control=True)
def compile_relinquish(site: Site) -> Run:
    """``tcgen05.relinquish_alloc_permit.cta_group::N.sync.aligned``."""
    site.flag("relinquish_alloc_permit")
    group = take_group(site)
    take_aligned(site)
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, what)
        warp.cta.cluster.unit(TensorCores).use_group(group, what)
        warp.cta.unit(TensorMemory).may_allocate = False

    return run
