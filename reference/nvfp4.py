"""NVFP4: E2M1 elements under one UE4M3 scale per 16 channels of a token, for contractions over channels.

Note [NVFP4]
~~~~~~~~~~~~
TransformerEngine's recipe (``common/cast/nvfp4/core_nvfp4.cuh``) has two scales: UE4M3 per 16 elements, and
one float32 per tensor, taken from the tensor's current maximum. That second one would let a later token
change an earlier one, so here it is a constant per head. TransformerEngine stores ``code * scale`` for ``x *
S_enc`` with ``S_enc = fl(2688 / amax_tensor)``, 2688 = 448 * 6. Our *head scale* h stands for its decoding
factor, ``amax_tensor / 2688``::

    S_enc = min(fl(1 / h), FLT_MAX)
    S_dec = fl(1 / S_enc)
    m     = fl(S_enc * fl(1 / 6))
    scale = UE4M3(min(fl(amax * m), FLT_MAX))            amax over the 16 channels
    inv   = min(fl(1 / fl(scale * S_dec)), FLT_MAX)      scale = 0 gives FLT_MAX
    code  = E2M1(fl(x * inv))
    value = code * scale * S_dec

every step in binary32 with IEEE division, in this order: products of bfloat16 inputs often land exactly on a
tie of E2M1, and then the last bit of ``inv`` decides. For a power of two h >= 2^-127, ``S_dec = h`` exactly;
for h = 1 there is nothing else to apply: ``value = code * scale``. Magnitudes up to 2688 h are representable,
larger ones saturate. A block whose scale underflows to 0 has codes (of saturated products) but decodes to zeros.

NaN lives in the scale: a token that holds a NaN or an Inf gets payload 0 and all its scale bytes 0x7F (NaN).
Padding rows get payload 0 and scale 0. Blocks lie within a token, so nothing leaks.

Note [Hadamard rotation]
~~~~~~~~~~~~~~~~~~~~~~~~
Rotating the channels of q and k by the same orthonormal R leaves q.k unchanged and spreads an outlier channel
over all blocks: ``y = H (s * x) / sqrt(n)``, n the largest power of two that divides D, H the Sylvester
matrix of order n (one diagonal block per n channels if n < D), s fixed signs. The signs are Legendre symbols,
``s_d = ((d + 1) / 257)`` for channel d < 256: +1 where d + 1 is a square modulo the prime 257. (A row of H
itself would only permute the outputs.)

Order in binary32: multiply by s (exact); for stride 1, 2, 4, ..., n / 2, each pair ``(a, b)`` of channels
that lie that far apart becomes ``(fl(a + b), fl(a - b))``; last, multiply by ``fl(1 / sqrt(n))``. The result
is quantized as it is, without a rounding to bfloat16 in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference.documents import validate_cu_seqlens
from flamia.reference.formats import CHUNK, E2M1, as_float32, decode, decode_ue4m3, encode, encode_ue4m3

BLOCK = 16
"""Channels per scale."""

SCALE_NAN = np.uint8(0x7F)
FLT_MAX = np.float32(np.finfo(np.float32).max)

ROTATION_SIGNS = np.array([1 if pow(d + 1, 128, 257) == 1 else -1 for d in range(256)], np.float32)
"""Signs s of Note [Hadamard rotation], by Euler's criterion; float32 ``(256,)``, the first D are used."""
ROTATION_SIGNS.flags.writeable = False


@dataclass(frozen=True)
class QuantizedNVFP4:
    """A packed tensor in NVFP4. See Note [NVFP4].

    :param payload: uint8 ``(T, H, D)``, E2M1 codes, one per byte.
    :param scale: uint8 ``(T, H, D // 16)``, UE4M3 bytes.
    :param head_scale: float32 ``(H,)``, S_dec.
    """

    payload: NDArray[np.uint8]
    scale: NDArray[np.uint8]
    head_scale: NDArray[np.float32]


def quantize_nvfp4(x: NDArray[Any], cu_seqlens: Any, head_scale: Any = 1.0, hadamard: bool = False) -> QuantizedNVFP4:
    """Quantize to NVFP4 with constant head scales. See Note [NVFP4].

    :param x: float32, bfloat16 or float16 ``(T, H, D)``, D a multiple of 16.
    :param cu_seqlens: integers ``(documents + 1,)``.
    :param head_scale: h, one number or ``(H,)``; positive, finite in float32. Constants, never statistics of
        x.
    :param hadamard: first rotate the channels, see Note [Hadamard rotation].
    :raises TypeError: for other dtypes of x.
    :raises ValueError: for other shapes, head scales and boundaries.
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(f"x must be a NumPy array (T, H, D), got {type(x).__name__}")
    as_float32(x[:0], "x")
    if x.ndim != 3 or x.shape[1] == 0 or x.shape[2] == 0 or x.shape[2] % BLOCK:
        raise ValueError(f"x must have shape (T, H, D), H >= 1 and D a multiple of {BLOCK}, got {x.shape}")
    cu = validate_cu_seqlens(cu_seqlens, x.shape[0])
    total, heads, dim = x.shape
    encode_scale, decode_scale = head_scales(head_scale, heads)
    payload = np.zeros(x.shape, np.uint8)
    scale = np.zeros((total, heads, dim // BLOCK), np.uint8)
    step = max(1, CHUNK // (heads * dim))
    for start in range(0, int(cu[-1]), step):
        part = slice(start, min(start + step, int(cu[-1])))
        values = as_float32(x[part], "x")
        if hadamard:
            values = rotate_channels(values)
        payload[part], scale[part] = _quantize_chunk(values, encode_scale, decode_scale)
    return QuantizedNVFP4(payload, scale, decode_scale)


def head_scales(head_scale: Any, heads: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``(S_enc, S_dec)`` of Note [NVFP4], float32 ``(H,)`` each.

    :raises ValueError: unless every scale is positive and finite in float32, and there is one or one per
        head.
    """
    with np.errstate(over="ignore"):
        h = np.asarray(head_scale).astype(np.float32)
        if h.shape not in ((), (heads,)):
            raise ValueError(f"head_scale must be one number or have shape ({heads},), got shape {h.shape}")
        if not bool(((h > 0) & np.isfinite(h)).all()):
            raise ValueError(f"head_scale must be positive and finite in float32, got {head_scale}")
        encode_scale = np.minimum(np.float32(1) / np.broadcast_to(h, (heads,)), FLT_MAX)
        return encode_scale, np.float32(1) / encode_scale


def _quantize_chunk(
    x: NDArray[np.float32], encode_scale: NDArray[np.float32], decode_scale: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Note [NVFP4] for some tokens ``(t, H, D)``: payload and scale."""
    blocks = x.reshape(*x.shape[:2], -1, BLOCK)
    m = encode_scale * (np.float32(1) / np.float32(6))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        amax = np.abs(blocks).max(axis=-1)  # NaN and Inf stay
        lost = ~np.isfinite(amax).all(axis=-1)
        scale = encode_ue4m3(np.minimum(amax * m[:, None], FLT_MAX))
        inv = np.minimum(np.float32(1) / (decode_ue4m3(scale) * decode_scale[:, None]), FLT_MAX)
        payload = encode(blocks * inv[..., None], E2M1).reshape(x.shape)
    payload[lost] = 0
    scale[lost] = SCALE_NAN
    return payload, scale


def decode_codes(payload: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of E2M1 codes without their scales: float32 of the same shape."""
    return decode(payload, E2M1)


def decode_nvfp4(quantized: QuantizedNVFP4) -> NDArray[np.float32]:
    """``fl(code * scale * S_dec)`` as float32 ``(T, H, D)``, one rounding (none for a power of two); NaN for
    byte 0x7F."""
    factor = np.repeat(decode_ue4m3(quantized.scale), BLOCK, axis=-1)
    return decode_codes(quantized.payload) * factor * quantized.head_scale[:, None]


def rotate_channels(x: NDArray[Any]) -> NDArray[np.float32]:
    """Rotate the channels of every token: float32 of the shape of ``x``. See Note [Hadamard rotation].

    :param x: float32, bfloat16 or float16 ``(..., D)``, D at most 256.
    :raises ValueError: if D is 0 or above 256.
    """
    dim = x.shape[-1]
    if not 0 < dim <= ROTATION_SIGNS.size:
        raise ValueError(f"x must have 1 to {ROTATION_SIGNS.size} channels to be rotated, got shape {x.shape}")
    order = dim & -dim
    y = as_float32(x, "x") * ROTATION_SIGNS[:dim]
    stride = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while stride < order:
            pairs = y.reshape(*x.shape[:-1], dim // (2 * stride), 2, stride)
            y = np.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), axis=-2)
            stride *= 2
        out: NDArray[np.float32] = y.reshape(x.shape) * np.float32(1 / math.sqrt(order))
    return out
