"""Speed of the quantizer on one core, against what the memory allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference.scaling import quantize_tokens

GOAL_ELEMENTS = 100e6
"""Goal: elements per second, or the memory's limit if that is lower."""

BYTES_PER_ELEMENT = 3
"""bfloat16 in and E4M3 out: what must move at least."""


@dataclass(frozen=True)
class QuantizationSpeed:
    """Elements per second from bfloat16 to token-block E4M3, best of all repeats.

    :param speed: by tokens per block (1 and 32).
    :param memory_limit: elements per second at which 3 bytes per element move as fast as NumPy copies one large array.
    """

    elements: int
    speed: dict[int, float]
    memory_limit: float

    @property
    def goal(self) -> float:
        """Elements per second to reach."""
        return min(GOAL_ELEMENTS, self.memory_limit)

    @property
    def met(self) -> bool:
        """Whether every block size reaches the goal."""
        return min(self.speed.values()) >= self.goal


def measure_quantization(
    tokens: int = 16384, heads: int = 8, head_dim: int = 128, repeats: int = 5
) -> QuantizationSpeed:
    """Quantize one packed tensor. NumPy's loops run on one core."""
    x = np.random.default_rng(0).standard_normal((tokens, heads, head_dim), np.float32).astype(bfloat16)
    cu = [0, tokens]
    speed = {block: x.size / best_time(partial(quantize_tokens, x, cu, block), repeats) for block in (1, 32)}
    source: NDArray[Any] = x.view(np.uint8)
    target = np.empty_like(source)
    copied = 2 * source.nbytes / best_time(lambda: np.copyto(target, source), repeats)
    return QuantizationSpeed(x.size, speed, copied / BYTES_PER_ELEMENT)


def best_time(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
