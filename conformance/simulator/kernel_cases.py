"""The quantization kernels of `flamia.kernels` as cases: their host code runs unchanged, on the simulator.

What must come out is what `flamia.reference` quantizes, in its layout. Needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.simulator.case import Data
from flamia.conformance.simulator.machine.launch import Report
from flamia.kernels.quantize import quantize_qkv
from flamia.kernels.schedule import build_schedule
from flamia.kernels.targets import TARGETS, Target
from flamia.reference import layout, scaling

Array = NDArray[Any]
Expected = Mapping[str, tuple[Array, Array]]

LENGTHS = (130, 1, 0, 33)
"""Tokens of the documents; three rows of padding follow."""
HEADS, DIM = (2, 1), 64


@dataclass(frozen=True)
class HostCase:
    """Host code that launches kernels.

    :param run: from a device and a seed to what came out and what should.
    :param roles: none: every warp has a lane of its own.
    """

    name: str
    summary: str
    target: Target
    run: Callable[[Any, int], Expected]
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def simulate(self, seed: int = 0, **options: Any) -> tuple[Report, Data]:
        """Run once; the report is that of the launch with the most instructions.

        :raises Fault: for a rule of PTX that a kernel breaks.
        """
        from flamia.conformance.simulator.host import simulated_device

        with simulated_device(self.target, seed=seed, **options) as (device, reports):
            expected = self.run(device, seed)
        return max(reports, key=lambda r: r.total), Data([], expected)


def kernel_cases(run: Callable[[Any, int], Expected], summary: str) -> dict[str, HostCase]:
    """A case for each target."""
    return {t.name: HostCase(t.name, summary, t, run) for t in TARGETS}


def _plan(device: Any) -> tuple[Array, Any]:
    import torch

    cu = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    return cu, build_schedule(torch.tensor(cu, device=str(device)), int(cu[-1]) + 3, *HEADS, True)


def quantize(device: Any, seed: int) -> Expected:
    """q, k and v into payload and scale tiles."""
    import torch

    cu, plan = _plan(device)
    rng = np.random.default_rng(seed)
    given = {}
    for name, heads in (("q", HEADS[0]), ("k", HEADS[1]), ("v", HEADS[1])):
        given[name] = rng.standard_normal((plan.num_tokens, heads, DIM), np.float32).astype(bfloat16)
    tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in given.values()]
    q, k, v = tensors
    tiles = quantize_qkv(q, k, v, plan)
    out: dict[str, tuple[Array, Array]] = {}
    for name, x, block, got in (
        ("q", given["q"], 1, tiles.q),
        ("k", given["k"], 1, tiles.k),
        ("v", given["v"], 32, tiles.v),
        ("v1", given["v"], 1, tiles.v1),
    ):
        assert got is not None
        quantized = scaling.quantize_tokens(x.astype(np.float32), cu, block)
        payload = layout.pack_payload(quantized.payload, cu)
        scales = layout.pack_scales(quantized.scale, cu, DIM)
        out[f"{name} payload"] = (got.payload.numpy()[:, : payload.shape[1]], payload)
        out[f"{name} scales"] = (got.scales.numpy()[:, : scales.shape[1]], scales)
    return out


def schedule(device: Any, seed: int) -> Expected:
    """The tile table of a pack."""
    cu, plan = _plan(device)
    offsets = layout.tile_offsets(cu)
    return {"tile_offsets": (plan.tile_offsets.numpy(), np.asarray(offsets, np.int32))}
