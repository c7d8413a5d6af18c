"""Moves between registers, address conversions (PTX ISA, "mov", "cvta", "isspacep", "mapa", "getctarank")."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL, width_of
from flamia.conformance.simulator.machine.windows import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW
from flamia.conformance.simulator.ops.elementwise import assign
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Sink, Special, Vector

_PIECES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def copy_row(target: int, source: int) -> Run:
    """``target = source``."""

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        if mask is FULL:
            rows[target][...] = rows[source]
        else:
            np.copyto(rows[target], rows[source], where=mask, casting="unsafe")

    return run


def _copy_rows(pairs: list[tuple[int, int]]) -> Run:
    if len(pairs) == 2:
        (t0, s0), (t1, s1) = pairs

        def run2(warp: Any, mask: Any) -> None:
            rows = warp.rows
            if mask is FULL:
                rows[t0][...] = rows[s0]
                rows[t1][...] = rows[s1]
            else:
                np.copyto(rows[t0], rows[s0], where=mask)
                np.copyto(rows[t1], rows[s1], where=mask)

        return run2

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        for target, source in pairs:
            np.copyto(rows[target], rows[source], where=mask)

    return run


@op("mov")
def compile_mov(site: Site) -> Run:
    """``mov.type``: a register, a constant, an address, or pieces in braces packed or unpacked."""
    kind = site.take_type()
    site.expect_operands(2)
    target, source = site.operands
    if isinstance(source, Special) and source.name.startswith(("%clock", "%globaltimer")):
        return _clock(site, kind, source.name)
    if isinstance(source, Vector):
        piece = _PIECES[width_of(kind) // len(source.items)]
        pairs = [(site.part(target, piece, i), site.row(s, piece)) for i, s in enumerate(source.items)]
        return _copy_rows(pairs)
    if isinstance(target, Vector):
        piece = _PIECES[width_of(kind) // len(target.items)]
        pairs = [
            (site.target(t, piece), site.part(source, piece, i))
            for i, t in enumerate(target.items)
            if not isinstance(t, Sink)
        ]
        return _copy_rows(pairs)
    return copy_row(site.target(target, kind), site.row(source, kind))


def _clock(site: Site, kind: str, name: str) -> Run:
    """Clocks count segments run by the machine; they only promise not to go back."""
    target = site.target(0, kind)
    shift = 32 if name.endswith("_hi") else 0

    def run(warp: Any, mask: Any) -> None:
        now = np.int64(warp.machine.time >> shift)
        np.copyto(warp.rows[target], now, where=mask, casting="unsafe")

    return run


_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


@op("cvta")
def compile_cvta(site: Site) -> Run:
    """``cvta{.to}.space.u64``: between a space's addresses and generic ones, see `machine.windows`."""
    kind = site.take_type("u64", "u32")
    to = site.flag("to")
    space = site.take("global", "shared::cta", "shared::cluster", "shared", "local", "const", "param::entry", "param")
    site.expect_operands(2)
    window = np.uint64(_WINDOWS.get(space.split("::")[0], 0))
    target, source = site.target(0, kind), site.row(1, kind)
    if window == 0:
        return copy_row(target, source)
    return assign(target, (lambda a: a - window) if to else (lambda a: a + window), source)


@op("isspacep")
def compile_isspacep(site: Site) -> Run:
    """``isspacep.space p, a``: whether a generic address lies in the space."""
    space = site.take("global", "shared::cta", "shared::cluster", "shared", "local", "const", "param::entry", "param")
    site.expect_operands(2)
    target, source = site.target(0, "pred"), site.row(1, "u64")
    windows = {"shared": SHARED_WINDOW >> 32, "local": LOCAL_WINDOW >> 32}

    def run(warp: Any, mask: Any) -> None:
        high = warp.rows[source] >> np.uint64(32)
        name = space.split("::")[0]
        if name in windows:
            inside = high == np.uint64(windows[name])
            if space == "shared::cta":
                rank = (warp.rows[source] >> np.uint64(RANK_SHIFT)) & np.uint64(0xFF)
                inside &= rank == np.uint64(warp.cta.rank)
        else:
            inside = (high != np.uint64(windows["shared"])) & (high != np.uint64(windows["local"]))
        np.copyto(warp.rows[target], inside, where=mask)

    return run


@op("mapa")
def compile_mapa(site: Site) -> Run:
    """``mapa{.shared::cluster}.type d, a, b``: the address that a has in the CTA of rank b."""
    kind = site.take_type("u32", "u64")
    site.take("shared::cluster")
    site.expect_operands(3)
    clear = np.array(~(0xFF << RANK_SHIFT) & (2**64 - 1), np.uint64).astype(f"u{width_of(kind)}")[()]

    def run(a: Any, rank: Any) -> Any:
        return (a & clear) | (rank.astype(a.dtype) << a.dtype.type(RANK_SHIFT))

    return assign(site.target(0, kind), run, site.row(1, kind), site.row(2, "u32"))


@op("getctarank")
def compile_getctarank(site: Site) -> Run:
    """``getctarank{.shared::cluster}.type d, a``: the rank of the CTA that holds a shared address."""
    kind = site.take_type("u32", "u64")
    site.take("shared::cluster")
    site.expect_operands(2)

    def run(a: Any) -> Any:
        return (a >> a.dtype.type(RANK_SHIFT)) & a.dtype.type(0xFF)

    return assign(site.target(0, "u32"), run, site.row(1, kind))
