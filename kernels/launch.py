"""Launches: built machine code loaded by CuPy and run on PyTorch's current stream.

The stream is looked up at each call, so ``torch.cuda.stream(...)`` and CUDA-graph capture see every launch. A
kernel gets raw pointers; the tensors behind them belong to the caller, and PyTorch's allocator, which frees in
stream order, keeps memory that is freed after the launch from being reused before the kernel has run. A tensor
that was made on another stream needs `torch.Tensor.record_stream`, as with any PyTorch operation.

A kernel must be loaded before a graph is captured, because loading synchronises: run the call once before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from flamia.kernels.build import Artifact, EntryReport, build
from flamia.kernels.registry import Unit
from flamia.kernels.targets import Target, target_for


@dataclass(frozen=True)
class _Stream:
    """What CuPy wants of a stream."""

    ptr: int


def device_target(device: Any = None) -> Target:
    """The target of a CUDA device, by default PyTorch's current one.

    :raises ValueError: for a compute capability without kernels, in one sentence that names what is supported.
    """
    import torch

    return target_for(torch.cuda.get_device_capability(device))


def launch(
    unit: Unit,
    entry: str,
    params: np.ndarray[Any, Any],
    device: Any,
    *,
    ctas: int | None = None,
    at_most: int | None = None,
) -> None:
    """Launch ``entry`` of ``unit`` on PyTorch's current stream of ``device``.

    :param params: one struct of `structs`, passed by value.
    :param device: a `torch.device` with an index.
    :param ctas: how many; without it, as many as are resident at once (the entry's ``__launch_bounds__``), but no
        more than ``at_most``.
    :raises ValueError: for an entry that the kernel lacks, or a struct of another size.
    """
    import torch

    if params.nbytes != unit.kernel.params:
        raise ValueError(f"params must have the {unit.kernel.params} bytes of {unit.kernel.name}, got {params.nbytes}")
    # As bytes: of a struct with fields CuPy asks NumPy for a description, which takes longer than the launch.
    memory = params.view(f"V{params.nbytes}")
    on_it = torch.cuda.current_device() == device.index
    with nullcontext() if on_it else torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        loaded = _load(unit, entry, device.index, torch.cuda.is_current_stream_capturing)
        if ctas is None:
            ctas = _num_sms(device.index) * loaded.report.ctas
            ctas = ctas if at_most is None else max(1, min(ctas, at_most))
        shared = loaded.report.dynamic_shared_bytes
        loaded.function((ctas,), (loaded.report.threads,), (memory,), shared_mem=shared, stream=_Stream(stream))


@cache
def _num_sms(device_index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@dataclass(frozen=True)
class _Loaded:
    """A loaded entry: CuPy's function and the report of its build."""

    function: Any
    report: EntryReport


_LOADED: dict[tuple[Unit, str, int], _Loaded] = {}


def _load(unit: Unit, entry: str, device_index: int, is_capturing: Callable[[], bool]) -> _Loaded:
    """The loaded entry; the current device is ``device_index``."""
    key = (unit, entry, device_index)
    found = _LOADED.get(key)
    if found is None:
        if is_capturing():
            raise RuntimeError(
                f"kernel {unit.name} must be loaded before a CUDA graph is captured: "
                "run the call once outside the capture"
            )
        unit.kernel.entry(entry)
        artifact = build(unit, device_target(device_index))
        module = load_module(artifact)
        for report in artifact.entries:
            function = module.get_function(report.name)
            if report.dynamic_shared_bytes:
                function.max_dynamic_shared_size_bytes = report.dynamic_shared_bytes
            _LOADED[unit, report.name, device_index] = _Loaded(function, report)
        found = _LOADED[key]
    return found


def load_module(artifact: Artifact) -> Any:
    """The artifact's machine code as a `cupy.RawModule`."""
    import cupy

    return cupy.RawModule(path=str(artifact.cubin))
