"""Parameter structs of the kernels, as NumPy dtypes of the same layout as the structs in the sources.

A kernel takes one struct by value. Its size is given to the source as ``PARAMS_BYTES`` and checked there by a
static assert; fields run from wide to narrow, so that neither side pads between them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

POINTER, STRIDE, COUNT, REAL = np.uint64, np.int64, np.int32, np.float32

JOBS = 3
"""Tensors that one launch of the quantizer takes: q, k and v."""

TOKENS = np.dtype([("data", POINTER), ("token_stride", STRIDE), ("head_stride", STRIDE)], align=True)
"""A strided tensor ``(T, H, D)``; strides in elements, channels adjacent. ``Tokens`` in ``common/tokens.cuh``."""

CLEAR_ROWS = np.dtype(
    [("rows", TOKENS), ("heads", COUNT), ("row_bytes", COUNT)],
    align=True,
)
"""A ``(T, H, D)`` output whose padding rows become 0; strides in bytes. ``ClearRows`` in ``common/padding.cuh``."""

CLEAR_VALUES = np.dtype([("data", POINTER), ("head_stride", STRIDE), ("heads", COUNT), ("value", REAL)], align=True)
"""A float32 ``(H, T)`` output whose padding entries become ``value``. ``ClearValues`` in ``common/padding.cuh``."""

PADDING = np.dtype([("rows", CLEAR_ROWS, 3), ("values", CLEAR_VALUES, 3), ("num_tokens", STRIDE)], align=True)
"""What a launch clears on the way; null pointers are skipped. ``Padding`` in ``common/padding.cuh``."""

SCHEDULE = np.dtype(
    [
        ("cu_seqlens", POINTER),
        ("tiles", POINTER),
        ("tile_offsets", POINTER),
        ("forward_items", POINTER),
        ("backward_items", POINTER),
        ("status", POINTER),
        ("workspace", POINTER),
        ("num_tokens", STRIDE),
        ("max_length", STRIDE),
        ("workspace_stride", STRIDE),
        ("num_documents", COUNT),
        ("wide", COUNT),
        ("num_q_heads", COUNT),
        ("num_kv_heads", COUNT),
        ("causal", COUNT),
        ("key_bits", COUNT),
    ],
    align=True,
)

JOB = np.dtype(
    [
        ("source", TOKENS),
        ("payload", POINTER),
        ("scales", POINTER),
        ("exponents", POINTER),
        ("block_payload", POINTER),
        ("block_scales", POINTER),
        ("block_token_scales", POINTER),
        ("nvfp4_payload", POINTER),
        ("nvfp4_scales", POINTER),
        ("nvfp4_head_scales", POINTER),
        ("wide", POINTER),
        ("factors", POINTER),
        ("heads", COUNT),
        ("hadamard", COUNT),
    ],
    align=True,
)
"""One tensor to quantize and where to; null pointers are skipped."""

QUANTIZE = np.dtype(
    [
        ("jobs", JOB, JOBS),
        ("padding", PADDING),
        ("tiles", POINTER),
        ("status", POINTER),
        ("max_tiles", STRIDE),
        ("total_heads", COUNT),
        ("halves", COUNT),
    ],
    align=True,
)

ROW_PASS = np.dtype(
    [
        ("dout", TOKENS),
        ("out", TOKENS),
        ("row_sum", POINTER),
        ("row_sum_stride", STRIDE),
        ("row_max", POINTER),
        ("row_max_stride", STRIDE),
        ("payload", POINTER),
        ("scales", POINTER),
        ("token_scales", POINTER),
        ("delta", POINTER),
        ("top", POINTER),
        ("wide", POINTER),
        ("padding", PADDING),
        ("tiles", POINTER),
        ("status", POINTER),
        ("max_tiles", STRIDE),
        ("heads", COUNT),
        ("unused", COUNT),
    ],
    align=True,
)

EPILOGUE = np.dtype(
    [
        ("partial", POINTER),
        ("exponents", POINTER),
        ("out", TOKENS),
        ("padding", PADDING),
        ("tiles", POINTER),
        ("status", POINTER),
        ("max_tiles", STRIDE),
        ("heads", COUNT),
        ("group", COUNT),
        ("head_dim", COUNT),
        ("unused", COUNT),
    ],
    align=True,
)

DECODE = np.dtype(
    [
        ("payload", POINTER),
        ("scales", POINTER),
        ("head_scales", POINTER),
        ("out", TOKENS),
        ("tiles", POINTER),
        ("status", POINTER),
        ("max_tiles", STRIDE),
        ("heads", COUNT),
        ("head_dim", COUNT),
    ],
    align=True,
)

HOPPER_FACTORS = np.dtype(
    [
        *((name, POINTER) for name in ("k_exponents", "v_exponents", "factors", "tiles", "status")),
        ("max_tiles", STRIDE),
        ("kv_heads", COUNT),
        ("unused", COUNT),
    ],
    align=True,
)

PACK_JOB = np.dtype(
    [("source", TOKENS), ("wide", POINTER), ("exponents", POINTER), ("heads", COUNT), ("unused", COUNT)], align=True
)
"""One unscaled tensor to lay out."""

HOPPER_PACK = np.dtype(
    [
        ("jobs", PACK_JOB, JOBS),
        ("padding", PADDING),
        ("tiles", POINTER),
        ("status", POINTER),
        ("max_tiles", STRIDE),
        ("total_heads", COUNT),
        ("unused", COUNT),
    ],
    align=True,
)

HOPPER_FORWARD = np.dtype(
    [
        ("q", POINTER),
        ("q_exponents", POINTER),
        ("k", POINTER),
        ("factors", POINTER),
        ("v", POINTER),
        ("out", TOKENS),
        ("lse", POINTER),
        ("m", POINTER),
        ("l", POINTER),
        ("tiles", POINTER),
        ("tile_offsets", POINTER),
        ("items", POINTER),
        ("status", POINTER),
        ("ticket", POINTER),
        ("max_tiles", STRIDE),
        ("num_tokens", STRIDE),
        ("c", REAL),
        ("c_exponent", COUNT),
        ("c_usual", COUNT),
        ("group", COUNT),
        ("causal", COUNT),
        ("element_bytes", COUNT),
        ("half", COUNT),
        ("q_heads", COUNT),
    ],
    align=True,
)

FORMATS = np.dtype(
    [("x", POINTER), ("out", POINTER), ("count", STRIDE), ("conversion", COUNT), ("unused", COUNT)], align=True
)

HOPPER_BACKWARD = np.dtype(
    [
        *[
            (name, POINTER)
            for name in (
                *("q", "k", "v", "dout", "q_wide", "dout_wide"),
                *("q_exponents", "k_exponents", "v_exponents", "dout_scales", "delta", "top"),
            )
        ],
        ("first", TOKENS),
        ("second", TOKENS),
        *[(name, POINTER) for name in ("q_columns", "k_columns", "scratch", "totals")],
        *[(name, POINTER) for name in ("tiles", "tile_offsets", "items", "status", "ticket")],
        ("max_tiles", STRIDE),
        ("group", COUNT),
        ("causal", COUNT),
        ("c", REAL),
        ("softmax_scale", REAL),
        ("c_usual", COUNT),
        ("kv_heads", COUNT),
        ("x", POINTER),
        ("pairs", STRIDE),
        ("first_head", COUNT),
        ("last_head", COUNT),
        ("longest", COUNT),
        ("unused", COUNT),
    ],
    align=True,
)
"""The kernels of the Hopper backward; ``BackwardParams`` in ``hopper/backward.cuh``."""


BLACKWELL_FORWARD = np.dtype(
    [
        *((name, POINTER) for name in ("q", "q_scales", "k", "k_scales", "v", "v_scales", "v1", "v1_scales")),
        *((name, POINTER) for name in ("out", "lse", "m", "l", "tiles", "tile_offsets", "items", "status", "ticket")),
        *((name, POINTER) for name in ("stage_p", "stage_top")),
        *((name, STRIDE) for name in ("max_tiles", "num_tokens", "out_token_stride", "out_head_stride")),
        *((name, REAL) for name in ("c", "inverse_c", "score_factor")),
        *((name, COUNT) for name in ("usual", "group", "causal", "element", "stage_keys")),
    ],
    align=True,
)

BLACKWELL_BACKWARD = np.dtype(
    [
        *((name, POINTER) for name in ("q", "q_scales", "q_tokens", "q_exponents")),
        *((name, POINTER) for name in ("k", "k_scales", "k_tokens", "k_exponents")),
        *((name, POINTER) for name in ("v", "v_scales", "v1", "v1_scales")),
        *((name, POINTER) for name in ("dout", "dout_scales", "dout_token_scales", "delta", "top")),
        ("first", TOKENS),
        ("second", TOKENS),
        *((name, POINTER) for name in ("totals", "x", "x_scales", "tiles", "tile_offsets", "items", "status")),
        ("ticket", POINTER),
        *((name, POINTER) for name in ("stage_p", "stage_p_scale", "stage_x", "stage_x_scale")),
        ("max_tiles", STRIDE),
        ("pairs", STRIDE),
        *((name, REAL) for name in ("c", "largest_score", "score_factor", "softmax_scale")),
        *((name, COUNT) for name in ("usual", "group", "causal", "element", "num_items", "stage_tiles")),
        ("first_head", COUNT),
        ("last_head", COUNT),
        ("longest", COUNT),
        ("unused", COUNT),
    ],
    align=True,
)
"""The three kernels of the Blackwell backward; the strides of ``first`` and ``second`` are in bytes."""


def fill(dtype: np.dtype[Any], values: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """One struct, shape ``(1,)``: nested mappings and sequences fill nested structs and arrays; the rest is 0.

    :raises KeyError: for a name that the struct lacks.
    :raises ValueError: for more elements than an array has.
    """
    return np.frombuffer(_pack(dtype, values), dtype)


# The device may wait while the host fills these: assigning to NumPy records takes several times as long.


_CODES = {np.dtype(kind).str: code for kind, code in ((POINTER, "Q"), (STRIDE, "q"), (COUNT, "i"), (REAL, "f"))}


@cache
def _layout(dtype: np.dtype[Any]) -> tuple[struct.Struct, dict[str, tuple[np.dtype[Any], int] | None]]:
    """How all fields are packed at once, and by name, in their order, None for a number, or the struct whose bytes are
    packed, and how many of them.
    """
    form, end = "<", 0
    fields: dict[str, tuple[np.dtype[Any], int] | None] = {}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        element = kind.subdtype[0] if kind.subdtype else kind
        number = element.fields is None
        form += f"{offset - end}x" + (_CODES[kind.str] if number else f"{kind.itemsize}s")
        fields[name] = None if number else (element, kind.itemsize // element.itemsize)
        end = offset + kind.itemsize
    return struct.Struct(f"{form}{dtype.itemsize - end}x"), fields


def _pack(dtype: np.dtype[Any], values: Mapping[str, Any]) -> bytes:
    packer, fields = _layout(dtype)
    if not values.keys() <= fields.keys():
        raise KeyError(f"{sorted(values.keys() - fields.keys())} are no fields of the struct")
    parts = []
    for name, nested in fields.items():
        if nested is None:
            parts.append(values.get(name, 0))
        else:
            parts.append(_pack_structs(name, *nested, values.get(name, ())))
    return packer.pack(*parts)


def _pack_structs(name: str, dtype: np.dtype[Any], count: int, value: Any) -> bytes:
    elements = value if isinstance(value, (list, tuple)) else (value,)
    if len(elements) > count:
        raise ValueError(f"{name} must have at most {count} elements, got {len(elements)}")
    return b"".join(x.tobytes() if isinstance(x, np.void) else _pack(dtype, x) for x in elements)
