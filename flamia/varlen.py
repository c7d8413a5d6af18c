"""`flamia.flash_attn_varlen_func`: the signature of FlashAttention's function of that name, computed by FLAMIA.

Signature as in flash-attn 2.8 (``flash_attn.flash_attn_varlen_func``). What FLAMIA does not do is refused by the name
of the argument, never ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flamia.api import attention, require_torch

if TYPE_CHECKING:
    from torch import Tensor

    from flamia.reference.recipes import Recipe


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    recipe: Recipe | str = "mxfp8",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of packed documents under FlashAttention's signature; see `flamia.attention` for everything else.

    :param q: ``(T, Hq, D)``. :param k: ``(T, Hkv, D)``. :param v: as k.
    :param cu_seqlens_q: int32 or int64 ``(documents + 1,)``.
    :param cu_seqlens_k: the same boundaries: queries and keys have equal lengths here. Give the same tensor, or one of
        equal content, which a GPU compares without being waited for.
    :param max_seqlen_q: at least the longest document; ``max_seqlen_k`` likewise.
    :param dropout_p: only 0.
    :param window_size: only ``(-1, -1)``.
    :param softcap: only 0.
    :param alibi_slopes: only None.
    :param deterministic: either value: FLAMIA is always deterministic.
    :param return_attn_probs: return ``(out, lse, None)``, lse float32 ``(Hq, T)`` with natural logarithms; there are
        no probabilities to return.
    :param block_table: only None.
    :param recipe: FLAMIA's own, as ``backend``: see `flamia.attention`.
    :raises ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    require_torch("flamia.flash_attn_varlen_func")
    for name, value, allowed in (
        ("dropout_p", dropout_p, 0.0),
        ("softcap", softcap, 0.0),
        ("alibi_slopes", alibi_slopes, None),
        ("block_table", block_table, None),
    ):
        if value is not allowed and (allowed is None or value != allowed):
            shown = value if isinstance(value, int | float) else type(value).__name__
            raise ValueError(f"{name} must be {allowed}, got {shown}: FLAMIA has no such attention")
    if not isinstance(window_size, tuple | list) or tuple(window_size) != (-1, -1):
        raise ValueError(f"window_size must be (-1, -1), got {window_size}: FLAMIA has no sliding window")
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise TypeError(f"{name} must be an int, got {type(bound).__name__}")
    check_equal_documents(q, cu_seqlens_q, cu_seqlens_k)
    out, lse = attention(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen=min(max_seqlen_q, max_seqlen_k),
        recipe=recipe,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=True,
        backend=backend,
    )
    return (out, lse, None) if return_attn_probs else out


def check_equal_documents(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Queries and keys are cut into the same documents.

    :raises ValueError: at once for another shape and, on the CPU, for another content; on a GPU that is a device-side
        assertion.
    """
    import torch

    from flamia.pytorch.arguments import assert_equal_documents, check_cu_seqlens

    if not isinstance(q, torch.Tensor):
        return  # `attention` says what q must be
    check_cu_seqlens(cu_seqlens_q, q.device, "cu_seqlens_q")
    if cu_seqlens_q is cu_seqlens_k:
        return
    check_cu_seqlens(cu_seqlens_k, q.device, "cu_seqlens_k")
    assert_equal_documents(cu_seqlens_q, cu_seqlens_k)
