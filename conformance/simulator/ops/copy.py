"""Asynchronous copies of a thread (PTX ISA, "cp.async"), from global to shared memory.

They go through the generic proxy. The bytes are in flight until they arrive, at some time before the wait that covers
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.mbarriers import Mbarriers
from flamia.conformance.simulator.machine.memory import APPROXIMATE, WRITTEN
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.ops.addressing import compile_address
from flamia.conformance.simulator.ops.asynchronous import compile_shared_address
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Immediate


class Copies:
    """The copies of a warp: of each group, how many are under way.

    Groups of lanes are told apart by the lanes that commit: a warp that commits by halves has a list for each lane set.
    """

    def __init__(self, warp: Any) -> None:
        self.open: list[Copy] = []
        self.groups: list[list[Copy]] = []
        self.pending: list[Copy] = []


class Copy:
    """One instruction's copies.

    :param then: called when the bytes are there.
    """

    def __init__(self, lanes: Any) -> None:
        self.lanes, self.done = lanes, False
        self.then: list[Callable[[], None]] = []


@op("cp.async.ca", "cp.async.cg")
def compile_copy(site: Site) -> Run:
    """``cp.async.{ca,cg}.shared{::cta}.global{.hints} [d], [a], size{, source size}``: the rest is zero."""
    site.flag("async")
    mode = site.take("ca", "cg")
    site.take("shared::cta", "shared")
    site.flag("global")
    while site.take("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"):
        pass
    target, source = compile_address(site, 0), compile_address(site, 1)
    size = site.integer(2)
    if size not in ((4, 8, 16) if mode == "ca" else (16,)):
        raise site.refuse(f"{size} bytes")
    real = -1
    if len(site.operands) > 3:
        real = site.row(site.operand(3), "u32")
    unit, units = (size, 1) if size < 16 else (8, 2)

    def run(warp: Any, mask: Any) -> None:
        memory, machine = warp.cta.shared, warp.machine
        where, origin = target(warp), source(warp)
        take = np.full(32, size, np.uint32) if real < 0 else warp.rows[real].copy()
        values = np.zeros((32, size), np.uint8)
        full = mask & (take == size)
        part = mask & (take > 0) & (take < size)
        if full.any():
            loaded = machine.global_memory.load(origin, unit, units, full)
            values[full] = np.ascontiguousarray(loaded).view(np.uint8).reshape(32, size)[full]
        for lane in np.flatnonzero(part):
            n = int(take[lane])
            data = machine.global_memory.where(int(origin[lane]), n)
            machine.global_memory.check_range(data, writes=False)
            values[lane, :n] = machine.global_memory.data[data]
        lanes = np.flatnonzero(mask)
        index = (where[lanes, None] - memory.base) + np.arange(size)
        cells = values.view(np.dtype(f"u{unit}"))
        marked = full.any() and machine.global_memory.finds_approximate(origin, unit, units, full)
        state = WRITTEN | APPROXIMATE if marked else WRITTEN
        memory.store(where, cells[:, 0] if units == 1 else cells, unit, units, mask, warp.order.tag, state, warp.order)
        tag = warp.order.tag
        token = memory.begin_write(index.reshape(-1), "cp.async")
        copy = Copy(mask)
        copies = warp.unit(Copies)
        copies.open.append(copy)
        copies.pending.append(copy)

        def arrive() -> None:
            memory.complete(token)
            if memory.writer is not None:
                memory.writer[np.unique(index >> 2)] = tag
            copy.done = True
            copies.pending.remove(copy)
            for then in copy.then:
                then()
            machine.changed = True

        machine.after_random_delay(f"{warp.cta} cp.async", arrive, f"cp.async {size} B", ordered=False)

    return run


@op("cp.async.commit_group")
def compile_commit(site: Site) -> Run:
    """``cp.async.commit_group``: the copies since the last one are a group."""
    site.flag("async")
    site.flag("commit_group")
    site.expect_operands(0)

    def run(warp: Any, mask: Any) -> None:
        copies = warp.unit(Copies)
        copies.groups.append(copies.open)
        copies.open = []

    return run


@op("cp.async.wait_group", "cp.async.wait_all", control=True)
def compile_wait(site: Site) -> Run:
    """``cp.async.wait_group n``: all groups but the last n are complete; ``wait_all``: everything."""
    site.flag("async")
    everything = site.take("wait_group", "wait_all") == "wait_all"
    left = 0 if everything else site.integer(0)
    assert everything or isinstance(site.operand(0), Immediate)

    def run(warp: Any, mask: Any) -> Blocked | None:
        copies = warp.unit(Copies)
        pending = [c for group in copies.groups[: len(copies.groups) - left] for c in group]
        if everything:
            pending += copies.open
        pending = [c for c in pending if (c.lanes & mask).any()]
        if all(c.done for c in pending):
            copies.groups = [g for g in copies.groups if not all(c.done for c in g)] if left == 0 else copies.groups
            return None
        return Blocked("cp.async groups", lambda: all(c.done for c in pending))

    return run


@op("cp.async.mbarrier.arrive", control=True)
def compile_arrive(site: Site) -> Run:
    """``cp.async.mbarrier.arrive{.noinc}{.shared{::cta}}.b64 [addr]``: each thread arrives once its copies are there.

    Without ``.noinc`` the pending count grows by one first, so that the arrival changes nothing in the end.
    """
    site.flag("async")
    site.flag("mbarrier")
    site.flag("arrive")
    site.take_type("b64")
    counted = site.flag("noinc")
    address = compile_shared_address(site, 0, site.take("shared::cta", "shared"))

    def run(warp: Any, mask: Any) -> None:
        at = address(warp, mask)
        knowledge = warp.order.release()
        waits = [c for c in warp.unit(Copies).pending if (c.lanes & mask).any()]
        barriers = [warp.cta.cluster.unit(Mbarriers).find(int(at[lane]), warp) for lane in lanes_of(mask)]
        left = [len(waits)]
        if not counted:
            for barrier in barriers:
                barrier.pending += 1

        def one_done() -> None:
            left[0] -= 1
            if left[0] <= 0:
                for barrier in barriers:
                    barrier.arrive(1, knowledge)

        for copy in waits:
            copy.then.append(one_done)
        if not waits:
            one_done()

    return run
