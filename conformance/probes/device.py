"""Compiling the probes for the chip at hand and launching them."""

from __future__ import annotations

import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.kernels.nvrtc import load_nvrtc
from flamia.kernels.targets import Target, target_for


def device_target(device: str) -> Target:
    """The compilation target of a CUDA device.

    :raises ValueError: for a chip that FLAMIA has no kernels for.
    """
    import torch

    return target_for(torch.cuda.get_device_capability(device))


@cache
def load(source: str, target: Target, device: str) -> Any:
    """A source of this folder as a CuPy module on ``device``."""
    import cupy

    text = (resources.files(__package__) / source).read_text(encoding="utf-8")
    compiled = load_nvrtc().compile(source, text, {}, target)
    path = Path(_folder().name) / f"{source}-{target.name}.cubin"
    path.write_bytes(compiled.cubin)
    with cupy.cuda.Device(_index(device)):
        return cupy.RawModule(path=str(path))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the machine code lies until the process ends."""
    return tempfile.TemporaryDirectory(prefix="flamia-probes-")


def launch(source: str, entry: str, device: str, blocks: int, threads: int, arguments: list[Any]) -> None:
    """Run an entry to its end. NumPy arrays are copied to the device before, and back after."""
    import cupy

    function = load(source, device_target(device), device).get_function(entry)
    with cupy.cuda.Device(_index(device)):
        on_device = [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in arguments]
        function((blocks,), (threads,), tuple(on_device))
        for given, x in zip(arguments, on_device, strict=True):
            if isinstance(given, np.ndarray):
                given[...] = cupy.asnumpy(x)


def map_elements(entry: str, x: NDArray[Any], dtype: Any, device: str) -> NDArray[Any]:
    """An entry of ``scalar.cu`` on every element."""
    out = np.zeros(x.size, dtype)
    flat = np.ascontiguousarray(x).reshape(-1)
    launch("scalar.cu", entry, device, -(-x.size // 256), 256, [flat, out, np.int32(x.size)])
    return out.reshape(x.shape)


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
