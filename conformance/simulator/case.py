"""A kernel with everything that one simulation needs: source, launch, inputs, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from numpy.typing import NDArray

from flamia.conformance.comparison import compare_bits
from flamia.conformance.simulator.machine.devicememory import DeviceMemory
from flamia.conformance.simulator.machine.launch import Report, simulate
from flamia.kernels.nvrtc import load_nvrtc
from flamia.kernels.targets import Target

OPTIONS = ("--std=c++17", "--fmad=false", "--generate-line-info")
"""Options of every compilation; line information makes a fault name a line of the source."""


@lru_cache(maxsize=128)
def compile_ptx(
    name: str, source: str, headers: tuple[tuple[str, str], ...], target: Target, options: tuple[str, ...]
) -> str:
    """PTX of a source.

    :raises flamia.kernels.nvrtc.CompileError: with the compiler's log.
    """
    return load_nvrtc().compile(name, source, dict(headers), target, (*OPTIONS, *options), ptx_only=True).ptx.decode()


@dataclass
class Data:
    """The arguments of one launch.

    :param arguments: one per parameter, as `simulate` takes them; written in place.
    :param expected: name -> the array among the arguments, and what must be in it afterwards.
    :param memory: holds buffers whose addresses stand in structs.
    """

    arguments: Sequence[Any]
    expected: Mapping[str, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)
    memory: DeviceMemory | None = None

    def mismatch(self) -> str | None:
        """The first coordinate of the first output that is not as expected, bit for bit."""
        for name, (got, expected) in self.expected.items():
            found = compare_bits(name, got, expected)
            if found is not None:
                return found.message
        return None


class Simulated(Protocol):
    """What the tools take: a `Case`, or anything else that is simulated under a name."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def target(self) -> Target: ...

    @property
    def roles(self) -> Mapping[str, tuple[int, ...]]: ...

    def simulate(self, seed: int = 0, **options: Any) -> tuple[Report, Data]:
        """Run once."""
        ...


@dataclass(frozen=True)
class Case:
    """A kernel and one way to launch it.

    :param source: CUDA C++.
    :param draw: seed -> fresh `Data`.
    :param roles: name of a role -> its warps; for timelines and counts.
    """

    name: str
    summary: str
    source: str
    entry: str
    target: Target
    draw: Callable[[int], Data]
    block: int | tuple[int, ...]
    grid: int | tuple[int, ...] = 1
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    options: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ptx(self) -> str:
        """The compiled PTX."""
        return compile_ptx(f"{self.name}.cu", self.source, self.headers, self.target, self.options)

    def simulate(self, seed: int = 0, data: Data | None = None, **options: Any) -> tuple[Report, Data]:
        """Run once.

        :param seed: of the schedule, and of the inputs unless ``data`` is given.
        :param options: of `simulate`: ``strict``, ``fast_mma``, ``trace``, ...
        :raises Fault: for a rule of PTX that the kernel breaks.
        """
        data = data or self.draw(seed)
        report = simulate(
            self.ptx,
            self.entry,
            self.grid,
            self.block,
            data.arguments,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            seed=seed,
            memory=data.memory,
            **options,
        )
        return report, data
