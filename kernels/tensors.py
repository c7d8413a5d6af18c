"""Checks of the tensors that the kernels read, and their pointers.

A tensor of tokens may have any token and head stride; its channels must be adjacent. Errors name the argument.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flamia.kernels import structs

ELEMENTS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
"""Names of element types in the registry, by the name of the PyTorch dtype."""

MAX_TOKENS = 2**31 - 1
"""Packed tokens of one call: token indices are 32 bits on the device, byte offsets 64."""

TILE = 128
"""Tokens of a tile."""

MAX_CLEARED = 3
"""Outputs of a kind whose padding one launch clears: the arrays of `structs.PADDING`."""

MAX_SOFTMAX_SCALE = float(np.finfo(np.float32).max) / 2
"""So that its product with log2 e is a finite FP32 number."""


def check_softmax_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale as a Python float, ``1 / sqrt(head_dim)`` by default.

    :raises TypeError, ValueError: if it is no number from 0 to `MAX_SOFTMAX_SCALE`.
    """
    if softmax_scale is None:
        return float(head_dim**-0.5)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"softmax_scale must be a number, got {softmax_scale!r}")
    if isinstance(softmax_scale, np.generic):
        softmax_scale = softmax_scale.item()
    if not 0 <= softmax_scale <= MAX_SOFTMAX_SCALE:
        raise ValueError(f"softmax_scale must be from 0 to {MAX_SOFTMAX_SCALE:.4g}, got {softmax_scale}")
    return float(softmax_scale)


def softmax_constant(softmax_scale: float) -> np.float32:
    """``c = fl(softmax_scale * log2 e)``: the product in float64, rounded once."""
    return np.float32(softmax_scale * math.log2(math.e))


def check_tokens(name: str, x: Any, heads: int | None = None, like: Any = None) -> str:
    """Check a ``(T, H, D)`` tensor and return the name of its element type.

    :param heads: the number of heads it must have.
    :param like: a tensor whose T, D, dtype and device it must share.
    :raises TypeError, ValueError: naming the argument.
    """
    element = ELEMENTS.get(str(getattr(x, "dtype", None)))
    if element is None or not hasattr(x, "data_ptr"):
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name} must be a torch tensor of {sorted(ELEMENTS)}, got {got}")
    if x.device.type != "cuda":
        raise ValueError(f"{name} must be on a CUDA device, got {x.device}")
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"{name} must have shape (T, H, D) with H >= 1, got {tuple(x.shape)}")
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"{name} must have at most {MAX_TOKENS} tokens, got {x.shape[0]}")
    if x.shape[2] == 0 or x.shape[2] % 32 or x.shape[2] > 256:
        raise ValueError(f"{name} must have a head_dim that is a multiple of 32 up to 256, got {x.shape[2]}")
    if x.stride(2) != 1 and x.numel():
        raise ValueError(f"{name} must have adjacent channels (last stride 1), got strides {x.stride()}")
    if heads is not None and x.shape[1] != heads:
        raise ValueError(f"{name} must have {heads} heads, got {x.shape[1]}")
    if like is not None:
        if x.dtype != like.dtype:
            raise TypeError(f"{name} must have dtype {like.dtype}, got {x.dtype}")
        if (x.shape[0], x.shape[2]) != (like.shape[0], like.shape[2]):
            raise ValueError(
                f"{name} must have {like.shape[0]} tokens and head_dim {like.shape[2]}, got shape {tuple(x.shape)}"
            )
        if x.device != like.device:
            raise ValueError(f"{name} must be on {like.device}, got {x.device}")
    return element


def check_rows(name: str, x: Any, heads: int, num_tokens: int, device: Any) -> None:
    """Check a float32 ``(H, T)`` tensor with adjacent tokens.

    :raises TypeError, ValueError: naming the argument.
    """
    if str(getattr(x, "dtype", None)) != "torch.float32" or not hasattr(x, "data_ptr"):
        raise TypeError(f"{name} must be a float32 torch tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if tuple(x.shape) != (heads, num_tokens):
        raise ValueError(f"{name} must have shape {(heads, num_tokens)}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name} must have adjacent tokens (stride 1 in its last dimension), got strides {x.stride()}")


def check_cleared(name: str, x: Any, num_tokens: int, device: Any) -> None:
    """Check a ``(T, H, D)`` output whose padding rows a launch clears, or None, which it skips.

    :raises TypeError, ValueError: naming the argument.
    """
    if x is None:
        return
    if str(getattr(x, "dtype", None)) not in ELEMENTS or not hasattr(x, "data_ptr"):
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name} must be a torch tensor of {sorted(ELEMENTS)}, got {got}")
    if x.ndim != 3 or x.shape[0] != num_tokens:
        raise ValueError(f"{name} must have shape ({num_tokens}, H, D), got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if x.stride(2) != 1 and x.numel():
        raise ValueError(f"{name} must have adjacent channels (last stride 1), got strides {x.stride()}")


def tokens_struct(x: Any) -> dict[str, int]:
    """Fields of `structs.TOKENS` for a ``(T, H, D)`` tensor."""
    return {"data": x.data_ptr(), "token_stride": x.stride(0), "head_stride": x.stride(1)}


def pointer(x: Any) -> int:
    """Device address of a tensor; 0 for None."""
    return 0 if x is None else int(x.data_ptr())


def padding_struct(num_tokens: int, rows: tuple[Any, ...], values: tuple[tuple[Any, float], ...] = ()) -> Any:
    """A `structs.PADDING`: outputs whose rows past the last document are cleared on the way.

    :param rows: up to three ``(T, H, D)`` tensors, or None; they become 0.
    :param values: up to three pairs of a float32 ``(H, T)`` tensor, or None, and the value it gets.
    :raises ValueError: for more of either.
    """
    cleared = []
    for x in rows:
        if x is None:
            continue
        size = x.element_size()
        fields = {"data": x.data_ptr(), "token_stride": x.stride(0) * size, "head_stride": x.stride(1) * size}
        cleared.append({"rows": fields, "heads": x.shape[1], "row_bytes": x.shape[2] * size})
    filled = [
        {"data": x.data_ptr(), "head_stride": x.stride(0), "heads": x.shape[0], "value": value}
        for x, value in values
        if x is not None
    ]
    if max(len(cleared), len(filled)) > MAX_CLEARED:
        raise ValueError(f"a launch clears at most {MAX_CLEARED} outputs of a kind, got {len(cleared)}, {len(filled)}")
    return structs.fill(structs.PADDING, {"rows": cleared, "values": filled, "num_tokens": num_tokens})[0]
