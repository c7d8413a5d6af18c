"""The Hopper kernels as a row of `flamia.dispatch`: what `flamia.attention` launches on compute capability 9.0.

What is saved for the backward are the quantizer's tiles of q, k and v, with their exponents or scales; the schedule is
built again from ``cu_seqlens``, which is one small launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flamia.conformance.certificates import identify_target
from flamia.dispatch import AttentionKernel
from flamia.reference.recipes import Recipe

NAME = "hopper"
CAPABILITY = (9, 0)
TILE = 128


def make_kernel(device: int) -> AttentionKernel:
    """The row for one of this machine's GPUs.

    :raises ImportError, RuntimeError: if CuPy or NVRTC is missing.
    """
    from flamia.conformance.targets.hopper import HopperTarget
    from flamia.kernels.hopper import HEAD_DIMS

    return AttentionKernel(
        name=NAME,
        identity=identify_target(HopperTarget(f"cuda:{device}")),
        capability=CAPABILITY,
        recipes=("mxfp8",),
        head_dims=HEAD_DIMS,
        dtypes=("bfloat16", "float16", "float32"),
        forward=forward,
        backward=backward,
        empty_saved=empty_saved,
        checks_documents=True,
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, recipe: Recipe, causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out, lse, m, l and what `backward` needs."""
    from flamia.kernels.hopper import attention_forward
    from flamia.kernels.quantize import QuantizedInputs

    got = attention_forward(
        q, k, v, cu_seqlens, recipe=recipe.name, causal=causal, softmax_scale=softmax_scale, backward=False
    )
    got.schedule.assert_legal()
    x = got.inputs
    assert isinstance(x, QuantizedInputs)
    saved = [x.q.payload, x.q.exponents, x.k.payload, x.k.exponents, x.v.payload, x.v.scales]
    if x.v1 is not None:
        saved += [x.v1.payload, x.v1.scales]
    return got.out, got.lse, got.m, got.l, saved


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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of out."""
    from flamia.kernels.hopper_backward import attention_backward
    from flamia.kernels.quantize import QuantizedInputs, TokenTiles
    from flamia.kernels.schedule import build_schedule

    q, q_exponents, k, k_exponents, v, v_scales, *one = saved
    inputs = QuantizedInputs(
        q=TokenTiles(q, None, exponents=q_exponents),
        k=TokenTiles(k, None, exponents=k_exponents),
        v=TokenTiles(v, v_scales),
        v1=TokenTiles(one[0], one[1]) if one else None,
    )
    schedule = build_schedule(cu_seqlens, out.shape[0], out.shape[1], kv_heads, causal)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    found = attention_backward(dout, out, m, l, inputs, schedule, softmax_scale)
    return found.dq, found.dk, found.dv


def empty_saved(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, recipe: Recipe, causal: bool) -> list[Tensor]:
    """What `forward` saves, uninitialised, for tracing."""
    total, dim = q.shape[0], q.shape[2]
    tiles = total // TILE + cu_seqlens.shape[0] - 1
    scale_bytes = 512 * math.ceil(int(dim) / TILE)

    def payload(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[1], tiles, TILE * dim), dtype=torch.uint8)

    def scales(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[1], tiles, scale_bytes), dtype=torch.uint8)

    def exponents(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[1], tiles, TILE), dtype=torch.float32)

    saved: list[Any] = [payload(q), exponents(q), payload(k), exponents(k), payload(v), scales(v)]
    return [*saved, payload(v), scales(v)] if causal else saved
