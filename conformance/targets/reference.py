"""The reference as a target: under any recipe and profile, or a copy of it with a fault planted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.stages import ReferenceEngine
from flamia.conformance.targets.base import PROMISES, Target
from flamia.reference.recipes import MXFP8, Recipe, Scaling, get_recipe


class ReferenceTarget(Target):
    """`flamia.reference`.

    :param recipe: a name or a `Recipe`; with another ``package``, a name.
    :param package: the import name of the reference or of a copy of it.
    :param name: of the target.
    """

    bits = True
    stages = True

    def __init__(
        self,
        recipe: Recipe | str = MXFP8,
        profile: str = "ideal",
        *,
        package: str = "flamia.reference",
        name: str = "reference",
    ) -> None:
        self.recipe: Recipe = get_recipe(recipe)
        self.profile = profile
        self.name = name
        self.engine = ReferenceEngine(package)
        self._given: Any = self.recipe if package == "flamia.reference" else self.recipe.name
        self.promises = frozenset(PROMISES) - {"graph"}
        if self.recipe.values is Scaling.NONE:
            # NaN lives in the scales, and there are none: 0 x NaN reaches the rows that do not see the token
            self.promises -= {"containment"}

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call."""
        return self.engine.run(inputs, self._given, self.profile, backward=backward, stages=stages)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array]:
        """Offsets and schedules."""
        return self.engine.plan(cu_seqlens, heads, dim, causal)
