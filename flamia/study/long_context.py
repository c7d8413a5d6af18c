"""Long contexts: does P survive an attention sink?

One *sink* key holds a large share of the softmax, and 131,072 *flat* keys share the rest: each of them lies about 2^-17
or 2^-19 below the row's maximum. E4M3 reaches from 448 down to 2^-9: under one constant scale the P of the flat keys
becomes subnormal or 0, under a scale per tile of 128 keys it does not.

Inputs are E4M3 numbers, so that q, k and v are exact in every recipe whose scales are powers of two, and what is
measured is P alone. Logits of the flat keys scatter by about 0.4; their values scatter around a common vector, so that
their share of the output matters. Half of the rows give the sink a weight of exactly 2^17 or 2^19 flat keys, which
E4M3 holds exactly under an integer maximum: there the error is that of the flat keys. The other half puts the sink
between two powers of two (2^17.375, 2^19.5), where its own P is rounded to E4M3 as every other P is; under the usual
real-valued maximum it is not, being 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference import Profile, Recipe
from flamia.reference.formats import E4M3, round_to
from flamia.reference.rows import KEYS_AT_ONCE, attention_rows

FLAT_KEYS = 131_072
ROWS = 64
DIM = 128
UNIT = 1 / 8
"""Octaves of softmax weight per unit of q·k; the softmax scale is ``UNIT * ln 2``."""
SETTINGS = ("at 2^n", "between")
"""Where the sink's weight lies: at a power of two, or between two of them."""

Tensors = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True)
class LongContext:
    """Errors of O under one recipe: ``norm(x - exact) / norm(exact)``.

    :param keys: flat keys.
    :param masses: by setting: the sink's share of the softmax in float64, mean over rows, for the two heads.
    :param errors: by setting, for the two heads.
    """

    recipe: str
    keys: int
    masses: dict[str, list[float]]
    errors: dict[str, list[float]]


def sink_inputs(flat_keys: int, rows: int, seed: int) -> Tensors:
    """q ``(2 * rows, 2, 128)``, `rows` for each of `SETTINGS`; k, v ``(flat_keys + 1, 1, 128)``; all E4M3 numbers.

    The first three channels hold the logits, in octaves ``UNIT * q * k``; shares of .44 and .76 are those of weights
    2^17 and 2^19 beside 131,072 flat keys of mean weight 1.28 (1.66 and 1.81 in the other rows):

    =============================  ==========  ==========  ==========
    channel                        0           1           2
    =============================  ==========  ==========  ==========
    sink key                       16          2           0
    flat keys                      0           0           1/2
    q: weight 2^17 (2^19)          8           4 (12)      4
    q: 2^17.375 (2^19.5)           8           5.5 (14)    10 (12)
    =============================  ==========  ==========  ==========
    """
    rng = np.random.default_rng(seed)
    q = _grid(rng.standard_normal((len(SETTINGS), rows, 2, DIM), np.float32))
    k = _grid(rng.standard_normal((flat_keys + 1, 1, DIM), np.float32) * np.float32(0.4))
    q[..., 0] = 8
    q[0, ..., 1], q[0, ..., 2] = (4, 12), 4
    q[1, ..., 1], q[1, ..., 2] = (5.5, 14), (10, 12)
    k[..., :3] = 0, 0, 0.5
    k[0] = 0
    k[0, 0, :2] = 16, 2
    v = rng.standard_normal((flat_keys + 1, 1, DIM), np.float32)
    v[1:] += rng.standard_normal(DIM).astype(np.float32)
    return q.reshape(-1, 2, DIM), k, _grid(v)


def exact_rows(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], softmax_scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64 out ``(rows, heads, D)`` and the softmax of key 0, the sink, ``(rows, heads)``.

    Scores are taken relative to the sink's, which is close to the largest.
    """
    queries = softmax_scale * q.astype(np.float64).swapaxes(0, 1)
    sink = queries @ k[0, 0].astype(np.float64)
    out, total = np.zeros(queries.shape), np.zeros(sink.shape)
    for first in range(0, len(k), KEYS_AT_ONCE):
        keys, values = (x[first : first + KEYS_AT_ONCE, 0].astype(np.float64) for x in (k, v))
        p = np.exp(queries @ keys.T - sink[..., None])
        out += p @ values
        total += p.sum(axis=-1)
    return (out / total[..., None]).swapaxes(0, 1), 1 / total.T


def measure_long_context(
    recipes: list[Recipe], profile: Profile, *, flat_keys: int = FLAT_KEYS, rows: int = ROWS, seed: int = 0
) -> list[LongContext]:
    """The same rows and keys under each recipe."""
    q, k, v = sink_inputs(flat_keys, rows, seed)
    scale = UNIT * math.log(2)
    exact, mass = exact_rows(q, k, v, scale)
    masses = _by_setting(mass, lambda x: x.mean(axis=0))
    size = _by_setting(exact, _norms)
    found = []
    for recipe in recipes:
        out = attention_rows(q, k, v, recipe=recipe, softmax_scale=scale, profile=profile)
        norms = _by_setting(out - exact, _norms)
        errors = {name: [a / b for a, b in zip(norms[name], size[name], strict=True)] for name in SETTINGS}
        found.append(LongContext(recipe.name, flat_keys, masses, errors))
    return found


def _by_setting(x: NDArray[np.float64], reduce: Any) -> dict[str, list[float]]:
    parts = np.split(x, len(SETTINGS))
    return {name: [float(y) for y in reduce(part)] for name, part in zip(SETTINGS, parts, strict=True)}


def _norms(x: NDArray[np.float64]) -> Any:
    """Frobenius norm per head."""
    return np.linalg.norm(x, axis=(0, 2))


def _grid(x: Any) -> NDArray[np.float32]:
    """To the nearest E4M3 number."""
    return round_to(np.asarray(x, np.float32), E4M3)
