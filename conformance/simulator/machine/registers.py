"""The register file of a warp, and the rows that closures read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine.types import DTYPES, LANES, Row, width_of

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.program import Program, RowSpec
    from flamia.conformance.simulator.machine.warp import Warp


POISON = 0xEB
"""Bytes of registers that nothing wrote: on the chip they hold anything."""


class RowPlan:
    """How the rows of a program are made for a warp.

    :param shared: rows that are the same in every warp; None where they are not.
    :param registers: by width, type and part of a register: pairs of a row and the register's index in its file.
    :param others: rows that depend on the warp, or are its own.
    """

    def __init__(self, program: Program) -> None:
        self.shared: list[Row] = [spec.lanes if spec.kind == "constant" else None for spec in program.rows]
        self.registers: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
        self.others: list[tuple[int, RowSpec]] = []
        self.counts = dict(program.counts)
        for row, spec in enumerate(program.rows):
            if spec.kind == "register":
                declared = program.function.registers[spec.name]
                width = 0 if declared == "pred" else width_of(declared)
                key = (width, spec.type, spec.part)
                self.registers.setdefault(key, []).append((row, program.storage[spec.name]))
            elif spec.kind != "constant":
                self.others.append((row, spec))

    def build(self, warp: Warp) -> list[Row]:
        """`Warp.rows`, with registers of their own."""
        rows = self.shared.copy()
        files: dict[int, NDArray[Any]] = {}
        for width, count in self.counts.items():
            if width:
                cells = np.full(count * LANES * width, POISON, np.uint8)
                shape = (count, LANES, 2) if width == 16 else (count, LANES)
                files[width] = cells.view(np.dtype(f"u{min(width, 8)}")).reshape(shape)
            else:
                files[width] = np.zeros((count, LANES), np.bool_)
        for (width, kind, part), pairs in self.registers.items():
            view = _view(files[width], width, kind, part)
            for row, index in pairs:
                rows[row] = view[index]
        for row, spec in self.others:
            rows[row] = _own_row(warp, spec)
        return rows


def _own_row(warp: Warp, spec: RowSpec) -> Row:
    match spec.kind:
        case "special":
            return _special(warp, spec.name).astype(DTYPES[spec.type])
        case "symbol":
            assert spec.symbol is not None
            address = warp.cta.address_of(spec.symbol.name, warp) + spec.symbol.offset
            return np.full(LANES, address & (2 ** (8 * width_of(spec.type)) - 1), DTYPES[spec.type])
    shape = (LANES, 2) if spec.type == "b128" else (LANES,)
    return np.zeros(shape, np.uint64 if spec.type == "b128" else DTYPES[spec.type])


def _view(file: NDArray[Any], width: int, kind: str, part: int) -> NDArray[Any]:
    """The registers of one width as lanes of ``kind``: a piece of each, from the low bytes, if they are wider."""
    if kind in ("pred", "b128"):
        return file
    dtype = np.dtype(DTYPES[kind])
    step = width // dtype.itemsize
    pieces: NDArray[Any] = file.reshape(len(file), -1).view(dtype)[:, part::step]
    return pieces


def _special(warp: Warp, name: str) -> NDArray[Any]:
    cta = warp.cta
    lane = np.arange(LANES)
    thread = lane + LANES * warp.index
    base, _, axis = name.partition(".")
    part = "xyz".index(axis) if axis in ("x", "y", "z") else 0
    x, y, _ = cta.block
    cluster = cta.cluster
    values: dict[str, Any] = {
        "%tid": (thread % x, thread // x % y, thread // (x * y))[part],
        "%ntid": cta.block[part],
        "%laneid": lane,
        "%warpid": warp.index,
        "%nwarpid": len(cta.warps) or -(-cta.threads // LANES),
        "%ctaid": cta.index[part],
        "%nctaid": cta.machine.grid[part],
        "%smid": cta.slot,
        "%nsmid": cta.machine.multiprocessors,
        "%gridid": 0,
        "%clusterid": cluster.index[part],
        "%nclusterid": tuple(g // c for g, c in zip(cta.machine.grid, cluster.shape, strict=True))[part],
        "%cluster_ctaid": cta.place[part],
        "%cluster_nctaid": cluster.shape[part],
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": cluster.size,
        "%is_explicit_cluster": int(cluster.size > 1),
        "%lanemask_eq": 1 << lane,
        "%lanemask_lt": (1 << lane) - 1,
        "%lanemask_le": (2 << lane) - 1,
        "%lanemask_gt": 0xFFFFFFFF & ~((2 << lane) - 1),
        "%lanemask_ge": 0xFFFFFFFF & ~((1 << lane) - 1),
        "%total_smem_size": cta.shared_bytes,
        "%aggr_smem_size": cta.shared_bytes,
        "%dynamic_smem_size": cta.machine.dynamic_shared,
        "%reserved_smem_offset_0": 0,
    }
    return np.broadcast_to(np.asarray(values[base], np.int64), (LANES,))
