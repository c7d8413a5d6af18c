"""The operators ``flamia::attention_forward`` and ``flamia::attention_backward``, and the derivative of the first.

Note [Operators]
~~~~~~~~~~~~~~~~
Both are functional: no argument is written, no result shares memory with an argument, and every result's shape follows
from the arguments' shapes. So they can be traced (`torch.compile`, `torch.export`), recomputed (activation
checkpointing gives the same bits, because every implementation is deterministic) and, with a GPU's kernels, captured in
a CUDA graph.

``implementation`` is ``reference:<profile>`` or the name of a certified kernel (`flamia.dispatch`). The forward returns
what the backward needs as results of its own, see Note [Saved tensors]; only ``out`` is differentiable. With ``saves``
False, where no gradient is wanted, that list is empty, and a kernel need not write what only a backward reads.

The backward is computed from quantized numbers by rules of its own; differentiating it again would not give second
derivatives of anything, so it refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flamia import dispatch
from flamia.pytorch import cpu
from flamia.pytorch.arguments import assert_documents, assert_longest, check_no_tangent
from flamia.pytorch.recipe_text import decode_recipe
from flamia.pytorch.saved import empty_operands

torch.library.define(
    "flamia::attention_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt? max_seqlen, str recipe, bool causal, "
    "float? softmax_scale, str implementation, bool saves) "
    "-> (Tensor out, Tensor lse, Tensor m, Tensor l, Tensor[] saved)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
torch.library.define(
    "flamia::attention_backward",
    "(Tensor dout, Tensor out, Tensor m, Tensor l, Tensor cu_seqlens, Tensor[] saved, SymInt kv_heads, str recipe, "
    "bool causal, float? softmax_scale, str implementation, SymInt? max_seqlen=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    recipe: str,
    causal: bool,
    softmax_scale: float | None,
    implementation: str,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    chosen = decode_recipe(recipe)
    if cpu.is_reference(implementation):
        profile = cpu.profile_of(implementation)
        return cpu.forward(q, k, v, cu_seqlens, max_seqlen, chosen, causal, softmax_scale, profile, saves)
    kernel = dispatch.get_kernel(implementation)
    if not kernel.checks_documents:
        assert_documents(cu_seqlens, q.shape[0])
        if max_seqlen is not None:
            assert_longest(cu_seqlens, max_seqlen)
    result: tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]] = kernel.forward(
        q, k, v, cu_seqlens, chosen, causal, _scale(softmax_scale, q), max_seqlen, saves
    )
    return result


def _backward(
    dout: Tensor,
    out: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    cu_seqlens: Tensor,
    saved: list[Tensor],
    kv_heads: int,
    recipe: str,
    causal: bool,
    softmax_scale: float | None,
    implementation: str,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = decode_recipe(recipe)
    if cpu.is_reference(implementation):
        profile = cpu.profile_of(implementation)
        return cpu.backward(dout, out, m, l, cu_seqlens, saved, kv_heads, chosen, causal, softmax_scale, profile)
    kernel = dispatch.get_kernel(implementation)
    result: tuple[Tensor, Tensor, Tensor] = kernel.backward(
        dout, out, m, l, cu_seqlens, saved, kv_heads, chosen, causal, _scale(softmax_scale, out), max_seqlen
    )
    return result


def _scale(softmax_scale: float | None, x: Tensor) -> float:
    return x.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    recipe: str,
    causal: bool,
    softmax_scale: float | None,
    implementation: str,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    chosen = decode_recipe(recipe)
    total, heads = q.shape[:2]
    lse, m, l = (q.new_empty((heads, total), dtype=torch.float32) for _ in range(3))  # noqa: E741
    if not saves:
        saved = []
    elif cpu.is_reference(implementation):
        saved = empty_operands(q, k, v, chosen, causal, cpu.profile_of(implementation))
    else:
        saved = dispatch.get_kernel(implementation).empty_saved(q, k, v, cu_seqlens, chosen, causal)
    return q.new_empty(q.shape), lse, m, l, saved


def _fake_backward(
    dout: Tensor,
    out: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    cu_seqlens: Tensor,
    saved: list[Tensor],
    kv_heads: int,
    recipe: str,
    causal: bool,
    softmax_scale: float | None,
    implementation: str,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    total, _, dim = out.shape
    dk, dv = (out.new_empty((total, kv_heads, dim)) for _ in range(2))
    return out.new_empty(out.shape), dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, k, _, cu_seqlens, ctx.max_seqlen, *ctx.rest, ctx.saves = inputs
    out, lse, m, l, saved = output  # noqa: E741
    ctx.mark_non_differentiable(lse, m, l, *saved)
    ctx.set_materialize_grads(False)  # no zeros for lse, m, l and the payloads
    ctx.kv_heads = k.shape[1]
    ctx.save_for_backward(out, m, l, cu_seqlens, *saved)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (3 + len(ctx.rest))
    if dout is None:
        return (None, None, None, *nothing)
    if not ctx.saves:
        raise RuntimeError(
            "out of flamia.attention cannot be differentiated: it was called or traced where no gradient was wanted, "
            "under torch.no_grad or with none of q, k and v requiring one"
        )
    check_no_tangent("dout", dout)
    out, m, l, cu_seqlens, *saved = ctx.saved_tensors  # noqa: E741
    rest = (saved, ctx.kv_heads, *ctx.rest, ctx.max_seqlen)
    gradients = torch.ops.flamia.attention_backward(dout, out, m, l, cu_seqlens, *rest)
    return (*gradients, *nothing)


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "flamia.attention cannot be differentiated twice: its backward is defined on quantized tensors and has no "
        "derivative; for second derivatives use another attention, such as "
        "torch.nn.functional.scaled_dot_product_attention with its math backend"
    )


torch.library.impl("flamia::attention_forward", "default", _forward)
torch.library.impl("flamia::attention_backward", "default", _backward)
torch.library.register_fake("flamia::attention_forward", _fake_forward)
torch.library.register_fake("flamia::attention_backward", _fake_backward)
torch.library.register_autograd("flamia::attention_forward", _differentiate, setup_context=_keep)
torch.library.register_autograd("flamia::attention_backward", _refuse)
