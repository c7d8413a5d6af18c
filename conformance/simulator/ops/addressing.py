"""Addresses of memory operands, and the space that they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.memory import Space
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL
from flamia.conformance.simulator.machine.windows import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW
from flamia.conformance.simulator.ptx.syntax import Operand

Reader: TypeAlias = "Callable[[Any], NDArray[np.int64]]"

SPACES = (
    "global",
    "shared::cta",
    "shared::cluster",
    "shared",
    "local",
    "param::entry",
    "param::func",
    "param",
    "const",
)


def compile_address(site: Site, operand: int | Operand) -> Reader:
    """A closure that gives the addresses of ``[a + offset]`` as 32 int64."""
    row, offset, kind = site.address(operand)
    if kind == "u32":
        add = np.uint32(offset & 0xFFFFFFFF)
        if offset == 0:
            return lambda warp: warp.rows[row].astype(np.int64)
        return lambda warp: (warp.rows[row] + add).astype(np.int64)
    if offset == 0:
        return lambda warp: warp.rows[row].view(np.int64)
    return lambda warp: warp.rows[row].view(np.int64) + offset


Access: TypeAlias = "Callable[[Any, NDArray[np.int64], NDArray[np.bool_], Callable[[Space, Any, Any], Any]], Any]"


def split_by_space(
    warp: Any, space: str, address: NDArray[np.int64], mask: NDArray[np.bool_]
) -> list[tuple[Space, NDArray[np.int64], NDArray[np.bool_]]]:
    """The memories that the lanes of ``mask`` reach, each with the addresses in it and its lanes.

    :param space: one of `SPACES`; empty for generic addresses.
    """
    if space in ("global", "param", "const", "param::entry"):
        return [(warp.machine.global_memory, address, mask)]
    if space == "shared::cta":
        return [(warp.cta.shared, address, mask)]
    if space in ("shared", "shared::cluster"):
        return _by_rank(warp, address, mask)
    if space in ("local", "param::func"):
        return [_local(warp, address, mask)]
    high = address >> 32
    first = high[mask][0] if mask is not FULL else high[0]
    if (high == first).all():
        return _generic(warp, int(first), address, mask)
    out = []
    for window in np.unique(high[mask]):
        out += _generic(warp, int(window), address, mask & (high == window))
    return out


def _generic(
    warp: Any, high: int, address: NDArray[np.int64], mask: NDArray[np.bool_]
) -> list[tuple[Space, NDArray[np.int64], NDArray[np.bool_]]]:
    if high == SHARED_WINDOW >> 32:
        return _by_rank(warp, address - SHARED_WINDOW, mask)
    if high == LOCAL_WINDOW >> 32:
        return [_local(warp, address - LOCAL_WINDOW, mask)]
    return [(warp.machine.global_memory, address, mask)]


def _by_rank(
    warp: Any, address: NDArray[np.int64], mask: NDArray[np.bool_]
) -> list[tuple[Space, NDArray[np.int64], NDArray[np.bool_]]]:
    cluster = warp.cta.cluster
    if cluster.size == 1:
        return [(warp.cta.shared, address, mask)]
    rank = address >> RANK_SHIFT
    out = []
    for r in np.unique(rank[mask]):
        if not 0 <= r < cluster.size:
            lanes = mask & (rank == r)
            at = int(address[lanes][0])
            raise faults.OutOfBounds(f"no CTA of rank {r} in a cluster of {cluster.size}", (), at)
        lanes = mask & (rank == r)
        cluster.ctas[int(r)].check_running(int(address[lanes][0]))
        out.append((cluster.ctas[int(r)].shared, address, lanes))
    return out


def _local(
    warp: Any, address: NDArray[np.int64], mask: NDArray[np.bool_]
) -> tuple[Space, NDArray[np.int64], NDArray[np.bool_]]:
    memory = warp.unit(LocalMemory)
    size = memory.bytes
    bad = mask & ((address < 0) | (address >= size))
    if bad.any():
        at = int(address[bad][0])
        raise faults.OutOfBounds(f"local memory of a thread has {size} bytes", tuple(np.flatnonzero(bad)), at)
    return memory.space, address + memory.offsets, mask


class LocalMemory:
    """The local memories of a warp's threads, one behind the other."""

    def __init__(self, warp: Any) -> None:
        machine = warp.machine
        self.bytes = machine.local_bytes
        stride = -(-self.bytes // 64) * 64
        self.space = Space(f"local memory of {warp}", 0, 32 * stride)
        self.offsets = np.arange(32, dtype=np.int64) * stride
        for offset in self.offsets:
            self.space.allocate(int(offset) + 16, self.bytes - 16)
