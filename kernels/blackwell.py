"""Attention on Blackwell: the forward, from tensors to out, LSE and what the backward needs.

The bits of out, m and l are those of `flamia.reference.attention_forward` under the profile ``blackwell``. Nothing
waits for the device, and every shape follows from the shapes of the arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia.kernels import structs
from flamia.kernels.launch import launch
from flamia.kernels.quantize import Nvfp4, QuantizedInputs, quantize_qkv
from flamia.kernels.registry import BLACKWELL_FORWARD
from flamia.kernels.schedule import TICKETS, DeviceSchedule, build_schedule
from flamia.kernels.tensors import TILE, check_softmax_scale, check_tokens, pointer, softmax_constant

HEAD_DIMS = (64, 128)
RECIPES = ("mxfp8", "nvfp4_fp8")
ELEMENTS = {"torch.bfloat16": 0, "torch.float16": 1, "torch.float32": 2}
"""Codes of the output's elements."""

USUAL_CONSTANTS = (2.0**-100, 2.0**100)
"""Softmax constants outside this range, 0 among them, take the kernel's slow path."""


@dataclass(frozen=True)
class Stages:
    """Intermediate results, for tests.

    :param p: uint8 ``(Hq, max_tiles, key tiles, 128 queries, 128 keys)``: P of every tile, by query tile of the pack.
    :param top: float32 ``(Hq, max_tiles, key tiles, 128)``: the integers m_t.
    """

    p: Any
    top: Any


@dataclass(frozen=True)
class BlackwellForward:
    """Result of `attention_forward`.

    :param out: ``(T, Hq, D)``, dtype of q.
    :param lse: float32 ``(Hq, T)``, natural logarithm; ``m`` and ``l`` as in `flamia.reference.Forward`.
    :param stages: None without hooks.
    """

    out: Any
    lse: Any
    m: Any
    l: Any  # noqa: E741
    inputs: QuantizedInputs
    schedule: DeviceSchedule
    stages: Stages | None = None


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    *,
    recipe: str = "mxfp8",
    causal: bool = True,
    softmax_scale: float | None = None,
    nvfp4: Nvfp4 | None = None,
    score_factor: float = 1.0,
    backward: bool = True,
    max_seqlen: int | None = None,
    exp2: str = "exact",
    strict: bool = False,
    hooks: bool = False,
) -> BlackwellForward:
    """Attention of packed documents.

    :param q: ``(T, Hq, D)`` bfloat16, float16 or float32 CUDA tensor, D 64 or 128, any token and head stride.
    :param k: ``(T, Hkv, D)``, dtype and device of q; ``v`` likewise.
    :param cu_seqlens: int32 or int64 CUDA tensor ``(documents + 1,)``; its content is checked on the device, see
        `DeviceSchedule.check`.
    :param recipe: one of `RECIPES`.
    :param softmax_scale: finite and >= 0; default ``1 / sqrt(D)``.
    :param nvfp4: how q and k are quantized; for the recipe ``nvfp4_fp8``, exactly.
    :param score_factor: the product of the constant head scales of q and k, rounded to FP32: 0 to infinity.
    :param backward: whether the schedule shall have the backward's items.
    :param max_seqlen: see `flamia.kernels.schedule.build_schedule`.
    :param exp2: ``"exact"``, or ``"hardware"``: faster, within an error budget.
    :param strict: wait where PTX promises no order.
    :param hooks: return P and m_t of every tile.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {RECIPES} on Blackwell, got {recipe!r}")
    if (nvfp4 is not None) != (recipe == "nvfp4_fp8"):
        raise ValueError(f"nvfp4 must be given for the recipe nvfp4_fp8, exactly; got {nvfp4!r} for {recipe!r}")
    score_factor = check_score_factor(score_factor)
    check_tokens("q", q)
    check_tokens("k", k, like=q)
    scale = check_softmax_scale(softmax_scale, q.shape[2])
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"q must have a head_dim of {HEAD_DIMS} on Blackwell, got {q.shape[2]}")
    schedule = build_schedule(cu_seqlens, q.shape[0], q.shape[1], k.shape[1], causal, backward, max_seqlen)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = (q.shape[1], q.shape[0])
    lse, m, l = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(3))  # noqa: E741
    rows = ((lse, -math.inf), (m, -math.inf), (l, 0.0))
    inputs = quantize_qkv(q, k, v, schedule, nvfp4=nvfp4, out=out, rows=rows)
    stages = _make_stages(q, schedule) if hooks else None
    result = BlackwellForward(out, lse, m, l, inputs, schedule, stages)
    unit = BLACKWELL_FORWARD.unit(recipe=recipe, dim=q.shape[2], exp2=exp2, strict=int(strict), hooks=int(hooks))
    params = structs.fill(structs.BLACKWELL_FORWARD, _fields(result, softmax_constant(scale), score_factor))
    launch(unit, "attention_forward", params, out.device, at_most=max(schedule.forward.shape[0], 1))
    return result


def check_score_factor(score_factor: Any) -> float:
    """The factor as a Python float.

    :raises TypeError, ValueError: if it is no number from 0 to infinity.
    """
    if isinstance(score_factor, bool) or not isinstance(score_factor, (int, float, np.integer, np.floating)):
        raise TypeError(f"score_factor must be a number, got {score_factor!r}")
    if not score_factor >= 0:
        raise ValueError(f"score_factor must be at least 0, got {score_factor!r}")
    return float(score_factor)


def _make_stages(q: Any, schedule: DeviceSchedule) -> Stages:
    import torch

    shape = (q.shape[1], schedule.max_tiles, -(-schedule.num_tokens // TILE), TILE)
    p = torch.empty((*shape, TILE), dtype=torch.uint8, device=q.device)
    return Stages(p, torch.empty(shape, dtype=torch.float32, device=q.device))


def _fields(f: BlackwellForward, c: np.float32, score_factor: float) -> dict[str, Any]:
    """Fields of `structs.BLACKWELL_FORWARD`."""
    x, schedule, stages = f.inputs, f.schedule, f.stages
    q, k = (x.q, x.k) if x.q4 is None or x.k4 is None else (x.q4, x.k4)
    usual = bool(USUAL_CONSTANTS[0] <= c <= USUAL_CONSTANTS[1] and score_factor == 1)
    size = f.out.element_size()
    return {
        "q": pointer(q.payload),
        "q_scales": pointer(q.scales),
        "k": pointer(k.payload),
        "k_scales": pointer(k.scales),
        "v": pointer(x.v.payload),
        "v_scales": pointer(x.v.token_scales),
        "v1": 0 if x.v1 is None else pointer(x.v1.payload),
        "v1_scales": 0 if x.v1 is None else pointer(x.v1.scales),
        "out": pointer(f.out),
        "lse": pointer(f.lse),
        "m": pointer(f.m),
        "l": pointer(f.l),
        "tiles": pointer(schedule.tiles),
        "tile_offsets": pointer(schedule.tile_offsets),
        "items": pointer(schedule.forward),
        "status": pointer(schedule.status),
        "ticket": pointer(schedule.status) + 4 * TICKETS,
        "stage_p": 0 if stages is None else pointer(stages.p),
        "stage_top": 0 if stages is None else pointer(stages.top),
        "max_tiles": schedule.max_tiles,
        "num_tokens": schedule.num_tokens,
        "out_token_stride": f.out.stride(0) * size,
        "out_head_stride": f.out.stride(1) * size,
        "c": c,
        "inverse_c": 1 / float(c) if usual else 0.0,
        "score_factor": score_factor,
        "usual": usual,
        "group": schedule.num_q_heads // schedule.num_kv_heads,
        "causal": schedule.causal,
        "element": ELEMENTS[str(f.out.dtype)],
        "stage_keys": 0 if stages is None else stages.p.shape[2],
    }
