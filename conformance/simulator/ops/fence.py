"""``fence``, ``membar`` and proxy fences (PTX 9.7.13.4).

Generic accesses of this machine happen in one order that all threads see, so that fences between them change no values.
What they change is who knows of which writes: see Note [Proxy order].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flamia.conformance.simulator.machine.mbarriers import Mbarriers
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.ops.asynchronous import Mask
from flamia.conformance.simulator.ops.registry import Run, op

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp

_SCOPES = ("cta", "cluster", "gpu", "sys")


@op("membar", "fence")
def compile_fence(site: Site) -> Run:
    """``membar.{cta,gl,sys}`` and ``fence{.sem}.scope``, ``sync_restrict`` forms included."""
    sem = ""
    if site.instruction.base == "membar":
        if not site.take("cta", "gl", "sys"):
            raise site.refuse("a level is missing")
    else:
        sem = site.take("sc", "acq_rel", "acquire", "release")
        site.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        if not site.take(*_SCOPES):
            raise site.refuse("a scope is missing")
    site.expect_operands(0)
    return lambda warp, mask: warp.order.fence(sem != "acquire", sem != "release")


@op("fence.mbarrier_init")
def compile_fence_mbarrier_init(site: Site) -> Run:
    """``fence.mbarrier_init.release.cluster``: initialised mbarriers become visible to the cluster and its copies."""
    site.flag("mbarrier_init")
    if not (site.flag("release") and site.flag("cluster")):
        raise site.refuse("it is spelled fence.mbarrier_init.release.cluster")
    site.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        warp.cta.cluster.unit(Mbarriers).fence_init(warp)

    return run


@op("fence.proxy.async", "membar.proxy.async")
def compile_fence_proxy_async(site: Site) -> Run:
    """``fence.proxy.async{.global|.shared::{cta,cluster}}``."""
    site.flag("proxy")
    site.flag("async")
    site.take("global", "shared::cta", "shared::cluster")
    site.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        warp.order.proxy_fence()
        warp.cta.cluster.unit(Mbarriers).fence_init(warp)

    return run


@op("fence.proxy.alias", "fence.proxy.tensormap::generic", "fence.proxy.async::generic")
def compile_fence_proxy_other(site: Site) -> Run:
    """Proxies that this machine does not tell apart: aliases, tensor maps, and async to generic (waits order those)."""
    site.flag("proxy")
    site.take("alias", "tensormap::generic", "async::generic")
    site.take("acquire", "release")
    site.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    site.take(*_SCOPES)
    return lambda warp, mask: None
