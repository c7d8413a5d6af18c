"""Shapes of ``tcgen05.ld``, ``st`` and ``cp``: which word of tensor memory meets which register or byte.

Note [Register fragments of tensor memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Thread t of the warp, register r, lane and column relative to the address (PTX 9.7.16.2.3.1, figures 183 to 187)::

    32x32b    lane t                           column r
    16x64b    lane t/4 + 8 (t%2)               column (t/2)%2 + 2 r
    16x128b   lane t/4 + 8 (r%2)               column t%4 + 4 (r/2)
    16x256b   lane t/4 + 8 ((r/2)%2)           column 2 (t%4) + r%2 + 8 (r/4)
    16x32bx2  lane t%16                        column r, from thread 16 on + the immediate

``.pack::16b`` and ``.unpack::16b`` let a register stand for the low halves of two neighbouring columns: what is column
c above is columns 2c (low half of the register) and 2c + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.tensor.descriptors import Descriptor
from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.swizzle import Addresses, operand_addresses

Index = NDArray[np.intp]

_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_MOST = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}


@dataclass(frozen=True)
class Fragment:
    """Where the registers of a warp lie in tensor memory.

    :param lanes, columns: ``(registers, 32)``, relative to the address of the instruction.
    :param height: lanes that are touched: 32 or 16.
    :param width: columns that are touched from the address on.
    """

    lanes: Index
    columns: Index
    height: int
    width: int


@cache
def fragment(shape: str, num: int, packed: bool = False, split: int = 0) -> Fragment:
    """The fragment of a shape. :param num: N of ``.xN``. :param split: the immediate of ``16x32bx2``, in columns.

    :raises Illegal: for a repetition that the shape does not have.
    """
    if num & (num - 1) or not 1 <= num <= _MOST[shape]:
        raise Illegal("shape", f".x{num} is not among .x1 .. .x{_MOST[shape]} of shape .{shape}")
    t = np.arange(32)[None, :]
    r = np.arange(num * _REGISTERS[shape])[:, None]
    if shape == "32x32b":
        lanes, columns = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lanes, columns = t // 4 + 8 * (t % 2) + 0 * r, t // 2 % 2 + 2 * r
    elif shape == "16x128b":
        lanes, columns = t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    elif shape == "16x256b":
        lanes, columns = t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    else:
        lanes, columns = t % 16 + 0 * r, r + np.where(t < 16, 0, split)
    width = int(columns.max()) + 1
    return Fragment(lanes, columns, 32 if shape == "32x32b" else 16, 2 * width if packed else width)


def gather(words: NDArray[np.uint32], lane: int, column: int, where: Fragment, packed: bool) -> NDArray[np.uint32]:
    """Registers ``(registers, 32)`` of a load. :param words: tensor memory ``(128, 512)``."""
    lanes = lane + where.lanes
    if not packed:
        return words[lanes, column + where.columns]
    low, high = (words[lanes, column + 2 * where.columns + half] & np.uint32(0xFFFF) for half in (0, 1))
    return low | high << np.uint32(16)


def scatter(
    words: NDArray[np.uint32], lane: int, column: int, where: Fragment, packed: bool, values: NDArray[np.uint32]
) -> None:
    """Store registers ``(registers, 32)``; with ``packed``, the upper halves of the words become 0."""
    lanes = lane + where.lanes
    if not packed:
        words[lanes, column + where.columns] = values
        return
    words[lanes, column + 2 * where.columns] = values & np.uint32(0xFFFF)
    words[lanes, column + 2 * where.columns + 1] = values >> np.uint32(16)


def check_reach(lane: int, column: int, where: Fragment, warp_in_group: int) -> None:
    """That a warp may touch these lanes, and that the columns exist.

    :param warp_in_group: number of the warp in its warpgroup; warp w reaches lanes 32 w to 32 w + 31.
    :raises Illegal: otherwise.
    """
    first = 32 * warp_in_group
    address = lane << 16 | column
    aligned = lane == first if where.height == 32 else lane in (first, first + 16)
    if not aligned:
        allowed = f"{first}" if where.height == 32 else f"{first} or {first + 16}"
        raise Illegal(
            "tmem-range",
            f"warp {warp_in_group} of its warpgroup reaches lanes {first} to {first + 31}: the address must name lane "
            f"{allowed}, got {lane}",
            address,
        )
    if column + where.width > 512:
        raise Illegal("tmem-range", f"{where.width} columns from {column} end past column 511", address)


@dataclass(frozen=True)
class CopyShape:
    """A shape of ``tcgen05.cp``.

    :param rows: rows of the matrix in shared memory.
    :param row_bytes: bytes of each.
    :param quadrants: for every block of 32 rows, the quadrants of lanes it goes to.
    """

    rows: int
    row_bytes: int
    quadrants: tuple[tuple[int, ...], ...]


COPY_SHAPES = {
    ("128x256b", None): CopyShape(128, 32, ((0,), (1,), (2,), (3,))),
    ("128x128b", None): CopyShape(128, 16, ((0,), (1,), (2,), (3,))),
    ("64x128b", "warpx2::02_13"): CopyShape(64, 16, ((0, 2), (1, 3))),
    ("64x128b", "warpx2::01_23"): CopyShape(64, 16, ((0, 1), (2, 3))),
    ("32x128b", "warpx4"): CopyShape(32, 16, ((0, 1, 2, 3),)),
}
"""By shape and multicast (PTX 9.7.16.9.2). ``4x256b`` and the decompressing forms are refused: figures only."""


def copy_addresses(descriptor: Descriptor, shape: CopyShape) -> Addresses:
    """Shared-memory address of every byte, ``(rows, row_bytes)``: the K-major canonical layout of the descriptor."""
    return operand_addresses(descriptor, shape.rows, shape.row_bytes, 1, False)


def copy_lanes(shape: CopyShape) -> list[tuple[int, int]]:
    """Pairs (first source row, first lane) of the blocks of 32 rows."""
    return [(32 * block, 32 * q) for block, where in enumerate(shape.quadrants) for q in where]
