"""Instructions about the machine itself: registers per thread, dependent grids, hints."""

from __future__ import annotations

from typing import Any

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import REGISTERS, lanes_of
from flamia.conformance.simulator.ops.registry import Run, op


class RegisterPool:
    """Registers of a CTA, by warp.

    A launch gives each thread the number that the kernel was compiled for: with ``.maxntid``, as many as let the CTA
    fit, in multiples of 8 and at most 255. ``setmaxnreg`` is meant for CTAs that are alone on a multiprocessor.
    """

    def __init__(self, cta: Any) -> None:
        threads = max(cta.threads, 1)
        per_thread = min(255, REGISTERS // threads) // 8 * 8
        self.cta = cta
        limit = cta.program.function.directives.get("maxnreg")
        self.per_thread: list[int] = [min(per_thread, limit[0]) if limit else per_thread] * len(cta.warps)
        self.total = 32 * sum(self.per_thread)

    @property
    def used(self) -> int:
        """Registers held by warps that did not end."""
        return 32 * sum(n for n, w in zip(self.per_thread, self.cta.warps, strict=True) if not w.done)


@op("setmaxnreg", control=True)
def compile_setmaxnreg(site: Site) -> Run:
    """``setmaxnreg.{inc,dec}.sync.aligned.u32 n``: dec releases registers; inc waits for the CTA's pool."""
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
        pool = warp.cta.unit(RegisterPool)
        now = pool.per_thread[warp.index]
        if action == "dec":
            if count > now:
                raise faults.Oversubscribed(f"setmaxnreg.dec to {count} registers, of {now}")
            pool.per_thread[warp.index] = count
            warp.machine.changed = True
            return None
        if count < now:
            raise faults.Oversubscribed(f"setmaxnreg.inc to {count} registers, of {now}")

        def fits() -> bool:
            return bool(pool.used + 32 * (count - now) <= pool.total)

        if not fits():
            reason = f"setmaxnreg.inc to {count}: {pool.used} of {pool.total} registers are held"
            return Blocked(reason, fits)
        pool.per_thread[warp.index] = count
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
