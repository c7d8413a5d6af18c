"""The operators computed by the reference, on the CPU.

NumPy releases the GIL inside its loops and products, and the reference runs them on all cores. Tensors of another
device are copied to the CPU and results back, which waits for that device.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from flamia.pytorch.exchange import to_numpy, to_torch
from flamia.pytorch.saved import load_operands, save_operands
from flamia.reference.arguments import check_softmax_scale
from flamia.reference.backward import attention_backward
from flamia.reference.documents import validate_cu_seqlens
from flamia.reference.forward import Forward, attention_forward
from flamia.reference.profiles import get_profile
from flamia.reference.recipes import Recipe


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    recipe: Recipe,
    causal: bool,
    softmax_scale: float | None,
    profile: str,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out, lse, m, l and, if ``saves``, the saved operands, by `flamia.reference.attention_forward`."""
    cu = validate_cu_seqlens(to_numpy(cu_seqlens), q.shape[0])
    longest = int(np.diff(cu).max(initial=0))
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(
            f"max_seqlen must be at least the longest document of cu_seqlens ({longest}), got {max_seqlen}"
        )
    result = attention_forward(
        to_numpy(q),
        to_numpy(k),
        to_numpy(v),
        cu,
        recipe=recipe,
        causal=causal,
        softmax_scale=softmax_scale,
        profile=profile,
    )
    rows = [to_torch(x, device=q.device) for x in (result.lse, result.m, result.l)]
    saved = save_operands(result.operands, recipe, causal, profile, q.device) if saves else []
    return to_torch(result.out, q.dtype, q.device), rows[0], rows[1], rows[2], saved


def backward(
    dout: Tensor,
    out: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    cu_seqlens: Tensor,
    saved: list[Tensor],
    kv_heads: int,
    recipe: Recipe,
    causal: bool,
    softmax_scale: float | None,
    profile: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of ``out``, by `flamia.reference.attention_backward`."""
    kept = Forward(
        out=to_numpy(out),
        lse=np.empty((0, 0), np.float32),  # no gradient needs it
        m=to_numpy(m),
        l=to_numpy(l),
        operands=load_operands(saved, recipe, causal, profile),
        cu_seqlens=to_numpy(cu_seqlens).astype(np.int64),
        recipe=recipe,
        profile=get_profile(profile),
        causal=causal,
        softmax_scale=check_softmax_scale(softmax_scale, out.shape[-1]),
        head_counts=(out.shape[1], kv_heads),
    )
    gradients = attention_backward(to_numpy(dout), kept)
    dq, dk, dv = (to_torch(x, out.dtype, out.device) for x in (gradients.dq, gradients.dk, gradients.dv))
    return dq, dk, dv


def is_reference(implementation: str) -> bool:
    """Whether the operators' ``implementation`` names the reference: ``reference:`` and a profile."""
    return implementation.startswith("reference:")


def profile_of(implementation: str) -> str:
    """The profile's name in the ``implementation`` of the reference."""
    return implementation.partition(":")[2]
