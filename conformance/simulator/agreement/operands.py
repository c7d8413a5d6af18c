"""Operands: corner values of every type, each against each, and random bits in several ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.agreement.case import Draw

Array = NDArray[Any]

F32_CORNERS = np.array(
    [
        0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x40000000, 0x3F000000, 0x7F7FFFFF,
        0xFF7FFFFF, 0x00800000, 0x80800000, 0x007FFFFF, 0x807FFFFF, 0x00000001, 0x80000001, 0x00400000, 0x7F800000,
        0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x4B000000, 0x4B800001, 0x34000000, 0x43E00000, 0x4F000000,
        0xCF000000, 0x4F800000, 0x5F000000, 0x3FC00000, 0xC0200000,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip
"""Zeros, ones and their neighbours, extremes, subnormals, infinities, NaN, ties, and the ends of the integers."""

F16_CORNERS = np.array(
    [
        0x0000, 0x8000, 0x3C00, 0xBC00, 0x3C01, 0x7BFF, 0xFBFF, 0x0400, 0x03FF, 0x8001, 0x0001, 0x7C00, 0xFC00, 0x7E00,
        0x7C01, 0xFE55, 0x5F00, 0x3555,
    ],
    np.uint16,
)  # fmt: skip
BF16_CORNERS = np.array(
    [
        0x0000, 0x8000, 0x3F80, 0xBF80, 0x3F81, 0x7F7F, 0xFF7F, 0x0080, 0x007F, 0x8001, 0x0001, 0x7F80, 0xFF80, 0x7FC0,
        0x7F81, 0xFFD5, 0x43E0, 0x3EAB,
    ],
    np.uint16,
)  # fmt: skip


def integer_corners(bits: int) -> Array:
    """Zero, the ends of both signednesses, powers of two and their neighbours."""
    powers = {1 << k for k in (0, 1, 4, 7, 8, 15, 16, 31, 32, 63) if k < bits}
    values = {0, (1 << bits) - 1, *powers, *(p - 1 for p in powers), *(-p % (1 << bits) for p in powers)}
    return np.array(sorted(values), np.dtype(f"u{bits // 8}"))


def _crossed(corners: Array, operands: int, position: int, rng: np.random.Generator) -> Array:
    """Every pair of corners; a third operand takes corners in a random order."""
    count = corners.size
    if operands == 1:
        return corners
    index = np.arange(count * count)
    if position == 0:
        return np.asarray(corners[index // count])
    if position == 1:
        return np.asarray(corners[index % count])
    return rng.choice(corners, index.size)


def random_f32(rng: np.random.Generator, size: int) -> Array:
    """A third standard normal, a third of any exponent, a third any bits."""
    normal = rng.standard_normal(size, np.float32)
    wide = normal * np.exp2(rng.integers(-60, 60, size)).astype(np.float32)
    bits = rng.integers(0, 1 << 32, size, np.uint32).view(np.float32)
    return np.choose(np.arange(size) % 3, [normal, wide, bits]).astype(np.float32)


def f32(operands: int, position: int, random: int = 1024) -> Draw:
    """Operand ``position`` of ``operands`` FP32 operands: crossed corners, then random numbers.

    A quarter of the random numbers nearly cancel: the second operand is minus the first, a few units in the last
    place off.
    """

    def draw(rng: np.random.Generator) -> Array:
        first = random_f32(np.random.default_rng(17), random)
        out = first if position == 0 else random_f32(rng, random)
        if position == 1:
            quarter = slice(0, random // 4)
            near = first.view(np.uint32) + rng.integers(0, 4, random, np.uint32) ^ np.uint32(0x80000000)
            out[quarter] = near.view(np.float32)[quarter]
        return np.concatenate([_crossed(F32_CORNERS, operands, position, rng), out])

    return draw


def bits(width: int, operands: int, position: int, random: int = 1024) -> Draw:
    """Operand of unsigned ``width`` bits: crossed corners, then random bits."""

    def draw(rng: np.random.Generator) -> Array:
        kind = np.dtype(f"u{width // 8}")
        crossed = _crossed(integer_corners(width), operands, position, rng)
        free = rng.integers(0, np.iinfo(kind).max, random, kind, endpoint=True)
        small = free >> rng.integers(0, width, random, kind)
        return np.concatenate([crossed, np.where(np.arange(random) % 2 == 0, free, small).astype(kind)])

    return draw


def pairs16(corners: Array, operands: int, position: int, random: int = 1024) -> Draw:
    """Two 16-bit floating-point numbers per 32-bit word, crossed corners in the low half."""

    def draw(rng: np.random.Generator) -> Array:
        low = _crossed(corners, operands, position, rng)
        words = low.astype(np.uint32) | rng.choice(corners, low.size).astype(np.uint32) << 16
        return np.concatenate([words, rng.integers(0, 1 << 32, random, np.uint32)])

    return draw


def every16(rng: np.random.Generator) -> Array:
    """All 65,536 patterns of 16 bits."""
    return np.arange(1 << 16, dtype=np.uint16)


def counts(size: int) -> Draw:
    """Shift counts, positions and lengths: mostly small, some far out of range."""

    def draw(rng: np.random.Generator) -> Array:
        out = rng.integers(0, 70, size, np.uint32)
        out[::7] = rng.integers(0, 1 << 32, out[::7].size, np.uint32)
        return out

    return draw


def words(size: int) -> Draw:
    """Random 32-bit words."""
    return lambda rng: rng.integers(0, 1 << 32, size, np.uint32)
