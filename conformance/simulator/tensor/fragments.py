"""Registers of ``wgmma.mma_async``: which thread holds which element of D and of A.

Note [Register fragments of wgmma]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Warp w of the warpgroup, lane t, register i (PTX 9.7.15.5.1.1)::

    D (f32)     row 16 w + t/4 + 8 ((i/2)%2)    column 8 (i/4) + 2 (t%4) + i%2
    A, 16 bit   row 16 w + t/4 + 8 (i%2)        columns 2 (t%4) + 8 (i/2) + {0, 1}
    A, 8 bit    row 16 w + t/4 + 8 (i%2)        columns 4 (t%4) + 16 (i/2) + {0, 1, 2, 3}

In bytes both rows of A are the same: byte 4 (t%4) + 16 (i/2) of 32.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]


@cache
def accumulator_index(n: int) -> tuple[Index, Index]:
    """Row within the warp's 16 and column of every register of D: ``(N / 2, 32)`` each."""
    i, t = np.arange(n // 2)[:, None], np.arange(32)[None, :]
    return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


@cache
def operand_index() -> tuple[Index, Index]:
    """Row within the warp's 16 and 4-byte word (0..7) of the four registers of A: ``(4, 32)`` each."""
    i, t = np.arange(4)[:, None], np.arange(32)[None, :]
    return t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)


def operand_bytes(registers: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """A of one warpgroup, uint8 ``(64, 32)``. :param registers: uint32 ``(4 warps, 4 registers, 32)``."""
    rows, words = operand_index()
    a = np.empty((4, 16, 8), np.uint32)
    a[:, rows, words] = registers
    return a.reshape(64, 8).view(np.uint8)


def gather_accumulator(registers: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """D of one warpgroup, float32 ``(64, N)``. :param registers: ``(4 warps, N / 2, 32)``."""
    rows, columns = accumulator_index(n)
    d = np.empty((4, 16, n), np.float32)
    d[:, rows, columns] = registers
    return d.reshape(64, n)


def scatter_accumulator(d: NDArray[np.float32]) -> NDArray[np.float32]:
    """Registers ``(4 warps, N / 2, 32)`` of D, float32 ``(64, N)``."""
    rows, columns = accumulator_index(d.shape[1])
    return np.ascontiguousarray(d.reshape(4, 16, -1)[:, rows, columns])
