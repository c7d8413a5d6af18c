"""Whether the backward differentiates the function that the forward computed.

Note [Consistency]
~~~~~~~~~~~~~~~~~~
Three measurements on one causal run:

* *P in both passes.* The number that multiplied V in the forward, ``P_ij / l_i``, against the one that the backward
  multiplies by dO (or by dO / l: then l cancels). Equal means equal in value: bit for bit where both passes leave P
  unnormalised, else to 2^-20, the roundings of a division. The contract promises equality wherever both were normal
  E4M3 numbers before they were rounded; a result of 2^-6, the smallest normal one, may have been rounded up to it and
  is not counted there. In the diagonal tile the forward's P is the one that l sums, before V1's exponents are folded.
* *Rows of dS.* Adding a constant to a row of scores changes nothing, so ``sum_j dS_ij = 0``. Reported: the norm over
  rows of ``sum_j dS_ij`` over that of ``sum_j |dS_ij|``, of dS before it is quantized.
* *Sum of dK.* Adding one vector to every key does not either, so ``sum_j dK_j = 0`` in each document and KV head.
  Reported: ``sum |sum_j dK_j| / sum_j |dK_j|``, numerator and denominator over all documents, heads and channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference import Forward, Profile, Recipe, attention_backward, attention_forward
from flamia.reference.documents import BLOCK, TILE, Document
from flamia.reference.formats import E4M3
from flamia.reference.recipes import Scaling
from flamia.study.sample import Sample

MAX_TOKENS = 1024
"""P of at most so many tokens is kept for the comparison."""

Key = tuple[int, int, int, int]
"""Document index, first query head, query tile, key tile."""


@dataclass
class Consistency:
    """Note [Consistency] for one recipe.

    :param compared: visible entries of P that are not 0 in both passes.
    :param equal: those of the same value in both.
    :param compared_normal: entries that are above E4M3's smallest normal number in both passes; 0 where P is bfloat16.
    :param equal_normal: those of the same value in both.
    :param difference: ``sum |P_backward - P_forward| / sum P_forward``, of P / l.
    :param ds_rows: row sums of dS relative to the sums of magnitudes.
    :param dk_sum: sum of dK over keys relative to the sum of magnitudes.
    """

    recipe: str
    tokens: int
    compared: int = 0
    equal: int = 0
    compared_normal: int = 0
    equal_normal: int = 0
    difference: float = 0.0
    ds_rows: float = 0.0
    dk_sum: float = 0.0

    @property
    def share_equal(self) -> float | None:
        """Of all compared entries; None where there are none."""
        return self.equal / self.compared if self.compared else None

    @property
    def share_equal_normal(self) -> float | None:
        """Of entries that are normal in both passes; None where there are none."""
        return self.equal_normal / self.compared_normal if self.compared_normal else None


class _Tiles:
    """An observer that keeps the tiles of some stages; the engine calls it from several threads."""

    def __init__(self, *stages: str) -> None:
        self.kept: dict[str, dict[Key, NDArray[Any]]] = {stage: {} for stage in stages}
        self.documents: dict[int, Document] = {}

    def __call__(
        self, stage: str, document: Document, heads: slice, query_tile: int, key_tile: int, x: NDArray[Any]
    ) -> None:
        if stage in self.kept:
            self.documents[document.index] = document
            self.kept[stage][document.index, heads.start, query_tile, key_tile] = x


def measure_consistency(sample: Sample, recipe: Recipe, profile: Profile) -> Consistency:
    """Run the first `MAX_TOKENS` tokens and compare; see Note [Consistency]."""
    sample = sample.first_tokens(min(MAX_TOKENS, int(sample.cu_seqlens[-1])))
    ahead, back = _Tiles("p", "p_top"), _Tiles("p", "p_scale", "ds_exact")
    forward = attention_forward(*sample.qkv, sample.cu_seqlens, recipe=recipe, profile=profile, observer=ahead)
    gradients = attention_backward(sample.dout, forward, dtype=np.float32, observer=back)

    result = Consistency(recipe.name, int(sample.cu_seqlens[-1]))
    total = differing = 0.0
    active: NDArray[np.bool_] = np.not_equal(sample.dout, 0).any(axis=-1).T  # the backward has no P in other rows
    for l, codes_f, p_f, codes_b, p_b in _probabilities(forward, ahead, back, active):  # noqa: E741
        seen = (p_f != 0) | (p_b != 0)
        if recipe.normalize == "p":
            equal = np.abs(p_b - p_f / l) <= 2.0**-20 * np.abs(p_b)
            difference = np.abs(p_b - p_f / l)
        else:
            equal = p_b == p_f
            difference = np.abs(p_b - p_f) / l
        total += float((p_f / l).sum())
        differing += float(difference.sum())
        result.compared += int(seen.sum())
        result.equal += int((equal & seen).sum())
        if recipe.values is not Scaling.NONE:
            normal = (codes_f > E4M3.min_normal) & (codes_b > E4M3.min_normal)
            result.compared_normal += int(normal.sum())
            result.equal_normal += int((equal & normal).sum())
    result.difference = differing / total if total else 0.0
    result.ds_rows = _row_sums(back)
    result.dk_sum = _key_sums(sample, gradients.dk)
    return result


def _probabilities(
    forward: Forward, ahead: _Tiles, back: _Tiles, active: NDArray[np.bool_]
) -> Iterator[tuple[Any, ...]]:
    """For each tile: l, and for both passes the E4M3 element and P as the pass used it, ``[heads, keys, queries]``.

    P is in units of 2^m, and divided by l in the backward of a recipe that normalises P.
    """
    recipe = forward.recipe
    for key, codes_f in ahead.kept["p"].items():
        if key not in back.kept["p"]:
            continue
        document = ahead.documents[key[0]]
        rows = min(TILE, document.length - key[2] * TILE)
        tokens = slice(document.start + key[2] * TILE, document.start + key[2] * TILE + rows)
        heads = slice(key[1], key[1] + codes_f.shape[0])
        m, l = (x[heads, None, tokens].astype(np.float64) for x in (forward.m, forward.l))  # noqa: E741
        top = ahead.kept["p_top"][key][:, None, :rows].astype(np.float64)
        codes_f = codes_f[..., :rows] * active[heads, None, tokens]
        with np.errstate(invalid="ignore"):
            p_f = np.where(codes_f == 0, 0.0, codes_f * np.exp2(top - m - recipe.p_exponent))
        p_b = back.kept["p"][key][..., :rows].astype(np.float64)
        codes_b = p_b
        if key in back.kept["p_scale"]:
            scale = back.kept["p_scale"][key].astype(np.float64) - 127
            p_b = p_b * np.exp2(np.repeat(np.repeat(scale, BLOCK, -1), BLOCK, -2))[..., :rows]
        elif recipe.p_scale == "constant":
            codes_b = p_b * 2.0**recipe.p_backward_exponent
        yield l, codes_f, p_f, codes_b, p_b


def _row_sums(back: _Tiles) -> float:
    """The measure of dS rows over all documents and heads."""
    sums: dict[tuple[int, int, int], list[NDArray[np.float64]]] = {}
    for (index, head, query_tile, _), ds in back.kept["ds_exact"].items():
        wide = ds.astype(np.float64)
        parts = sums.setdefault((index, head, query_tile), [np.zeros(1), np.zeros(1)])
        parts[0] = parts[0] + wide.sum(axis=1)
        parts[1] = parts[1] + np.abs(wide).sum(axis=1)
    rows, sizes = (np.concatenate([x[i].ravel() for x in sums.values()]) for i in (0, 1))
    size = np.linalg.norm(sizes)
    return float(np.linalg.norm(rows) / size) if size else 0.0


def _key_sums(sample: Sample, dk: NDArray[Any]) -> float:
    """The measure of the sum of dK over keys."""
    wide = dk.astype(np.float64)
    starts = sample.cu_seqlens[:-1][np.diff(sample.cu_seqlens) > 0]
    size = np.abs(wide).sum()
    return float(np.abs(np.add.reduceat(wide, starts, axis=0)).sum() / size) if size else 0.0
