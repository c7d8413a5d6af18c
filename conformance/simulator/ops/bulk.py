"""``cp.async.bulk``, ``cp.reduce.async.bulk`` and their groups (PTX 9.7.9.25).

A copy reads its source and writes its destination at one moment, after a random delay; copies are not ordered among
each other. Towards shared memory it announces itself on an mbarrier (complete-tx), towards global memory in a bulk
group of the issuing thread. Reductions of floats round to nearest; several copies reduce in the order of completion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.mbarriers import Mbarrier, Mbarriers, find_cta
from flamia.conformance.simulator.machine.memory import WRITTEN
from flamia.conformance.simulator.machine.sharedtraffic import SharedTraffic, copy_state
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.ops.addressing import compile_address
from flamia.conformance.simulator.ops.asynchronous import Mask, compile_shared_address, later, line_of
from flamia.conformance.simulator.ops.bulkgroups import BulkGroups, BulkOperation
from flamia.conformance.simulator.ops.floating import maximum, minimum
from flamia.conformance.simulator.ops.registry import Run, op

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.warp import Warp

TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    **{f"{k}{b}": np.dtype(f"{'u' if k in 'ub' else 'i'}{b // 8}") for k in "usb" for b in (32, 64)},
}
GLOBAL_OPS = {
    "add": ("f16", "bf16", "f32", "f64", "u32", "s32", "u64"),
    "min": ("f16", "bf16", "u32", "s32", "u64", "s64"),
    "max": ("f16", "bf16", "u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
_SHARED_TYPES = ("u32", "s32", "u64")


def reduce_values(operation: str, old: Any, new: Any) -> Any:
    """``old`` combined with ``new``: one element of the destination, one of the source."""
    with np.errstate(all="ignore"):
        match operation:
            case "add":
                total = old + new
                if total.dtype.itemsize == 2:  # every NaN of the 16-bit formats leaves as the canonical one
                    total.view(np.uint16)[np.isnan(total)] = 0x7FFF
                return total
            case "min":
                return np.minimum(old, new) if old.dtype.kind in "iu" else minimum(old, new)
            case "max":
                return np.maximum(old, new) if old.dtype.kind in "iu" else maximum(old, new)
            case "inc":
                return np.where(old >= new, 0, old + np.uint32(1)).astype(np.uint32)
            case "dec":
                return np.where((old == 0) | (old > new), new, old - np.uint32(1)).astype(np.uint32)
            case "and":
                return old & new
            case "or":
                return old | new
            case _:
                return old ^ new


def check_alignment(what: str, size: int, *addresses: int) -> None:
    for value, name in ((size, "size"), *((a, "address") for a in addresses)):
        if value % 16:
            raise faults.Misaligned(f"{what}: the {name} {value:#x} is no multiple of 16", (), value)


def take_hints(site: Site) -> int:
    """Cache hints change nothing. :returns: how many operands they bring."""
    return int(site.flag("L2::cache_hint"))


@op("cp.async.bulk.shared::cluster.global", "cp.async.bulk.shared::cta.global", control=True)
def compile_load(site: Site) -> Run:
    """Global to shared: ``[dst], [src], size, [mbar]{, ctaMask}{, policy}``."""
    for name in ("async", "bulk", "global", "mbarrier::complete_tx::bytes"):
        if not site.flag(name):
            raise site.refuse(f"the modifier .{name} is missing")
    space = site.take("shared::cluster", "shared::cta")
    multicast = site.flag("multicast::cluster")
    site.expect_operands(4 + multicast + take_hints(site))
    target, mbar = (compile_shared_address(site, i, space) for i in (0, 3))
    source, size = compile_address(site, 1), site.row(2, "u32")
    mask_row = site.row(4, "u16") if multicast else -1
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        to, at, announce = target(warp, mask), source(warp), mbar(warp, mask)
        for lane in lanes_of(mask):
            ranks: list[int | None] = [None]
            if multicast:
                bits = int(warp.rows[mask_row][lane])
                ranks = [r for r in range(16) if bits >> r & 1]
            for rank in ranks:
                _issue_load(
                    site,
                    warp,
                    what,
                    rank,
                    int(to[lane]),
                    int(at[lane]),
                    int(warp.rows[size][lane]),
                    int(announce[lane]),
                )

    return run


def _issue_load(
    site: Site, warp: Warp, what: str, rank: int | None, to: int, at: int, size: int, announce: int
) -> None:
    """One copy, to the CTA of ``rank`` at the same offset if given."""
    if rank is not None:
        to, announce = ((rank << 24) | (a & 0xFFFFFF) for a in (to, announce))
    check_alignment(what, size, to, at)
    cluster = warp.cta.cluster
    cta = find_cta(cluster, to)
    barrier = cluster.unit(Mbarriers).find(announce, warp, async_proxy=True)
    memory = warp.machine.global_memory
    where = memory.where(at, size)
    if memory.writer is not None:
        tags = memory.writer[where.start >> 2 : where.stop >> 2]
        if tags.any() and warp.order.unfenced(tags).any():
            raise faults.MissingProxyFence(f"{what} reads global memory that a generic store wrote", (), at)
    reading = memory.begin_read(where, what)
    writing = cta.unit(SharedTraffic).begin_fill(warp, to, size, what, barrier.number, barrier.phase)
    land(
        site,
        warp,
        what,
        cta,
        barrier,
        size,
        lambda: _copy(memory, where, cta.shared, writing.where),
        [(memory, reading), (cta.shared, writing)],
    )


def land(
    site: Site,
    warp: Warp,
    what: str,
    cta: Cta,
    barrier: Mbarrier,
    size: int,
    move: Callable[[], None],
    tokens: list[Any],
) -> None:
    """Schedule what a copy into shared memory does when it arrives: move, and announce on its mbarrier."""
    traffic = cta.unit(SharedTraffic)
    phase = barrier.phase
    traffic.watch(lambda: barrier.observed > phase, what)

    def complete() -> None:
        move()
        for space, token in tokens:
            space.complete(token)
        if barrier.phase != phase:
            raise asyncfaults.ExpectTxMismatch(
                f"{what}: its {size} bytes belong to phase {phase} of {barrier}, which completed without them",
                (),
                barrier.address,
            )
        barrier.complete(size)

    later(site, warp, f"{cta} copy engine", complete, what, ordered=False)


def _copy(source: Any, where: Any, target: Any, to: Any) -> None:
    target.data[to] = source.data[where]
    copy_state(source, where, target, to)


@op("cp.async.bulk.shared::cluster.shared::cta", control=True)
@op("cp.reduce.async.bulk.shared::cluster.shared::cta", control=True)
def compile_between(site: Site) -> Run:
    """Shared to shared of another CTA: ``[dst], [src], size, [mbar]``, plain or reducing."""
    reduce = site.flag("reduce")
    kind = site.take_type(*_SHARED_TYPES, *GLOBAL_OPS["and"]) if reduce else ""
    operation = site.take(*GLOBAL_OPS) if reduce else ""
    for name in ("async", "bulk", "shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"):
        if not site.flag(name):
            raise site.refuse(f"the modifier .{name} is missing")
    if reduce and kind not in (*GLOBAL_OPS.get(operation, ()),):
        raise site.refuse(f".{operation}.{kind} does not exist")
    site.expect_operands(4)
    target, mbar = (compile_shared_address(site, i, "shared::cluster") for i in (0, 3))
    source, size = compile_shared_address(site, 1, "shared::cta"), site.row(2, "u32")
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        to, at, announce = target(warp, mask), source(warp, mask), mbar(warp, mask)
        for lane in lanes_of(mask):
            issue(warp, int(to[lane]), int(at[lane]), int(warp.rows[size][lane]), int(announce[lane]))

    def issue(warp: Warp, to: int, at: int, nbytes: int, announce: int) -> None:
        check_alignment(what, nbytes, to, at)
        cluster = warp.cta.cluster
        here, there = warp.cta, find_cta(cluster, to)
        if find_cta(cluster, announce) is not there:
            raise asyncfaults.MbarrierMisuse(
                f"{what}: the mbarrier must be in the CTA of the destination", (), announce
            )
        barrier = cluster.unit(Mbarriers).find(announce, warp, async_proxy=True)
        traffic = here.unit(SharedTraffic)
        reading = traffic.begin_read(warp, traffic.granules(at, nbytes), what)
        where, into = here.shared.where(at, nbytes), there.shared.where(to, nbytes)
        tokens = [(here.shared, reading)]
        if reduce:
            there.shared.check_range(into, writes=False)
        else:
            writing = there.unit(SharedTraffic).begin_fill(warp, to, nbytes, what, barrier.number, barrier.phase)
            tokens.append((there.shared, writing))

        def move() -> None:
            if not reduce:
                return _copy(here.shared, where, there.shared, into)
            dtype = TYPES[kind]
            old, new = there.shared.data[into].view(dtype), here.shared.data[where].view(dtype)
            there.shared.data[into] = reduce_values(operation, old, new).view(np.uint8)
            return None

        land(site, warp, what, there, barrier, nbytes, move, tokens)

    return run


@op("cp.async.bulk.global.shared::cta", "cp.reduce.async.bulk.global.shared::cta", control=True)
def compile_store(site: Site) -> Run:
    """Shared to global: ``[dst], [src], size{, policy}`` in a bulk group, plain or reducing."""
    reduce = site.flag("reduce")
    kind = site.take_type(*TYPES) if reduce else ""
    operation = site.take(*GLOBAL_OPS) if reduce else ""
    for name in ("async", "bulk", "global", "shared::cta", "bulk_group"):
        if not site.flag(name):
            raise site.refuse(f"the modifier .{name} is missing")
    if reduce and kind not in GLOBAL_OPS.get(operation, ()):
        raise site.refuse(f".{operation}.{kind} does not exist")
    if site.flag("noftz") != (operation == "add" and kind in ("f16", "bf16")):
        raise site.refuse(".noftz belongs to .add of f16 and bf16, exactly")
    site.expect_operands(3 + take_hints(site))
    target, source = compile_address(site, 0), compile_shared_address(site, 1, "shared::cta")
    size = site.row(2, "u32")
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        to, at = target(warp), source(warp, mask)
        for lane in lanes_of(mask):
            issue(warp, lane, int(to[lane]), int(at[lane]), int(warp.rows[size][lane]))

    def issue(warp: Warp, lane: int, to: int, at: int, nbytes: int) -> None:
        check_alignment(what, nbytes, to, at)
        where, into = warp.cta.shared.where(at, nbytes), warp.machine.global_memory.where(to, nbytes)
        granules = warp.cta.unit(SharedTraffic).granules(at, nbytes)
        send(site, warp, lane, what, granules, where, into, (operation, TYPES[kind]) if reduce else None)

    return run


def send(
    site: Site,
    warp: Warp,
    lane: int,
    what: str,
    granules: Any,
    where: Any,
    into: Any,
    reduction: tuple[str, Any] | None,
) -> None:
    """One copy out of shared memory, in the bulk group of the thread.

    :param granules: of 16 bytes that it reads; ``where``: the bytes, in order; ``into``: bytes of global memory.
    :param reduction: operation and type of the elements; None to overwrite.
    """
    cta, memory = warp.cta, warp.machine.global_memory
    traffic = cta.unit(SharedTraffic)
    reading, waited = traffic.send(warp, granules, what)
    writing = None if reduction else memory.begin_write(into, what)
    if reduction:
        memory.check_range(into, writes=True)
    operation = BulkOperation(on_wait=waited)
    warp.unit(BulkGroups).add(lane, operation)
    traffic.watch(lambda: operation.waited, what)
    held = np.empty(0, np.uint8)

    def read() -> None:
        nonlocal held
        held = cta.shared.data[where].copy()
        copy_state(cta.shared, where, memory, into)
        cta.shared.complete(reading)
        operation.read = True
        later(site, warp, f"{cta} copy engine", write, what, ordered=False)

    def write() -> None:
        if writing is not None:
            memory.data[into] = held
            memory.complete(writing)
        elif reduction is not None:
            memory.check_range(into, writes=False)
            name, dtype = reduction
            old = memory.data[into].view(dtype)
            memory.data[into] = reduce_values(name, old, held.view(dtype)).view(np.uint8)
            memory.state[into] |= WRITTEN
        operation.done = True

    later(site, warp, f"{cta} copy engine", read, what, ordered=False)


@op("cp.async.bulk.prefetch.L2", control=True)
def compile_prefetch(site: Site) -> Run:
    """``cp.async.bulk.prefetch.L2.global [src], size``: nothing to see."""
    for name in ("async", "bulk", "prefetch", "L2", "global"):
        site.flag(name)
    take_hints(site)
    site.address(0)
    site.row(1, "u32")
    return lambda warp, mask: None
