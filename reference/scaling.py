"""Scales of blocks: the RCEIL rule, token-block scaling, and the study-only schemes it is compared with.

Note [RCEIL]
~~~~~~~~~~~~
A block with largest magnitude amax has the scale 2^e, ``e = ceil(log2(amax / max))`` with max the element
format's largest value, clamped to [-127, 127]: the smallest power of two under which nothing saturates. It is
computed on bits, as ``rp_satfinite(fl(amax * fl(1 / max)))`` (cuBLAS, "Block scaling"; TransformerEngine),
never with a floating log2. Against the exact rule this differs for a single amax in all of binary32,
0x04600001, the first number above 448 * 2^-127: it gives byte 0 instead of 1, and the element saturates to
448, which is its rounding. amax = 0 gives byte 0. The FLOOR rule of OCP MX v1.0 (section 6.3), ``floor(log2
amax) - emax``, clips whatever has a mantissa above 1.75; it exists here for study only.

Note [Token blocks]
~~~~~~~~~~~~~~~~~~~
A *token-block scale* is one E8M0 exponent per head and block of B consecutive tokens of one document, B = 1
or 32, covering all channels. Blocks start at the document's first token; its last block may be short. Because
the scale does not vary along channels, the same payload bytes serve contractions over channels and over
tokens.

NaN lives in the scale, never in the payload: a token that holds a NaN or an Inf gets payload 0 and scale byte
255. It takes no part in the block's maximum. With B = 32 the byte of its whole block is 255, and the block's
other tokens keep the payloads that they would have beside a token of zeros; the byte wins on decoding.
Padding rows get payload 0 and byte 0, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference.documents import BLOCK, validate_cu_seqlens
from flamia.reference.formats import (
    CHUNK,
    E4M3,
    ElementFormat,
    as_float32,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0_rp,
    round_to,
)

Rule = Literal["rceil", "floor"]

BLOCKS = (1, BLOCK)
"""Tokens per token block."""


@dataclass(frozen=True)
class Quantized:
    """A packed tensor in token-block scaling. See Note [Token blocks].

    :param payload: uint8 ``(T, H, D)``, E4M3 codes.
    :param scale: uint8 ``(T, H)``, the E8M0 byte of each token's block.
    """

    payload: NDArray[np.uint8]
    scale: NDArray[np.uint8]


def rceil(amax: NDArray[Any], fmt: ElementFormat = E4M3) -> NDArray[np.uint8]:
    """E8M0 bytes by the RCEIL rule, see Note [RCEIL]; Inf gives 254, NaN gives 255.

    :param amax: non-negative float32, bfloat16 or float16 of any shape.
    """
    reciprocal = np.float32(1) / np.float32(fmt.max_finite)
    return encode_e8m0_rp(as_float32(amax, "amax") * reciprocal)


def floor_scale(amax: NDArray[Any], fmt: ElementFormat = E4M3) -> NDArray[np.uint8]:
    """E8M0 bytes by OCP MX's FLOOR rule, for study only: values above ``max * 2^e`` will be clipped.

    ``floor(log2 amax)`` is the exponent field. What OCP leaves open is as in `rceil`: 0 gives byte 0, Inf
    254, NaN 255.

    :param amax: non-negative float32, bfloat16 or float16 of any shape.
    """
    values = as_float32(amax, "amax")
    field = (values.view(np.uint32) >> np.uint32(23)).astype(np.int32) & 0xFF
    byte = np.where(np.isinf(values), 254, np.maximum(field - fmt.max_exponent, 0))
    return np.where(np.isnan(values), 255, byte).astype(np.uint8)


def scale_rule(rule: Rule) -> Callable[..., NDArray[np.uint8]]:
    """`rceil` or `floor_scale` by name.

    :raises ValueError: for another name.
    """
    rules: dict[str, Callable[..., NDArray[np.uint8]]] = {"rceil": rceil, "floor": floor_scale}
    if rule not in rules:
        raise ValueError(f"rule must be 'rceil' or 'floor', got {rule!r}")
    return rules[rule]


def exponent_of(scale: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The FP32 exponent addend of E8M0 bytes, ``byte - 127``, of any shape; NaN for byte 255."""
    return np.where(scale == 255, np.float32(np.nan), scale.astype(np.float32) - np.float32(127))


def token_amax(x: NDArray[Any]) -> NDArray[np.float32]:
    """``max_d |x[t, h, d]|`` of each token: float32 ``(T, H)``; Inf or NaN where the token is not finite.

    The maximum is taken of the magnitudes as integers, which orders finite < Inf < NaN.

    :param x: float32, bfloat16 or float16 ``(T, H, D)``.
    """
    width = np.dtype(f"u{x.dtype.itemsize}")
    magnitude = width.type((1 << (8 * x.dtype.itemsize - 1)) - 1)
    largest = np.empty(x.shape[:2], width)
    for part in _token_chunks(x):
        np.max(x[part].view(width) & magnitude, axis=-1, out=largest[part])
    return largest.view(x.dtype).astype(np.float32)


def block_starts(cu_seqlens: NDArray[np.int64], block: int = BLOCK) -> NDArray[np.int64]:
    """First token of every block of every document, in order: int64, ascending."""
    blocks = -(-np.diff(cu_seqlens) // block)
    first_block = np.cumsum(blocks) - blocks
    within = np.arange(blocks.sum()) - np.repeat(first_block, blocks)
    starts: NDArray[np.int64] = np.repeat(cu_seqlens[:-1], blocks) + block * within
    return starts


def block_amax(x: NDArray[Any], cu_seqlens: Any, block: int) -> NDArray[np.float32]:
    """Largest magnitude of each token's block, over its finite tokens; see Note [Token blocks].

    :param x: float32, bfloat16 or float16 ``(T, H, D)``.
    :param block: tokens per block, 1 or 32.
    :returns: float32 ``(T, H)``; 0 for blocks without a finite token, and for padding.
    """
    cu = _check(x, cu_seqlens, block)
    finite = token_amax(x[: cu[-1]])
    finite[~np.isfinite(finite)] = 0
    out = np.zeros(x.shape[:2], np.float32)
    out[: cu[-1]] = _over_blocks(np.maximum, finite, cu, block)
    return out


def quantize_tokens(x: NDArray[Any], cu_seqlens: Any, block: int, rule: Rule = "rceil") -> Quantized:
    """Quantize to E4M3 under token-block scales. See Note [Token blocks].

    Element: ``E4M3(x * 2^-e)``; the product is exact wherever the result is not zero.

    :param x: float32, bfloat16 or float16 ``(T, H, D)``.
    :param cu_seqlens: integers ``(documents + 1,)``.
    :param block: tokens per block, 1 or 32.
    :param rule: the contract's ``"rceil"``, or ``"floor"`` for study.
    :raises TypeError: for other dtypes (float64 would be rounded twice).
    :raises ValueError: for other shapes, blocks and rules.
    """
    scale_of = scale_rule(rule)
    cu = _check(x, cu_seqlens, block)
    tokens = int(cu[-1])
    payload, scale = np.zeros(x.shape, np.uint8), np.zeros(x.shape[:2], np.uint8)
    amax = token_amax(x[:tokens])
    lost = ~np.isfinite(amax)
    any_lost = bool(lost.any())
    amax[lost] = 0
    byte = scale_of(_over_blocks(np.maximum, amax, cu, block))
    factor = decode_e8m0(np.uint8(254) - byte)[..., None]
    with np.errstate(invalid="ignore", over="ignore"):  # in tokens that are not finite, which are zeroed below
        for part in _token_chunks(x[:tokens]):
            values = _widen(x[part])
            values *= factor[part]
            encode(values, E4M3, out=payload[part])
    if any_lost:
        payload[:tokens][lost] = 0
        byte[_over_blocks(np.logical_or, lost, cu, block)] = 255
    scale[:tokens] = byte
    return Quantized(payload, scale)


def dequantize_tokens(quantized: Quantized) -> NDArray[np.float32]:
    """``payload * 2^(byte - 127)`` as float32 ``(T, H, D)``: exact; NaN for tokens with byte 255.

    A token whose amax lies within half a unit of 2^128 rounds up to it, which is Inf in float32.
    """
    with np.errstate(over="ignore"):
        return decode(quantized.payload, E4M3) * decode_e8m0(quantized.scale)[..., None]


def tile_amax(x: NDArray[np.float32], tile: int = BLOCK) -> NDArray[np.float32]:
    """Largest finite magnitude of each square tile of computed matrices (P, dS).

    :param x: float32 ``(..., M, N)``; elements past a partial last tile count as 0.
    :returns: float32 ``(..., ceil(M / tile), ceil(N / tile))``.
    """
    *batch, m, n = x.shape
    rows, columns = -(-m // tile), -(-n // tile)
    magnitude = np.abs(x)
    if (rows * tile, columns * tile) != (m, n):
        whole = np.zeros((*batch, rows * tile, columns * tile), np.float32)
        whole[..., :m, :n] = magnitude
        magnitude = whole

    def largest() -> NDArray[np.float32]:
        by_row = magnitude.reshape(*batch, rows, tile, columns * tile).max(axis=-2)
        out: NDArray[np.float32] = by_row.reshape(*batch, rows, columns, tile).max(axis=-1)
        return out

    amax = largest()
    if not np.isfinite(amax).all():
        magnitude[~np.isfinite(magnitude)] = 0
        amax = largest()
    return amax


# Study-only schemes. Each returns decoded float32 (T, H, D): what a tensor core would multiply. Non-finite
# values follow the contract: their block has scale byte 255 and decodes to NaN. Padding decodes to 0.


def fake_quantize_channels(
    x: NDArray[Any], cu_seqlens: Any, fmt: ElementFormat = E4M3, rule: Rule = "rceil"
) -> NDArray[np.float32]:
    """One E8M0 per 32 channels of a token: OCP MX along the channels, what others use for QK^T.

    :raises ValueError: unless D is a multiple of 32.
    """
    return _fake_quantize(x, cu_seqlens, 1, BLOCK, fmt, rule)


def fake_quantize_token_columns(
    x: NDArray[Any], cu_seqlens: Any, fmt: ElementFormat = E4M3, rule: Rule = "rceil"
) -> NDArray[np.float32]:
    """One E8M0 per channel and 32 tokens of a document: OCP MX along the tokens, what others use for PV.
    Leaks."""
    return _fake_quantize(x, cu_seqlens, BLOCK, 1, fmt, rule)


def fake_quantize_tiles(
    x: NDArray[Any], cu_seqlens: Any, fmt: ElementFormat = E4M3, rule: Rule = "rceil"
) -> NDArray[np.float32]:
    """One E8M0 per 32 tokens of a document and 32 channels. Leaks.

    :raises ValueError: unless D is a multiple of 32.
    """
    return _fake_quantize(x, cu_seqlens, BLOCK, BLOCK, fmt, rule)


def fake_quantize_tensor(
    x: NDArray[Any], cu_seqlens: Any, fmt: ElementFormat = E4M3, rule: Rule = "rceil"
) -> NDArray[np.float32]:
    """One float32 scale ``s = fl(amax / max)`` for all documents ("current scaling"): ``fl(s * E4M3(fl(x /
    s)))``. Leaks.

    ``rule`` is taken so that all schemes are called alike; a float32 scale is not rounded to a power of two.
    """
    cu = _check(x, cu_seqlens, 1)
    out = np.zeros(x.shape, np.float32)
    values = as_float32(x[: cu[-1]], "x")
    finite = np.isfinite(values)
    scale = np.max(np.abs(values), initial=0, where=finite) / np.float32(fmt.max_finite)
    if not finite.all():
        out[: cu[-1]] = np.nan
    elif scale > 0:
        out[: cu[-1]] = round_to(values / scale, fmt) * scale
    return out


def _fake_quantize(
    x: NDArray[Any], cu_seqlens: Any, tokens: int, channels: int, fmt: ElementFormat, rule: Rule
) -> NDArray[np.float32]:
    """Blocks of ``tokens`` x ``channels`` elements of a head, document-local along tokens."""
    scale_of = scale_rule(rule)
    cu = _check(x, cu_seqlens, tokens)
    heads, dim = x.shape[1:]
    if dim % channels:
        raise ValueError(f"x must have a head dimension that is a multiple of {channels}, got shape {x.shape}")
    out = np.zeros(x.shape, np.float32)
    values = as_float32(x[: cu[-1]], "x")
    blocks = values.reshape(len(values), heads, dim // channels, channels)
    amax = _over_blocks(np.maximum, np.abs(blocks).max(axis=-1), cu, tokens)
    byte = scale_of(np.where(np.isfinite(amax), amax, np.float32(np.nan)), fmt)
    factor = decode_e8m0(np.where(byte == 255, byte, np.uint8(254) - byte))
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = round_to(blocks * factor[..., None], fmt) * decode_e8m0(byte)[..., None]
    out[: cu[-1]] = rounded.reshape(values.shape)
    return out


def _over_blocks(reduce: np.ufunc, x: NDArray[Any], cu: NDArray[np.int64], block: int) -> NDArray[Any]:
    """``x`` ``(cu[-1], ...)`` reduced over each token block and repeated for each token of the block."""
    if block == 1 or not len(x):
        return x
    starts = block_starts(cu, block)
    reduced: NDArray[Any] = reduce.reduceat(x, starts, axis=0)
    return np.repeat(reduced, np.diff(starts, append=len(x)), axis=0)


def _check(x: Any, cu_seqlens: Any, block: int) -> NDArray[np.int64]:
    """``cu_seqlens`` as int64, after checking all three."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"x must be a NumPy array (T, H, D), got {type(x).__name__}")
    if x.ndim != 3 or 0 in x.shape[1:]:
        raise ValueError(f"x must have shape (T, H, D) with H, D >= 1, got {x.shape}")
    as_float32(x[:0], "x")
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS} tokens, got {block!r}")
    return validate_cu_seqlens(cu_seqlens, x.shape[0])


def _token_chunks(x: NDArray[Any]) -> Iterator[slice]:
    """Ranges of tokens of about `CHUNK` elements, so that every temporary stays in cache."""
    step = max(1, CHUNK // (x.shape[1] * x.shape[2]))
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def _widen(x: NDArray[Any]) -> NDArray[np.float32]:
    """A new float32 array of the same values; bfloat16 is the upper half of float32, and shifting is 3x the
    cast."""
    if x.dtype == bfloat16:
        return np.left_shift(x.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return x.astype(np.float32)
