"""Which lanes and columns of tensor memory the matrices of ``tcgen05.mma`` occupy.

Note [Tensor memory layouts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensor memory is 128 lanes of 512 columns of 32 bits; an address is ``lane << 16 | column``. In each CTA (PTX
9.7.16.10.5, data path layouts):

========  =========  ===========================================================================================
M         cta_group  row r, column n of D (one FP32 per word)
========  =========  ===========================================================================================
128       1          lane r, column n                                                             (layout D)
64        1          lane 32 (r / 16) + r % 16, column n: half of the lanes are idle              (layout F)
256       2          CTA r / 128, lane r % 128, column n                                          (layout A)
128       2          CTA r / 64, lane r % 64 + 64 (n / (N/2)), column n % (N/2)                   (layout B)
========  =========  ===========================================================================================

A in tensor memory lies as D does, a row per lane, with 4, 2 or 8 elements per word (8, 16 or 4 bits); with M = 128 and
``cta_group::2`` both halves of the lanes hold the same 64 rows.

*Scales*: row m lies in lane ``m % 32``, word ``m / 32`` of the table, a copy in each of the four quadrants of 32
lanes; the id is the byte of the word at which the row's scales begin. With M = 128 and ``cta_group::2`` the scales of
B follow its columns: those of n < N/2 in quadrants 0 and 1, the others in 2 and 3.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.instruction import Instruction

LANES, COLUMNS = 128, 512
Index = NDArray[np.intp]


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of a tensor memory address. :raises Illegal: outside 128 lanes and 512 columns."""
    lane, column = address >> 16, address & 0xFFFF
    if lane >= LANES or column >= COLUMNS:
        raise Illegal(
            "tmem-range", f"tensor memory address {address:#010x} is outside 128 lanes x 512 columns", address
        )
    return lane, column


def check_columns(address: int, count: int, what: str) -> int:
    """First column of a matrix that begins at lane 0. :raises Illegal: for another lane, or past column 511."""
    lane, column = split_address(address)
    if lane:
        raise Illegal("tmem-range", f"the address of {what} must name lane 0, got lane {lane}", address)
    if column + count > COLUMNS:
        raise Illegal("tmem-range", f"{what} of {count} columns from {column} ends past column 511", address)
    return column


@lru_cache(maxsize=64)
def accumulator_lanes(m: int, cta_group: int) -> Index:
    """Lanes of the rows that one CTA holds, ``(rows,)``; with M = 128 and cta_group 2, of the columns below N/2."""
    if m == 64 and cta_group == 1:
        rows = np.arange(64)
        return rows // 16 * 32 + rows % 16
    return np.arange(m // cta_group)


def accumulator_columns(instruction: Instruction) -> int:
    """Columns that D occupies."""
    return instruction.n // 2 if is_split(instruction) else instruction.n


def is_split(instruction: Instruction) -> bool:
    """Whether D is laid out 2 x 2: M = 128 over two CTAs."""
    return instruction.cta_group == 2 and instruction.m == 128


def read_accumulator(words: NDArray[np.uint32], column: int, instruction: Instruction) -> NDArray[np.float32]:
    """The rows of D that one CTA holds, float32 ``(rows, N)``. :param words: tensor memory ``(128, 512)``."""
    values = words.view(np.float32)
    lanes = accumulator_lanes(instruction.m, instruction.cta_group)
    span = slice(column, column + accumulator_columns(instruction))
    if is_split(instruction):
        return np.concatenate([values[:64, span], values[64:, span]], axis=1)
    return values[lanes, span]


def write_accumulator(
    words: NDArray[np.uint32],
    column: int,
    instruction: Instruction,
    result: NDArray[np.float32],
    enabled: NDArray[np.bool_] | None = None,
) -> None:
    """Write the rows of D that one CTA holds. :param enabled: per lane, bool ``(128,)``; None for all."""
    values = words.view(np.float32)
    lanes = accumulator_lanes(instruction.m, instruction.cta_group)
    span = slice(column, column + accumulator_columns(instruction))
    if is_split(instruction):
        half = instruction.n // 2
        result = np.concatenate([result[:, :half], result[:, half:]], axis=0)
        lanes = np.arange(128)
    if enabled is not None:
        keep = enabled[lanes]
        lanes, result = lanes[keep], result[keep]
    values[lanes, span] = result


def operand_columns(instruction: Instruction) -> int:
    """Columns that A occupies in tensor memory for one K step: 32 bytes of every row. :raises Illegal: if padded."""
    if instruction.padded and instruction.a.bits < 8:
        raise Illegal("unsupported", f"A of type {instruction.a.name} in tensor memory is not simulated")
    return 8


def read_operand(words: NDArray[np.uint32], column: int, instruction: Instruction) -> NDArray[np.uint8]:
    """Bytes of the rows of A that one CTA holds in tensor memory, uint8 ``(rows, 32)``.

    :raises Illegal: if the two copies of a 2 x 2 layout differ.
    """
    block = np.ascontiguousarray(words[:, column : column + operand_columns(instruction)]).view(np.uint8)
    if is_split(instruction):
        if not np.array_equal(block[:64], block[64:]):
            row = int(np.argmax((block[:64] != block[64:]).any(axis=1)))
            raise Illegal(
                "scale-replication",
                f"A with M = 128 and cta_group::2 must be in lanes 0-63 and 64-127 alike; row {row} differs",
                (row + 64) << 16 | column,
            )
        return block[:64]
    return block[accumulator_lanes(instruction.m, instruction.cta_group)]


def scale_words(rows: int) -> int:
    """Columns of a scale table of ``rows`` rows."""
    return -(-rows // 32)


def read_scales(
    words: NDArray[np.uint32], column: int, rows: int, first_byte: int, count: int, name: str, split: bool = False
) -> NDArray[np.uint8]:
    """The scales of one operand, uint8 ``(rows, count)``.

    :param column: of the table's first word.
    :param first_byte: the id.
    :param count: scales per row.
    :param split: whether quadrants 2 and 3 hold the scales of the second half of the rows.
    :raises Illegal: if the quadrants that must agree do not.
    """
    part = rows // 2 if split else rows
    span = slice(column, column + scale_words(part))
    table = np.ascontiguousarray(words[:, span]).view(np.uint8).reshape(4, 32, -1, 4)
    table = table[..., first_byte : first_byte + count].swapaxes(1, 2).reshape(4, -1, count)[:, :part]
    groups = ((0, 1), (2, 3)) if split else ((0, 1, 2, 3),)
    for group in groups:
        for quadrant in group[1:]:
            if (differs := (table[quadrant] != table[group[0]]).any(axis=1)).any():
                row = int(np.argmax(differs))
                lane = 32 * quadrant + row % 32
                raise Illegal(
                    "scale-replication",
                    f"the scales of {name} must be the same in quadrants {', '.join(map(str, group))}: row {row} has "
                    f"{bytes(table[quadrant, row]).hex()} in quadrant {quadrant} and "
                    f"{bytes(table[group[0], row]).hex()} in {group[0]}",
                    lane << 16 | (column + row // 32),
                )
    return np.concatenate([table[group[0]] for group in groups])
