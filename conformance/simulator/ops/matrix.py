"""Fragments of 8x8 matrices of 16-bit elements (PTX ISA, "ldmatrix", "stmatrix", "movmatrix").

Thread i's fragment is row i/4, columns 2(i%4) and the next; with ``.trans`` column i/4 and those rows. Threads 8k to
8k+7 give the addresses of the rows of matrix k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.memory import APPROXIMATE, WRITTEN
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.taint import guard_of, names_of
from flamia.conformance.simulator.machine.types import Row, lanes_of
from flamia.conformance.simulator.ops.addressing import compile_address, split_by_space
from flamia.conformance.simulator.ops.registry import Run, op

_LANE = np.arange(32)


def _take_shape(site: Site) -> tuple[int, bool, str]:
    """Number of matrices, whether transposed, the space."""
    site.take_type("b16")
    if not (site.flag("sync") and site.flag("aligned") and site.flag("m8n8")):
        raise site.refuse("only '.sync.aligned.m8n8' is known")
    count = int((site.take("x1", "x2", "x4") or "x1")[1:])
    return count, site.flag("trans"), site.take("shared::cta", "shared")


def _check(warp: Any, mask: Row) -> None:
    if not warp.is_converged(mask):
        raise faults.Divergent("an aligned instruction without some lanes of the warp", lanes_of(mask))


@op("ldmatrix")
def compile_ldmatrix(site: Site) -> Run:
    """``ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared.b16 {d...}, [a]``."""
    count, transposed, space = _take_shape(site)
    site.expect_operands(2)
    targets, names = [site.target(t, "u32") for t in site.items(0)], names_of(site.items(0))
    address = compile_address(site, 1)

    def run(warp: Any, mask: Any) -> None:
        _check(warp, mask)
        needed = _LANE < 8 * count
        rows = np.zeros((32, 2), np.uint64)
        for memory, where, lanes in split_by_space(warp, space, address(warp), needed):
            found = memory.load(where, 8, 2, lanes, warp.order)
            if memory.finds_approximate(where, 8, 2, lanes):
                warp.machine.taint.add(names)
            rows[lanes] = found[lanes]
        elements = rows[: 8 * count].view(np.uint16).reshape(count, 8, 8)
        for k, target in enumerate(targets):
            block = elements[k].T if transposed else elements[k]
            warp.rows[target][...] = np.ascontiguousarray(block).view(np.uint32).reshape(32)

    return run


@op("stmatrix")
def compile_stmatrix(site: Site) -> Run:
    """``stmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared.b16 [a], {s...}``."""
    count, transposed, space = _take_shape(site)
    site.expect_operands(2)
    items = site.items(1)
    sources = [site.row(s, "u32") for s in items]
    address = compile_address(site, 0)
    names = names_of(items) | guard_of(site.instruction)

    def run(warp: Any, mask: Any) -> None:
        _check(warp, mask)
        blocks = np.stack([np.ascontiguousarray(warp.rows[s]).view(np.uint16).reshape(8, 8) for s in sources])
        if transposed:
            blocks = blocks.transpose(0, 2, 1)
        rows = np.zeros((32, 2), np.uint64)
        rows[: 8 * count] = np.ascontiguousarray(blocks).view(np.uint64).reshape(8 * count, 2)
        needed = _LANE < 8 * count
        for memory, where, lanes in split_by_space(warp, space, address(warp), needed):
            state = WRITTEN | APPROXIMATE if warp.machine.taint.covers(names) else WRITTEN
            memory.store(where, rows, 8, 2, lanes, warp.order.tag, state, warp.order)

    return run


@op("movmatrix")
def compile_movmatrix(site: Site) -> Run:
    """``movmatrix.sync.aligned.m8n8.trans.b16 d, a``."""
    count, transposed, space = _take_shape(site)
    if count != 1 or not transposed or space:
        raise site.refuse("only '.trans' is known")
    site.expect_operands(2)
    target, source = site.target(0, "u32"), site.row(1, "u32")

    def run(warp: Any, mask: Any) -> None:
        _check(warp, mask)
        block = np.ascontiguousarray(warp.rows[source]).view(np.uint16).reshape(8, 8)
        warp.rows[target][...] = np.ascontiguousarray(block.T).view(np.uint32).reshape(32)

    return run
