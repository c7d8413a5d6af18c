"""How far a recipe is from exact attention: relative Frobenius errors of O, dQ, dK and dV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference import Forward, Gradients, Oracle, Profile, Recipe, attention_oracle
from flamia.reference import attention_backward as backward
from flamia.reference import attention_forward as forward
from flamia.study.sample import Sample

OUTPUTS = ("o", "dq", "dk", "dv")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """Errors of one recipe against float64.

    :param recipe: its name.
    :param per_head: by output: ``norm(x - exact) / norm(exact)`` per head, over all tokens and channels.
    :param by_token: float64 ``(Hq, T)``: the same of each single row of O.
    """

    recipe: str
    per_head: dict[str, list[float]]
    by_token: Array

    @property
    def mean(self) -> dict[str, float]:
        """By output: the geometric mean over heads."""
        return {name: geometric_mean(np.array(values)) for name, values in self.per_head.items()}

    @property
    def spread(self) -> dict[str, tuple[float, float]]:
        """By output: the best and the worst head."""
        return {name: (min(values), max(values)) for name, values in self.per_head.items()}


def exact_attention(sample: Sample) -> Oracle:
    """Outputs and gradients in float64."""
    return attention_oracle(*sample.qkv, sample.cu_seqlens, sample.dout)


def run_recipe(sample: Sample, recipe: Recipe, profile: Profile) -> tuple[Forward, Gradients]:
    """Causal forward and backward of the whole sample."""
    result = forward(*sample.qkv, sample.cu_seqlens, recipe=recipe, profile=profile)
    return result, backward(sample.dout, result)


def measure_errors(recipe: Recipe, result: Forward, gradients: Gradients, oracle: Oracle) -> Errors:
    """Compare one recipe's results, as they leave the engine (rounded to the input's dtype), with the exact ones."""
    assert oracle.dq is not None and oracle.dk is not None and oracle.dv is not None
    pairs = {
        "o": (result.out, oracle.out),
        "dq": (gradients.dq, oracle.dq),
        "dk": (gradients.dk, oracle.dk),
        "dv": (gradients.dv, oracle.dv),
    }
    per_head = {name: [float(e) for e in relative_error(x, exact, (0, 2))] for name, (x, exact) in pairs.items()}
    return Errors(recipe.name, per_head, relative_error(result.out, oracle.out, 2).T)


def relative_error(x: NDArray[Any], exact: Array, axes: int | tuple[int, ...]) -> Array:
    """Frobenius norm of the error over that of the exact value, along ``axes``; where both are 0 it is 0."""
    difference = np.sqrt(((x.astype(np.float64) - exact) ** 2).sum(axis=axes))
    size = np.sqrt((exact**2).sum(axis=axes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0, 0.0, difference / size)


def geometric_mean(x: Array) -> float:
    """Over all entries; 0 if one of them is 0."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(x).mean()))
