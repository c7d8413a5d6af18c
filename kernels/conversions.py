"""Every number conversion of the kernels over an array, for tests and probes."""

from __future__ import annotations

from typing import Any

from flamia.kernels import structs
from flamia.kernels.launch import launch
from flamia.kernels.registry import FORMATS
from flamia.kernels.tensors import pointer

CONVERSIONS = (
    "e4m3",
    "e4m3_software",
    "e2m1",
    "e2m1_software",
    "e8m0_rp",
    "e8m0_rp_software",
    "rceil_e4m3",
    "e2m1_among_eight",
)
"""Names of conversions; those without ``_software`` are in the form that the target has. ``e2m1_among_eight`` is how
NVFP4 payloads are made; it takes NaN for -6."""


def convert(x: Any, conversion: str) -> Any:
    """Convert every element of a float32 CUDA tensor: a uint8 tensor of its shape.

    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    if str(getattr(x, "dtype", None)) != "torch.float32" or not hasattr(x, "data_ptr"):
        raise TypeError(f"x must be a float32 CUDA tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.device.type != "cuda":
        raise ValueError(f"x must be on a CUDA device, got {x.device}")
    if conversion not in CONVERSIONS:
        raise ValueError(f"conversion must be one of {CONVERSIONS}, got {conversion!r}")
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    fields = {"x": pointer(x), "out": pointer(out), "count": x.numel(), "conversion": CONVERSIONS.index(conversion)}
    launch(FORMATS.unit(), "convert", structs.fill(structs.FORMATS, fields), x.device)
    return out
