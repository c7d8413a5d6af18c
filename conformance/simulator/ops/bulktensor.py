"""``cp.async.bulk.tensor`` and ``cp.reduce.async.bulk.tensor`` in tiled mode (PTX 9.7.9.27).

A box lies in shared memory row by row, dimension 0 along the row, under the swizzle of its map. Towards shared memory,
elements outside the tensor are zeros and count among the bytes of complete-tx; towards global memory they are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.mbarriers import Mbarriers, find_cta
from flamia.conformance.simulator.machine.sharedtraffic import SharedTraffic, copy_state
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.tensormap import BYTES, TensorMap, decode
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.machine.windows import RANK_SHIFT
from flamia.conformance.simulator.ops.asynchronous import Mask, compile_shared_address, line_of
from flamia.conformance.simulator.ops.bulk import GLOBAL_OPS, TYPES, land, send, take_hints
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Address
from flamia.conformance.simulator.tensor.swizzle import swizzle_addresses

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp

_DIMS = ("1d", "2d", "3d", "4d", "5d")
_LOW = (1 << RANK_SHIFT) - 1
_ALIGNMENT = 128
BoxReader: TypeAlias = "Callable[[Warp, int], tuple[TensorMap, tuple[int, ...]]]"


def _compile_box(site: Site, operand: int) -> BoxReader:
    """A closure that gives the map and the coordinates of ``[map, {c0, c1, ...}]`` for a lane."""
    rank = int((site.take(*_DIMS) or "0d")[0])
    item = site.operand(operand)
    if not isinstance(item, Address) or len(item.coordinates) != rank:
        raise site.refuse(f"a tensor map with {rank} coordinates is needed")
    base, offset, _ = site.address(operand)
    rows = [site.row(c, "s32") for c in item.coordinates]

    def read(warp: Warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        memory = warp.machine.global_memory
        at = int(warp.rows[base][lane]) + offset
        found = decode(memory.data[memory.where(at, BYTES)].tobytes())
        if len(found.shape) != rank:
            raise faults.Illegal(f"the tensor map has {len(found.shape)} dimensions, the instruction {rank}", (), at)
        return found, tuple(int(warp.rows[row][lane]) for row in rows)

    return read


def _shared_bytes(box: TensorMap, address: int) -> NDArray[np.int64]:
    """Addresses of the bytes of a box in shared memory, ``(rows, row_bytes)``. :raises Misaligned: for 128 bytes."""
    if address % _ALIGNMENT:
        raise faults.Misaligned(f"a box in shared memory needs {_ALIGNMENT}-byte alignment", (), address)
    linear = address + np.arange(box.box_bytes, dtype=np.int64).reshape(-1, box.row_bytes)
    return swizzle_addresses(linear, box.swizzle)


def _check_global(warp: Warp, address: NDArray[np.int64], what: str) -> NDArray[np.int64]:
    """Indices of bytes of global memory. :raises OutOfBounds: for addresses outside of it."""
    memory = warp.machine.global_memory
    at = address - memory.base
    if ((at < 0) | (at >= memory.size)).any():
        raise faults.OutOfBounds(f"{what} leaves global memory", (), int(address[(at < 0) | (at >= memory.size)][0]))
    return at


@op(*(f"cp.async.bulk.tensor.{d}.shared::{s}.global" for d in _DIMS for s in ("cluster", "cta")), control=True)
def compile_load(site: Site) -> Run:
    """Global to shared: ``[dst], [map, {coordinates}], [mbar]{, ctaMask}{, policy}``."""
    read = _compile_box(site, 1)
    for name in ("async", "bulk", "tensor", "global", "mbarrier::complete_tx::bytes"):
        if not site.flag(name):
            raise site.refuse(f"the modifier .{name} is missing")
    site.flag("tile")
    site.take("cta_group::1", "cta_group::2")
    space = site.take("shared::cluster", "shared::cta")
    multicast = site.flag("multicast::cluster")
    site.expect_operands(3 + multicast + take_hints(site))
    target, mbar = compile_shared_address(site, 0, space), compile_shared_address(site, 2, space)
    mask_row = site.row(3, "u16") if multicast else -1
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        to, announce = target(warp, mask), mbar(warp, mask)
        for lane in lanes_of(mask):
            places = [(int(to[lane]), int(announce[lane]))]
            if multicast:
                bits = int(warp.rows[mask_row][lane])
                low = places[0][0] & _LOW, places[0][1] & _LOW
                places = [(r << RANK_SHIFT | low[0], r << RANK_SHIFT | low[1]) for r in range(16) if bits >> r & 1]
            box, start = read(warp, lane)
            for place in places:
                _issue_load(site, warp, what, box, start, *place)

    return run


def _issue_load(
    site: Site, warp: Warp, what: str, box: TensorMap, start: tuple[int, ...], to: int, announce: int
) -> None:
    cluster, memory = warp.cta.cluster, warp.machine.global_memory
    cta = find_cta(cluster, to)
    barrier = cluster.unit(Mbarriers).find(announce, warp, async_proxy=True)
    address, inside = box.locate(start)
    source = _check_global(warp, address[inside], what)
    into = _shared_bytes(box, to) - cta.shared.base
    reading = memory.begin_read(source, what)
    writing = cta.unit(SharedTraffic).begin_fill(warp, to, box.box_bytes, what, barrier.number, barrier.phase)

    def move() -> None:
        held = np.zeros(inside.shape, np.uint8)
        held[inside] = memory.data[source]
        cta.shared.data[into] = held
        copy_state(memory, source, cta.shared, into[inside])

    land(site, warp, what, cta, barrier, box.box_bytes, move, [(memory, reading), (cta.shared, writing)])


@op(
    *(f"cp.{r}async.bulk.tensor.{d}.global.shared::cta" for d in _DIMS for r in ("", "reduce.")),
    control=True,
)
def compile_store(site: Site) -> Run:
    """Shared to global: ``[map, {coordinates}], [src]{, policy}`` in a bulk group, plain or reducing."""
    read = _compile_box(site, 0)
    reduce = site.flag("reduce")
    operation = site.take(*GLOBAL_OPS) if reduce else ""
    for name in ("async", "bulk", "tensor", "global", "shared::cta", "bulk_group"):
        if not site.flag(name):
            raise site.refuse(f"the modifier .{name} is missing")
    if reduce and not operation:
        raise site.refuse("an operation is missing")
    site.flag("tile")
    site.expect_operands(2 + take_hints(site))
    source = compile_shared_address(site, 1, "shared::cta")
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        at = source(warp, mask)
        for lane in lanes_of(mask):
            box, start = read(warp, lane)
            issue(warp, lane, box, start, int(at[lane]))

    def issue(warp: Warp, lane: int, box: TensorMap, start: tuple[int, ...], at: int) -> None:
        shared = warp.cta.shared
        address, inside = box.locate(start)
        into = _check_global(warp, address[inside], what)
        granules = warp.cta.unit(SharedTraffic).granules(at, box.box_bytes)
        shared.where(at, box.box_bytes)
        where = (_shared_bytes(box, at) - shared.base)[inside]
        reduction: Any = None
        if reduce:
            if box.dtype not in GLOBAL_OPS[operation] and box.dtype.replace("u", "b") not in GLOBAL_OPS[operation]:
                raise faults.Illegal(f"{what}: .{operation} of {box.dtype} does not exist")
            reduction = (operation, TYPES[box.dtype])
        send(site, warp, lane, what, granules, where, into, reduction)

    return run


@op(*(f"cp.async.bulk.prefetch.tensor.{d}" for d in _DIMS), control=True)
def compile_prefetch(site: Site) -> Run:
    """``cp.async.bulk.prefetch.tensor``: nothing to see."""
    _compile_box(site, 0)
    for name in ("async", "bulk", "prefetch", "tensor", "L2", "global", "tile"):
        site.flag(name)
    take_hints(site)
    return lambda warp, mask: None
