"""Heads: group ratios and head dimensions."""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import Inputs
from flamia.conformance.cases.draw import gaussian
from flamia.conformance.cases.registry import case

RATIOS = (1, 2, 3, 5, 7, 8, 12)
SUPPORTED_DIMS = (32, 64, 96, 128, 192, 256)
OTHER_DIMS = (8, 40, 48, 72, 80, 120, 160, 224)


def _grouped(ratio: int) -> None:
    @case(
        f"heads/group_of_{ratio}",
        size="quick" if ratio in (1, 3, 8) else "full",
        classes=("gqa-mapping",),
        promises=("heads", "determinism"),
    )
    def build(rng: np.random.Generator) -> Inputs:
        """KV heads of different content, each with a group of query heads.

        gqa-mapping: KV head ``h % Hkv`` in place of ``h // group``, or a group that must be a power of two.
        """
        return gaussian(rng, [90, 1, 40], (2 * ratio, 2))


def _dimension(dim: int, supported: bool) -> None:
    @case(
        f"heads/dim_{dim}",
        size="quick" if dim in (32, 128, 48, 80) else "full",
        classes=("head-dim",),
        levels=(1, 2, 3, 5) if supported else (5,),
        may_refuse=dim not in (64, 128),
    )
    def build(rng: np.random.Generator) -> Inputs:
        """A head dimension that the target computes right, or refuses.

        head-dim: dimensions that run without an error and give wrong results, because a tile is wider than the tensor.
        """
        return gaussian(rng, [70, 130], (2, 1), dim=dim)


for _ratio in RATIOS:
    _grouped(_ratio)
for _dim in SUPPORTED_DIMS:
    _dimension(_dim, True)
for _dim in OTHER_DIMS:
    _dimension(_dim, False)
