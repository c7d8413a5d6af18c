"""``tcgen05.commit`` and ``tcgen05.fence`` (PTX 9.7.16.11 and 9.7.16.12). See Note [Asynchronous order]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flamia.conformance.simulator.machine.mbarriers import Mbarriers, find_cta
from flamia.conformance.simulator.machine.order import Knowledge
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.tensorpipe import TensorCores
from flamia.conformance.simulator.machine.windows import RANK_SHIFT
from flamia.conformance.simulator.ops.asynchronous import (
    Mask,
    compile_shared_address,
    later,
    line_of,
    single_lane,
)
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.tcgen05_alloc import take_group

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp


@op("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", control=True)
def compile_fence(site: Site) -> Run:
    """``tcgen05.fence::{before,after}_thread_sync``."""
    before = site.take("fence::before_thread_sync", "fence::after_thread_sync").startswith("fence::before")
    site.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        order = warp.order.asynchronous
        (order.fence_before if before else order.fence_after)()

    return run


@op("tcgen05.commit", control=True)
def compile_commit(site: Site) -> Run:
    """``tcgen05.commit.cta_group::N.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64 [mbar]{, mask}``.

    The arrival comes when everything that this thread's warp issued before is done.
    """
    site.flag("commit")
    site.take_type("b64")
    group = take_group(site)
    if not site.flag("mbarrier::arrive::one"):
        raise site.refuse("it is spelled .mbarrier::arrive::one")
    space = site.take("shared::cluster")
    multicast = site.flag("multicast::cluster")
    site.expect_operands(1 + multicast)
    address = compile_shared_address(site, 0, space)
    mask_row = site.row(1, "u16") if multicast else -1
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        lane = single_lane(warp, mask, what)
        cluster = warp.cta.cluster
        cores = cluster.unit(TensorCores)
        cores.use_group(group, what)
        at = int(address(warp, mask)[lane])
        places = [at]
        if multicast:
            bits = int(warp.rows[mask_row][lane])
            places = [r << RANK_SHIFT | at & ((1 << RANK_SHIFT) - 1) for r in range(16) if bits >> r & 1]
        barriers = cluster.unit(Mbarriers)
        for place in places:
            find_cta(cluster, place)
            barriers.find(place, warp, async_proxy=True)
        released = warp.order.release()
        knowledge = Knowledge(released.known, released.fenced, warp.order.asynchronous.committed())

        def arrive() -> None:
            for place in places:
                barriers.find(place, None).arrive(1, knowledge)

        later(site, warp, cores.engine(cores.ctas(warp, group)), arrive, what)

    return run
