"""``tcgen05.ld``, ``tcgen05.st`` and ``tcgen05.wait`` (PTX 9.7.16.8).

The words move after a random delay, at the latest when the matching wait returns. Until then the destination
registers of a load may not be used, whenever it happens to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import asyncfaults
from flamia.conformance.simulator.machine.asyncorder import LOAD, STORE
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.registeruse import Holder
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.tensormemory import Operation, Operations, Region, TensorMemory
from flamia.conformance.simulator.machine.tensorpipe import TensorCores
from flamia.conformance.simulator.ops.asynchronous import Mask, later, line_of, need_converged, translate
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.tcgen05_alloc import take_aligned
from flamia.conformance.simulator.ptx.syntax import Register, Sink
from flamia.conformance.simulator.tensor import movement
from flamia.conformance.simulator.tensor.tmem_layout import split_address

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_NUMBERS = tuple(f"x{1 << i}" for i in range(8))


class Moves:
    """Loads and stores of one warp that are under way.

    :param holders: loads since the last ``wait::ld``, with their destinations.
    """

    def __init__(self, warp: Warp) -> None:
        self.loads, self.stores = 0, 0
        self.holders: list[Holder] = []


class _Shape:
    """What ``ld`` and ``st`` have in common: the fragment and the registers."""

    def __init__(self, site: Site, registers: int, split: int, packing: str) -> None:
        self.packed = site.flag(packing)
        shape, number = site.take(*_SHAPES), site.take(*_NUMBERS)
        if not shape or not number:
            raise site.refuse("a shape and a repetition are needed")
        if (shape == "16x32bx2") != (len(site.operands) > split):
            raise site.refuse("the immediate belongs to .16x32bx2, exactly")
        offset = site.integer(split) if shape == "16x32bx2" else 0
        self.where = translate(movement.fragment)(shape, int(number[1:]), self.packed, offset)
        self.items = site.items(registers)
        if len(self.items) != len(self.where.lanes):
            raise site.refuse(f"{len(self.items)} registers where {shape}.{number} has {len(self.where.lanes)}")
        self.shape = shape

    def locate(self, warp: Warp, address: int) -> tuple[int, int, Region]:
        """First lane and column, and the region. :raises Illegal: if this warp does not reach it."""
        lane, column = split_address(address)
        movement.check_reach(lane, column, self.where, warp.index % 4)
        return lane, column, Region.of(range(lane, lane + self.where.height), column, self.where.width)


def _begin(warp: Warp, operation: Operation, stores: bool) -> int:
    order, kind = warp.order.asynchronous, STORE if stores else LOAD
    number = order.issue(kind)
    warp.cta.cluster.unit(Operations).add(order.entry(kind), number, operation)
    return number


@op("tcgen05.ld", control=True)
def compile_ld(site: Site) -> Run:
    """``tcgen05.ld{.red}.sync.aligned.shape.num{.pack::16b}.b32 r{, redval}, [taddr]{, split}``."""
    site.flag("ld")
    reduce = _take_reduction(site)
    if reduce is None:
        site.take_type("b32")
    take_aligned(site)
    at = 1 if reduce is None else 2
    shape = _Shape(site, 0, at + 1, "pack::16b")
    targets = [site.target(item, "b32") for item in shape.items]
    names = [item.name for item in shape.items if isinstance(item, Register)]
    reduced = -1
    if reduce is not None:
        if shape.shape not in ("32x32b", "16x32bx2") or len(targets) < 2 or shape.packed:
            raise site.refuse(".red is for .32x32b and .16x32bx2, from .x2 on, without packing")
        reduced = site.target(1, "b32")
        item = site.operand(1)
        names += [item.name] if isinstance(item, Register) else []
    address, offset, _ = site.address(at)
    what = line_of(site)
    operation = Operation("ld", what)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, what)
        held = [n for n in names if n in warp.in_flight]
        if held:
            raise asyncfaults.RegisterInFlight(
                f"{what} writes register {held[0]}, which {warp.in_flight[held[0]].what} holds"
            )
        lane, column, region = shape.locate(warp, warp.uniform(address, mask) + offset)
        memory = warp.cta.unit(TensorMemory)
        number = _begin(warp, operation, stores=False)
        memory.read(warp, region, number, False, what)
        moves = warp.unit(Moves)
        moves.loads += 1
        holder = Holder(what, list(names))
        holder.hold(warp)
        moves.holders.append(holder)
        cores = warp.cta.cluster.unit(TensorCores)
        keys = cores.begin([warp.cta], what)

        def deliver() -> None:
            values = movement.gather(memory.words, lane, column, shape.where, shape.packed)
            for target, value in zip(targets, values, strict=True):
                warp.rows[target][...] = value
            if reduce is not None:
                warp.rows[reduced][...] = reduce(values)
            holder.finish()
            moves.loads -= 1
            cores.end(keys)

        later(site, warp, f"{warp} tensor memory", deliver, what)

    return translate(run)


def _take_reduction(site: Site) -> Callable[[NDArray[np.uint32]], NDArray[np.uint32]] | None:
    """``.red ... .{min,max}{.abs}{.NaN}.{f32,u32,s32}``: over the registers of each thread."""
    if not site.flag("red"):
        return None
    kind = site.take_type("f32", "u32", "s32")
    operation = site.take("min", "max")
    absolute, nan = site.flag("abs"), site.flag("NaN")
    if not operation:
        raise site.refuse(".min or .max is missing")

    def reduce(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
        typed = values.view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[kind])
        if absolute:
            typed = np.abs(typed)
        if kind == "f32" and not nan:
            out = (np.fmin if operation == "min" else np.fmax).reduce(typed, axis=0)
        else:
            out = (np.minimum if operation == "min" else np.maximum).reduce(typed, axis=0)
        if kind == "f32":
            out = np.where(np.isnan(out), np.uint32(0x7FFFFFFF).view(np.float32), out)
        return np.ascontiguousarray(out).view(np.uint32)

    return reduce


@op("tcgen05.st", control=True)
def compile_st(site: Site) -> Run:
    """``tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr]{, split}, r``."""
    site.flag("st")
    site.take_type("b32")
    take_aligned(site)
    last = len(site.operands) - 1
    split = 1 if last == 2 else len(site.operands)
    shape = _Shape(site, last, split, "unpack::16b")
    sources = [site.row(item, "b32") for item in shape.items if not isinstance(item, Sink)]
    address, offset, _ = site.address(0)
    what = line_of(site)
    operation = Operation("st", what)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, what)
        lane, column, region = shape.locate(warp, warp.uniform(address, mask) + offset)
        memory = warp.cta.unit(TensorMemory)
        number = _begin(warp, operation, stores=True)
        memory.write(warp, region, number, False, what)
        values = np.stack([warp.rows[s] for s in sources])
        moves = warp.unit(Moves)
        moves.stores += 1
        cores = warp.cta.cluster.unit(TensorCores)
        keys = cores.begin([warp.cta], what)

        def deliver() -> None:
            movement.scatter(memory.words, lane, column, shape.where, shape.packed, values)
            moves.stores -= 1
            cores.end(keys)

        later(site, warp, f"{warp} tensor memory", deliver, what)

    return translate(run)


@op("tcgen05.wait::ld", "tcgen05.wait::st", control=True)
def compile_wait(site: Site) -> Run:
    """``tcgen05.wait::{ld,st}.sync.aligned``."""
    stores = site.take("wait::ld", "wait::st") == "wait::st"
    take_aligned(site)
    site.expect_operands(0)
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> Blocked | None:
        need_converged(warp, mask, what)
        moves = warp.unit(Moves)

        def left() -> int:
            return moves.stores if stores else moves.loads

        def finish() -> None:
            warp.order.asynchronous.wait(STORE if stores else LOAD)
            if not stores:
                for holder in moves.holders:
                    for name in holder.names:
                        warp.in_flight.pop(name, None)
                moves.holders.clear()

        if left():
            return Blocked(what, lambda: left() == 0, finish)
        finish()
        return None

    return run
