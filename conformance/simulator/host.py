"""The host code of `flamia.kernels` on the simulator: its launches execute here, on PyTorch's CPU tensors.

Inside `simulated_device` CPU tensors pass for CUDA tensors: they say that they are on a CUDA device, and the address
they give is one of the simulator's global memory. So wrappers such as `flamia.kernels.quantize.quantize_qkv` run
unchanged, for whatever target one likes, without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from flamia.conformance.simulator.machine.devicememory import DeviceMemory
from flamia.conformance.simulator.machine.launch import Report, simulate
from flamia.kernels import launch as real
from flamia.kernels.build import build
from flamia.kernels.registry import Unit
from flamia.kernels.targets import Target


class CpuDevice(str):
    """``cpu`` for PyTorch, a CUDA device for `flamia.kernels`."""

    type = "cuda"

    # A device has an index, and a string a method of that name.
    index = 0  # type: ignore[assignment]


POISON = 0xFD


class HostMemory:
    """The simulator's global memory, as it mirrors storages of PyTorch.

    A storage gets its address when it is first asked for it. One that ``torch.empty`` made is filled with `POISON`; as
    long as it holds nothing else it counts as never written.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.fresh: dict[int, Any] = {}  # address of a storage to the storage, which keeps the address taken
        self.known: dict[int, tuple[int, Any]] = {}

    def address(self, tensor: Any, real_address: int) -> int:
        """Where a tensor begins in the simulator; 0 for one without bytes."""
        if real_address == 0:
            return 0
        storage = tensor.untyped_storage()
        base = int(storage.data_ptr())
        if base not in self.known:
            import torch

            array = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
            untouched = base in self.fresh and bool((array == POISON).all())
            self.known[base] = (self.memory.allocate(array, initialised=not untouched), storage)
        return self.known[base][0] + real_address - base


@contextmanager
def simulated_device(
    target: Target, *, seed: int = 0, multiprocessors: int = 2, **options: Any
) -> Iterator[tuple[CpuDevice, list[Report]]]:
    """Send launches to the simulator.

    :param target: what kernels are built for.
    :param multiprocessors: of the device, for launches that fill it.
    :param options: of `simulate`.
    :yields: the device to make tensors on, and the reports of the launches so far.
    """
    import torch

    memory = HostMemory(DeviceMemory())
    device, reports = CpuDevice("cpu"), list[Report]()
    data_ptr, empty, empty_like = torch.Tensor.data_ptr, torch.empty, torch.empty_like

    def launch(
        unit: Unit, entry: str, params: Any, device: Any, *, ctas: int | None = None, at_most: int | None = None
    ) -> None:
        artifact = build(unit, target)
        (built,) = (e for e in artifact.entries if e.name == entry)
        if ctas is None:
            ctas = multiprocessors * built.ctas
            ctas = ctas if at_most is None else max(1, min(ctas, at_most))
        report = simulate(
            artifact.ptx.read_text(),
            entry,
            ctas,
            built.threads,
            [np.ascontiguousarray(params).tobytes()],
            shared_bytes=built.dynamic_shared_bytes,
            seed=seed,
            memory=memory.memory,
            **options,
        )
        reports.append(report)

    def remember(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        storage.fill_(POISON)
        memory.fresh[storage.data_ptr()] = storage
        return tensor

    patches: list[Any] = [
        mock.patch.object(torch.Tensor, "data_ptr", lambda x: memory.address(x, data_ptr(x))),
        mock.patch.object(torch.Tensor, "device", property(lambda x: device)),
        mock.patch.object(torch, "empty", lambda *a, **k: remember(empty(*a, **k))),
        mock.patch.object(torch, "empty_like", lambda *a, **k: remember(empty_like(*a, **k))),
    ]
    for name, module in list(sys.modules.items()):
        if name.startswith("flamia.kernels.") and getattr(module, "launch", None) is real.launch:
            patches.append(mock.patch.object(module, "launch", launch))
    for patch in patches:
        patch.start()
    try:
        yield device, reports
    finally:
        for patch in reversed(patches):
            patch.stop()
