"""Attention on Hopper: the backward, from dout and what the forward kept to dQ, dK and dV.

The bits are those of `flamia.reference.attention_backward` under the profile ``hopper``: a row pre-pass, a kernel whose
CTAs own keys (dK, dV) and store each tile of X, and one that multiplies these tiles for dQ, for as many heads at a time
as a bound of memory allows. Nothing waits for the device, every shape follows from the arguments' shapes and
``max_seqlen``, and no result depends on the number of CTAs or the order of work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flamia.kernels import structs
from flamia.kernels.backward_arguments import check_arrays, check_inputs, check_schedule_and_rows
from flamia.kernels.hopper import HEAD_DIMS, PackedInputs
from flamia.kernels.launch import launch
from flamia.kernels.quantize import QuantizedInputs, RowPass, row_pass
from flamia.kernels.registry import HOPPER_BACKWARD_DQ, HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_OPERANDS
from flamia.kernels.schedule import TICKETS, DeviceSchedule
from flamia.kernels.stored import STORED_BYTES, check_stored_bytes, divide_heads
from flamia.kernels.tensors import (
    ELEMENTS,
    TILE,
    check_softmax_scale,
    pointer,
    softmax_constant,
    tokens_struct,
)

CONSUMERS = 256
"""Threads of a CTA that hold accumulators."""

SCRATCH_WORDS = 64
"""Words of scratch memory per consumer thread, for slow tiles."""

QUERY_COLUMN_BYTES, KEY_COLUMN_BYTES = 784, 528
"""Bytes for 64 queries, and for 64 keys: Note [Columns] of ``hopper/backward.cuh``."""

X_BYTES = {"mxfp8": 3 * TILE * TILE // 2, "bf16": 2 * TILE * TILE}
"""A stored tile of X, by recipe: Note [Packed X] of ``hopper/backward_stored.cuh``."""

READ = {name: ("payload", "exponents") for name in ("q", "k", "v")}
"""What the kernels read of the quantized inputs."""

READ_PACKED = {name: ("wide", "exponents") for name in ("q", "k", "v")}
"""And of those of an unscaled recipe."""

USUAL_CONSTANTS = (2.0**-20, 2.0**4)
"""Softmax scales, and the constants made from them, outside of this range make every tile a slow one."""

WIDENS_UP_TO = {(True, False): 1024, (True, True): 4096, (False, False): 512, (False, True): 512}
"""Tokens per document up to which widening in shared memory pays: Note [Widening] of ``hopper/backward.cuh``. Keys are
whether attention is causal, and whether query heads share keys. The backward of 32,768 tokens on an H200, D = 128, with
copies in memory and widening, in microseconds: causal, 16 heads, 300 tokens 655 and 527, 1,024 973 and 898, 2,048 1,547
and 1,635; 32 and 8 heads, 2,048 3,664 and 3,423; full, 16 heads, 300 821 and 740, 1,024 1,399 and 1,510."""


@dataclass(frozen=True)
class HopperGradients:
    """Gradients in the dtype of q: dq ``(T, Hq, D)``, dk and dv ``(T, Hkv, D)``; 0 in padding rows."""

    dq: Any
    dk: Any
    dv: Any


@dataclass(frozen=True)
class WideOperands:
    """Values in bfloat16 tiles, uint8 ``(Hq, max_tiles, 256 D)``, of q and dO'; zeros for lost tokens.

    None, both, where the kernel widens in shared memory: Note [Widening] of ``hopper/backward.cuh``.
    """

    q: Any = None
    dout: Any = None


def attention_backward(
    dout: Any,
    out: Any,
    m: Any,
    l: Any,  # noqa: E741
    inputs: QuantizedInputs | PackedInputs,
    schedule: DeviceSchedule,
    softmax_scale: float,
    *,
    stored_bytes: int = STORED_BYTES,
    widens: bool | None = None,
) -> HopperGradients:
    """Gradients of attention for the recipe MXFP8, or BF16 for inputs that are packed.

    :param dout: ``(T, Hq, D)`` CUDA tensor, dtype of out.
    :param out: the forward's output; ``m`` and ``l``: float32 ``(Hq, T)``, of `HopperForward`.
    :param inputs: q, k and v of the forward.
    :param schedule: the forward's, with the backward's items.
    :param softmax_scale: the forward's, finite and >= 0.
    :param stored_bytes: bound of the memory for tiles of X, 12 bits per query, key and head, or 16: Note [Bounded X] of
        `flamia.kernels.stored`. One KV head with its query heads is the least, and is taken even if it does not fit.
    :param widens: for tests and measurements, which of two ways q and dO' become bfloat16 in, on which no bit depends;
        None for `prefers_widening`; without effect on packed inputs.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    check_schedule_and_rows(schedule, out, m, l, HEAD_DIMS, "Hopper")
    dim = out.shape[2]
    softmax_scale = check_softmax_scale(softmax_scale, dim)
    check_stored_bytes(stored_bytes)
    shape = (schedule.num_q_heads, schedule.max_tiles, 2 * TILE * dim)

    def room() -> Any:
        return torch.empty(shape, dtype=torch.uint8, device=out.device)

    if not isinstance(inputs, (QuantizedInputs, PackedInputs)):
        raise TypeError(f"inputs must be a QuantizedInputs or a PackedInputs, got {type(inputs).__name__}")
    if isinstance(inputs, PackedInputs):
        check_arrays(inputs, schedule, READ_PACKED, dim, out.device)
        wide = WideOperands(inputs.q.wide, room())
    else:
        check_inputs(inputs, schedule, READ, dim, out.device)
        widens = prefers_widening(schedule) if widens is None else widens
        wide = WideOperands() if widens else WideOperands(room(), room())
    kv_shape = (out.shape[0], schedule.num_kv_heads, dim)
    dq = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    dk, dv = (torch.empty(kv_shape, dtype=out.dtype, device=out.device) for _ in range(2))
    scaled = isinstance(inputs, QuantizedInputs)
    rows = row_pass(dout, out, l, m, schedule, gradients=(dq, dk, dv), wide=wide.dout, scaled=scaled)
    gradients = HopperGradients(dq, dk, dv)
    launch_backward(inputs, rows, wide, schedule, softmax_scale, gradients, stored_bytes)
    return gradients


def prefers_widening(schedule: DeviceSchedule) -> bool:
    """Whether documents are so short that q and dO' are better widened in shared memory; no bit depends on it.

    What counts is how long a document a token is in, on average. That is known to be at least the mean of a document of
    ``max_seqlen`` tokens and of others of equal lengths; without a useful ``max_seqlen``, all have equal lengths.
    """
    tokens, documents = schedule.num_tokens, int(schedule.tile_offsets.shape[0]) - 1
    shared = schedule.num_q_heads > schedule.num_kv_heads
    bound = WIDENS_UP_TO[schedule.causal, shared] * tokens
    longest = schedule.max_seqlen
    if longest is None or longest >= tokens or documents < 2:
        return tokens**2 <= bound * documents
    return longest**2 + (tokens - longest) ** 2 // (documents - 1) <= bound


def count_multiprocessors(device: Any) -> int:
    """CTAs of the persistent kernels: one per multiprocessor."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_backward(
    inputs: QuantizedInputs | PackedInputs,
    rows: RowPass,
    wide: WideOperands,
    schedule: DeviceSchedule,
    softmax_scale: float,
    out: HopperGradients,
    stored_bytes: int,
) -> None:
    """The kernels: what they share of q and k; then for each chunk of heads dK and dV, and dQ."""
    device, dim, kv_heads, widens = out.dq.device, out.dq.shape[2], schedule.num_kv_heads, int(wide.q is None)
    recipe = "bf16" if isinstance(inputs, PackedInputs) else "mxfp8"
    chunks = divide_heads(schedule, stored_bytes, X_BYTES[recipe])
    heads = max(1, chunks.heads)
    memory = _make_workspace(schedule, dim, heads * chunks.pairs * X_BYTES[recipe], device)
    fields = _fields(inputs, rows, wide, schedule, softmax_scale)
    fields |= {name: pointer(x) for name, x in memory.items()} | {"pairs": chunks.pairs}
    params = structs.fill(structs.HOPPER_BACKWARD, fields)
    units = schedule.max_tiles * (schedule.num_q_heads + kv_heads)
    operands_unit = HOPPER_BACKWARD_OPERANDS.unit(recipe=recipe, dim=dim, widens=widens)
    launch(operands_unit, "backward_operands", params, device, at_most=units)
    element = ELEMENTS[str(out.dq.dtype)]
    ticket = pointer(schedule.status) + 4 * TICKETS
    gradients = {"first": tokens_struct(out.dk), "second": tokens_struct(out.dv)}
    keys = gradients | {"items": pointer(schedule.backward), "ticket": ticket + 8}
    queries = {"first": tokens_struct(out.dq), "items": pointer(schedule.forward), "ticket": ticket + 16}
    keys_unit = HOPPER_BACKWARD_KEYS.unit(recipe=recipe, element=element, dim=dim, widens=widens)
    dq_unit = HOPPER_BACKWARD_DQ.unit(recipe=recipe, element=element, dim=dim)
    for first in range(0, kv_heads, heads):
        chunk = {"first_head": first, "last_head": min(first + heads, kv_heads)}
        params = structs.fill(structs.HOPPER_BACKWARD, fields | keys | chunk)
        launch(keys_unit, "backward_keys", params, device, at_most=schedule.backward.shape[0])
        params = structs.fill(structs.HOPPER_BACKWARD, fields | queries | chunk)
        launch(dq_unit, "backward_dq", params, device, at_most=schedule.forward.shape[0])


def _make_workspace(schedule: DeviceSchedule, dim: int, x_bytes: int, device: Any) -> dict[str, Any]:
    """Memory that lives during the call, by field.

    :param x_bytes: tiles of X of one of the query heads that share a KV head.
    """
    import torch

    group = schedule.num_q_heads // schedule.num_kv_heads
    threads = count_multiprocessors(device) * CONSUMERS

    def room(count: int, dtype: Any) -> Any:
        return torch.empty(count, dtype=dtype, device=device)

    return {
        "q_columns": room(schedule.num_q_heads * schedule.max_tiles * 2 * QUERY_COLUMN_BYTES, torch.uint8),
        "k_columns": room(schedule.num_kv_heads * schedule.max_tiles * 2 * KEY_COLUMN_BYTES, torch.uint8),
        "scratch": room(threads * SCRATCH_WORDS, torch.float32),
        "totals": room(threads * dim, torch.float32) if group > 1 else None,
        "x": room(x_bytes * group, torch.uint8),
    }


def _fields(
    inputs: QuantizedInputs | PackedInputs,
    rows: RowPass,
    wide: WideOperands,
    schedule: DeviceSchedule,
    softmax_scale: float,
) -> dict[str, Any]:
    """Fields of `structs.HOPPER_BACKWARD` that all kernels share."""
    if isinstance(inputs, PackedInputs):
        q, k, v, dout = inputs.q.wide, inputs.k.wide, inputs.v.wide, wide.dout
    else:
        q, k, v, dout = inputs.q.payload, inputs.k.payload, inputs.v.payload, rows.dout.payload
    c = softmax_constant(softmax_scale)
    low, high = USUAL_CONSTANTS
    usual = low <= c <= high and low <= softmax_scale <= high
    return {
        **{name: pointer(x) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))},
        "q_wide": pointer(wide.q),
        "dout_wide": pointer(wide.dout),
        "q_exponents": pointer(inputs.q.exponents),
        "k_exponents": pointer(inputs.k.exponents),
        "v_exponents": pointer(inputs.v.exponents),
        "dout_scales": pointer(rows.dout.scales),
        "delta": pointer(rows.delta),
        "top": pointer(rows.top),
        "tiles": pointer(schedule.tiles),
        "tile_offsets": pointer(schedule.tile_offsets),
        "status": pointer(schedule.status),
        "max_tiles": schedule.max_tiles,
        "longest": schedule.longest,
        "group": schedule.num_q_heads // schedule.num_kv_heads,
        "kv_heads": schedule.num_kv_heads,
        "causal": schedule.causal,
        "c": c,
        "softmax_scale": softmax_scale,
        "c_usual": int(usual),
    }
