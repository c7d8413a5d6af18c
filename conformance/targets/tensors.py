"""NumPy arrays to torch tensors and back, with their strides. The only module that needs PyTorch at import."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.targets.base import TargetUnavailableError

Array = NDArray[Any]
FILLED_GAP_ELEMENTS = 1 << 24
"""Up to this size, the elements between those of a view are NaN, so that reading them shows."""


def to_torch(x: Array, device: str = "cpu") -> torch.Tensor:
    """A tensor with the values, shape and strides (in elements) of ``x``, none of them negative.

    :param x: bfloat16, float32, float64, or integers.
    """
    if x.dtype == bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(x).view(np.int16).reshape(x.shape)).view(torch.bfloat16)
    else:
        values = torch.from_numpy(np.ascontiguousarray(x).reshape(x.shape))
    if x.flags.c_contiguous or not x.size:
        # from_numpy shares memory with the inputs of the next call
        return values.clone().to(device) if device == "cpu" else values.to(device)
    strides = tuple(s // x.dtype.itemsize for s in x.strides)
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    memory = torch.empty(span, dtype=values.dtype, device=device)
    if span <= FILLED_GAP_ELEMENTS and values.dtype.is_floating_point:
        memory.fill_(torch.nan)
    view = torch.as_strided(memory, x.shape, strides)
    distinct = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
    view[distinct].copy_(values[distinct])
    return view


def to_numpy(x: torch.Tensor) -> Array:
    """The values of a tensor, C-contiguous; bfloat16 as ml_dtypes'."""
    x = x.detach().contiguous().cpu()
    if x.dtype == torch.bfloat16:
        bits: Array = x.view(torch.int16).numpy().view(bfloat16)
        return bits
    plain: Array = x.numpy()
    return plain


def find_cuda(what: str, device: str) -> int:
    """Index of a CUDA device; ``"cpu"``, the suite's default, stands for the current one.

    :param what: for the message: what would run there.
    :raises TargetUnavailableError: if PyTorch does not find it.
    """
    if not torch.cuda.is_available():
        raise TargetUnavailableError(f"{what} cannot run here: PyTorch finds no CUDA device")
    index: int | None = torch.device("cuda" if device == "cpu" else device).index
    if index is None:
        return int(torch.cuda.current_device())
    if index >= (count := torch.cuda.device_count()):
        raise TargetUnavailableError(f"{what} cannot run on {device!r}: PyTorch finds CUDA devices 0 to {count - 1}")
    return index


def replay_graph(call: Callable[[], Any], tensors: Sequence[torch.Tensor], fresh: Sequence[Array], device: str) -> Any:
    """Capture ``call`` in a CUDA graph, overwrite its input tensors with ``fresh``, replay, and return its outputs."""
    with torch.no_grad(), torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()
        for tensor, values in zip(tensors, fresh, strict=True):
            tensor.copy_(to_torch(values, device))
        graph.replay()
        torch.cuda.synchronize()
    return outputs


def context_survives(device: str) -> bool:
    """Whether the CUDA context is alive: an illegal memory access ends it for the whole process."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def describe_device(device: str) -> dict[str, str]:
    """Name, compute capability and driver of a device, by name."""
    if not device.startswith("cuda"):
        return {"device": platform.processor() or platform.machine()}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "compute capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }
