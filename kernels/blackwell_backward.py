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
from flamia.kernels.backward_arguments import check_inputs, check_schedule_and_rows
from flamia.kernels.blackwell import ELEMENTS, HEAD_DIMS, RECIPES, check_score_factor
from flamia.kernels.launch import launch
from flamia.kernels.quantize import QuantizedInputs, RowPass, row_pass
from flamia.kernels.registry import BLACKWELL_BACKWARD, BLACKWELL_DQ, Unit
from flamia.kernels.schedule import NUM_BACKWARD, NUM_FORWARD, TICKETS, DeviceSchedule
from flamia.kernels.stored import Chunks, check_stored_bytes, divide_heads
from flamia.kernels.tensors import TILE, check_softmax_scale, pointer, softmax_constant

USUAL_CONSTANTS = {"c": (2.0**-60, 2.0**60), "softmax_scale": (2.0**-10, 2.0**10)}
"""Constants outside these ranges take the kernels' slow path: Note [Fast tiles] of ``backward_numbers.cuh``."""

X_BYTES = 128 * 128 + 16
"""A stored tile of X with its scales."""

_SCALED, _FOLDED = ("payload", "scales"), ("payload", "exponents")
_BOTH = (*_SCALED, "exponents")
READ: dict[str, dict[str, tuple[str, ...]]] = {
    "mxfp8": {"q": _BOTH, "k": _BOTH, "v": _SCALED, "v1": _SCALED},
    "nvfp4_fp8": {"q": _FOLDED, "k": _FOLDED, "v": _SCALED, "v1": _SCALED, "q4": _SCALED, "k4": _SCALED},
}
"""What the kernels read of the quantized inputs, by recipe."""

STORED_BYTES = 16 << 30
"""Default bound of the memory for tiles of X: three KV heads of eight query heads at 32K tokens, causal. With one at a
time the longest item of a launch would be more than a CTA's share of it."""

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
    check_schedule_and_rows(schedule, out, m, l, HEAD_DIMS, "Blackwell")
    total, _, dim = out.shape
    scale, score_factor = check_softmax_scale(softmax_scale, dim), check_score_factor(score_factor)
    check_inputs(inputs, schedule, READ[recipe], dim, out.device)
    check_stored_bytes(stored_bytes)
    for name, flag in (("strict", strict), ("hooks", hooks)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")
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
    chunks = divide_heads(schedule, stored_bytes, X_BYTES)
    x = _make_tiles(schedule, chunks, out.device)
    fields |= {"totals": pointer(totals), "x": pointer(x[0]), "x_scales": pointer(x[1]), "pairs": chunks.pairs}
    ticket = pointer(schedule.status) + 4 * (TICKETS + 2)
    keys = {"first": _gradient(dv), "second": _gradient(dk), "items": pointer(schedule.backward), "ticket": ticket}
    queries = {"first": _gradient(dq), "items": pointer(schedule.forward), "ticket": ticket + 8}
    counts = {"num_items": NUM_BACKWARD}, {"num_items": NUM_FORWARD}
    step = chunks.heads or schedule.num_kv_heads
    for first in range(0, schedule.num_kv_heads, step):
        heads = {"first_head": first, "last_head": min(first + step, schedule.num_kv_heads)}
        _launch(keys_unit, "attention_backward", fields | keys | counts[0] | heads, schedule.backward)
        if chunks.heads == 0:
            _launch(queries_unit, "attention_backward", fields | queries | counts[1] | heads, schedule.forward)
        else:
            _launch(BLACKWELL_DQ.unit(dim=dim), "attention_dq", fields | queries | counts[1] | heads, schedule.forward)
    return BlackwellGradients(dq, dk, dv, rows, stages)


def _make_stages(schedule: DeviceSchedule, device: Any) -> Stages:
    import torch

    shape = (schedule.num_q_heads, schedule.max_tiles, -(-schedule.num_tokens // TILE))
    return Stages(*(torch.empty((*shape, n, n), dtype=torch.uint8, device=device) for n in (TILE, 4, TILE, 4)))


def _launch(unit: Unit, entry: str, fields: dict[str, Any], items: Any) -> None:
    ctas = max(1, min(items.shape[0], MAX_CTAS))
    launch(unit, entry, structs.fill(structs.BLACKWELL_BACKWARD, fields), items.device, at_most=ctas)


def _make_tiles(schedule: DeviceSchedule, chunks: Chunks, device: Any) -> tuple[Any, Any]:
    """Codes and scales of X; None where they are not stored."""
    import torch

    if chunks.heads == 0:
        return None, None
    count = chunks.heads * (schedule.num_q_heads // schedule.num_kv_heads) * chunks.pairs
    codes, scales = (torch.empty(count * n, dtype=torch.uint8, device=device) for n in (X_BYTES - 16, 16))
    return codes, scales


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
        "longest": schedule.longest,
        "largest_score": 2.0**20 / numbers["c"] if usual else 0.0,
        "score_factor": score_factor,
        "usual": usual,
        "group": schedule.num_q_heads // schedule.num_kv_heads,
        "causal": schedule.causal,
    }
