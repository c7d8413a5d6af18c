"""The Hopper kernels as rows of `flamia.dispatch`: what `flamia.attention` launches on compute capability 9.0.

There is a row for each recipe, because each has a certificate of its own. What is saved for the backward are the tiles
of q, k and v, with their exponents; the schedule is built again from ``cu_seqlens``, which is one small launch.
"""

from __future__ import annotations

from torch import Tensor

from flamia.conformance.certificates import identify_target
from flamia.dispatch import AttentionKernel
from flamia.pytorch.tiles import empty_tiles, load_tiles, save_tiles
from flamia.reference.recipes import Recipe

NAME = "hopper"
CAPABILITY = (9, 0)

SAVED = {
    recipe: tuple(f"{role}.{array}" for role in ("q", "k", "v") for array in (elements, "exponents"))
    for recipe, elements in (("mxfp8", "payload"), ("bf16", "wide"))
}
"""What the backward reads, by recipe."""


def make_kernels(device: int) -> list[AttentionKernel]:
    """The rows for one of this machine's GPUs.

    :raises ImportError, RuntimeError: if CuPy or NVRTC is missing.
    """
    from flamia.conformance.targets.hopper import HopperTarget
    from flamia.kernels.hopper import HEAD_DIMS, RECIPES

    rows = []
    for recipe in RECIPES:
        target = HopperTarget(f"cuda:{device}")
        target.recipe = recipe
        rows.append(
            AttentionKernel(
                name=NAME if recipe == "mxfp8" else f"{NAME} {recipe}",
                identity=identify_target(target),
                capability=CAPABILITY,
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
    from flamia.kernels.hopper import attention_forward

    got = attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        recipe=recipe.name,
        causal=causal,
        softmax_scale=softmax_scale,
        backward=False,
        saves=saves,
        max_seqlen=max_seqlen,
    )
    got.schedule.assert_legal()
    return got.out, got.lse, got.m, got.l, save_tiles(got.inputs, SAVED[recipe.name]) if saves else []


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
    from flamia.kernels.hopper_backward import attention_backward
    from flamia.kernels.schedule import build_schedule

    inputs = load_tiles(saved, SAVED[recipe.name], causal)
    schedule = build_schedule(cu_seqlens, out.shape[0], out.shape[1], kv_heads, causal, max_seqlen=max_seqlen)
    found = attention_backward(dout, out, m, l, inputs, schedule, softmax_scale)
    return found.dq, found.dk, found.dv


def empty_saved(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, recipe: Recipe, causal: bool) -> list[Tensor]:
    """What `forward` saves, uninitialised, for tracing."""
    return empty_tiles(q, k, v, cu_seqlens, SAVED[recipe.name], causal)
