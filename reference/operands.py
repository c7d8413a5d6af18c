"""Operands: quantized tensors as the tiles of the engine read them.

`prepare` quantizes a packed tensor under one `Scaling`; `Operand.document` cuts one document and some heads out of it,
head-major and padded with zero tokens to whole 128-token tiles.

Note [Folded exponents]
~~~~~~~~~~~~~~~~~~~~~~~
A token scale (B=1) cannot be a hardware scale factor along tokens, so in a token contraction it is *folded*: the exact
power of two multiplies the operand that is computed on the fly (P or dS) and is undone on the output row. The exponent
of a token is ``scale byte - 127``; a non-finite token (byte 255) has the addend NaN. A token whose payload is all zero
has no exponent of its own, and byte 0 (2^-127) would push its row of dS below FP32: it counts as a token of maximum 1,
whose exponent is ``ceil(log2(1 / 448)) = -8``. So a zero-initialised projection receives its gradient. That rule is for
dS; where V1's exponents are folded into P (`probabilities.fold_values`), byte 0 of a zero token is -127.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference import nvfp4, scaling
from flamia.reference.documents import TILE, Document
from flamia.reference.formats import E2M1, E4M3, decode, decode_e8m0, decode_ue4m3
from flamia.reference.recipes import Recipe, Scaling

F32 = np.float32
ONE = F32(1.0)
ZERO_TOKEN_EXPONENT = F32(-8.0)

BFLOAT16_LARGEST = 255 / 128 * 2.0**127
"""The largest finite bfloat16 number."""
SATURATING_BYTE = 247
"""The smallest scale byte under which an E4M3 element may lie above: 448 * 2^119 does not, 256 * 2^120 does."""


def exp2_of(exponent: NDArray[Any], dtype: Any = np.float32) -> NDArray[Any]:
    """Exact ``2**exponent`` for integral float exponents; NaN stays NaN, -inf gives 0."""
    finite = np.isfinite(exponent)
    power = np.ldexp(np.ones((), dtype), np.where(finite, exponent, 0).astype(np.int32))
    return np.where(finite, power, np.where(np.isnan(exponent), np.nan, 0)).astype(dtype)


@dataclass(frozen=True)
class DocumentOperand:
    """One document and some heads of an operand, padded to ``Lp = 128 * tiles`` tokens.

    :param codes: float32 ``(H, Lp, D)``, the element values without their scales.
    :param scale: E8M0 bytes ``(H, Lp)`` for token blocks, UE4M3 bytes ``(H, Lp, D // 16)`` for NVFP4, None without
        scales.
    :param factor: the constant head scale of NVFP4; 1 elsewhere.
    """

    scaling: Scaling
    codes: NDArray[np.float32]
    scale: NDArray[np.uint8] | None
    factor: np.float32 = ONE

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Decoded float64 ``(H, Lp, D)`` but for `factor`; exact."""
        wide: NDArray[np.float64] = self.codes.astype(np.float64)
        if self.scale is None:
            return wide
        if self.scaling is Scaling.NVFP4:
            block_factor = decode_ue4m3(self.scale).astype(np.float64)
            return wide * np.repeat(block_factor, nvfp4.BLOCK, axis=-1)
        return wide * decode_e8m0(self.scale).astype(np.float64)[..., None]

    @cached_property
    def found_values(self) -> NDArray[np.float64]:
        """`values` as Note [Own exponents] multiplies them: finite in bfloat16, and 0 in tokens whose scale is NaN."""
        if self.scale is None or not (self.scale >= SATURATING_BYTE).any():
            return self.values
        found = np.where((self.scale == 255)[..., None], 0.0, self.values)
        return np.clip(found, -BFLOAT16_LARGEST, BFLOAT16_LARGEST, out=found)

    @cached_property
    def wide_codes(self) -> NDArray[np.float64]:
        """``codes`` in float64, for exact products."""
        return self.codes.astype(np.float64)

    @cached_property
    def exponents(self) -> NDArray[np.float32]:
        """Token exponents ``(H, Lp)`` for folding, see Note [Folded exponents]; zeros where nothing is folded."""
        if self.scale is None or self.scaling is Scaling.NVFP4:
            return np.zeros(self.codes.shape[:2], F32)
        zero = ~self.codes.any(axis=-1) & (self.scale != 255) & (self.scaling is not Scaling.NONE)
        return np.where(zero, ZERO_TOKEN_EXPONENT, scaling.exponent_of(self.scale))


@dataclass(frozen=True)
class Operand:
    """A packed quantized tensor.

    :param payload: ``(T, H, D)``: uint8 codes, or the values themselves (bfloat16 for `Scaling.NONE`, decoded float32
        for the study-only scalings).
    :param scale: as in `DocumentOperand` with ``T`` first: ``(T, H)`` or ``(T, H, D // 16)``; None without scales.
    :param factor: as in `DocumentOperand`.
    """

    scaling: Scaling
    payload: NDArray[Any]
    scale: NDArray[np.uint8] | None = None
    factor: np.float32 = ONE

    def document(self, document: Document, heads: slice) -> DocumentOperand:
        """Cut out one document and a range of heads."""
        rows = slice(document.start, document.stop)
        payload = self.payload[rows, heads]
        if self.scaling is Scaling.NVFP4:
            values = decode(payload, E2M1)
        elif payload.dtype == np.uint8:
            values = decode(payload, E4M3)
        else:
            values = payload.astype(F32)
        scale = None if self.scale is None else _tiled(self.scale[rows, heads], document)
        return DocumentOperand(self.scaling, _tiled(values, document), scale, self.factor)

    @property
    def bits_per_token(self) -> float:
        """Stored bits per token and head, scales included (payloads packed, block scales counted once per block)."""
        return stored_bits(self.scaling, self.payload.shape[-1])


def stored_bits(scaling_: Scaling, head_dim: int) -> float:
    """Bits per token and head that an operand of ``head_dim`` channels occupies under ``scaling_``."""
    return {
        Scaling.NONE: 16.0 * head_dim + 8,
        Scaling.TOKEN: 8.0 * head_dim + 8,
        Scaling.TOKEN_BLOCK: 8.0 * head_dim + 8 / 32,
        Scaling.NVFP4: 4.0 * head_dim + 8 * head_dim / 16,
        Scaling.CHANNELS_1X32: 8.0 * head_dim + 8 * head_dim / 32,
        Scaling.TOKENS_1X32: 8.0 * head_dim + 8 * head_dim / 32,
        Scaling.TILE_32X32: 8.0 * head_dim + 8 * head_dim / 1024,
        Scaling.TENSOR: 8.0 * head_dim,
    }[scaling_]


def prepare(x: NDArray[Any], cu_seqlens: NDArray[np.int64], scaling_: Scaling, recipe: Recipe) -> Operand:
    """Quantize a packed ``(T, H, D)`` float32 or bfloat16 tensor under ``scaling_``."""
    if scaling_ is Scaling.NONE:
        tokens = slice(0, int(cu_seqlens[-1]))
        kept, byte = np.zeros(x.shape, bfloat16), np.zeros(x.shape[:2], np.uint8)
        kept[tokens] = x[tokens]
        lost = ~np.isfinite(scaling.token_amax(kept[tokens]))
        kept[tokens][lost] = 0
        byte[tokens] = np.where(lost, 255, 127)
        return Operand(scaling_, kept, byte)
    if scaling_ is Scaling.NVFP4:
        four = nvfp4.quantize_nvfp4(x, cu_seqlens, recipe.head_scale, recipe.hadamard)
        return Operand(scaling_, four.payload, four.scale, F32(four.head_scale[0]))
    if scaling_ in (Scaling.TOKEN, Scaling.TOKEN_BLOCK):
        eight = scaling.quantize_tokens(x, cu_seqlens, 1 if scaling_ is Scaling.TOKEN else 32, recipe.scale_rule)
        return Operand(scaling_, eight.payload, eight.scale)
    study = {
        Scaling.CHANNELS_1X32: scaling.fake_quantize_channels,
        Scaling.TOKENS_1X32: scaling.fake_quantize_token_columns,
        Scaling.TILE_32X32: scaling.fake_quantize_tiles,
        Scaling.TENSOR: scaling.fake_quantize_tensor,
    }[scaling_]
    return Operand(scaling_, study(x, cu_seqlens, rule=recipe.scale_rule))


def _tiled(x: NDArray[Any], document: Document) -> NDArray[Any]:
    """``(L, H, ...)`` to ``(H, 128 * tiles, ...)``, zero padded."""
    out = np.zeros((x.shape[1], document.tiles * TILE, *x.shape[2:]), x.dtype)
    out[:, : document.length] = np.moveaxis(x, 1, 0)
    return out
