"""Attention on Hopper: the forward, from tensors to out, LSE and what the backward needs.

The bits of out, LSE, m and l are those of `flamia.reference.attention_forward` under the profile ``hopper``. Nothing
waits for the device, and every shape follows from the shapes of the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flamia.kernels import structs
from flamia.kernels.launch import launch
from flamia.kernels.quantize import KeyOperands, QuantizedInputs, quantize_qkv
from flamia.kernels.registry import HOPPER_FACTORS, HOPPER_FORWARD, HOPPER_PACK
from flamia.kernels.schedule import TICKETS, DeviceSchedule, build_schedule
from flamia.kernels.tensors import (
    TILE,
    check_softmax_scale,
    check_tokens,
    padding_struct,
    pointer,
    softmax_constant,
    tokens_struct,
)

HEAD_DIMS = (64, 128)
RECIPES = ("mxfp8", "bf16")
FACTOR_WORDS = TILE + 4
WARPS = 8
"""Of a CTA that makes factor tiles, one each."""

USUAL_CONSTANT = 2.0**-40
"""Softmax constants below this one take the kernel's slow path."""


@dataclass(frozen=True)
class WideTiles:
    """A tensor in bfloat16 tiles, Note [Wide tile] of ``hopper/tiles.cuh``.

    :param wide: uint8 ``(H, max_tiles, 256 D)``.
    :param exponents: float32 ``(H, max_tiles, 128)``: NaN for a token that is not finite, else a bound of its elements.
    """

    wide: Any
    exponents: Any


@dataclass(frozen=True)
class PackedInputs:
    """The operands of an unscaled recipe."""

    q: WideTiles
    k: WideTiles
    v: WideTiles


@dataclass(frozen=True)
class HopperForward:
    """Result of `attention_forward`.

    :param out: ``(T, Hq, D)``, dtype of q.
    :param lse: float32 ``(Hq, T)``, natural logarithm; ``m`` and ``l`` as in `flamia.reference.Forward`.
    """

    out: Any
    lse: Any
    m: Any
    l: Any  # noqa: E741
    inputs: QuantizedInputs | PackedInputs
    schedule: DeviceSchedule


def make_factors(k_exponents: Any, v_exponents: Any, factors: Any, schedule: DeviceSchedule) -> None:
    """Factor tiles of unscaled keys, Note [Factor tile] of ``hopper/factors.cuh``.

    :param k_exponents: float32 ``(Hkv, max_tiles, 128)``, see `WideTiles`; ``v_exponents`` likewise.
    :param factors: where they go, float32 ``(Hkv, max_tiles, 132)``.
    """
    params = structs.fill(
        structs.HOPPER_FACTORS,
        {
            "k_exponents": pointer(k_exponents),
            "v_exponents": pointer(v_exponents),
            "factors": pointer(factors),
            "tiles": pointer(schedule.tiles),
            "status": pointer(schedule.status),
            "max_tiles": schedule.max_tiles,
            "kv_heads": schedule.num_kv_heads,
        },
    )
    at_most = -(-schedule.max_tiles * schedule.num_kv_heads // WARPS)
    launch(HOPPER_FACTORS.unit(), "make_factors", params, schedule.status.device, at_most=at_most)


def key_operands(v: Any, schedule: DeviceSchedule, recipe: str) -> KeyOperands:
    """Room for the operands of k and v; without wide tiles of v for an unscaled recipe, which has them."""
    import torch

    heads, dim, tiles = v.shape[1], v.shape[2], schedule.max_tiles
    factors = torch.empty((heads, tiles, FACTOR_WORDS), dtype=torch.float32, device=v.device)
    if recipe != "mxfp8":
        return KeyOperands(factors, None)
    return KeyOperands(factors, torch.empty((heads, tiles, 2 * TILE * dim), dtype=torch.uint8, device=v.device))


def pack_qkv(
    q: Any, k: Any, v: Any, schedule: DeviceSchedule, *, out: Any = None, rows: Sequence[tuple[Any, float]] = ()
) -> PackedInputs:
    """q, k and v as bfloat16 tiles in one launch; arguments as of `flamia.kernels.quantize.quantize_qkv`."""
    import torch

    element = check_tokens("q", q, schedule.num_q_heads)
    for name, x in (("k", k), ("v", v)):
        check_tokens(name, x, schedule.num_kv_heads, like=q)
    tiles, dim = schedule.max_tiles, q.shape[2]
    packed = [
        WideTiles(
            torch.empty((x.shape[1], tiles, 2 * TILE * dim), dtype=torch.uint8, device=q.device),
            torch.empty((x.shape[1], tiles, TILE), dtype=torch.float32, device=q.device),
        )
        for x in (q, k, v)
    ]
    heads = sum(x.shape[1] for x in (q, k, v))
    params = structs.fill(
        structs.HOPPER_PACK,
        {
            "jobs": [
                {
                    "source": tokens_struct(x),
                    "wide": pointer(to.wide),
                    "exponents": pointer(to.exponents),
                    "heads": x.shape[1],
                }
                for x, to in zip((q, k, v), packed, strict=True)
            ],
            "padding": padding_struct(schedule.num_tokens, (out,), tuple(rows)),
            "tiles": pointer(schedule.tiles),
            "status": pointer(schedule.status),
            "max_tiles": tiles,
            "total_heads": heads,
        },
    )
    launch(HOPPER_PACK.unit(element=element, dim=dim), "pack_tokens", params, q.device, at_most=tiles * heads)
    return PackedInputs(*packed)


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    *,
    recipe: str = "mxfp8",
    causal: bool = True,
    softmax_scale: float | None = None,
    backward: bool = True,
    saves: bool = True,
    max_seqlen: int | None = None,
) -> HopperForward:
    """Attention of packed documents.

    :param q: ``(T, Hq, D)`` bfloat16, float16 or float32 CUDA tensor, D 64 or 128, any token and head stride.
    :param k: ``(T, Hkv, D)``, dtype and device of q; ``v`` likewise.
    :param cu_seqlens: int32 or int64 CUDA tensor ``(documents + 1,)``; its content is checked on the device, see
        `DeviceSchedule.check`.
    :param recipe: one of `RECIPES`.
    :param softmax_scale: finite and >= 0; default ``1 / sqrt(D)``.
    :param backward: whether the schedule shall have the backward's items.
    :param saves: whether ``inputs`` shall have what the forward does not read; without effect on the recipe BF16, whose
        forward reads everything.
    :param max_seqlen: see `flamia.kernels.schedule.build_schedule`.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {RECIPES} on Hopper, got {recipe!r}")
    check_tokens("q", q)
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"q must have a head_dim of {HEAD_DIMS} on Hopper, got {q.shape[2]}")
    scale = check_softmax_scale(softmax_scale, q.shape[2])
    schedule = build_schedule(cu_seqlens, q.shape[0], q.shape[1], k.shape[1], causal, backward, max_seqlen)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = (q.shape[1], q.shape[0])
    lse, m, l = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(3))  # noqa: E741
    rows = ((lse, -math.inf), (m, -math.inf), (l, 0.0))
    keys = key_operands(v, schedule, recipe)
    inputs: QuantizedInputs | PackedInputs
    if recipe == "mxfp8":
        inputs = quantize_qkv(q, k, v, schedule, keys=keys, saves=saves, out=out, rows=rows)
    else:
        inputs = pack_qkv(q, k, v, schedule, out=out, rows=rows)
        make_factors(inputs.k.exponents, inputs.v.exponents, keys.factors, schedule)
        keys = KeyOperands(keys.factors, inputs.v.wide)
    result = HopperForward(out, lse, m, l, inputs, schedule)
    _launch_forward(result, keys, recipe, scale)
    return result


def _launch_forward(f: HopperForward, keys: KeyOperands, recipe: str, softmax_scale: float) -> None:
    x = f.inputs
    q, k = (x.q.wide, x.k.wide) if isinstance(x, PackedInputs) else (x.q.payload, x.k.payload)
    c = softmax_constant(softmax_scale)
    schedule, dim = f.schedule, f.out.shape[2]
    params = structs.fill(
        structs.HOPPER_FORWARD,
        {
            "q": pointer(q),
            "q_exponents": pointer(x.q.exponents),
            "k": pointer(k),
            "factors": pointer(keys.factors),
            "v": pointer(keys.v),
            "out": tokens_struct(f.out),
            "lse": pointer(f.lse),
            "m": pointer(f.m),
            "l": pointer(f.l),
            "tiles": pointer(schedule.tiles),
            "tile_offsets": pointer(schedule.tile_offsets),
            "items": pointer(schedule.forward),
            "status": pointer(schedule.status),
            "ticket": pointer(schedule.status) + 4 * TICKETS,
            "max_tiles": schedule.max_tiles,
            "num_tokens": schedule.num_tokens,
            "c": c,
            "c_exponent": math.frexp(float(c))[1] if c else -200,
            "c_usual": bool(c >= USUAL_CONSTANT),
            "group": schedule.num_q_heads // schedule.num_kv_heads,
            "causal": schedule.causal,
            "element_bytes": f.out.element_size(),
            "half": str(f.out.dtype) == "torch.float16",
            "q_heads": schedule.num_q_heads,
        },
    )
    unit = HOPPER_FORWARD.unit(recipe=recipe, dim=dim)
    launch(unit, "attention_forward", params, f.out.device, at_most=schedule.forward.shape[0])
