"""Checks of `flamia.attention`: all that can be known before anything is computed, and without reading a GPU's memory.

What ``cu_seqlens`` holds is data: on the CPU the operator reads it and raises before it computes; on a GPU
`assert_documents` checks it there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flamia.reference.arguments import MAX_HEAD_DIM, MAX_SOFTMAX_SCALE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_unpack_dual: Any = forward_ad.unpack_dual  # untyped in some releases
BACKENDS = ("auto", "reference", "reference:blackwell", "reference:hopper", "cuda")


def check_call(
    q: object,
    k: object,
    v: object,
    cu_seqlens: object,
    max_seqlen: object,
    causal: object,
    softmax_scale: object,
    return_lse: object,
    backend: object,
) -> None:
    """Every rule of `flamia.attention` but those of ``recipe``."""
    check_tensors(q, k, v, packed=cu_seqlens is not None)
    assert isinstance(q, Tensor)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.device, "cu_seqlens")
    if max_seqlen is not None:
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt):
            raise TypeError(f"max_seqlen must be an int or None, got {type(max_seqlen).__name__}")
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen must be >= 0, got {max_seqlen}")
        if max_seqlen >= 2**63:  # an operator's integers have 64 bits
            raise ValueError(f"max_seqlen must be below 2^63, got {max_seqlen}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be a bool, got {type(return_lse).__name__}")
    if softmax_scale is not None:
        if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float | torch.SymFloat):
            raise TypeError(f"softmax_scale must be a number or None, got {type(softmax_scale).__name__}")
        if not 0.0 <= softmax_scale <= MAX_SOFTMAX_SCALE:
            raise ValueError(f"softmax_scale must be from 0 to {MAX_SOFTMAX_SCALE:.4g}, got {softmax_scale}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")


def check_tensors(q: object, k: object, v: object, packed: bool) -> None:
    """Types, dtypes, devices, shapes and strides of q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
        if x.layout != torch.strided or x.is_nested:
            kind = "a nested tensor" if x.is_nested else x.layout
            raise TypeError(f"{name} must be a dense tensor (torch.strided), got {kind}")
        check_no_tangent(name, x)
        if packed and x.ndim == 4:
            raise ValueError(
                f"{name} must have shape (T, H, D) when cu_seqlens is given, got {tuple(x.shape)}; a batch "
                "(B, S, H, D) goes without cu_seqlens, as B documents of length S"
            )
        if packed and x.ndim != 3:
            raise ValueError(f"{name} must have shape (T, H, D), got {tuple(x.shape)}")
        if not packed and x.ndim == 3:
            raise ValueError(
                f"cu_seqlens must be given for packed tensors (T, H, D), got None; {name} has shape {tuple(x.shape)}"
            )
        if not packed and x.ndim != 4:
            raise ValueError(f"{name} must have shape (B, S, H, D), got {tuple(x.shape)}")
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
        if x.ndim != q.ndim or x.shape[:-2] != q.shape[:-2]:
            tokens = "tokens (T)" if packed else "batch and tokens (B, S)"
            raise ValueError(f"{name} must have the {tokens} of q {tuple(q.shape)}, got shape {tuple(x.shape)}")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name} must have the head_dim of q ({q.shape[-1]}), got {x.shape[-1]}")
        if x.shape[-2] == 0:
            raise ValueError(f"{name} must have at least one head, got shape {tuple(x.shape)}")
    dim = q.shape[-1]
    if dim == 0 or dim % 32 or dim > MAX_HEAD_DIM:
        raise ValueError(f"q must have a head_dim that is a multiple of 32 up to {MAX_HEAD_DIM}, got {dim}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have the {k.shape[-2]} heads of k, got {v.shape[-2]}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q must have a multiple of k's {k.shape[-2]} heads, got {q.shape[-2]}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            raise ValueError(
                f"{name} must have contiguous channels (stride 1 in its last dimension), got strides {x.stride()}"
            )


def check_no_tangent(name: str, x: Tensor) -> None:
    """Refuse a dual tensor of forward-mode differentiation: the operators would drop its tangent, without a word.

    `torch.func.jvp`, `torch.func.jacfwd` and `torch.autograd.forward_ad` make such tensors; torch.compile traces this.
    """
    if _unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{name} must carry no tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad): "
            "flamia.attention has no forward-mode derivative"
        )


def check_cu_seqlens(cu_seqlens: object, device: torch.device, name: str) -> None:
    """Type, dtype, device and shape of the document boundaries."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {cu_seqlens.layout}")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {cu_seqlens.device}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}")


def assert_documents(cu_seqlens: Tensor, total: int) -> None:
    """Check what ``cu_seqlens`` holds where it lies, without waiting for the device.

    On a GPU a violation is a device-side assertion: the next call that waits for the device raises, with this text on
    stderr. On the CPU it raises at once. These are about ten small launches; a kernel that builds a schedule knows
    already, and asserts in one (`flamia.dispatch.AttentionKernel`, ``checks_documents``).
    """
    legal = (cu_seqlens[0] == 0) & (cu_seqlens.diff() >= 0).all() & (cu_seqlens[-1] <= total)
    torch._assert_async(legal, f"cu_seqlens must start at 0, never decrease, and end at or before T = {total}")


def assert_longest(cu_seqlens: Tensor, max_seqlen: int) -> None:
    """Check that no document is longer than ``max_seqlen``, where `cu_seqlens` lies, as in `assert_documents`."""
    short = (cu_seqlens.diff() <= max_seqlen).all()
    torch._assert_async(short, f"max_seqlen must be at least the longest document of cu_seqlens, got {max_seqlen}")


def assert_equal_documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """The same boundaries for queries and keys; values are compared where they lie, as in `assert_documents`."""
    rule = "cu_seqlens_k must equal cu_seqlens_q (queries and keys of a document have one length)"
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(f"{rule}, got shapes {tuple(cu_seqlens_k.shape)} and {tuple(cu_seqlens_q.shape)}")
    equal = (cu_seqlens_q == cu_seqlens_k).all()
    if equal.device.type == "cpu" and not torch.compiler.is_compiling():
        if not equal:
            raise ValueError(f"{rule}, got {cu_seqlens_k.tolist()} and {cu_seqlens_q.tolist()}")
        return
    torch._assert_async(equal, rule)
