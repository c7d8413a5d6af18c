"""The Hopper kernels as a target: everything that `flamia.attention` would launch, on a GPU of compute capability 9.0.

It calls the kernels directly, certified or not, because its report is what certifies them. What it returns beside out,
LSE and the gradients are the payloads, scales and schedules of the same call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.targets.base import PROMISES, Target, TargetUnavailableError, package_versions
from flamia.conformance.targets.cuda import _operand_arrays, _schedules
from flamia.conformance.targets.tensors import describe_device, replay_graph, to_numpy, to_torch
from flamia.kernels import hopper, hopper_backward
from flamia.kernels.nvrtc import load_nvrtc
from flamia.kernels.quantize import QuantizedInputs
from flamia.kernels.registry import (
    HOPPER_BACKWARD_KEYS,
    HOPPER_BACKWARD_QUERIES,
    HOPPER_FORWARD,
    HOPPER_OPERANDS,
    OPTIONS,
    QUANTIZE,
    ROW_PASS,
    SCHEDULE,
)
from flamia.kernels.schedule import NUM_TILES, build_schedule
from flamia.reference.recipes import MXFP8, Recipe

KERNELS = (
    *(SCHEDULE, QUANTIZE, ROW_PASS, HOPPER_OPERANDS, HOPPER_FORWARD),
    *(HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES),
)
"""Everything that one call of attention and its gradients launch."""


def make_target(option: str, device: str) -> Target:
    """The target on a CUDA device; ``"cpu"``, the suite's default, stands for the current one.

    :raises TargetUnavailableError: in one sentence that says what is missing.
    """
    if not torch.cuda.is_available():
        raise TargetUnavailableError("the Hopper kernels cannot run here: PyTorch finds no CUDA device")
    place = torch.device("cuda" if device == "cpu" else device)
    index = torch.cuda.current_device() if place.index is None else place.index
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        raise TargetUnavailableError(f"the Hopper kernels need compute capability 9.0, got {capability}")
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise TargetUnavailableError(f"the Hopper kernels cannot run here: {error}") from error
    return HopperTarget(f"cuda:{index}")


class HopperTarget(Target):
    """Attention of `flamia.kernels.hopper` and `.hopper_backward`."""

    name = "hopper"
    recipe: Recipe | str = MXFP8
    profile = "hopper"
    bits = True
    stages = True
    promises = frozenset(PROMISES) - {"consistency"}  # the backward keeps no P

    def __init__(self, device: str) -> None:
        self.device = device

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call.

        :raises TypeError, ValueError: for arguments that the kernels do not take.
        """
        q, k, v = (to_torch(x, self.device) for x in (inputs.q, inputs.k, inputs.v))
        got = hopper.attention_forward(
            q, k, v, self._boundaries(inputs), causal=inputs.causal, softmax_scale=inputs.softmax_scale
        )
        got.schedule.check()
        assert isinstance(got.inputs, QuantizedInputs)
        dq = dk = dv = None
        if backward:
            scale = inputs.head_dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale
            dout = to_torch(inputs.dout, self.device)
            found = hopper_backward.attention_backward(dout, got.out, got.m, got.l, got.inputs, got.schedule, scale)
            dq, dk, dv = to_numpy(found.dq), to_numpy(found.dk), to_numpy(found.dv)
        arrays: dict[str, Array] = {}
        if stages:
            arrays = {"m": to_numpy(got.m), "l": to_numpy(got.l), **dict(_schedules(got.schedule))}
            tiles = int(got.schedule.status[NUM_TILES])
            for role in ("q", "k", "v", "v1"):
                arrays.update(_operand_arrays(role, getattr(got.inputs, role), tiles))
        return Results(to_numpy(got.out), to_numpy(got.lse), dq, dk, dv, arrays=arrays)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array]:
        """Tile offsets and schedules."""
        schedule = build_schedule(to_torch(cu_seqlens, self.device), int(cu_seqlens[-1]), *heads, causal)
        schedule.check()
        return {"tile_offsets": to_numpy(schedule.tile_offsets), **dict(_schedules(schedule))}

    def replay(self, first: Inputs, second: Inputs) -> Results:
        """The forward in a CUDA graph."""
        q, k, v = (to_torch(x, self.device) for x in (first.q, first.k, first.v))
        boundaries = self._boundaries(first)

        def call() -> Any:
            got = hopper.attention_forward(q, k, v, boundaries, causal=first.causal, softmax_scale=first.softmax_scale)
            return got.out, got.lse

        out, lse = replay_graph(call, [q, k, v], [second.q, second.k, second.v], self.device)
        return Results(to_numpy(out), to_numpy(lse))

    def is_alive(self) -> bool:
        """Whether the CUDA context survived."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def environment(self) -> dict[str, str]:
        """Versions, device and compiler."""
        compiler = {"compiler": "NVRTC {}.{}".format(*load_nvrtc().version)}
        return super().environment() | package_versions("torch", "cupy") | compiler | describe_device(self.device)

    def sources(self) -> dict[str, str]:
        """Text of the kernels, by file, and the compiler's options."""
        return kernel_sources()

    def _boundaries(self, inputs: Inputs) -> torch.Tensor:
        return to_torch(inputs.cu_seqlens, self.device)


@cache
def kernel_sources() -> dict[str, str]:
    """What the kernels are compiled from."""
    units = [kernel.units[0] for kernel in KERNELS]
    found = {unit.kernel.source: unit.source() for unit in units}
    for unit in units:
        found |= unit.headers()
    return found | {"options": re.sub(r"\s+", " ", " ".join(OPTIONS))}
