"""Instructions about the machine itself: registers per thread, dependent grids, hints."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.registerpool import RegisterPool
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import LANES, lanes_of
from flamia.conformance.simulator.ops.registry import Run, op


@op("setmaxnreg", control=True)
def compile_setmaxnreg(site: Site) -> Run:
    """``setmaxnreg.{inc,dec}.sync.aligned.u32 n``: Note [Register pool]."""
    site.take_type("u32")
    action = site.take("inc", "dec")
    if not (site.flag("sync") and site.flag("aligned")) or not action:
        raise site.refuse("'.inc' or '.dec' with '.sync.aligned' is needed")
    count = site.integer(0)
    if not (24 <= count <= 256 and count % 8 == 0):
        raise site.refuse(f"{count} registers: a multiple of 8 from 24 to 256 is needed")

    def run(warp: Any, mask: Any) -> Blocked | None:
        if not warp.is_converged(mask):
            raise faults.Divergent("setmaxnreg without some lanes of the warp", lanes_of(mask))
        pool: RegisterPool = warp.cta.unit(RegisterPool)
        if not pool.known:
            warp.machine.remark("setmaxnreg that ptxas ignores, as neither .maxnreg nor .minnctapersm is given")
            return None
        now = pool.per_thread[warp.index]
        if (count > now) if action == "dec" else (count < now):
            raise faults.Oversubscribed(f"setmaxnreg.{action} to {count} registers, of {now}")
        more = LANES * (count - now)

        def fits() -> bool:
            return bool(more <= pool.free)

        if not fits():
            return Blocked(f"setmaxnreg.inc to {count}: {more} registers, of which {pool.free} are free", fits)
        pool.per_thread[warp.index] = count
        warp.machine.changed = True
        return None

    return run


@op("griddepcontrol")
def compile_griddepcontrol(site: Site) -> Run:
    """``griddepcontrol.{launch_dependents,wait}``: the grids before this one are complete: launches are one by one."""
    if not site.take("launch_dependents", "wait"):
        raise site.refuse("'.launch_dependents' or '.wait' is needed")
    site.expect_operands(0)
    return lambda warp, mask: None


@op("pmevent", "brkpt")
def compile_nothing(site: Site) -> Run:
    """``pmevent``, ``brkpt``: for tools."""
    site.flag("mask")
    return lambda warp, mask: None


@op("createpolicy")
def compile_createpolicy(site: Site) -> Run:
    """``createpolicy.fractional.L2::<priority>.b64 policy``: an opaque number; policies change nothing."""
    if not site.flag("fractional") or not site.take("L2::evict_first", "L2::evict_last", "L2::evict_normal"):
        raise site.refuse("'.fractional' with a priority of L2 is needed")
    site.take_type("b64")
    site.expect_operands(1)
    target = site.target(0, "u64")

    def run(warp: Any, mask: Any) -> None:
        np.copyto(warp.rows[target], np.uint64(1), where=mask)

    return run
