"""Whether token blocks fit the data: the exponents of tokens, and how far a token lies below its block's maximum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flamia.reference.scaling import block_amax, exponent_of, rceil
from flamia.study.sample import TENSORS, Sample

NORMAL_OCTAVES = 14
"""From 448 down to 2^-6: about so far below its block's maximum a token's own maximum is still a normal E4M3 number."""


@dataclass(frozen=True)
class DynamicRange:
    """Exponents of one tensor under RCEIL scales.

    :param tensor: ``q``, ``k``, ``v`` or ``dout``.
    :param exponents: int ``(T * H,)``: of each token by itself (B = 1).
    :param below_block: int ``(T * H,)``, >= 0: of the token's block of 32, minus its own.
    """

    tensor: str
    exponents: NDArray[np.int64]
    below_block: NDArray[np.int64]


def measure_dynamic_range(sample: Sample) -> list[DynamicRange]:
    """One entry per tensor. Tokens that are all zero have no exponent and are left out."""
    found = []
    for name in TENSORS:
        x = getattr(sample, name)
        amax = block_amax(x, sample.cu_seqlens, 1)
        own, block = (exponent_of(rceil(a)) for a in (amax, block_amax(x, sample.cu_seqlens, 32)))
        seen = amax > 0
        found.append(DynamicRange(name, own[seen].astype(np.int64), (block - own)[seen].astype(np.int64)))
    return found
