"""One kernel of the comparison: its source, its launch, and what goes in and comes out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Draw = Callable[[np.random.Generator], Array]

UNWRITTEN = 0xA5
"""What every byte of an output holds before the launch, so that a store too many or too few shows."""

CUDA = Path(__file__).resolve().parent / "cuda"
"""Folder of sources and headers."""


@dataclass(frozen=True)
class Output:
    """An array that a kernel writes.

    :param labels: what each index of the first axis is, for messages; empty: the index itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    labels: tuple[str, ...] = ()

    def allocate(self) -> Array:
        """The array before the launch: every byte `UNWRITTEN`."""
        count = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        array: Array = np.full(count, UNWRITTEN, np.uint8).view(self.dtype).reshape(self.shape)
        return array


@dataclass(frozen=True)
class Kernel:
    """A kernel for sm_90a whose result is determined by its inputs alone.

    The entry is ``kernel``; its parameters are pointers to the inputs and then to the outputs, nothing else.

    :param family: heading of the result table.
    :param source: CUDA C++; empty: the file ``<name>.cu`` of `CUDA`.
    :param inputs: name -> function that draws the array.
    :param threads: per CTA. :param blocks: CTAs. :param cluster: CTAs per cluster (the source says so, too).
    :param shared_bytes: dynamic shared memory.
    :param exact: False where the chip's result is an approximation that the simulator does not model bit for bit.
    """

    name: str
    family: str
    source: str
    inputs: dict[str, Draw]
    outputs: tuple[Output, ...]
    threads: int = 128
    blocks: int = 1
    cluster: int = 1
    shared_bytes: int = 0
    exact: bool = True

    @property
    def text(self) -> str:
        """The whole translation unit."""
        if not self.source:
            return (CUDA / f"{self.name}.cu").read_text(encoding="utf-8")
        return '#include "common.cuh"\n\n' + self.source

    def draw(self, seed: int) -> dict[str, Array]:
        """The inputs of a seed: the same arrays everywhere."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        return {name: np.ascontiguousarray(draw(rng)) for name, draw in self.inputs.items()}

    def allocate(self) -> dict[str, Array]:
        """The outputs before the launch."""
        return {output.name: output.allocate() for output in self.outputs}


def headers() -> dict[str, str]:
    """What a source may include: text by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.cuh"))}
