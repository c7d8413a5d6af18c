"""The kernels of `flamia.kernels` around attention as cases: their host code runs unchanged, on the simulator.

What must come out is what `flamia.reference` gives, in its layout. Needs PyTorch.
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
from flamia.kernels.conversions import convert
from flamia.kernels.epilogue import decode_tiles, reduce_heads
from flamia.kernels.quantize import quantize_qkv, quantize_tokens
from flamia.kernels.quantize import row_pass as launch_row_pass
from flamia.kernels.schedule import build_schedule
from flamia.kernels.targets import TARGETS, Target
from flamia.reference import formats, layout, scaling
from flamia.reference.backward import row_pass as reference_row_pass
from flamia.reference.documents import TILE
from flamia.reference.forward import Forward
from flamia.reference.profiles import get_profile
from flamia.reference.recipes import MXFP8

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
        """Run once; the report is that of the last launch.

        :raises Fault: for a rule of PTX that a kernel breaks.
        """
        from flamia.conformance.simulator.host import simulated_device

        with simulated_device(self.target, seed=seed, **options) as (device, reports):
            expected = self.run(device, seed)
        return reports[-1], Data([], expected)


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


def _draw_tokens(rng: np.random.Generator, tokens: int, heads: int) -> tuple[Array, Any]:
    """Normal bfloat16 tokens ``(tokens, heads, DIM)``, and as a tensor."""
    import torch

    x = rng.standard_normal((tokens, heads, DIM), np.float32).astype(bfloat16)
    return x, torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def row_pass(device: Any, seed: int) -> Expected:
    """The backward's row pre-pass: dO in tiles, delta, and the exponent of the probabilities."""
    import torch

    cu, plan = _plan(device)
    rng, heads, used = np.random.default_rng(seed), HEADS[0], int(cu[-1])
    (dout, dout_tensor), (out, out_tensor) = (_draw_tokens(rng, plan.num_tokens, heads) for _ in range(2))
    row_sum = np.exp2(6 * rng.random((heads, plan.num_tokens), np.float32))
    row_max = rng.integers(-40, 40, (heads, plan.num_tokens)).astype(np.float32)
    got = launch_row_pass(dout_tensor, out_tensor, torch.from_numpy(row_sum), torch.from_numpy(row_max), plan)
    forward = Forward(
        out.astype(np.float32), row_max, row_max, row_sum, {}, cu, MXFP8, get_profile("blackwell"), True, 1.0,
        head_counts=(heads, 1),
    )  # fmt: skip
    want = reference_row_pass(dout.astype(np.float32), forward)
    operand = want.dout["dout"]
    payload = layout.pack_payload(operand.payload, cu)
    tile, row = layout.token_slots(cu)
    found: dict[str, tuple[Array, Array]] = {"dO payload": (got.dout.payload.numpy()[:, : payload.shape[1]], payload)}
    for name, values, expected, fill in (
        ("delta", got.delta, want.delta, 0.0),
        ("top", got.top, want.top, np.inf),
    ):
        tiles = np.full((heads, payload.shape[1], TILE), fill, np.float32)
        tiles[:, tile, row] = expected[:, :used]
        found[name] = (values.numpy()[:, : payload.shape[1]], tiles)
    return found


def decode(device: Any, seed: int) -> Expected:
    """Tokens quantized in blocks of 1 and of 32, and decoded again."""
    cu, plan = _plan(device)
    x, tensor = _draw_tokens(np.random.default_rng(seed), plan.num_tokens, HEADS[0])
    out: dict[str, tuple[Array, Array]] = {}
    for block in (1, 32):
        got = decode_tiles(quantize_tokens(tensor, plan, block), plan).numpy()
        quantized = scaling.quantize_tokens(x.astype(np.float32), cu, block)
        out[f"blocks of {block}"] = (got, scaling.dequantize_tokens(quantized))
    return out


def epilogue(device: Any, seed: int) -> Expected:
    """Gradients of two heads added up and rounded to bfloat16."""
    import torch

    cu, plan = _plan(device)
    partial = np.random.default_rng(seed).standard_normal((2, plan.max_tiles, TILE, DIM), np.float32)
    out = torch.full((plan.num_tokens, 1, DIM), 7.0, dtype=torch.bfloat16)
    reduce_heads(torch.from_numpy(partial), out, plan)
    tile, row = layout.token_slots(cu)
    expected = np.zeros((plan.num_tokens, 1, DIM), bfloat16)
    expected[: int(cu[-1]), 0] = (partial[0] + partial[1])[tile, row].astype(bfloat16)
    return {"out": (out.view(torch.int16).numpy(), expected.view(np.int16))}


def conversions(device: Any, seed: int) -> Expected:
    """Random float32 bits to E4M3 and E2M1, in the form of the target and in software."""
    import torch

    x = np.random.default_rng(seed).integers(0, 1 << 32, 4096, np.uint32).view(np.float32)
    out: dict[str, tuple[Array, Array]] = {}
    for name, element in (("e4m3", formats.E4M3), ("e2m1", formats.E2M1)):
        with np.errstate(invalid="ignore"):
            expected = formats.encode(x, element)
        for form in ("", "_software"):
            out[name + form] = (convert(torch.from_numpy(x.copy()), name + form).numpy(), expected)
    return out
