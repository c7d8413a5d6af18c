"""Control flow and barriers (PTX ISA, "Control Flow Instructions", "bar, barrier")."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.outcomes import Blocked, Exit
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.ops.registry import Run, op


@op("ret", "exit", control=True)
def compile_exit(site: Site) -> Run:
    """``ret`` of an entry, ``exit``: the lanes end."""
    site.flag("uni")
    site.expect_operands(0)

    def run(warp: Any, mask: Any) -> Exit:
        return Exit(mask)

    return run


@op("trap", control=True)
def compile_trap(site: Site) -> Run:
    """``trap``: a fault of the kernel's own."""
    site.expect_operands(0)

    def run(warp: Any, mask: Any) -> None:
        raise faults.Trap("the kernel executed trap", lanes_of(mask))

    return run


@op("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync", control=True)
@op("bar.arrive", "barrier.arrive", "barrier.cta.arrive", "bar.cta.arrive", control=True)
@op("bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red", control=True)
def compile_barrier(site: Site) -> Run:
    """``bar{rier}{.cta}.{sync,arrive,red}``; ``bar`` is ``barrier....aligned``: all lanes of the warp must be there."""
    aligned = site.flag("aligned") or site.instruction.base == "bar"
    site.flag("cta")
    action = site.take("sync", "arrive", "red")
    reduction = site.take("popc", "and", "or") if action == "red" else ""
    result, vote, negated = -1, -1, False
    operands = list(site.operands)
    if reduction:
        kind = site.take_type("u32" if reduction == "popc" else "pred")
        result = site.target(operands.pop(0), kind)
        vote, negated = site.predicate(operands.pop())
    number = site.row(operands[0], "u32")
    count = site.row(operands[1], "u32") if len(operands) > 1 else -1
    if action == "arrive" and count < 0:
        raise site.refuse("an arrival needs a number of threads")

    def run(warp: Any, mask: Any) -> Blocked | None:
        if aligned and not warp.is_converged(mask):
            missing = lanes_of(warp.live & ~mask)
            raise faults.Divergent(f"an aligned barrier without lanes {missing} of the warp", lanes_of(mask))
        barrier = warp.uniform(number, mask)
        expected = warp.uniform(count, mask) if count >= 0 else None
        votes = None
        # Threads of a warp that exited count as arrived, as on the chip, which counts warps.
        threads = 32 if warp.is_converged(mask) else int(np.count_nonzero(mask))
        if reduction:
            held = mask & ~warp.rows[vote] if negated else mask & warp.rows[vote]
            # Lanes that ended, or never were, arrive but do not vote.
            votes = int(np.count_nonzero(held)), int(np.count_nonzero(mask))
        phase = warp.cta.barriers.arrive(barrier, expected, warp, threads, votes, reduction)
        if action == "arrive":
            return None

        def resume() -> None:
            warp.order.acquire(phase.knowledge)
            if reduction:
                value = {"popc": phase.count, "and": phase.all, "or": phase.any}[reduction]
                np.copyto(warp.rows[result], value, where=mask, casting="unsafe")

        reason = f"barrier {barrier} ({phase.arrived} of {expected or 'all'} threads)"
        return Blocked(reason, lambda: phase.open, resume)

    return run


@op("nanosleep")
def compile_nanosleep(site: Site) -> Run:
    """``nanosleep``: time is not modelled."""
    site.take_type("u32")
    site.expect_operands(1)
    site.row(0, "u32")
    return lambda warp, mask: None
