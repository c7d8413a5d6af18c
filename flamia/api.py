"""`flamia.attention`: the one call that a model makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    from torch import Tensor

    from flamia.reference.recipes import Recipe

try:
    from flamia.pytorch import call
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    call = None  # type: ignore[assignment]  # so that these names can be documented and listed without PyTorch


def require_torch(caller: str) -> None:
    """:raises ImportError: naming the extra, without PyTorch."""
    if call is None:
        raise ImportError(f"{caller} needs PyTorch: run `pip install 'flamia[torch]'`")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = ...,
    *,
    max_seqlen: int | None = ...,
    recipe: Recipe | str = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = ...,
    *,
    max_seqlen: int | None = ...,
    recipe: Recipe | str = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    recipe: Recipe | str = "mxfp8",
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed documents, or of a batch, quantized inside the call and differentiable.

    :param q: ``(T, Hq, D)`` with ``cu_seqlens``, or ``(B, S, Hq, D)``: B documents of length S. bfloat16, float16 or
        float32, channels contiguous, any other strides. Under autocast, float tensors are cast to its dtype first.
        D is a multiple of 32 up to 256.
    :param k: ``(T, Hkv, D)`` or ``(B, S, Hkv, D)``, dtype and device of q; Hkv divides Hq, and query head h reads KV
        head ``h // (Hq // Hkv)``.
    :param v: as k.
    :param cu_seqlens: int32 or int64 ``(documents + 1,)`` on the device of q: document i owns the rows
        ``cu_seqlens[i] <= t < cu_seqlens[i + 1]``. Starts at 0, never decreases, ends at or before T; empty documents
        are legal, and rows past the end are padding (output and gradients 0, LSE -inf).
    :param max_seqlen: an upper bound of the documents' lengths. Nothing needs it; if given it is checked, and spares a
        GPU's backward memory, or launches, for a pack of short documents.
    :param recipe: a `flamia.Recipe` or the name of one, see :doc:`/recipes`.
    :param causal: a query sees the keys of its document up to itself; False: all keys of its document.
    :param softmax_scale: from 0 to half of the largest float32; default ``1 / sqrt(D)``.
    :param return_lse: also return the log-sum-exp.
    :param backend: ``"auto"``: the reference for CPU tensors, a certified kernel for CUDA tensors. ``"cuda"``: a
        certified kernel or an error. ``"reference"``: the reference on the CPU wherever the tensors are; with
        ``"reference:blackwell"`` or ``"reference:hopper"`` it predicts the bits of those tensor cores (slow).
    :returns: out, in the shape of q and its dtype (autocast's dtype under autocast). With ``return_lse`` the pair
        ``(out, lse)``: float32 ``(Hq, T)``, for a batch ``(B, Hq, S)``, the natural logarithm; not differentiable.
    :raises TypeError, ValueError: naming the argument, its value and what is allowed, before anything is computed.
        What a ``cu_seqlens`` on a GPU holds is checked there without waiting for it: a violation is a device-side
        assertion, raised by the next call that waits for the GPU.
    :raises flamia.dispatch.NoCertifiedKernel: if no certified kernel serves CUDA tensors; says what to run.
    :raises ImportError: without PyTorch.

    Float16 inputs are widened exactly before they are quantized and results are rounded to float16 once; bfloat16
    passes between PyTorch and the reference without a copy. What is saved for the backward are the quantized operands,
    not q, k and v. The backward cannot be differentiated again.
    """
    require_torch("flamia.attention")
    out, lse = call.attention(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen=max_seqlen,
        recipe=recipe,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
        backend=backend,
    )
    return (out, lse) if return_lse else out
