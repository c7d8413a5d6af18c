"""Slow, independent versions of the formats and scales: one value at a time, in rationals or by ml_dtypes."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np

from flamia.reference.formats import E4M3, ElementFormat, decode_table

F32 = np.float32
BF16 = ml_dtypes.bfloat16


def exact_code(x: float, fmt: ElementFormat) -> int:
    """The nearest code of a finite number by exact rationals, ties to the even code, saturating."""
    codes = range((1 << fmt.bits) // 2)
    values = {c: Fraction(float(v)) for c in codes if np.isfinite(v := decode_table(fmt)[c])}
    size = min(Fraction(abs(x)), Fraction(fmt.max_finite))
    code = min(values, key=lambda c: (abs(values[c] - size), c % 2))
    return code | (int(np.signbit(F32(x))) << (fmt.bits - 1))


def exact_rceil(amax: float, fmt=E4M3) -> int:
    """Smallest byte b in 0..254 with amax <= max * 2^(b - 127), by rationals."""
    ratio = Fraction(amax) / Fraction(fmt.max_finite)
    b = 0
    if ratio > 0:  # start below the answer, then step
        b = max(0, ratio.numerator.bit_length() - ratio.denominator.bit_length() + 127 - 2)
    while b < 254 and ratio > Fraction(2) ** (b - 127):
        b += 1
    return b


def exact_floor(amax: float, fmt=E4M3) -> int:
    if amax == 0:
        return 0
    exponent = int(np.frexp(amax)[1]) - 1  # float64: exact for every float32
    return min(max(exponent - fmt.max_exponent + 127, 0), 254)


def slow_quantize(x: np.ndarray, cu: list[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    payload, scale = np.zeros(x.shape, np.uint8), np.zeros(x.shape[:2], np.uint8)
    for head in range(x.shape[1]):
        for begin, end in pairwise(cu):
            for start in range(begin, end, block):
                tokens = range(start, min(start + block, end))
                rows = {t: [float(v) for v in x[t, head]] for t in tokens}
                finite = {t: row for t, row in rows.items() if np.isfinite(row).all()}
                byte = exact_rceil(max((abs(v) for row in finite.values() for v in row), default=0.0))
                for t, row in finite.items():
                    scaled = np.clip([v * 2.0 ** (127 - byte) for v in row], -448, 448)
                    payload[t, head] = scaled.astype(F32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
                scale[list(tokens), head] = byte if len(finite) == len(rows) else 255
    return payload, scale


def random_tokens(rng: np.random.Generator, shape: tuple[int, ...], dtype: type, spread: float) -> np.ndarray:
    """Values over many octaves, uneven between tokens, with zeros and -0 among them."""
    limit = 12 if dtype is np.float16 else 60
    x = rng.standard_normal(shape) * np.exp2(np.clip(rng.normal(0, spread, (*shape[:2], 1)), -limit, limit))
    x[rng.random(shape) < 0.05] = -0.0
    return x.astype(F32).astype(dtype)
