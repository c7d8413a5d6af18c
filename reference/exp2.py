"""2^x by a polynomial that NumPy and every GPU evaluate to the same bits.

Note [FMA exponential]
~~~~~~~~~~~~~~~~~~~~~~
A hardware exponential (``ex2.approx``) is a table that no other machine shares. The contract therefore
defines, for FP32 ``x``,

    r = floor(x)                      an integer
    f = fl(x - r)                     in [0, 1]
    t = fma(87/256, f, 169/256)
    p = fma(t, f, 1)                  in [1, 2]
    2^x ~ p * 2^r

where ``fma`` is the correctly rounded FP32 fused multiply-add, PTX ``fma.rn.f32``. That is two FMAs per
element, and the coefficients are multiples of 1/256 of at most eight bits (exact in bfloat16, immediates on
a GPU).

*Range.* ``x - r`` is exact for ``x >= 0``, for ``x <= -1/2``, and wherever ``x`` is a multiple of 2^-24.
Any other ``x`` in ``(-1/2, 0)`` is rounded, and ``-2^-25 <= x < 0`` rounds to ``f = 1``: so ``f = 1`` is
legal. As 87/256 + 169/256, then + 1 are exact sums that end in 2, ``p(1) = 2`` exactly, and such an ``x``
gives ``2 * 2^-1 = 1``, the correctly rounded answer. ``p(0) = 1`` exactly, so integer ``x`` are exact.

*Monotone.* All coefficients are positive, so each FMA is a non-decreasing function of ``f``, and rounding
preserves order: ``p`` is non-decreasing over the floats of [0, 1]. As ``p(0) = 1`` and ``p(1) = 2``, so is
``p * 2^r`` over all ``x``.

*Error.* Let q be the polynomial in real arithmetic. ``q / 2^f - 1`` is zero at 0 and 1 and has its extrema
where ``q' = q ln 2``, a quadratic with two roots in [0, 1]: -2.6890e-3 at f = .185 and 2.6703e-3 at .758. The
roundings of t and p are at most 2^-25 and 2^-24 and reach p with factors of at most 1, together less than
2^-23. So ``|p / 2^f - 1| <= 2.6892e-3 = 2^-8.54`` (`MAX_RELATIVE_ERROR`); its root mean square is 1.9e-3. P
is rounded to E4M3 next, whose relative error is at most 2^-4 and .026 in the root mean square: the two add up
to less than half a percent more than the rounding alone. A cubic (error 1.1e-4) leaves every error of
gradients on real activations where it is, and costs one instruction per element in each pass.

*Fit.* Of the quadratics with p(0) = 1 and p(1) = 2 the best has error 2.679e-3; of those whose coefficients are
multiples of 1/256 (or 1/1024) and sum to 2 the one above is best.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

C1 = 169 / 256
"""FP32 bits 0x3F290000."""
C2 = 87 / 256
"""FP32 bits 0x3EAE0000."""

MAX_RELATIVE_ERROR = 2.6892e-3
"""Bound of ``|p / 2^f - 1|`` over all float32 f in [0, 1]."""

FRACTION_BITS = 23
"""Of p, a float32 number in [1, 2]."""

CHUNK = 1 << 14  # elements: the float64 temporaries stay in the L2 cache

_TO_2_24 = 1.5 * 2.0**28


def grid_constant(bits: int) -> float:
    """What, added and subtracted, rounds a much smaller float64 to a multiple of 2^-bits, ties to even."""
    return 1.5 * 2.0 ** (52 - bits)


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


def exp2_mantissa(
    f: NDArray[np.float32], out: NDArray[np.float32] | None = None, bits: int = FRACTION_BITS
) -> NDArray[np.float32]:
    """``p(f)`` of Note [FMA exponential]: float32 ``f`` in [0, 1] to float32 in [1, 2], of the same shape.

    The bits are those of the two FMAs, computed in float64, where no intermediate result is rounded twice:

    * ``87/256 f`` has 31 bits: exact. ``t`` is in [169/256, 1], where float32 is the grid 2^-24. Adding ``169/256 +
      1.5 * 2^28`` rounds once, to that grid, and ties as float32 does, since ``1.5 * 2^28`` is an even multiple of it.
    * ``t f`` has 48 bits: exact. ``p`` is in [1, 2], where float32 is the grid 2^-23: likewise with ``1.5 * 2^29``.

    :param f: float32; outside [0, 1] the result is unspecified, NaN gives NaN.
    :param out: float32 array of the same shape to write to; it may be ``f``.
    :param bits: round ``p`` to a multiple of ``2**-bits``, from 1 to 23, instead: once, ties to even.
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
    to_grid = grid_constant(bits)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        w, y = wide[: chunk.size], work[: chunk.size]
        w[...] = source[start : start + CHUNK]
        np.multiply(w, C2, out=y)
        y += C1 + _TO_2_24
        y -= _TO_2_24
        y *= w
        y += 1.0 + to_grid
        y -= to_grid
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
