"""Checks of what a backward is called with, before any launch: the device does not look at sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flamia.kernels.quantize import SCALE_TILE_BYTES, QuantizedInputs
from flamia.kernels.schedule import DeviceSchedule
from flamia.kernels.tensors import TILE, check_rows, check_tokens


def check_schedule_and_rows(
    schedule: Any,
    out: Any,
    m: Any,
    l: Any,  # noqa: E741
    head_dims: Sequence[int],
    chip: str,
) -> None:
    """The schedule has the backward's items; out, m and l are of its call.

    :param head_dims: those that the kernels have.
    :param chip: what users call the chips of these kernels.
    :raises TypeError, ValueError: naming the argument.
    """
    if not isinstance(schedule, DeviceSchedule):
        raise TypeError(f"schedule must be a DeviceSchedule, got {type(schedule).__name__}")
    if schedule.backward is None:
        raise ValueError("schedule must have the backward's items: build_schedule(..., backward=True)")
    check_tokens("out", out, schedule.num_q_heads)
    if out.shape[0] != schedule.num_tokens:
        raise ValueError(f"out must have the {schedule.num_tokens} tokens of the schedule, got {out.shape[0]}")
    if out.shape[2] not in head_dims:
        raise ValueError(f"out must have a head_dim of {tuple(head_dims)} on {chip}, got {out.shape[2]}")
    for name, x in (("m", m), ("l", l)):
        check_rows(name, x, schedule.num_q_heads, schedule.num_tokens, out.device)


def check_inputs(
    inputs: Any, schedule: DeviceSchedule, read: Mapping[str, Sequence[str]], dim: int, device: Any
) -> None:
    """Every array that the kernels read is there and has this call's shape.

    :param read: names of arrays, by the name of the tensor in `QuantizedInputs`; v1 counts for causal attention alone.
    :raises TypeError, ValueError: naming the array.
    """
    if not isinstance(inputs, QuantizedInputs):
        raise TypeError(f"inputs must be a QuantizedInputs, got {type(inputs).__name__}")
    nvfp4 = "q4" in read
    if ((inputs.q4 is not None), (inputs.k4 is not None)) != (nvfp4, nvfp4):
        raise ValueError("inputs must have q4 and k4 for the recipe nvfp4_fp8, exactly")
    check_arrays(inputs, schedule, read, dim, device)


def check_arrays(
    inputs: Any, schedule: DeviceSchedule, read: Mapping[str, Sequence[str]], dim: int, device: Any
) -> None:
    """The same, whatever the inputs are.

    :raises TypeError, ValueError: naming the array.
    """
    sizes = {"payload": TILE * dim, "wide": 2 * TILE * dim, "scales": SCALE_TILE_BYTES, "exponents": TILE}
    sizes4 = {"payload": TILE * dim // 2, "scales": 8 * dim}
    for role, names in read.items():
        if role == "v1" and not schedule.causal:
            continue
        heads = schedule.num_q_heads if role[0] == "q" else schedule.num_kv_heads
        for name in names:
            x: Any = getattr(getattr(inputs, role), name, None)
            dtype = "torch.float32" if name == "exponents" else "torch.uint8"
            shape = (heads, schedule.max_tiles, (sizes4 if role in ("q4", "k4") else sizes)[name])
            what = f"inputs.{role}.{name} must be a contiguous {dtype} tensor {shape} on {device}"
            if x is None:
                raise TypeError(f"{what}, got None: the forward kept nothing for a backward")
            if str(getattr(x, "dtype", None)) != dtype or not hasattr(x, "data_ptr"):
                raise TypeError(f"{what}, got {getattr(x, 'dtype', type(x).__name__)}")
            if tuple(x.shape) != shape or x.device != device or not x.is_contiguous():
                raise ValueError(f"{what}, got {tuple(x.shape)} with strides {x.stride()} on {x.device}")
