"""Attention on Blackwell: the backward, from dout and what the forward kept to dq, dk and dv.

The bits are those of `flamia.reference.attention_backward` under the profile ``blackwell``: a row pre-pass, a kernel
whose CTAs own keys (dk, dv), and one for dq. The latter multiplies the tiles of X that the former stored, for as many
heads at a time as a bound of memory allows; where that is not even one, its CTAs own queries and compute X again. Both
have the same bits. Nothing waits for the device, and no result depends on the number of CTAs or the order of work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flamia.kernels import structs
from flamia.kernels.blackwell import ELEMENTS, HEAD_DIMS, RECIPES, check_score_factor
from flamia.kernels.launch import launch
from flamia.kernels.quantize import SCALE_TILE_BYTES, QuantizedInputs, RowPass, row_pass
from flamia.kernels.registry import BLACKWELL_BACKWARD, BLACKWELL_DQ, Unit
from flamia.kernels.schedule import NUM_BACKWARD, NUM_FORWARD, TICKETS, DeviceSchedule
from flamia.kernels.tensors import TILE, check_rows, check_softmax_scale, check_tokens, pointer, softmax_constant

USUAL_CONSTANTS = {"c": (2.0**-60, 2.0**60), "softmax_scale": (2.0**-10, 2.0**10)}
"""Constants outside these ranges take the kernels' slow path: Note [Fast tiles] of ``backward_numbers.cuh``."""

X_BYTES = 128 * 128 + 16
"""A stored tile of X with its scales."""

STORED_BYTES = 4 << 30
"""Default bound of the memory for tiles of X."""

MAX_CTAS = 160
"""CTAs of a launch: a B200 has 148 multiprocessors, no chip of the family more than 160."""


@dataclass(frozen=True)
class Stages:
    """Tiles of P and X by the kernel whose CTAs own keys, for tests.

    :param p: uint8 ``(Hq, max_tiles, query tiles, 128 keys, 128 queries)``: codes, by key tile of the pack; query tiles
        are counted from the first one that sees the keys.
    :param p_scale: uint8 ``(Hq, max_tiles, query tiles, 4, 4)``.
    :param x: as ``p``; ``x_scale`` as ``p_scale``.
    """

    p: Any
    p_scale: Any
    x: Any
    x_scale: Any


@dataclass(frozen=True)
class BlackwellGradients:
    """Gradients in the dtype of dout: dq ``(T, Hq, D)``, dk and dv ``(T, Hkv, D)``; 0 in padding rows.

    :param rows: what the row pre-pass wrote.
    :param stages: None without hooks.
    """

    dq: Any
    dk: Any
    dv: Any
    rows: RowPass
    stages: Stages | None = None


def attention_backward(
    dout: Any,
    out: Any,
    m: Any,
    l: Any,  # noqa: E741
    inputs: QuantizedInputs,
    schedule: DeviceSchedule,
    softmax_scale: float,
    *,
    recipe: str = "mxfp8",
    score_factor: float = 1.0,
    stored_bytes: int = STORED_BYTES,
    strict: bool = False,
    exp2: str = "exact",
    hooks: bool = False,
) -> BlackwellGradients:
    """Gradients of attention.

    :param dout: ``(T, Hq, D)`` CUDA tensor, dtype of out.
    :param out: the forward's output; ``m`` and ``l``: float32 ``(Hq, T)``, of `BlackwellForward`.
    :param inputs: the quantized q, k and v of the forward.
    :param schedule: the forward's, with the backward's items.
    :param softmax_scale: the forward's, finite and >= 0; ``recipe``, ``score_factor`` and ``exp2`` likewise.
    :param stored_bytes: bound of the memory for tiles of X; 0: compute them twice.
    :param strict: wait where PTX promises no order.
    :param hooks: return P and X of every tile.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {RECIPES} on Blackwell, got {recipe!r}")
    _check_schedule_and_rows(schedule, out, m, l)
    total, _, dim = out.shape
    scale, score_factor = check_softmax_scale(softmax_scale, dim), check_score_factor(score_factor)
    _check_inputs(inputs, schedule, recipe, dim, out.device)
    _check_options(stored_bytes, strict=strict, hooks=hooks)
    variant: dict[str, Any] = {"recipe": recipe, "dim": dim, "exp2": exp2, "strict": int(strict)}
    keys_unit = BLACKWELL_BACKWARD.unit(owner="keys", hooks=int(hooks), **variant)
    queries_unit = BLACKWELL_BACKWARD.unit(owner="queries", hooks=0, **variant)
    kv_shape = (total, schedule.num_kv_heads, dim)
    dq = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    dk, dv = (torch.empty(kv_shape, dtype=out.dtype, device=out.device) for _ in range(2))
    rows = row_pass(dout, out, l, m, schedule, gradients=(dq, dk, dv))
    stages = _make_stages(schedule, out.device) if hooks else None
    fields = _fields(inputs, rows, schedule, scale, score_factor) | {"element": ELEMENTS[str(out.dtype)]}
    if stages is not None:
        fields |= {f"stage_{name}": pointer(x) for name, x in vars(stages).items()} | {"stage_tiles": stages.p.shape[2]}
    totals = _totals(schedule, dim, out.device)
    x = _stored_tiles(schedule, stored_bytes, out.device)
    fields |= {"totals": pointer(totals), "x": pointer(x.codes), "x_scales": pointer(x.scales), "pairs": x.pairs}
    ticket = pointer(schedule.status) + 4 * (TICKETS + 2)
    keys = {"first": _gradient(dv), "second": _gradient(dk), "items": pointer(schedule.backward), "ticket": ticket}
    queries = {"first": _gradient(dq), "items": pointer(schedule.forward), "ticket": ticket + 8}
    counts = {"num_items": NUM_BACKWARD}, {"num_items": NUM_FORWARD}
    for first in range(0, schedule.num_kv_heads, x.heads):
        heads = {"first_head": first, "last_head": min(first + x.heads, schedule.num_kv_heads)}
        _launch(keys_unit, "attention_backward", fields | keys | counts[0] | heads, schedule.backward)
        if x.codes is None:
            _launch(queries_unit, "attention_backward", fields | queries | counts[1] | heads, schedule.forward)
        else:
            _launch(BLACKWELL_DQ.unit(dim=dim), "attention_dq", fields | queries | counts[1] | heads, schedule.forward)
    return BlackwellGradients(dq, dk, dv, rows, stages)


def _check_schedule_and_rows(schedule: Any, out: Any, m: Any, l: Any) -> None:  # noqa: E741
    if not isinstance(schedule, DeviceSchedule):
        raise TypeError(f"schedule must be a DeviceSchedule, got {type(schedule).__name__}")
    if schedule.backward is None:
        raise ValueError("schedule must have the backward's items: build_schedule(..., backward=True)")
    check_tokens("out", out, schedule.num_q_heads)
    if out.shape[0] != schedule.num_tokens:
        raise ValueError(f"out must have the {schedule.num_tokens} tokens of the schedule, got {out.shape[0]}")
    if out.shape[2] not in HEAD_DIMS:
        raise ValueError(f"out must have a head_dim of {HEAD_DIMS} on Blackwell, got {out.shape[2]}")
    for name, x in (("m", m), ("l", l)):
        check_rows(name, x, schedule.num_q_heads, schedule.num_tokens, out.device)


def _check_options(stored_bytes: Any, **flags: Any) -> None:
    if isinstance(stored_bytes, bool) or not isinstance(stored_bytes, int):
        raise TypeError(f"stored_bytes must be an integer, got {stored_bytes!r}")
    if stored_bytes < 0:
        raise ValueError(f"stored_bytes must be at least 0, got {stored_bytes}")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def _check_inputs(inputs: Any, schedule: DeviceSchedule, recipe: str, dim: int, device: Any) -> None:
    """Every array that the kernels read is there and has this call's shape: the device does not look at sizes."""
    if not isinstance(inputs, QuantizedInputs):
        raise TypeError(f"inputs must be a QuantizedInputs, got {type(inputs).__name__}")
    nvfp4 = recipe == "nvfp4_fp8"
    if ((inputs.q4 is not None), (inputs.k4 is not None)) != (nvfp4, nvfp4):
        raise ValueError(f"inputs must have q4 and k4 for the recipe nvfp4_fp8, exactly; the recipe is {recipe!r}")
    sizes = {"payload": TILE * dim, "scales": SCALE_TILE_BYTES, "exponents": TILE}
    sizes4 = {"payload": TILE * dim // 2, "scales": 8 * dim}
    folded = ("payload", "exponents") if nvfp4 else ("payload", "scales", "exponents")
    scaled = ("payload", "scales")
    read = {"q": folded, "k": folded, "v": scaled}
    if schedule.causal:
        read["v1"] = scaled
    if nvfp4:
        read |= {"q4": scaled, "k4": scaled}
    for role, names in read.items():
        heads = schedule.num_q_heads if role[0] == "q" else schedule.num_kv_heads
        for name in names:
            x: Any = getattr(getattr(inputs, role), name, None)
            dtype = "torch.float32" if name == "exponents" else "torch.uint8"
            shape = (heads, schedule.max_tiles, (sizes4 if role in ("q4", "k4") else sizes)[name])
            what = f"inputs.{role}.{name} must be a contiguous {dtype} tensor {shape} on {device}"
            if str(getattr(x, "dtype", None)) != dtype or not hasattr(x, "data_ptr"):
                raise TypeError(f"{what}, got {getattr(x, 'dtype', type(x).__name__)}")
            if tuple(x.shape) != shape or x.device != device or not x.is_contiguous():
                raise ValueError(f"{what}, got {tuple(x.shape)} with strides {x.stride()} on {x.device}")


def _make_stages(schedule: DeviceSchedule, device: Any) -> Stages:
    import torch

    shape = (schedule.num_q_heads, schedule.max_tiles, -(-schedule.num_tokens // TILE))
    return Stages(*(torch.empty((*shape, n, n), dtype=torch.uint8, device=device) for n in (TILE, 4, TILE, 4)))


def _launch(unit: Unit, entry: str, fields: dict[str, Any], items: Any) -> None:
    ctas = max(1, min(items.shape[0], MAX_CTAS))
    launch(unit, entry, structs.fill(structs.BLACKWELL_BACKWARD, fields), items.device, at_most=ctas)


@dataclass(frozen=True)
class _StoredTiles:
    """Room for tiles of X; None: they are not stored.

    :param heads: KV heads of one launch.
    :param pairs: tiles of a query head.
    """

    codes: Any
    scales: Any
    heads: int
    pairs: int


def _stored_tiles(schedule: DeviceSchedule, bound: int, device: Any) -> _StoredTiles:
    """Room for as many heads as fit the bound; their tiles of a pack are counted as if it were one document."""
    import torch

    tiles = schedule.max_tiles
    pairs = tiles * (tiles + 1) // 2 if schedule.causal else tiles**2
    group = schedule.num_q_heads // schedule.num_kv_heads
    heads = min(schedule.num_kv_heads, bound // max(1, group * pairs * X_BYTES))
    if heads == 0:
        return _StoredTiles(None, None, schedule.num_kv_heads, pairs)
    count = heads * group * pairs
    codes, scales = (torch.empty(count * n, dtype=torch.uint8, device=device) for n in (X_BYTES - 16, 16))
    return _StoredTiles(codes, scales, heads, pairs)


def _totals(schedule: DeviceSchedule, dim: int, device: Any) -> Any:
    """Room for the sums of dK and dV over the heads of a group, for each CTA; None for groups of one."""
    import torch

    if schedule.num_q_heads == schedule.num_kv_heads:
        return None
    ctas = min(schedule.backward.shape[0], MAX_CTAS)
    return torch.empty(ctas * 2 * dim * TILE, dtype=torch.float32, device=device)


def _gradient(x: Any) -> dict[str, int]:
    size = x.element_size()
    return {"data": pointer(x), "token_stride": x.stride(0) * size, "head_stride": x.stride(1) * size}


def _fields(
    inputs: QuantizedInputs, rows: RowPass, schedule: DeviceSchedule, softmax_scale: float, score_factor: float
) -> dict[str, Any]:
    """Fields of `structs.BLACKWELL_BACKWARD` that all kernels share."""
    x = inputs
    q, k = (x.q, x.k) if x.q4 is None or x.k4 is None else (x.q4, x.k4)
    numbers = {"c": float(softmax_constant(softmax_scale)), "softmax_scale": float(softmax_scale)}
    usual = score_factor == 1 and all(low <= numbers[name] <= high for name, (low, high) in USUAL_CONSTANTS.items())
    return numbers | {
        "q": pointer(q.payload),
        "q_scales": pointer(q.scales),
        "q_tokens": pointer(x.q.payload),
        "q_exponents": pointer(x.q.exponents),
        "k": pointer(k.payload),
        "k_scales": pointer(k.scales),
        "k_tokens": pointer(x.k.payload),
        "k_exponents": pointer(x.k.exponents),
        "v": pointer(x.v.payload),
        "v_scales": pointer(x.v.scales),
        "v1": 0 if x.v1 is None else pointer(x.v1.payload),
        "v1_scales": 0 if x.v1 is None else pointer(x.v1.scales),
        "dout": pointer(rows.dout.payload),
        "dout_scales": pointer(rows.dout.scales),
        "dout_token_scales": pointer(rows.dout.token_scales),
        "delta": pointer(rows.delta),
        "top": pointer(rows.top),
        "tiles": pointer(schedule.tiles),
        "tile_offsets": pointer(schedule.tile_offsets),
        "status": pointer(schedule.status),
        "max_tiles": schedule.max_tiles,
        "largest_score": 2.0**20 / numbers["c"] if usual else 0.0,
        "score_factor": score_factor,
        "usual": usual,
        "group": schedule.num_q_heads // schedule.num_kv_heads,
        "causal": schedule.causal,
    }
