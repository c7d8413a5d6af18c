"""Loads and stores (PTX ISA, "ld", "ld.global.nc", "st", "prefetch")."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.flags import Flags
from flamia.conformance.simulator.machine.memory import APPROXIMATE, WRITTEN
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.taint import guard_of, names_of
from flamia.conformance.simulator.machine.types import DTYPES, FULL, width_of
from flamia.conformance.simulator.ops.addressing import SPACES, compile_address, split_by_space
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Sink

_TYPES = (*(f"{k}{bits}" for k in "bus" for bits in (8, 16, 32, 64)), "f32", "f64", "b128")
_HINTS = (
    "ca cg cs lu cv wb wt nc L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate "
    "L2::evict_normal L2::evict_first L2::evict_last L2::64B L2::128B L2::256B"
).split()


def _take_access(site: Site) -> tuple[str, str, int, str]:
    """Space, type, vector length, and semantics if the access is strong; hints change nothing."""
    kind = site.take_type(*_TYPES)
    count = int((site.take("v2", "v4", "v8") or "v1")[1:])
    space = site.take(*SPACES)
    order = site.take("volatile", "weak", "relaxed", "acquire", "release", "mmio")
    site.take("cta", "cluster", "gpu", "sys")
    site.flag("unified")
    while site.take(*_HINTS):
        pass
    site.flag("L2::cache_hint")
    if count * width_of(kind) > 32:
        raise site.refuse("more than 32 bytes")
    return space, kind, count, "" if order == "weak" else order


def _pieces(kind: str, count: int) -> tuple[int, int]:
    """Unit and number of units of one lane's access: at most 8 bytes a unit."""
    return (8, 2 * count) if kind == "b128" else (width_of(kind), count)


def _param_space(site: Site, space: str, operand: int) -> str:
    """``.param`` of a call is local to the thread; that of the entry is not."""
    if space == "param":
        item = site.operand(operand)
        base = getattr(item, "base", None)
        name = getattr(base, "name", "")
        if any(v.name == name for v in site.program.function.variables):
            return "param::func"
    return space


@op("ld", "ldu")
def compile_ld(site: Site) -> Run:
    """``ld``: narrower values are extended by their type into wider registers."""
    space, kind, count, strong = _take_access(site)
    space = _param_space(site, space, 1)
    address = compile_address(site, 1)
    items = site.items(0)
    if len(items) != count:
        raise site.refuse(f"{len(items)} registers for {count} values")
    unit, units = _pieces(kind, count)
    dtype = np.dtype(DTYPES.get(kind, np.uint64))
    targets = [(i, site.target(t, site.target_kind(t, kind))) for i, t in enumerate(items) if not isinstance(t, Sink)]
    names = names_of(items)
    if kind == "b128":
        return _load_wide(space, address, targets[0][1])

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        for memory, where, lanes in split_by_space(warp, space, address(warp), mask):
            values = memory.load(where, unit, units, lanes, warp.order).view(dtype)
            if memory.finds_approximate(where, unit, units, lanes):
                warp.machine.taint.add(names)
            if strong:
                warp.cta.cluster.unit(Flags).read(warp, memory, where, lanes, strong == "acquire")
            if units == 1:
                target = targets[0][1] if targets else -1
                if target >= 0:
                    if lanes is FULL:
                        rows[target][...] = values
                    else:
                        np.copyto(rows[target], values, where=lanes, casting="unsafe")
                continue
            for i, target in targets:
                if lanes is FULL:
                    rows[target][...] = values[:, i]
                else:
                    np.copyto(rows[target], values[:, i], where=lanes, casting="unsafe")

    return run


def _load_wide(space: str, address: Any, target: int) -> Run:
    def run(warp: Any, mask: Any) -> None:
        for memory, where, lanes in split_by_space(warp, space, address(warp), mask):
            found = memory.load(where, 8, 2, lanes, warp.order)
            np.copyto(warp.rows[target], found, where=lanes[:, None])

    return run


@op("st")
def compile_st(site: Site) -> Run:
    """``st``: the low bytes of wider registers."""
    space, kind, count, strong = _take_access(site)
    space = _param_space(site, space, 0)
    address = compile_address(site, 0)
    items = site.items(1)
    if len(items) != count:
        raise site.refuse(f"{len(items)} registers for {count} values")
    unit, units = _pieces(kind, count)
    sources = [site.row(s, kind) for s in items]
    dtype = np.dtype(f"u{unit}")
    names = names_of(items) | guard_of(site.instruction)

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        if units == 1:
            values = rows[sources[0]]
            values = values.view(dtype) if values.flags.c_contiguous else np.ascontiguousarray(values).view(dtype)
        elif kind == "b128":
            values = rows[sources[0]]
        else:
            values = np.empty((32, units), dtype)
            for i, s in enumerate(sources):
                values[:, i] = (
                    rows[s].view(dtype) if rows[s].flags.c_contiguous else np.ascontiguousarray(rows[s]).view(dtype)
                )
        tag = warp.order.tag
        state = WRITTEN | APPROXIMATE if warp.machine.taint.covers(names) else WRITTEN
        for memory, where, lanes in split_by_space(warp, space, address(warp), mask):
            memory.store(where, values, unit, units, lanes, tag, state, warp.order)
            if strong:
                warp.cta.cluster.unit(Flags).write(warp, memory, where, lanes, strong == "release")

    return run


@op("prefetch", "prefetchu", "applypriority", "discard")
def compile_prefetch(site: Site) -> Run:
    """``prefetch``, ``prefetchu``: nothing to see; ``prefetch.tensormap`` too."""
    site.take("global", "local", "param", "const")
    while site.take("L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap"):
        pass
    site.address(0)
    return lambda warp, mask: None
