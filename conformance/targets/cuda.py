"""The quantization kernels as a target: level 1, on a GPU.

It computes no attention. What the backward's pre-pass needs of the forward (out, l and m) it takes from the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.stages import ReferenceEngine
from flamia.conformance.targets.base import Target, TargetUnavailableError, package_versions
from flamia.conformance.targets.kernels import kernel_sources, operand_arrays, schedule_arrays
from flamia.conformance.targets.tensors import describe_device, find_cuda, to_numpy, to_torch
from flamia.kernels.quantize import Nvfp4, Nvfp4Tiles, TokenTiles, quantize_qkv, row_pass
from flamia.kernels.registry import QUANTIZE, ROW_PASS, SCHEDULE
from flamia.kernels.schedule import NUM_TILES, DeviceSchedule, build_schedule
from flamia.kernels.targets import target_for
from flamia.reference.nvfp4 import head_scales
from flamia.reference.recipes import MXFP8, Recipe, Scaling, get_recipe

REFERENCE = ReferenceEngine()


def make_target(option: str, device: str) -> Target:
    """The target on a CUDA device; ``"cpu"``, the suite's default, stands for the current one."""
    return CudaTarget(device)


class CudaTarget(Target):
    """Payloads, scales, layouts and schedules of `flamia.kernels`."""

    name = "cuda"
    recipe: Recipe | str = MXFP8
    bits = True
    stages = True
    lse = False
    levels = frozenset({1})
    promises = frozenset()

    def __init__(self, device: str) -> None:
        self.device = device

    def require_device(self) -> None:
        """A GPU that the kernels are built for, and CuPy."""
        index = find_cuda("the CUDA kernels", self.device)
        try:
            target_for(torch.cuda.get_device_capability(index))
            import cupy  # noqa: F401
        except (ValueError, ImportError) as error:
            raise TargetUnavailableError(f"the CUDA kernels cannot run here: {error}") from error
        self.device = f"cuda:{index}"

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """Everything that the kernels write for one call; ``out`` is not among it and full of NaN.

        :raises ValueError: for a recipe whose operands the kernels do not make.
        """
        recipe = get_recipe(self.recipe)
        _check_recipe(recipe)
        q, k, v = (to_torch(x, self.device) for x in (inputs.q, inputs.k, inputs.v))
        schedule = self._schedule(inputs.cu_seqlens, inputs.total, inputs.head_counts, inputs.causal)
        scores = recipe.scores is Scaling.NVFP4
        nvfp4 = self._nvfp4(recipe, inputs.head_counts) if scores and inputs.head_dim % 64 == 0 else None
        got = quantize_qkv(q, k, v, schedule, nvfp4=nvfp4)
        operands: dict[str, TokenTiles | Nvfp4Tiles | None] = {"v": got.v, "v1": got.v1}
        operands |= {"q_tokens": got.q, "k_tokens": got.k} if scores else {"q": got.q, "k": got.k}
        operands |= {"q": got.q4, "k": got.k4} if scores else {}
        arrays = dict(schedule_arrays(schedule))
        if backward:
            rows = self._row_pass(inputs, recipe, schedule)
            operands["dout"] = rows.dout
        tiles = int(schedule.status[NUM_TILES])
        for role, operand in operands.items():
            arrays.update(operand_arrays(role, operand, tiles))
        return Results(np.full(inputs.q.shape, np.nan, np.float32), arrays=arrays)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array]:
        """Tile offsets and schedules."""
        schedule = self._schedule(cu_seqlens, int(cu_seqlens[-1]), heads, causal)
        return {"tile_offsets": to_numpy(schedule.tile_offsets), **dict(schedule_arrays(schedule))}

    def environment(self) -> dict[str, str]:
        """Versions, device and compiler."""
        from flamia.kernels.nvrtc import load_nvrtc

        compiler = {"compiler": "NVRTC {}.{}".format(*load_nvrtc().version)}
        return super().environment() | package_versions("torch") | compiler | describe_device(self.device)

    def sources(self) -> dict[str, str]:
        """Text of the kernels, by file, and the compiler's options."""
        return kernel_sources((SCHEDULE, QUANTIZE, ROW_PASS))

    def _schedule(
        self, cu_seqlens: NDArray[np.int64], total: int, heads: tuple[int, int], causal: bool
    ) -> DeviceSchedule:
        schedule = build_schedule(to_torch(cu_seqlens, self.device), total, *heads, causal)
        schedule.check()
        return schedule

    def _nvfp4(self, recipe: Recipe, heads: tuple[int, int]) -> Nvfp4:
        q, k = (to_torch(np.stack(head_scales(recipe.head_scale, n), axis=1), self.device) for n in heads)
        return Nvfp4(q, k, recipe.hadamard)

    def _row_pass(self, inputs: Inputs, recipe: Recipe, schedule: DeviceSchedule) -> Any:
        i = inputs
        forward = REFERENCE.forward.attention_forward(
            i.q,
            i.k,
            i.v,
            i.cu_seqlens,
            recipe=recipe,
            profile=self.profile,
            causal=i.causal,
            softmax_scale=i.softmax_scale,
        )
        dout, out, l, m = (to_torch(x, self.device) for x in (i.dout, forward.out, forward.l, forward.m))  # noqa: E741
        return row_pass(dout, out, l, m, schedule)


def _check_recipe(recipe: Recipe) -> None:
    wanted = {
        "scores": (Scaling.TOKEN, Scaling.NVFP4),
        "gradient_qk": (Scaling.TOKEN,),
        "values": (Scaling.TOKEN_BLOCK,),
        "diagonal_values": (Scaling.TOKEN, None),
        "dout_channels": (Scaling.TOKEN_BLOCK,),
        "dout_tokens": (Scaling.TOKEN_BLOCK, None),
        "normalize": ("dout",),
        "scale_rule": ("rceil",),
    }
    for field, allowed in wanted.items():
        got = getattr(recipe, field)
        if got not in allowed:
            names = [getattr(x, "name", x) for x in allowed]
            raise ValueError(f"recipe.{field} must be one of {names} for the kernels, got {getattr(got, 'name', got)}")
