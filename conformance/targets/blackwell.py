"""The Blackwell forward as a target: the kernels of one call, on a GPU of compute capability 10.0 or 10.3.

It calls the kernels directly, certified or not, because its report is what certifies them. Everything comes from the
kernels: what level 1 compares, and P and m_t of every tile by the forward's hooks. `simulator` needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results, TileKey
from flamia.conformance.targets.base import PROMISES, Target, TargetUnavailableError, package_versions
from flamia.conformance.targets.cuda import _operand_arrays, _schedules
from flamia.conformance.targets.tensors import describe_device, to_numpy, to_torch
from flamia.kernels.blackwell import RECIPES, BlackwellForward, attention_forward
from flamia.kernels.nvrtc import load_nvrtc
from flamia.kernels.quantize import Nvfp4
from flamia.kernels.registry import BLACKWELL_FORWARD, OPTIONS, QUANTIZE, SCHEDULE
from flamia.kernels.schedule import NUM_TILES, build_schedule
from flamia.kernels.targets import SM_100A, SM_103A
from flamia.reference.documents import iter_documents
from flamia.reference.nvfp4 import head_scales
from flamia.reference.recipes import Recipe, Scaling, get_recipe

KERNELS = (SCHEDULE, QUANTIZE, BLACKWELL_FORWARD)
"""Everything that one call launches."""

GRADIENTS = {"suffix", "shift", "consistency"}
"""Promises about gradients."""


def make_target(option: str, device: str) -> Target:
    """The target on a CUDA device; ``"cpu"``, the suite's default, stands for the current one.

    :raises TargetUnavailableError: in one sentence that says what is missing.
    """
    if not torch.cuda.is_available():
        raise TargetUnavailableError("the Blackwell kernels cannot run here: PyTorch finds no CUDA device")
    place = torch.device("cuda" if device == "cpu" else device)
    index = torch.cuda.current_device() if place.index is None else place.index
    capability = torch.cuda.get_device_capability(index)
    if capability not in (SM_100A.compute_capability, SM_103A.compute_capability):
        raise TargetUnavailableError(f"the Blackwell kernels need compute capability 10.0 or 10.3, got {capability}")
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise TargetUnavailableError(f"the Blackwell kernels cannot run here: {error}") from error
    return BlackwellTarget(f"cuda:{index}")


class BlackwellTarget(Target):
    """Attention of `flamia.kernels.blackwell`.

    :param strict: wait where PTX promises no order.
    """

    name = "blackwell"
    recipe: Recipe | str = "mxfp8"
    profile = "blackwell"
    bits = True
    stages = True
    backward = False
    promises = frozenset(PROMISES) - GRADIENTS - {"graph"}

    def __init__(self, device: str, strict: bool = False) -> None:
        self.device = device
        self.strict = strict

    @contextmanager
    def launching(self) -> Iterator[str]:
        """Where tensors go; kernels are launched inside."""
        yield self.device

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call.

        :raises TypeError, ValueError: for arguments that the kernels do not take.
        """
        recipe = get_recipe(self.recipe)
        if recipe.name not in RECIPES:
            raise ValueError(f"recipe must be one of {RECIPES} for the Blackwell kernels, got {recipe.name!r}")
        with self.launching() as device:
            q, k, v, cu = (to_torch(x, device) for x in (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens))
            nvfp4, factor = _nvfp4(recipe, inputs.head_counts, device)
            got = attention_forward(
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
                hooks=stages,
            )
            got.schedule.check()
            return _results(got, inputs, stages)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """Tile offsets and schedules."""
        schedule = build_schedule(to_torch(cu_seqlens, self.device), int(cu_seqlens[-1]), *heads, causal)
        schedule.check()
        return {"tile_offsets": to_numpy(schedule.tile_offsets), **dict(_schedules(schedule))}

    def environment(self) -> dict[str, str]:
        """Versions, device and compiler."""
        compiler = {"compiler": "NVRTC {}.{}".format(*load_nvrtc().version)}
        return super().environment() | package_versions("torch", "cupy-cuda13x") | compiler | self.describe()

    def describe(self) -> dict[str, str]:
        """The device."""
        return describe_device(self.device)

    def sources(self) -> dict[str, str]:
        """Text of the kernels, by file, and the options they are compiled with."""
        units = [kernel.units[0] for kernel in KERNELS]
        found = {unit.kernel.source: unit.source() for unit in units}
        for unit in units:
            found |= unit.headers()
        return found | {"options": " ".join(OPTIONS)}


def _nvfp4(recipe: Recipe, heads: tuple[int, int], device: str) -> tuple[Nvfp4 | None, float]:
    if recipe.scores is not Scaling.NVFP4:
        return None, 1.0
    scales = [np.ascontiguousarray(np.stack(head_scales(recipe.head_scale, n), axis=1)) for n in heads]
    q, k = (to_torch(x, device) for x in scales)
    return Nvfp4(q, k, recipe.hadamard), float(np.float32(scales[0][0, 1] * scales[1][0, 1]))


def _results(got: BlackwellForward, inputs: Inputs, stages: bool) -> Results:
    results = Results(to_numpy(got.out), to_numpy(got.lse))
    if not stages:
        return results
    x, tiles = got.inputs, int(got.schedule.status[NUM_TILES])
    operands: dict[str, Any] = {"v": x.v, "v1": x.v1}
    operands |= {"q": x.q, "k": x.k} if x.q4 is None else {"q_tokens": x.q, "k_tokens": x.k, "q": x.q4, "k": x.k4}
    arrays = {"m": to_numpy(got.m), "l": to_numpy(got.l), **dict(_schedules(got.schedule))}
    for role, operand in operands.items():
        arrays.update(_operand_arrays(role, operand, tiles))
    return Results(results.out, results.lse, arrays=arrays, tiles=_stage_tiles(got, inputs))


def _stage_tiles(got: BlackwellForward, inputs: Inputs) -> dict[str, dict[TileKey, Array]]:
    """P and m_t by tile, as Note [Stages] has them."""
    assert got.stages is not None
    p, top = to_numpy(got.stages.p), to_numpy(got.stages.top)
    found: dict[str, dict[TileKey, Array]] = {"forward.p": {}, "forward.p_top": {}}
    first = 0
    for document in iter_documents(inputs.cu_seqlens):
        for query_tile in range(document.tiles):
            for key_tile in range(query_tile + 1 if inputs.causal else document.tiles):
                for head in range(inputs.head_counts[0]):
                    key = (document.index, head, query_tile, key_tile)
                    found["forward.p"][key] = p[head, first + query_tile, key_tile].T
                    found["forward.p_top"][key] = top[head, first + query_tile, key_tile]
        first += document.tiles
    return found
