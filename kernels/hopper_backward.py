"""Attention on Hopper: the backward, from dout and what the forward kept to dQ, dK and dV.

The bits are those of `flamia.reference.attention_backward` under the profile ``hopper``. Nothing waits for the device,
and every shape follows from the shapes of the arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flamia.kernels import structs
from flamia.kernels.hopper import HEAD_DIMS, Widen, make_operands
from flamia.kernels.launch import launch
from flamia.kernels.quantize import QuantizedInputs, RowPass, row_pass
from flamia.kernels.registry import HOPPER_BACKWARD_COLUMNS, HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES
from flamia.kernels.schedule import TICKETS, DeviceSchedule
from flamia.kernels.tensors import ELEMENTS, TILE, pointer, softmax_constant, tokens_struct

CONSUMERS = 256
"""Threads of a CTA that hold accumulators."""

SCRATCH_WORDS = 64
"""Words of scratch memory per consumer thread, for slow tiles."""

QUERY_COLUMN_BYTES, KEY_COLUMN_BYTES = 1056, 544
"""Bytes for 64 queries, and for 64 keys: Note [Columns] of ``hopper/backward.cuh``."""

USUAL_CONSTANTS = (2.0**-20, 2.0**4)
"""Softmax scales, and the constants made from them, outside of this range make every tile a slow one."""


@dataclass(frozen=True)
class HopperGradients:
    """Gradients in the dtype of q: dq ``(T, Hq, D)``, dk and dv ``(T, Hkv, D)``; 0 in padding rows."""

    dq: Any
    dk: Any
    dv: Any


@dataclass(frozen=True)
class WideOperands:
    """Copies in bfloat16 tiles, uint8 ``(H, max_tiles, 256 D)``: codes of q and k, values of dO'."""

    q: Any
    k: Any
    dout: Any


def attention_backward(
    dout: Any,
    out: Any,
    m: Any,
    l: Any,  # noqa: E741
    inputs: QuantizedInputs,
    schedule: DeviceSchedule,
    softmax_scale: float,
) -> HopperGradients:
    """Gradients of attention for the recipe MXFP8.

    :param dout: ``(T, Hq, D)`` CUDA tensor, dtype of out.
    :param out: the forward's output; ``m`` and ``l``: float32 ``(Hq, T)``, of `HopperForward`.
    :param inputs: the quantized q, k and v of the forward.
    :param schedule: the forward's, with the backward's items.
    :param softmax_scale: the forward's, finite and >= 0.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    dim = out.shape[2]
    if dim not in HEAD_DIMS:
        raise ValueError(f"out must have a head_dim of {HEAD_DIMS} on Hopper, got {dim}")
    if schedule.backward is None:
        raise ValueError("schedule must have the backward's items: build_schedule(..., backward=True)")
    kv_shape = (out.shape[0], schedule.num_kv_heads, dim)
    dq = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    dk, dv = (torch.empty(kv_shape, dtype=out.dtype, device=out.device) for _ in range(2))
    rows = row_pass(dout, out, l, m, schedule, gradients=(dq, dk, dv))
    wide = widen_operands(inputs, rows, schedule, dim)
    gradients = HopperGradients(dq, dk, dv)
    launch_backward(inputs, rows, wide, schedule, softmax_scale, gradients)
    return gradients


def widen_operands(inputs: QuantizedInputs, rows: RowPass, schedule: DeviceSchedule, head_dim: int) -> WideOperands:
    """The copies that the token contractions read."""
    import torch

    def wide(payload: Any) -> Any:
        return torch.empty((*payload.shape[:2], 2 * TILE * head_dim), dtype=torch.uint8, device=payload.device)

    out = WideOperands(wide(inputs.q.payload), wide(inputs.k.payload), wide(rows.dout.payload))
    jobs = [
        Widen(inputs.q.payload, out.q),
        Widen(inputs.k.payload, out.k),
        Widen(rows.dout.payload, out.dout, rows.dout.scales),
    ]
    make_operands(jobs, schedule, head_dim)
    return out


def count_multiprocessors(device: Any) -> int:
    """CTAs of the persistent kernels: one per multiprocessor."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_backward(
    inputs: QuantizedInputs,
    rows: RowPass,
    wide: WideOperands,
    schedule: DeviceSchedule,
    softmax_scale: float,
    out: HopperGradients,
) -> None:
    """The kernels: what they share of each row, dK and dV, then dQ."""
    import torch

    device, dim, group = out.dq.device, out.dq.shape[2], schedule.num_q_heads // schedule.num_kv_heads
    ctas = count_multiprocessors(device)

    def workspace(words: int) -> Any:
        return torch.empty(ctas * CONSUMERS * words, dtype=torch.float32, device=device)

    def columns(heads: int, size: int) -> Any:
        return torch.empty(heads * schedule.max_tiles * size, dtype=torch.uint8, device=device)

    q_columns = columns(schedule.num_q_heads, 2 * QUERY_COLUMN_BYTES)
    k_columns = columns(schedule.num_kv_heads, 4 * KEY_COLUMN_BYTES)
    scratch = workspace(SCRATCH_WORDS)
    totals = workspace(dim) if group > 1 else None
    v1 = inputs.v if inputs.v1 is None else inputs.v1
    c = softmax_constant(softmax_scale)
    low, high = USUAL_CONSTANTS
    usual = low <= c <= high and low <= softmax_scale <= high
    # |w| < 448^2 D 2^(eQ + eK) c < 2^21
    products = math.ceil(math.log2(448.0**2 * dim))
    fields = {
        "q": pointer(inputs.q.payload),
        "k": pointer(inputs.k.payload),
        "v": pointer(inputs.v.payload),
        "v1": pointer(v1.payload),
        "dout": pointer(rows.dout.payload),
        "q_wide": pointer(wide.q),
        "k_wide": pointer(wide.k),
        "dout_wide": pointer(wide.dout),
        "q_exponents": pointer(inputs.q.exponents),
        "k_exponents": pointer(inputs.k.exponents),
        "v_scales": pointer(inputs.v.scales),
        "v1_scales": pointer(v1.scales),
        "dout_scales": pointer(rows.dout.scales),
        "delta": pointer(rows.delta),
        "top": pointer(rows.top),
        "q_columns": pointer(q_columns),
        "k_columns": pointer(k_columns),
        "scratch": pointer(scratch),
        "totals": pointer(totals),
        "tiles": pointer(schedule.tiles),
        "tile_offsets": pointer(schedule.tile_offsets),
        "status": pointer(schedule.status),
        "max_tiles": schedule.max_tiles,
        "group": group,
        "kv_heads": schedule.num_kv_heads,
        "causal": schedule.causal,
        "c": c,
        "softmax_scale": softmax_scale,
        "fast_exponent": 21 - products - math.ceil(math.log2(c)) if usual else -math.inf,
    }
    params = structs.fill(structs.HOPPER_BACKWARD, fields)
    units = schedule.max_tiles * (schedule.num_q_heads + schedule.num_kv_heads)
    launch(HOPPER_BACKWARD_COLUMNS.unit(dim=dim), "backward_columns", params, device, at_most=units)
    element = ELEMENTS[str(out.dq.dtype)]
    ticket = pointer(schedule.status) + 4 * TICKETS
    params = structs.fill(
        structs.HOPPER_BACKWARD,
        fields
        | {
            "first": tokens_struct(out.dk),
            "second": tokens_struct(out.dv),
            "items": pointer(schedule.backward),
            "ticket": ticket + 8,
        },
    )
    unit = HOPPER_BACKWARD_KEYS.unit(element=element, dim=dim)
    launch(unit, "backward_keys", params, device, at_most=schedule.backward.shape[0])
    params = structs.fill(
        structs.HOPPER_BACKWARD,
        fields | {"first": tokens_struct(out.dq), "items": pointer(schedule.forward), "ticket": ticket + 16},
    )
    unit = HOPPER_BACKWARD_QUERIES.unit(element=element, dim=dim)
    launch(unit, "backward_queries", params, device, at_most=schedule.forward.shape[0])
