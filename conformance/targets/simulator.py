"""The kernels on the simulator as a target: schedule, quantization and the Blackwell forward, with no GPU.

The host code is that of a call on a GPU, up to the launch: see `flamia.conformance.simulator.host`. Everything comes
from the kernels: what level 1 compares, and P and m_t of every tile by the forward's hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results, TileKey
from flamia.conformance.simulator.host import simulated_device
from flamia.conformance.targets.base import PROMISES, Target, TargetUnavailableError, package_versions
from flamia.conformance.targets.cuda import _operand_arrays, _schedules
from flamia.conformance.targets.tensors import to_numpy, to_torch
from flamia.kernels.blackwell import RECIPES, BlackwellForward, attention_forward
from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc
from flamia.kernels.quantize import Nvfp4
from flamia.kernels.registry import BLACKWELL_FORWARD
from flamia.kernels.schedule import NUM_TILES
from flamia.kernels.targets import Target as Chip
from flamia.kernels.targets import get_target
from flamia.reference.documents import iter_documents
from flamia.reference.nvfp4 import head_scales
from flamia.reference.recipes import Recipe, Scaling, get_recipe

GRADIENTS = {"suffix", "shift", "consistency"}
"""Promises about gradients."""


def make_target(option: str, device: str) -> Target:
    """The target for a chip.

    :param option: name of the chip's compilation target. :param device: of no effect.
    :raises TargetUnavailableError: without a compiler.
    """
    try:
        load_nvrtc()
    except NvrtcNotFoundError as error:
        raise TargetUnavailableError(f"the kernels cannot be compiled: {error}") from error
    return SimulatorTarget(get_target(option))


class SimulatorTarget(Target):
    """Attention of `flamia.kernels.blackwell` on the simulator.

    :param chip: for which the kernels are built.
    :param seed: of the order of warps and the delays of asynchronous operations; each call takes the next one.
    :param options: of `simulate` and of `attention_forward`: ``strict``.
    """

    recipe: Recipe | str = "mxfp8"
    profile = "blackwell"
    bits = True
    stages = True
    backward = False
    promises = frozenset(PROMISES) - GRADIENTS - {"graph"}

    def __init__(self, chip: Chip, seed: int = 0) -> None:
        self.chip = chip
        self.name = f"simulator:{chip.name}"
        self.seed = seed
        self.calls = 0

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call, under another random timing than the one before.

        :raises ValueError: for arguments that the kernels do not take.
        """
        recipe = get_recipe(self.recipe)
        if recipe.name not in RECIPES:
            raise ValueError(f"recipe must be one of {RECIPES} for the Blackwell kernels, got {recipe.name!r}")
        self.calls += 1
        with simulated_device(self.chip, seed=self.seed + self.calls):
            q, k, v, cu = (to_torch(x) for x in (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens))
            nvfp4, factor = self._nvfp4(recipe, inputs.head_counts)
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
                hooks=stages,
            )
            got.schedule.check()
            return self._results(got, inputs, stages)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """Nothing: documents of any size would take the simulator too long."""
        return None

    def environment(self) -> dict[str, str]:
        """Versions and compiler."""
        compiler = {"compiler": "NVRTC {}.{}".format(*load_nvrtc().version)}
        return super().environment() | package_versions("torch") | compiler | {"chip": f"simulated {self.chip.name}"}

    def sources(self) -> dict[str, str]:
        """Text of the forward kernel, by file."""
        unit = BLACKWELL_FORWARD.units[0]
        return {unit.kernel.source: unit.source(), **unit.headers()}

    @staticmethod
    def _nvfp4(recipe: Recipe, heads: tuple[int, int]) -> tuple[Nvfp4 | None, float]:
        if recipe.scores is not Scaling.NVFP4:
            return None, 1.0
        scales = [np.stack(head_scales(recipe.head_scale, n), axis=1) for n in heads]
        factor = np.float32(scales[0][0, 1] * scales[1][0, 1])
        q, k = (to_torch(np.ascontiguousarray(x)) for x in scales)
        return Nvfp4(q, k, recipe.hadamard), float(factor)

    def _results(self, got: BlackwellForward, inputs: Inputs, stages: bool) -> Results:
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
