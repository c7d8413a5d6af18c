"""The Blackwell kernels as rows of `flamia.dispatch`: what `flamia.attention` launches on B200 and B300.

There is a row for each recipe, because each has a certificate of its own. What is saved for the backward are the
quantizer's tiles of q, k and v; the schedule is built again from ``cu_seqlens``, which is one small launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.conformance.certificates import identify_target
from flamia.dispatch import AttentionKernel
from flamia.pytorch.tiles import empty_tiles, load_tiles, save_tiles
from flamia.reference.recipes import Recipe, Scaling

NAME = "blackwell"

SAVED = (
    *("q.payload", "q.scales", "q.exponents", "k.payload", "k.scales", "k.exponents"),
    *("v.payload", "v.scales", "v1.payload", "v1.scales"),
)
"""What the backward reads."""

SAVED_NVFP4 = (
    *("q.payload", "q.exponents", "k.payload", "k.exponents", "v.payload", "v.scales", "v1.payload", "v1.scales"),
    *("q4.payload", "q4.scales", "k4.payload", "k4.scales"),
)
"""Likewise where scores are products of NVFP4."""


def make_kernels(device: int) -> list[AttentionKernel]:
    """The rows for one of this machine's GPUs.

    :raises ImportError, RuntimeError: if CuPy or NVRTC is missing.
    """
    from flamia.conformance.targets.blackwell import BlackwellTarget
    from flamia.kernels.blackwell import HEAD_DIMS, RECIPES

    rows = []
    for recipe in RECIPES:
        target = BlackwellTarget(f"cuda:{device}")
        target.recipe = recipe
        rows.append(
            AttentionKernel(
                name=f"{NAME} {recipe}",
                identity=identify_target(target),
                capability=torch.cuda.get_device_capability(device),
                recipes=(recipe,),
                head_dims=HEAD_DIMS,
                dtypes=("bfloat16", "float16", "float32"),
                forward=forward,
                backward=backward,
                empty_saved=empty_saved,
                checks_documents=True,
            )
        )
    return rows


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    recipe: Recipe,
    causal: bool,
    softmax_scale: float,
    max_seqlen: int | None,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out, lse, m, l and, if ``saves``, what `backward` needs."""
    from flamia.conformance.targets.blackwell import make_nvfp4
    from flamia.kernels.blackwell import attention_forward

    nvfp4, factor = make_nvfp4(recipe, (q.shape[1], k.shape[1]), q.device)
    got = attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        recipe=recipe.name,
        causal=causal,
        softmax_scale=softmax_scale,
        nvfp4=nvfp4,
        score_factor=factor,
        backward=False,
        max_seqlen=max_seqlen,
    )
    got.schedule.assert_legal()
    return got.out, got.lse, got.m, got.l, save_tiles(got.inputs, saved_names(recipe)) if saves else []


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
    softmax_scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of out."""
    from flamia.conformance.targets.blackwell import score_factor
    from flamia.kernels.blackwell_backward import attention_backward
    from flamia.kernels.schedule import build_schedule

    inputs = load_tiles(saved, saved_names(recipe), causal)
    schedule = build_schedule(cu_seqlens, out.shape[0], out.shape[1], kv_heads, causal, max_seqlen=max_seqlen)
    found = attention_backward(
        dout, out, m, l, inputs, schedule, softmax_scale, recipe=recipe.name, score_factor=score_factor(recipe)
    )
    return found.dq, found.dk, found.dv


def empty_saved(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, recipe: Recipe, causal: bool) -> list[Tensor]:
    """What `forward` saves, uninitialised, for tracing."""
    return empty_tiles(q, k, v, cu_seqlens, saved_names(recipe), causal)


def saved_names(recipe: Recipe) -> tuple[str, ...]:
    """The arrays that are saved for a recipe, see `flamia.pytorch.tiles`."""
    return SAVED_NVFP4 if recipe.scores is Scaling.NVFP4 else SAVED
