"""Document shapes: where documents begin and end, and what lies past the last."""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import Inputs
from flamia.conformance.cases.draw import gaussian
from flamia.conformance.cases.registry import case


@case("documents/one_token", classes=("one-token",), promises=("edges", "pack"), tiny=True)
def one_token(rng: np.random.Generator) -> Inputs:
    """Documents of one token each: softmax over one key, so out is V's own quantization and dS is zero.

    one-token: kernels that assume at least one full tile, or two tokens, fail here.
    """
    return gaussian(rng, [1, 1, 1])
