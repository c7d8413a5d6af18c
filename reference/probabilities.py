"""P: from scores to quantized probabilities, shared by the forward and the backward.

Note [Probabilities]
~~~~~~~~~~~~~~~~~~~~
With ``x = c * S``, ``c = fl(softmax_scale * log2 e)``, the product of two FP32 numbers taken exactly: ``r = floor(x)``,
``f = fl(x - r)``, ``p = poly(f)`` in [1, 2]. So ``f`` is rounded once: it is ``fma(c, S, -r)``, and the scaled score
itself never exists. Where ``|x| >= 2^23``, x is first rounded to FP32, an integer, or to the largest of its sign if it
overflows, and ``f = 0``. Scores that overflowed: -inf counts as the lowest FP32 number, before anything is hidden; +inf
gives NaN. Maxima of x pass over NaN; where the largest score of a tile is +inf, the tile adds nothing to them.

P is ``E4M3(p * 2^(r + 8 - top))`` with an integer ``top``, its scale ``2^(top - 8)``. In the forward ``top`` is the
ceiling of the row's largest x in the 128-key tile; in the backward it is ``m_i + E``, where E is one integer per 32x32
tile. The mantissa of P depends on ``x`` alone; the scales only choose where it underflows. So a P that is a normal E4M3
number in both passes has the same value in both, bit for bit.

Tiles are held as ``[keys, queries]`` (S^T): row statistics then run along the slow axis, and the backward needs them
so.
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference.compiled import loops
from flamia.reference.documents import BLOCK, TILE
from flamia.reference.exp2 import C1, C2, CHUNK, FRACTION_BITS, exp2_mantissa, grid_constant
from flamia.reference.formats import E4M3, round_to
from flamia.reference.operands import F32, exp2_of

FLOOR_EXPONENT = F32(-126)
"""Exponents of P are raised to this one, the smallest of a normal FP32 number: far below E4M3's smallest value."""

LOWEST = F32(np.finfo(np.float32).min)

LARGE = 2.0**23
"""From here on FP32 numbers are integers."""

Array = NDArray[np.float32]


def exponential(scores: Array, c: np.float32, bits: int = FRACTION_BITS) -> tuple[Array, Array]:
    """``(r, p)`` with ``2^(c S) = 2^r p``, r integral, p in [1, 2], as Note [Probabilities]; overwrites ``scores``.

    :param scores: C-contiguous; none is -inf (`raise_overflowed`).
    :param bits: fraction bits of p, which is rounded once.
    """
    assert scores.flags.c_contiguous
    r = np.empty_like(scores)
    flat, floors = scores.reshape(-1), r.reshape(-1)
    if (fast := loops()) is not None:
        fast.exponential(flat, float(c), floors, (float(LOWEST), LARGE), (C1, C2, grid_constant(bits)))
        return r, scores
    buffers = np.empty((2, min(CHUNK, flat.size)))
    large = not np.abs([flat.min(initial=0), flat.max(initial=0)]).max() * np.float64(c) < LARGE
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        x, floor = buffers[:, : part.size]
        np.multiply(part, c, out=x, dtype=np.float64)  # exact: 48 bits
        if large:
            np.copyto(x, _round_large(x), where=~(np.abs(x) < LARGE))
        np.floor(x, out=floor)
        floors[start : start + CHUNK] = floor
        x -= floor
        near_one = np.flatnonzero(x > 1 - 2.0**-5)
        small = part[near_one].astype(np.float64) * c
        part[...] = x
        # c S - r is exact in float64 but for small negative products, where f is on the grid 2^-24: round there, once.
        small_negative = (small < 0) & (small > -(2.0**-5))
        part[near_one[small_negative]] = 1 + np.rint(small[small_negative] * 2.0**24) * 2.0**-24
    return r, exp2_mantissa(scores, out=scores, bits=bits)


def exponential_of_rounded(x: Array) -> tuple[Array, Array]:
    """``(r, p)`` of FP32 numbers ``x``; overwrites them. For probabilities with a constant scale, which need ``x``."""
    np.maximum(x, LOWEST, out=x)
    r = np.floor(x)
    x -= r
    return r, exp2_mantissa(x, out=x)


def raise_overflowed(scores: Array) -> Array:
    """Scores of -inf count as the lowest FP32 number; in place."""
    return np.maximum(scores, LOWEST, out=scores)


def ceiling(largest: Array, c: np.float32) -> Array:
    """``ceil(c S)`` of scores, as Note [Probabilities] takes the product; -inf where there was no score; 0 is +0."""
    x = np.multiply(largest, c, dtype=np.float64)
    ceilings: Array = np.where(np.abs(x) < LARGE, np.ceil(x), _round_large(x)).astype(F32)
    return np.where(largest == -np.inf, largest, ceilings + F32(0))


def _round_large(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """To FP32, saturating; +inf, a score that overflowed, becomes NaN."""
    rounded: NDArray[np.float64] = np.clip(x, LOWEST, -LOWEST).astype(F32).astype(np.float64)
    return np.where(np.isposinf(x), np.nan, rounded)


def shift(p: Array, exponent: Array) -> Array:
    """``p * 2^exponent`` for p in [1, 2] by adding to the exponent bits; overwrites both arguments.

    Exponents below `FLOOR_EXPONENT` are raised to it. NaN in either argument gives NaN.
    """
    np.maximum(exponent, FLOOR_EXPONENT, out=exponent)
    lost = np.isnan(exponent) if np.isnan(exponent.sum(dtype=np.float64)) else None
    exponent *= F32(1 << 23)
    p.view(np.int32)[...] += exponent.astype(np.int32)
    if lost is not None:
        p[lost] = np.nan
    return p


def quantize(p: Array, r: Array, top: Array, bits: np.float32, e4m3: bool) -> Array:
    """``p * 2^(r - top + bits)`` in E4M3 or bfloat16, as float32 element values; overwrites ``p`` and ``r``."""
    r -= top
    r += bits
    y = shift(p, r)
    if not e4m3:
        return y.astype(bfloat16).astype(F32)
    return round_to(y, E4M3, out=y)


def fraction_bits(e4m3: bool) -> int:
    """F of Note [Own exponents]."""
    return 3 if e4m3 else 7


def own_exponents(p: Array, r: Array, top: Array, bits: int) -> Array:
    """P of Note [Own exponents], ``p 2^(r - top)`` by the bits of a bfloat16 number, as float32.

    ``p`` has ``bits`` fraction bits. The exponent field is ``r - top + 127`` and the fraction that of p, whose 2
    carries over; so field 0 holds a subnormal number, without the leading one. Below, P is 0. NaN in any argument gives
    NaN. Overwrites ``p`` and ``r``.
    """
    r -= top
    lost = np.isnan(r) | np.isnan(p)
    below = lost | ~(r >= F32(-127))
    r += F32(127)
    np.copyto(r, F32(0), where=below)
    np.copyto(p, F32(1), where=below)
    n = (r * F32(2**bits) + (p - F32(1)) * F32(2**bits)).astype(np.int32)
    out: Array = (n << (23 - bits)).view(F32)
    if lost.any():
        out[lost] = np.nan
    return out


def own_probabilities(scores: Array, c: np.float32, top: Array, hidden: NDArray[np.bool_] | None, e4m3: bool) -> Array:
    """P of Note [Own exponents], 0 where it is hidden; overwrites ``scores``, any numbers where they are hidden."""
    bits = fraction_bits(e4m3)
    r, p = exponential(scores, c, bits)
    p = own_exponents(p, r, top, bits)
    if hidden is not None:
        np.copyto(p, F32(0), where=hidden)
    return p


def round_own(x: Array, bits: int) -> Array:
    """Numbers to ``bits`` fraction bits, bfloat16's exponents: dS of Note [Own exponents]; NaN unless finite."""
    finite = np.isfinite(x)
    if bits == 7:
        rounded = x.astype(bfloat16).astype(F32)
    else:
        dropped = 23 - bits
        rounded = (
            (x.view(np.uint32) + np.uint32(1 << (dropped - 1))) & np.uint32(~((1 << dropped) - 1) & 0xFFFFFFFF)
        ).view(F32)
    return rounded if finite.all() else np.where(finite, rounded, F32(np.nan))


def visible_mask(query_tile: int, key_tile: int, length: int, causal: bool) -> NDArray[np.bool_] | None:
    """Bool ``(128 keys, 128 queries)``, True where the query does not see the key; None if every query sees every key.

    A query sees the keys of its document, and if causal only those at its own position or before.
    """
    if causal and key_tile == query_tile:
        index = np.arange(TILE)
        return index[:, None] > index[None, :]
    if not causal and (key_tile + 1) * TILE > length:
        return np.broadcast_to((key_tile * TILE + np.arange(TILE) >= length)[:, None], (TILE, TILE))
    return None


def fold_values(codes: Array, exponents: Array, causal_mask: NDArray[np.bool_], e4m3: bool) -> tuple[Array, Array]:
    """Fold V1's token exponents into P for the diagonal tile (contract, section 5).

    ``P'_ij = E4M3(P_ij * 2^(e_j - E_ib))`` where ``E_ib`` is the largest ``e_j`` over the tokens of the 32-token block
    b that query i sees, a maximum over the query's own past alone. A visible non-finite token makes ``E_ib`` NaN.

    :param codes: P, float32 ``(..., 128 keys, 128 queries)``.
    :param exponents: e, float32 ``(..., 128 keys)``.
    :returns: P' of the shape of ``codes``, and E ``(..., 4, 128 queries)``; -inf where a block has no visible token.
    """
    seen = np.where(causal_mask, F32(-np.inf), exponents[..., :, None])
    blocks = seen.reshape(*seen.shape[:-2], TILE // BLOCK, BLOCK, TILE)
    largest = blocks.max(axis=-2)
    ratio = exp2_of(np.minimum(blocks - np.where(largest == -np.inf, F32(0), largest)[..., None, :], F32(0)))
    folded = codes.reshape(*codes.shape[:-2], TILE // BLOCK, BLOCK, TILE) * ratio
    if e4m3:  # bfloat16 values have exponents 0 or NaN: nothing to round
        folded = round_to(folded, E4M3, out=folded)
    folded = folded.reshape(codes.shape)
    np.copyto(folded, F32(0), where=causal_mask)
    return folded, largest


def drop(codes: Array, dead: NDArray[np.bool_]) -> Array:
    """``codes`` with 0 where the scale factor is too small to be held; NaN stays NaN."""
    return np.where(dead & ~np.isnan(codes), F32(0), codes)


def scale_bytes(exponent: Array) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """E8M0 bytes of integral exponents, and where the factor is below 2^-127 so that its block contributes zero.

    NaN gives byte 255; exponents above 127 saturate to byte 254.
    """
    dead = exponent < F32(-127)
    clipped = np.where(np.isnan(exponent), F32(128), np.clip(exponent, F32(-127), F32(127)))
    return (clipped + F32(127)).astype(np.uint8), dead
