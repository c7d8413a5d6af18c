"""Time of a bit-accurate profile."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flamia.bench.attention import Shape, make_inputs
from flamia.reference import attention_backward, attention_forward

GOAL_SECONDS = 30.0
"""Goal for forward and backward of 512 tokens and one head."""


@dataclass(frozen=True)
class BitAccurateTime:
    """Seconds of forward and backward of one head of MXFP8."""

    profile: str
    tokens: int
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.total < GOAL_SECONDS


def measure_bit_accurate(tokens: int = 512, profile: str = "blackwell") -> BitAccurateTime:
    """One causal document of one head, head_dim 128."""
    q, k, v, dout = make_inputs(Shape(tokens, 1, 1))
    start = time.perf_counter()
    forward = attention_forward(q, k, v, [0, tokens], profile=profile)
    middle = time.perf_counter()
    attention_backward(dout, forward)
    return BitAccurateTime(profile, tokens, middle - start, time.perf_counter() - middle)
