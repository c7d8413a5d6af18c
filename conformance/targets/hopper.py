"""The Hopper kernels as a target: everything that `flamia.attention` would launch, on a GPU of compute capability 9.0.

The forward of MXFP8 runs as it does where a gradient is wanted and where none is, and the backward in both of its forms
(Note [Widening] of ``hopper/backward.cuh``); bits must agree.
What a call returns beside out, LSE and the gradients are its payloads, scales and schedules.
"""

from __future__ import annotations

import torch

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.comparison import compare_bits
from flamia.conformance.targets.base import PROMISES, Target
from flamia.conformance.targets.kernels import KernelTarget, call_arrays, kernel_sources, row_arrays
from flamia.conformance.targets.tensors import to_numpy, to_torch
from flamia.kernels import hopper, hopper_backward
from flamia.kernels.hopper import HopperForward, PackedInputs
from flamia.kernels.registry import (
    HOPPER_BACKWARD_DQ,
    HOPPER_BACKWARD_KEYS,
    HOPPER_BACKWARD_OPERANDS,
    HOPPER_FACTORS,
    HOPPER_FORWARD,
    HOPPER_PACK,
    QUANTIZE,
    ROW_PASS,
    SCHEDULE,
    Kernel,
)
from flamia.kernels.schedule import NUM_TILES
from flamia.kernels.tensors import TILE
from flamia.reference.recipes import MXFP8, Recipe, get_recipe

COMMON = (ROW_PASS, HOPPER_FORWARD, HOPPER_BACKWARD_OPERANDS, HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_DQ)
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "mxfp8": (SCHEDULE, QUANTIZE, *COMMON),
    "bf16": (SCHEDULE, HOPPER_PACK, HOPPER_FACTORS, *COMMON),
}
"""What a call launches, by recipe."""


def make_target(option: str, device: str) -> Target:
    """The target on a CUDA device."""
    return HopperTarget(device)


class HopperTarget(KernelTarget):
    """Attention of `flamia.kernels.hopper` and `.hopper_backward`: the recipes of `KERNELS`."""

    name = "hopper"
    family, capabilities = "Hopper", ((9, 0),)
    recipe: Recipe | str = MXFP8
    profile = "hopper"
    promises = frozenset(PROMISES) - {"consistency"}  # the backward keeps no P

    def known_recipe(self) -> str:
        """The name of the recipe.

        :raises ValueError: for one that the kernels do not have.
        """
        name = get_recipe(self.recipe).name
        if name not in KERNELS:
            raise ValueError(f"recipe must be one of {tuple(KERNELS)} for the Hopper kernels, got {name!r}")
        return name

    def sources(self) -> dict[str, str]:
        """Text of the recipe's kernels, by file, and the compiler's options."""
        return kernel_sources(KERNELS[self.known_recipe()])

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, inputs: Inputs, saves: bool = True
    ) -> HopperForward:
        """The forward.

        :param saves: whether for a backward.
        """
        recipe, scale = self.known_recipe(), inputs.softmax_scale
        return hopper.attention_forward(
            q, k, v, cu, recipe=recipe, causal=inputs.causal, softmax_scale=scale, saves=saves
        )

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call.

        :raises TypeError, ValueError: for arguments that the kernels do not take.
        :raises AssertionError: if the two forms differ.
        """
        q, k, v, cu = (to_torch(x, self.device) for x in (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens))
        got = self.attend(q, k, v, cu, inputs, saves=False)
        got.schedule.check()
        packed = isinstance(got.inputs, PackedInputs)  # reads and keeps everything, in one form
        if (backward or stages) and not packed:
            alone, got = got, self.attend(q, k, v, cu, inputs)
            for name in ("out", "lse", "m", "l"):
                _require_same(name, getattr(alone, name), getattr(got, name), "leaving out what is saved")
        dq = dk = dv = None
        if backward:
            scale = inputs.head_dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale
            dout = to_torch(inputs.dout, self.device)
            saved = dout, got.out, got.m, got.l, got.inputs, got.schedule, scale
            ways = (None,) if packed else (False, True)
            first, *others = (hopper_backward.attention_backward(*saved, widens=w) for w in ways)
            for other in others:
                for name in ("dq", "dk", "dv"):
                    x, expected = getattr(other, name), getattr(first, name)
                    _require_same(name, x, expected, "widening q and dO' in shared memory")
            dq, dk, dv = (to_numpy(x) for x in (first.dq, first.dk, first.dv))
        arrays = _arrays(got) if stages else {}
        return Results(to_numpy(got.out), to_numpy(got.lse), dq, dk, dv, arrays=arrays)


def _require_same(name: str, x: torch.Tensor, expected: torch.Tensor, change: str) -> None:
    """:raises AssertionError: if ``change`` has changed bits of the array called ``name``."""
    difference = compare_bits(name, to_numpy(x), to_numpy(expected))
    if difference is not None:
        raise AssertionError(f"{change} changes bits: {difference.message}")


def _arrays(got: HopperForward) -> dict[str, Array]:
    """The arrays of Note [Stages] that a call wrote."""
    x = got.inputs
    if not isinstance(x, PackedInputs):
        arrays = call_arrays(got, x, None)
        if got.schedule.causal:
            _clear_halves(arrays, to_numpy(got.schedule.tiles)[:, 2])
        return arrays
    tiles = int(got.schedule.status[NUM_TILES])
    wide = {f"{role}.payload_tiles": to_numpy(y.wide[:, :tiles]) for role, y in (("q", x.q), ("k", x.k), ("v", x.v))}
    return row_arrays(got) | wide


def _clear_halves(arrays: dict[str, Array], rows: Array) -> None:
    """Zeros, as the reference has them, where the quantizer writes nothing: Note [Halves with tokens] of
    ``quantize/wide.cuh``.

    :param rows: tokens of each tile.
    """
    for name in ("q", "k", "v"):
        payload = arrays[f"{name}.payload_tiles"] = arrays[f"{name}.payload_tiles"].copy()  # row after row for these D
        payload[:, rows[: payload.shape[1]] <= TILE // 2, payload.shape[2] // 2 :] = 0
