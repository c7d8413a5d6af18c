"""The Hopper kernels as a target: everything that `flamia.attention` would launch, on a GPU of compute capability 9.0.

What it returns beside out, LSE and the gradients are the payloads, scales and schedules of the same call.
"""

from __future__ import annotations

from typing import Any

import torch

from flamia.conformance.calls import Inputs, Results
from flamia.conformance.targets.base import PROMISES, Target
from flamia.conformance.targets.kernels import KernelTarget, call_arrays, require_gpu
from flamia.conformance.targets.tensors import to_numpy, to_torch
from flamia.kernels import hopper, hopper_backward
from flamia.kernels.quantize import QuantizedInputs
from flamia.kernels.registry import (
    HOPPER_BACKWARD_DQ,
    HOPPER_BACKWARD_KEYS,
    HOPPER_BACKWARD_OPERANDS,
    HOPPER_FORWARD,
    QUANTIZE,
    ROW_PASS,
    SCHEDULE,
)
from flamia.reference.recipes import MXFP8, Recipe


def make_target(option: str, device: str) -> Target:
    """The target on a CUDA device; see `kernels.require_gpu`."""
    return HopperTarget(require_gpu("Hopper", [(9, 0)], device))


class HopperTarget(KernelTarget):
    """Attention of `flamia.kernels.hopper` and `.hopper_backward`."""

    name = "hopper"
    recipe: Recipe | str = MXFP8
    profile = "hopper"
    promises = frozenset(PROMISES) - {"consistency"}  # the backward keeps no P
    kernels = (
        *(SCHEDULE, QUANTIZE, ROW_PASS, HOPPER_FORWARD),
        *(HOPPER_BACKWARD_OPERANDS, HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_DQ),
    )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, inputs: Inputs) -> Any:
        """The forward."""
        return hopper.attention_forward(q, k, v, cu, causal=inputs.causal, softmax_scale=inputs.softmax_scale)

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call.

        :raises TypeError, ValueError: for arguments that the kernels do not take.
        """
        q, k, v, cu = (to_torch(x, self.device) for x in (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens))
        got = self.attend(q, k, v, cu, inputs)
        got.schedule.check()
        assert isinstance(got.inputs, QuantizedInputs)
        dq = dk = dv = None
        if backward:
            scale = inputs.head_dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale
            dout = to_torch(inputs.dout, self.device)
            found = hopper_backward.attention_backward(dout, got.out, got.m, got.l, got.inputs, got.schedule, scale)
            dq, dk, dv = to_numpy(found.dq), to_numpy(found.dk), to_numpy(found.dv)
        arrays = call_arrays(got, got.inputs, None) if stages else {}
        return Results(to_numpy(got.out), to_numpy(got.lse), dq, dk, dv, arrays=arrays)
