"""2^x by a polynomial that NumPy and every GPU evaluate to the same bits.

Note [FMA exponential]
~~~~~~~~~~~~~~~~~~~~~~
A hardware exponential (``ex2.approx``) is a table that no other machine shares. The contract therefore
defines, for FP32 ``x``,

    r = floor(x)                      an integer
    f = fl(x - r)                     in [0, 1]
    t = fma(5/64, f, 29/128)
    u = fma(t, f, 89/128)
    p = fma(u, f, 1)                  in [1, 2]
    2^x ~ p * 2^r

where ``fma`` is the correctly rounded FP32 fused multiply-add, PTX ``fma.rn.f32``. That is three FMAs per
element, and the coefficients are multiples of 1/128 of at most seven bits (exact in bfloat16, immediates on
a GPU).

*Range.* ``x - r`` is exact for ``x >= 0``, for ``x <= -1/2``, and wherever ``x`` is a multiple of 2^-24.
Any other ``x`` in ``(-1/2, 0)`` is rounded, and ``-2^-25 <= x < 0`` rounds to ``f = 1``: so ``f = 1`` is
legal. As 5/64 + 29/128, then + 89/128, then + 1 are exact sums that end in 2, ``p(1) = 2`` exactly, and
such an ``x`` gives ``2 * 2^-1 = 1``, the correctly rounded answer. ``p(0) = 1`` exactly, so integer ``x``
are exact.

*Monotone.* All coefficients are positive, so each FMA is a non-decreasing function of ``f``, and rounding
preserves order: ``p`` is non-decreasing over the floats of [0, 1]. As ``p(0) = 1`` and ``p(1) = 2``, so is
``p * 2^r`` over all ``x``.

*Error.* Let q be the polynomial in real arithmetic. ``q / 2^f - 1`` is zero at 0 and 1 and has its extrema
where ``q' = q ln 2``, a cubic with three roots in [0, 1]: 9.48e-5 at f = .100, -1.1128e-4 at .460 and
1.039e-4 at .868. The roundings of t, u and p are at most 2^-26, 2^-25 and 2^-24 and reach p with factors of
at most 1, together less than 2^-23. So ``|p / 2^f - 1| <= 1.114e-4 = 2^-13.13`` (`MAX_RELATIVE_ERROR`). P
is rounded to E4M3 next, whose largest relative error is 2^-4: 560 times more.

*Fit.* The minimax cubic with p(0) = 1 and p(1) = 2, found by linear programming on Chebyshev points, has
error 1.030e-4 (8.56e-5 without the condition at 1). Of the cubics whose coefficients are multiples of 1/128
and sum to 2 the one above is best.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

C1 = float.fromhex("0x1.64p-1")
"""89/128, FP32 bits 0x3F320000."""
C2 = float.fromhex("0x1.dp-3")
"""29/128, FP32 bits 0x3E680000."""
C3 = float.fromhex("0x1.4p-4")
"""5/64, FP32 bits 0x3DA00000."""

MAX_RELATIVE_ERROR = 1.114e-4
"""Bound of ``|p / 2^f - 1|`` over all float32 f in [0, 1]."""

CHUNK = 1 << 14  # elements: the float64 temporaries stay in the L2 cache

# Adding and subtracting 1.5 * 2^(52 - n) rounds a much smaller float64 to a multiple of 2^-n, ties to even.
_TO_2_24 = 1.5 * 2.0**28
_TO_2_23 = 1.5 * 2.0**29


def fma(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[np.float32]:
    """Correctly rounded ``a * b + c``: to nearest, ties to even, as PTX ``fma.rn.f32`` without ``.ftz``.

    The product of two float32 is exact in float64. The sum is rounded *to odd*: if the float64 sum is
    inexact (its error is known from TwoSum; Knuth, TAOCP 4.2.2) and its last bit is even, it moves one ulp
    toward the error. Rounding that to float32 is correct because 53 >= 24 + 2 (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers, 2008); subnormal results
    have fewer bits still.

    :param a, b, c: float32 arrays, broadcast together; any values.
    :returns: float32; NaN, Inf, signed zeros, subnormals and overflow as IEEE 754.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        rounded_addend = total - product
        error = (product - (total - rounded_addend)) + (addend - rounded_addend)
        bits = total.view(np.int64)
        move = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        # bits count away from zero, so toward an error of the sum's own sign is +1
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.asarray(bits + np.where(move, step, 0)).view(np.float64)
        return odd.astype(np.float32)


def exp2_mantissa(f: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """``p(f)`` of Note [FMA exponential]: float32 ``f`` in [0, 1] to float32 in [1, 2], of the same shape.

    The bits are those of the three FMAs, computed in float64, where no intermediate result is rounded twice:

    * ``5/64 f + 29/128`` is exact in float64 for ``f >= 2^-26`` (below f = 1/4 its bits lie between 2^-3 and
      2^-55, above there are fewer), and for smaller ``f`` ``t`` is 29/128 whichever way float64 rounds.
    * ``t f`` has 48 bits: exact. ``u`` is in [89/128, 1], where float32 is the grid 2^-24. Adding ``89/128
      + 1.5 * 2^28`` rounds once, to that grid, and ties as float32 does, since ``1.5 * 2^28`` is an even
      multiple of it.
    * ``p`` is in [1, 2], where float32 is the grid 2^-23: likewise with ``1.5 * 2^29``.

    :param f: float32; outside [0, 1] the result is unspecified, NaN gives NaN.
    :param out: float32 array of the same shape to write to; it may be ``f``.
    :raises TypeError: if ``f`` or ``out`` is not float32. :raises ValueError: if ``out`` has another shape.
    """
    if f.dtype != np.float32:
        raise TypeError(f"f must be a float32 array, got {f.dtype}")
    if out is None:
        out = np.empty(f.shape, np.float32)
    elif out.dtype != np.float32:
        raise TypeError(f"out must be a float32 array, got {out.dtype}")
    elif out.shape != f.shape:
        raise ValueError(f"out must have the shape of f, {f.shape}, got {out.shape}")
    source = np.ascontiguousarray(f).reshape(-1)
    flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, np.float32)
    wide = np.empty(min(CHUNK, flat.size))
    work = np.empty_like(wide)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        w, y = wide[: chunk.size], work[: chunk.size]
        w[...] = source[start : start + CHUNK]
        np.multiply(w, C3, out=y)
        y += C2
        chunk[...] = y  # the rounding of t; u and p are rounded by their magic constants
        y[...] = chunk
        y *= w
        y += C1 + _TO_2_24
        y -= _TO_2_24
        y *= w
        y += 1.0 + _TO_2_23
        y -= _TO_2_23
        chunk[...] = y
    if not out.flags.c_contiguous:
        out[...] = flat.reshape(out.shape)
    return out


def exp2_parts(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``(r, p)`` with ``2^x ~ p * 2^r``: float32 arrays of the shape of ``x``; see Note [FMA exponential].

    ``r`` is ``floor(x)`` and not clamped. Infinite ``x`` give ``r = x`` and ``p = 1``; NaN gives NaN in both.

    :raises TypeError: if ``x`` is not float32.
    """
    if x.dtype != np.float32:
        raise TypeError(f"x must be a float32 array, got {x.dtype}")
    r: NDArray[np.float32] = np.asarray(np.floor(x))
    with np.errstate(invalid="ignore"):
        f = np.asarray(x - r)
    f[np.isinf(r)] = 0
    return r, exp2_mantissa(f, out=f)
