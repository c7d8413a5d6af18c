"""Number formats narrower than FP64, and rounding to them at bit level.

A format has a sign bit, exponent bits and mantissa bits. Rounding works on the bits of exact float64 values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.types import Row


@dataclass(frozen=True)
class Format:
    """A binary format.

    :param largest: code of the largest finite magnitude.
    :param infinity: code of infinity, -1 without one.
    :param nan: code that conversions return for NaN.
    :param bias: of the exponent; the smallest normal exponent is ``1 - bias``.
    """

    name: str
    mantissa: int
    bits: int
    bias: int
    largest: int
    infinity: int
    nan: int


F16 = Format("f16", 10, 16, 15, 0x7BFF, 0x7C00, 0x7FFF)
BF16 = Format("bf16", 7, 16, 127, 0x7F7F, 0x7F80, 0x7FFF)
TF32 = Format("tf32", 10, 19, 127, 0x3FBFF, 0x3FC00, 0x3FFFF)
E4M3 = Format("e4m3", 3, 8, 7, 0x7E, -1, 0x7F)
E5M2 = Format("e5m2", 2, 8, 15, 0x7B, 0x7C, 0x7F)
E2M1 = Format("e2m1", 1, 4, 1, 0x7, -1, 0x7)
E2M3 = Format("e2m3", 3, 6, 1, 0x1F, -1, 0x1F)
E3M2 = Format("e3m2", 2, 6, 3, 0x1F, -1, 0x1F)

FORMATS = {f.name: f for f in (F16, BF16, TF32, E4M3, E5M2, E2M1, E2M3, E3M2)}


def encode(x: Row, f: Format, mode: str = "rn", saturate: bool = False) -> Row:
    """Codes of float64 lanes.

    :param mode: ``rn``, ``rna``, ``rz``, ``rm`` or ``rp``.
    :param saturate: overflow and infinity give the largest finite value (``.satfinite``); otherwise they give infinity,
        or the NaN of a format without one.
    :returns: uint32.
    """
    bits = np.ascontiguousarray(x).view(np.int64)
    magnitude = bits & _MAGNITUDE
    negative = bits < 0
    field = magnitude >> 52  # float64's exponent
    lowest = 1024 - f.bias  # of the smallest normal number
    # Bits below the format's spacing at the value, which is constant among its subnormals; 62 drops everything.
    drop = np.minimum(np.maximum(lowest - field, 0) + (52 - f.mantissa), 62)
    significand = (magnitude & _FRACTION) | (np.minimum(field, 1) << 52)
    half = np.left_shift(1, drop - 1)
    match mode:
        case "rn":
            more = half - 1 + ((significand >> drop) & 1)
        case "rna":
            more = half
        case "rz":
            more = 0
        case _:
            more = np.where(negative if mode == "rm" else ~negative, 2 * half - 1, 0)
    # Fields carry into each other, so that a mantissa that rounds up to 2 raises the exponent.
    code = ((np.maximum(field, lowest) - lowest) << f.mantissa) + ((significand + more) >> drop)
    over = code > f.largest
    if over.any():
        code = np.where(over, _overflow(magnitude, negative, f, mode, saturate), code)
        code = np.where(magnitude > _INFINITY, f.nan, np.where(negative, code | (1 << (f.bits - 1)), code))
        return code.astype(np.uint32)
    return (code | (negative.astype(np.int64) << (f.bits - 1))).astype(np.uint32)


_MAGNITUDE, _FRACTION, _INFINITY = np.int64(2**63 - 1), np.int64(2**52 - 1), np.int64(0x7FF << 52)


def _overflow(magnitude: Row, negative: Row, f: Format, mode: str, saturate: bool) -> Row:
    """Codes of magnitudes beyond the largest."""
    if saturate:
        return f.largest
    if f.infinity < 0:
        return f.nan
    if mode in ("rn", "rna"):
        return f.infinity
    # Rounding toward zero stops at the largest finite number; infinity itself stays.
    toward = mode == "rz" or (negative if mode == "rp" else ~negative)
    return np.where((magnitude < _INFINITY) & toward, f.largest, f.infinity)


def _decode_one(code: int, f: Format) -> float:
    sign = -1.0 if code >> (f.bits - 1) & 1 else 1.0
    magnitude = code & ((1 << (f.bits - 1)) - 1)
    if f.infinity >= 0 and magnitude >= f.infinity:
        return sign * np.inf if magnitude == f.infinity else np.nan
    if f.infinity < 0 and magnitude > f.largest:
        return np.nan
    field, mantissa = magnitude >> f.mantissa, magnitude & ((1 << f.mantissa) - 1)
    if field == 0:
        return float(sign * np.ldexp(mantissa, 1 - f.bias - f.mantissa))
    return float(sign * np.ldexp(mantissa + (1 << f.mantissa), field - f.bias - f.mantissa))


_TABLES: dict[str, Any] = {}


def decode(codes: Row, f: Format) -> Row:
    """Values of codes as float64, by a table of all of them."""
    if f.name not in _TABLES:
        _TABLES[f.name] = np.array([_decode_one(c, f) for c in range(1 << f.bits)])
    return _TABLES[f.name][codes]


def encode_ue8m0(x: Row, mode: str, saturate: bool) -> Row:
    """E8M0 bytes of |x|, float32 or bfloat16 values as float64: ``rp`` up, ``rz`` down; NaN gives 255.

    Byte b is 2^(b - 127). What is at most 2^-127 gives 0. What is too large gives 254 with ``saturate``, else 255.
    """
    magnitude = np.abs(x)
    finite = np.isfinite(magnitude) & (magnitude > 0)
    fraction, exponent = np.frexp(np.where(finite, magnitude, 1.0))  # magnitude = fraction 2^exponent, 1/2 <= fraction
    byte = exponent - 1 + 127 + ((fraction > 0.5) if mode == "rp" else 0)
    byte = np.clip(byte, 0, 255)
    byte = np.where(finite, byte, np.where(magnitude == 0, 0, 255))
    if saturate:
        byte = np.where(np.isnan(x), 255, np.minimum(byte, 254))
    return byte.astype(np.uint32)
