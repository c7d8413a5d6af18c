"""Exact arithmetic on float32 lanes, and its rounding.

Note [Exact pairs]
~~~~~~~~~~~~~~~~~~
The product of two float32 is exact in float64. A sum of two float64 is exact as a pair ``(high, low)``: the rounded
sum and its error (TwoSum; Knuth, TAOCP 4.2.2). Every rounding is made from such a pair. To nearest: ``high`` is first
rounded *to odd* - if ``low`` is not zero and the last bit of ``high`` is even, it moves one ulp toward ``low`` - after
which rounding it to 24 bits or fewer is correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
2008). Directed: the result to nearest is compared with the exact value, and moved by one ulp if it lies on the wrong
side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.types import NO_LANES, Row

NAN32 = np.uint32(0x7FFFFFFF)
"""The NaN that FP32 instructions return."""

_ZEROS = np.zeros(64, np.float32)
_LOW29, _TIE29 = np.int64(0x1FFFFFFF), np.int64(0x10000000)
_EXPONENT, _MAGNITUDE, _SMALLEST = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), np.uint32(0x00800000)
_NONE = bytes(64)


def has_nan(values: Row) -> bool:
    """Whether float32 lanes may hold a NaN: never false if one does. An infinity, too, makes it true."""
    dot = values.dot(_ZEROS[: values.size])
    return bool(dot != dot)


def fix_nan(values: Row) -> None:
    """Make every NaN of float32 lanes the canonical one, in place."""
    if has_nan(values):
        values.view(np.uint32)[np.isnan(values)] = NAN32


def flush(values: Row) -> Row:
    """Subnormal float32 as zeros of their sign (``.ftz``); the array itself if it has none."""
    bits = (values if values.flags.c_contiguous else np.ascontiguousarray(values)).view(np.uint32)
    small = (bits & _EXPONENT) == 0
    if small.tobytes() in (NO_LANES, _NONE):
        return values
    return np.where(small, bits & np.uint32(0x80000000), bits).view(np.float32)


def two_sum(a: Row, b: Row) -> tuple[Row, Row]:
    """The exact sum of two float64 as an exact pair."""
    high = a + b
    rounded = high - a
    return high, (a - (high - rounded)) + (b - rounded)


def to_odd(high: Row, low: Row) -> Row:
    """Note [Exact pairs]."""
    bits = high.view(np.int64)
    move = (low != 0) & ((bits & 1) == 0) & np.isfinite(high)
    # Away from zero is the next code, toward zero the one before.
    away = np.signbit(low) == np.signbit(high)
    return np.where(move, bits + np.where(away, 1, -1), bits).view(np.float64)


def round_pair(high: Row, low: Row, mode: str) -> Row:
    """An exact pair as float32.

    :param mode: ``rn``, ``rz``, ``rm`` or ``rp``. The sign of an exact zero is that of ``high``.
    """
    nearest = to_odd(high, low).astype(np.float32)
    if mode == "rn":
        return nearest
    difference = high - nearest
    sign = np.where(difference != 0, difference, low)
    sign = np.where(np.isfinite(high), sign, 0)
    down = np.nextafter(nearest, np.float32(-np.inf))
    up = np.nextafter(nearest, np.float32(np.inf))
    # A result that rounds to zero from below has the sign of the exact value.
    up = np.where((up == 0) & (high < 0), np.float32(-0.0), up)
    if mode == "rm":
        return np.where(sign < 0, down, nearest)
    if mode == "rp":
        return np.where(sign > 0, up, nearest)
    return np.where((sign < 0) & (high > 0), down, np.where((sign > 0) & (high < 0), up, nearest))


def add(a: Row, b: Row, mode: str) -> Row:
    """``a + b`` of float32 lanes, rounded once."""
    high, low = two_sum(a.astype(np.float64), b.astype(np.float64))
    return _signed_zero(round_pair(high, low, mode), high, a, b, mode)


def multiply(a: Row, b: Row, mode: str) -> Row:
    """``a * b`` of float32 lanes, rounded once."""
    high = a.astype(np.float64) * b.astype(np.float64)
    return round_pair(high, np.zeros_like(high), mode)


def fma(a: Row, b: Row, c: Row, mode: str = "rn") -> Row:
    """``a * b + c`` of float32 lanes, rounded once."""
    product = a.astype(np.float64) * b.astype(np.float64)
    if mode == "rn":
        total = product + c.astype(np.float64)
        result = total.astype(np.float32)
        # Rounding twice goes wrong only where the float64 sum lies on a tie of float32, or the result is subnormal or
        # the smallest normal number, to which a subnormal one may have been rounded.
        tie = (total.view(np.int64) & _LOW29) == _TIE29
        small = (result.view(np.uint32) & _MAGNITUDE) <= _SMALLEST
        np.logical_or(tie, small, out=tie)
        if tie.tobytes() in (NO_LANES, _NONE):
            return result
    high, low = two_sum(product, c.astype(np.float64))
    return _signed_zero(round_pair(high, low, mode), high, product, c, mode)


def _signed_zero(result: Row, high: Row, a: Row, b: Row, mode: str) -> Row:
    """An exact zero sum of opposite signs is -0 when rounding down (IEEE 754, 6.3)."""
    if mode != "rm":
        return result
    opposite = (high == 0) & (np.signbit(a) != np.signbit(b))
    return np.where(opposite, np.float32(-0.0), result)


def divide(a: Row, b: Row, mode: str) -> Row:
    """``a / b`` of float32 lanes, rounded once."""
    quotient = a.astype(np.float64) / b.astype(np.float64)
    # The remainder a - q b has the sign of the quotient's error times that of b: q b as an exact pair by halves of q.
    split = quotient * 134217729.0
    top = split - (split - quotient)
    rest = quotient - top
    wide = b.astype(np.float64)
    remainder = (a.astype(np.float64) - top * wide) - rest * wide
    sure = np.isfinite(quotient) & np.isfinite(wide) & (quotient != 0)
    low = np.where(sure, np.sign(remainder) * np.sign(wide) * np.abs(quotient) * 2.0**-60, 0.0)
    return round_pair(quotient, low, mode)


def square_root(a: Row, mode: str) -> Row:
    """The square root of float32 lanes, rounded once; -0 for -0."""
    root = np.sqrt(a.astype(np.float64))
    split = root * 134217729.0
    top = split - (split - root)
    rest = root - top
    remainder = ((a.astype(np.float64) - top * top) - 2 * top * rest) - rest * rest
    low = np.where(np.isfinite(root), np.sign(remainder) * root * 2.0**-60, 0.0)
    return round_pair(root, low, mode)


def total_order(bits: Row) -> Any:
    """Keys of float32 bits as int32, ordered as the numbers are, with -0 below +0."""
    signed = bits.view(np.int32)
    return signed ^ ((signed >> 31) & 0x7FFFFFFF)
