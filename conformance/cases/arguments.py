"""Arguments: calls that must be refused, and calls that are repeated."""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import Inputs
from flamia.conformance.cases.draw import gaussian
from flamia.conformance.cases.registry import case


@case("arguments/malformed", classes=("malformed-cu-seqlens",), levels=(), promises=("validation",), tiny=True)
def malformed(rng: np.random.Generator) -> Inputs:
    """A legal call, of which `levels.validation` makes illegal ones: each must raise.

    malformed-cu-seqlens: a cu_seqlens that does not start at 0, decreases, or ends past the tensors is accepted, and
    the kernel reads and writes out of bounds. Likewise a negative or NaN softmax_scale and shapes that do not fit.
    """
    return gaussian(rng, [20, 30], (2, 1))


@case("arguments/graph", classes=("graph-replay",), levels=(), promises=("graph",))
def graph(rng: np.random.Generator) -> Inputs:
    """A call captured in a CUDA graph and replayed on other tensors of the same shapes.

    graph-replay: scales, schedules or pointers that the host computed at capture are stale at replay.
    """
    return gaussian(rng, [130, 200], (4, 2))


@case("arguments/repeated", classes=("nondeterminism",), levels=(), promises=("determinism",))
def repeated(rng: np.random.Generator) -> Inputs:
    """Many tiles and a group of heads, again and again.

    nondeterminism: dQ summed by atomics, or a barrier that is sometimes too late.
    """
    return gaussian(rng, [400, 129, 30], (6, 2))
