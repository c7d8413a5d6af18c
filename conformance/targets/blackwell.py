"""The Blackwell kernels as a target: attention and its gradients, on a GPU of compute capability 10.0 or 10.3.

Everything comes from the kernels: what level 1 compares, and by their hooks P, m_t and dS of every tile. `simulator`
needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flamia.conformance.calls import Array, Inputs, Results, TileKey
from flamia.conformance.targets.base import PROMISES, Target
from flamia.conformance.targets.kernels import KernelTarget, call_arrays
from flamia.conformance.targets.tensors import to_numpy, to_torch
from flamia.kernels import blackwell, blackwell_backward
from flamia.kernels.blackwell import RECIPES, BlackwellForward
from flamia.kernels.blackwell_backward import BlackwellGradients
from flamia.kernels.quantize import Nvfp4
from flamia.kernels.registry import (
    BLACKWELL_BACKWARD,
    BLACKWELL_DQ,
    BLACKWELL_FORWARD,
    QUANTIZE,
    ROW_PASS,
    SCHEDULE,
)
from flamia.kernels.targets import SM_100A, SM_103A
from flamia.reference.documents import iter_documents
from flamia.reference.nvfp4 import head_scales
from flamia.reference.recipes import Recipe, Scaling, get_recipe

CHIPS = (SM_100A, SM_103A)


def make_target(option: str, device: str) -> Target:
    """The target on a CUDA device."""
    return BlackwellTarget(device)


class BlackwellTarget(KernelTarget):
    """Attention of `flamia.kernels.blackwell` and `.blackwell_backward`.

    :param strict: wait where PTX promises no order.
    """

    name = "blackwell"
    family, capabilities = "Blackwell", tuple(chip.compute_capability for chip in CHIPS)
    recipe: Recipe | str = "mxfp8"
    profile = "blackwell"
    promises = frozenset(PROMISES)
    kernels = (SCHEDULE, QUANTIZE, ROW_PASS, BLACKWELL_FORWARD, BLACKWELL_BACKWARD, BLACKWELL_DQ)

    def __init__(self, device: str, strict: bool = False) -> None:
        super().__init__(device)
        self.strict = strict

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu: torch.Tensor,
        inputs: Inputs,
        hooks: bool = False,
    ) -> BlackwellForward:
        """The forward.

        :raises ValueError: for a recipe that the kernels do not have.
        """
        recipe = get_recipe(self.recipe)
        if recipe.name not in RECIPES:
            raise ValueError(f"recipe must be one of {RECIPES} for the Blackwell kernels, got {recipe.name!r}")
        nvfp4, factor = make_nvfp4(recipe, inputs.head_counts, q.device)
        return blackwell.attention_forward(
            q,
            k,
            v,
            cu,
            recipe=recipe.name,
            causal=inputs.causal,
            softmax_scale=inputs.softmax_scale,
            nvfp4=nvfp4,
            score_factor=factor,
            strict=self.strict,
            hooks=hooks,
        )

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call.

        :raises TypeError, ValueError: for arguments that the kernels do not take.
        """
        with self.launching() as device:
            q, k, v, cu = (to_torch(x, device) for x in (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens))
            got = self.attend(q, k, v, cu, inputs, hooks=stages)
            got.schedule.check()
            found = self._differentiate(to_torch(inputs.dout, device), got, inputs, stages) if backward else None
            return _results(got, found, inputs, stages)

    def _differentiate(
        self, dout: torch.Tensor, forward: BlackwellForward, inputs: Inputs, hooks: bool
    ) -> BlackwellGradients:
        recipe, f = get_recipe(self.recipe), forward
        return blackwell_backward.attention_backward(
            dout,
            f.out,
            f.m,
            f.l,
            f.inputs,
            f.schedule,
            inputs.head_dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale,
            recipe=recipe.name,
            score_factor=score_factor(recipe),
            strict=self.strict,
            hooks=hooks,
        )


def score_factor(recipe: Recipe) -> float:
    """The product of the constant head scales of q and k; 1 where scores are not in NVFP4."""
    if recipe.scores is not Scaling.NVFP4:
        return 1.0
    _, (decode,) = head_scales(recipe.head_scale, 1)
    return float(np.float32(decode * decode))


def make_nvfp4(recipe: Recipe, heads: tuple[int, int], device: Any) -> tuple[Nvfp4 | None, float]:
    """How q and k are quantized to NVFP4 (None for other recipes), and `score_factor`. Nothing waits for the device."""
    if recipe.scores is not Scaling.NVFP4:
        return None, 1.0
    (encode,), (decode,) = head_scales(recipe.head_scale, 1)
    q, k = (torch.empty((n, 2), dtype=torch.float32, device=device) for n in heads)
    for x in (q, k):
        x[:, 0], x[:, 1] = float(encode), float(decode)
    return Nvfp4(q, k, recipe.hadamard), score_factor(recipe)


def _results(got: BlackwellForward, gradients: BlackwellGradients | None, inputs: Inputs, stages: bool) -> Results:
    g = gradients
    dq, dk, dv = (None, None, None) if g is None else (to_numpy(x) for x in (g.dq, g.dk, g.dv))
    arrays: dict[str, Array] = {}
    tiles: dict[str, dict[TileKey, Array]] = {}
    if stages:
        arrays = call_arrays(got, got.inputs, None if g is None else g.rows.dout)
        tiles = _forward_tiles(got, inputs)
        if g is not None:
            arrays["delta"] = _by_token(to_numpy(g.rows.delta), inputs)
            tiles |= _backward_tiles(g, inputs)
    return Results(to_numpy(got.out), to_numpy(got.lse), dq, dk, dv, arrays=arrays, tiles=tiles)


def _tile_pairs(inputs: Inputs) -> Iterator[tuple[TileKey, int]]:
    """Every tile, and the first tile of its document in the pack."""
    first = 0
    for document in iter_documents(inputs.cu_seqlens):
        for query_tile in range(document.tiles):
            for key_tile in range(query_tile + 1 if inputs.causal else document.tiles):
                for head in range(inputs.head_counts[0]):
                    yield (document.index, head, query_tile, key_tile), first
        first += document.tiles


def _forward_tiles(got: BlackwellForward, inputs: Inputs) -> dict[str, dict[TileKey, Array]]:
    """P and m_t by tile, as Note [Stages] has them."""
    assert got.stages is not None
    p, top = to_numpy(got.stages.p), to_numpy(got.stages.top)
    found: dict[str, dict[TileKey, Array]] = {"forward.p": {}, "forward.p_top": {}}
    for key, first in _tile_pairs(inputs):
        _, head, query_tile, key_tile = key
        found["forward.p"][key] = p[head, first + query_tile, key_tile].T
        found["forward.p_top"][key] = top[head, first + query_tile, key_tile]
    return found


def _backward_tiles(got: BlackwellGradients, inputs: Inputs) -> dict[str, dict[TileKey, Array]]:
    """P and dS by tile, likewise."""
    assert got.stages is not None
    names = {"p": "p", "p_scale": "p_scale", "ds": "x", "ds_scale": "x_scale"}
    arrays = {name: to_numpy(getattr(got.stages, ours)) for name, ours in names.items()}
    found: dict[str, dict[TileKey, Array]] = {f"backward.{name}": {} for name in names}
    for key, first in _tile_pairs(inputs):
        _, head, query_tile, key_tile = key
        at = head, first + key_tile, query_tile - (key_tile if inputs.causal else 0)
        for name, x in arrays.items():
            found[f"backward.{name}"][key] = x[at]
    return found


def _by_token(x: Array, inputs: Inputs) -> Array:
    """``(H, tiles, 128)`` as ``(H, T)``; 0 in padding rows."""
    out = np.zeros((x.shape[0], inputs.total), x.dtype)
    first = 0
    for document in iter_documents(inputs.cu_seqlens):
        start, stop = int(inputs.cu_seqlens[document.index]), int(inputs.cu_seqlens[document.index + 1])
        out[:, start:stop] = x[:, first : first + document.tiles].reshape(x.shape[0], -1)[:, : stop - start]
        first += document.tiles
    return out
