"""What the targets of this package's attention kernels share: their chip, their sources, their quantized operands.

Each calls its kernels directly, certified or not, because its report is what certifies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.targets.base import Target, TargetUnavailableError, package_versions
from flamia.conformance.targets.tensors import (
    context_survives,
    describe_device,
    find_cuda,
    replay_graph,
    to_numpy,
    to_torch,
)
from flamia.kernels.nvrtc import load_nvrtc
from flamia.kernels.quantize import Nvfp4Tiles, QuantizedInputs, TokenTiles
from flamia.kernels.registry import OPTIONS, Kernel
from flamia.kernels.schedule import NUM_BACKWARD, NUM_FORWARD, NUM_TILES, DeviceSchedule, build_schedule


class KernelTarget(Target):
    """Attention of `flamia.kernels` on one device; ``"cpu"``, the suite's default, stands for the current GPU.

    :param kernels: everything that one call of attention and its gradients launch.
    :param family: of chips, such as ``"Hopper"``, and :param capabilities: theirs.
    """

    bits = True
    stages = True
    kernels: tuple[Kernel, ...] = ()
    family: str
    capabilities: tuple[tuple[int, int], ...]

    def __init__(self, device: str) -> None:
        self.device = device

    def require_device(self) -> None:
        """A GPU of the family, and CuPy."""
        what = f"the {self.family} kernels"
        index = find_cuda(what, self.device)
        found = torch.cuda.get_device_capability(index)
        if found not in self.capabilities:
            wanted = " or ".join(f"{major}.{minor}" for major, minor in self.capabilities)
            raise TargetUnavailableError(f"{what} need compute capability {wanted}, got {found}")
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            raise TargetUnavailableError(f"{what} cannot run here: {error}") from error
        self.device = f"cuda:{index}"

    @contextmanager
    def launching(self) -> Iterator[str]:
        """Where tensors go; kernels are launched inside."""
        yield self.device

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, inputs: Inputs) -> Any:
        """The forward: an object with out and lse.

        :param inputs: for everything that is no tensor.
        """
        raise NotImplementedError

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """Tile offsets and schedules."""
        schedule = build_schedule(to_torch(cu_seqlens, self.device), int(cu_seqlens[-1]), *heads, causal)
        schedule.check()
        return {"tile_offsets": to_numpy(schedule.tile_offsets), **dict(schedule_arrays(schedule))}

    def replay(self, first: Inputs, second: Inputs) -> Results | None:
        """The forward in a CUDA graph.

        :raises AssertionError: if it cannot be captured, which all kernels of this library promise.
        """
        q, k, v, cu = (to_torch(x, self.device) for x in (first.q, first.k, first.v, first.cu_seqlens))

        def call() -> Any:
            got = self.attend(q, k, v, cu, first)
            return got.out, got.lse

        try:
            out, lse = replay_graph(call, [q, k, v], [second.q, second.k, second.v], self.device)
        except RuntimeError as error:
            raise AssertionError(f"the kernels cannot be captured in a CUDA graph: {error}") from error
        return Results(to_numpy(out), to_numpy(lse))

    def is_alive(self) -> bool:
        """Whether the CUDA context survived."""
        return context_survives(self.device)

    def environment(self) -> dict[str, str]:
        """Versions, device and compiler."""
        versions = package_versions("torch", "cupy", "cupy-cuda13x")
        compiler = {"compiler": "NVRTC {}.{}".format(*load_nvrtc().version)}
        return super().environment() | versions | compiler | self.describe()

    def describe(self) -> dict[str, str]:
        """The device."""
        return describe_device(self.device)

    def sources(self) -> dict[str, str]:
        """Text of the kernels, by file, and the compiler's options."""
        return kernel_sources(self.kernels)


def kernel_sources(kernels: Iterable[Kernel]) -> dict[str, str]:
    """What kernels are compiled from: text by file, and the compiler's options."""
    found: dict[str, str] = {}
    for unit in (kernel.units[0] for kernel in kernels):
        found |= {unit.kernel.source: unit.source(), **unit.headers()}
    return found | {"options": re.sub(r"\s+", " ", " ".join(OPTIONS))}


def schedule_arrays(schedule: DeviceSchedule) -> Iterator[tuple[str, Array]]:
    """The work items in use, named as in Note [Stages]."""
    for name, items, count in (
        ("forward", schedule.forward, NUM_FORWARD),
        ("backward", schedule.backward, NUM_BACKWARD),
    ):
        yield f"schedule.{name}", to_numpy(items[: int(schedule.status[count])]).astype(np.int64)


def operand_arrays(role: str, operand: TokenTiles | Nvfp4Tiles | None, tiles: int) -> Iterator[tuple[str, Array]]:
    """The tiles in use, named as in Note [Stages]."""
    if operand is None:
        return
    yield f"{role}.payload_tiles", to_numpy(operand.payload[:, :tiles])
    yield f"{role}.scale_tiles", to_numpy(operand.scales[:, :tiles])
    tokens = operand.token_scales if isinstance(operand, TokenTiles) else None
    if tokens is not None:
        yield f"{role}.scale_tiles_tokens", to_numpy(tokens[:, :tiles])


def row_arrays(forward: Any) -> dict[str, Array]:
    """Row statistics, and the work items in use."""
    return {"m": to_numpy(forward.m), "l": to_numpy(forward.l), **dict(schedule_arrays(forward.schedule))}


def call_arrays(forward: Any, inputs: QuantizedInputs, dout: TokenTiles | None) -> dict[str, Array]:
    """The arrays of Note [Stages] that a call wrote.

    :param forward: with m, l and schedule. :param dout: dO' of its backward.
    """
    tiles, arrays, x = int(forward.schedule.status[NUM_TILES]), row_arrays(forward), inputs
    operands: dict[str, TokenTiles | Nvfp4Tiles | None] = {"v": x.v, "v1": x.v1, "dout": dout}
    operands |= {"q": x.q, "k": x.k} if x.q4 is None else {"q_tokens": x.q, "k_tokens": x.k, "q": x.q4, "k": x.k4}
    for role, operand in operands.items():
        arrays.update(operand_arrays(role, operand, tiles))
    return arrays
