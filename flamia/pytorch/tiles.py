"""The quantizer's tiles as the list of tensors that a kernel saves for its backward, and back.

A kernel names what its backward reads (``"q.payload"``, ``"v1.scales"``: a tensor of `QuantizedInputs`, and an array of
its tiles; ``"q.wide"``: of `PackedInputs`); the list holds these arrays in that order. V1 exists for causal attention
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TILE = 128
BITS_OF_PAYLOAD = {"q4": 4, "k4": 4}
"""Of an element, where they are not 8."""


def save_tiles(inputs: Any, names: Sequence[str]) -> list[Tensor]:
    """Arrays of a `QuantizedInputs` or `PackedInputs` by name."""
    causal = getattr(inputs, "v1", None) is not None
    return [getattr(getattr(inputs, role), array) for role, array in _split(names, causal)]


def load_tiles(saved: list[Tensor], names: Sequence[str], causal: bool) -> Any:
    """A `QuantizedInputs` with these arrays, others None; or a `PackedInputs`."""
    from flamia.kernels.hopper import PackedInputs, WideTiles
    from flamia.kernels.quantize import Nvfp4Tiles, QuantizedInputs, TokenTiles

    arrays: dict[str, dict[str, Tensor]] = {}
    for (role, array), x in zip(_split(names, causal), saved, strict=True):
        arrays.setdefault(role, {})[array] = x
    if "wide" in arrays["q"]:
        return PackedInputs(**{role: WideTiles(**found) for role, found in arrays.items()})
    tiles: dict[str, Any] = {
        role: Nvfp4Tiles(**found, head_scales=None)
        if role in BITS_OF_PAYLOAD
        else TokenTiles(**{"scales": None, **found})
        for role, found in arrays.items()
    }
    return QuantizedInputs(**tiles)


def empty_tiles(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, names: Sequence[str], causal: bool
) -> list[Tensor]:
    """What `save_tiles` gives for a call, uninitialised, for tracing."""
    count = q.shape[0] // TILE + cu_seqlens.shape[0] - 1
    dim = q.shape[2]
    tensors = {"q": q, "k": k, "v": v}

    def empty(role: str, array: str) -> Tensor:
        x = tensors[role[0]]
        if array == "exponents":
            return x.new_empty((x.shape[1], count, TILE), dtype=torch.float32)
        if array == "wide":
            size = 2 * TILE * dim
        elif array == "payload":
            size = TILE * dim * BITS_OF_PAYLOAD.get(role, 8) // 8
        else:
            size = 8 * dim if role in BITS_OF_PAYLOAD else 512 * math.ceil(int(dim) / TILE)
        return x.new_empty((x.shape[1], count, size), dtype=torch.uint8)

    return [empty(role, array) for role, array in _split(names, causal)]


def _split(names: Sequence[str], causal: bool) -> list[tuple[str, str]]:
    pairs = [name.split(".") for name in names]
    return [(role, array) for role, array in pairs if causal or role != "v1"]
