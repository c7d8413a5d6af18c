"""The kernels on the simulator as a target: everything that one call on Blackwell launches, with no GPU.

The host code is that of a call on a GPU, up to the launch: see `flamia.conformance.simulator.host`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.simulator.host import simulated_device
from flamia.conformance.targets.base import Target, TargetUnavailableError
from flamia.conformance.targets.blackwell import BlackwellTarget
from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc
from flamia.kernels.targets import Target as Chip
from flamia.kernels.targets import get_target


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


class SimulatorTarget(BlackwellTarget):
    """Attention of the Blackwell kernels on the simulator.

    :param chip: for which the kernels are built.
    :param seed: of the order of warps and the delays of asynchronous operations; each call takes the next one.
    """

    def __init__(self, chip: Chip, seed: int = 0, strict: bool = False) -> None:
        super().__init__("cpu", strict)
        self.chip = chip
        self.name = f"simulator:{chip.name}"
        self.seed = seed

    def require_device(self) -> None:
        """The simulator."""

    @contextmanager
    def launching(self) -> Iterator[str]:
        """Under another random timing than the call before."""
        self.seed += 1
        with simulated_device(self.chip, seed=self.seed):
            yield "cpu"

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """Nothing: documents of any size would take the simulator too long."""
        return None

    def replay(self, first: Inputs, second: Inputs) -> Results | None:
        """Nothing: there is no graph to capture."""
        return None

    def is_alive(self) -> bool:
        """Always: each call has a device of its own."""
        return True

    def describe(self) -> dict[str, str]:
        """The simulated chip."""
        return {"device": f"simulated {self.chip.name}"}
