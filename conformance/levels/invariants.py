"""Promises about one call: edges, ones, shift and consistency."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.calls import Inputs, Results
from flamia.conformance.cases import Case
from flamia.conformance.comparison import Difference, locate_token
from flamia.conformance.levels.accuracy import check_accuracy
from flamia.conformance.levels.bits import cut_tile, expected_results
from flamia.conformance.levels.check import Context, Outcome, first_failure, not_applicable
from flamia.reference.documents import BLOCK
from flamia.reference.formats import E4M3, decode, decode_e8m0

SHIFT_BAND = 2.0**-8
"""Rounding of bfloat16 gradients, in the sum of dK over its absolute sum."""


def check_edges(context: Context, case: Case) -> Outcome:
    """Shapes, cleared padding rows and finite documents."""
    inputs, got = context.inputs(case), context.results(case)
    return first_failure(_edges(inputs, got))


def _edges(inputs: Inputs, got: Results) -> Iterator[Difference | None]:
    last = int(inputs.cu_seqlens[-1])
    shapes = {"out": inputs.q, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    for name, x in got.outputs().items():
        expected = (*inputs.q.shape[:2], 1) if name == "lse" else shapes[name].shape
        if x.shape != expected:
            yield Difference(f"{name} must have shape {expected}, got {x.shape}", None, 1)
            continue
        values = x.astype(np.float64)
        wrong = ~np.isfinite(values)
        wrong[last:] = ~np.isneginf(values[last:]) if name == "lse" else values[last:] != 0
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            rule = "finite" if at[0] < last else "-inf" if name == "lse" else "0"
            text = f"{name}{list(at)} must be {rule}, got {values[at]}, {locate_token(at[0], inputs.cu_seqlens)}"
            yield Difference(f"{text}; {int(wrong.sum())} such", at, int(wrong.sum()))


def check_ones(context: Context, case: Case) -> Outcome:
    """V = 1 gives 1 in every row of a document."""
    inputs = context.inputs(case)
    ones = np.ones(inputs.v.shape, inputs.v.dtype)
    out = context.target.run(inputs.replace(v=ones)).out[: inputs.cu_seqlens[-1]]
    wrong = np.argwhere(out != out.dtype.type(1))
    if not len(wrong):
        return Outcome()
    at = tuple(int(i) for i in wrong[0])
    worst = float(np.abs(out.astype(np.float64) - 1).max())
    text = f"out{list(at)} with V = 1: got {float(out[at]):.9g}, expected 1; {len(wrong)} of {out.size} differ"
    return Outcome("failed", text, at, {"worst_deviation": worst})


def check_zero_scale(context: Context, case: Case) -> Outcome:
    """Under softmax_scale = 0, out is the mean of the visible V, within the accuracy budget, and dQ = dK = 0."""
    got = context.results(case)
    for name, x in (("dq", got.dq), ("dk", got.dk)):
        if x is not None and (x != 0).any():
            at = tuple(int(i) for i in np.argwhere(x != 0)[0])
            return Outcome("failed", f"{name}{list(at)} must be 0, got {float(x[at])}", at)
    return check_accuracy(context, case)


def check_shift(context: Context, case: Case) -> Outcome:
    """Adding one vector to every key of a document shifts all scores of a row alike, so dK sums to zero there.

    The sum, over the sum of magnitudes, may be twice the reference's own plus a rounding band.
    """
    if not context.target.backward:
        return not_applicable("the target has no backward")
    inputs, got, expected = context.inputs(case), context.results(case), expected_results(context, case)
    assert got.dk is not None and expected.dk is not None
    mine, theirs = (_imbalance(inputs, x) for x in (got.dk, expected.dk))
    limit = 2 * (theirs.max(initial=0) + SHIFT_BAND)
    numbers = {"imbalance": float(mine.max(initial=0)), "limit": float(limit)}
    if not (mine > limit).any():
        return Outcome(numbers=numbers)
    document, head = (int(i) for i in np.argwhere(mine > limit)[0])
    text = f"the sum of dK over document {document}, head {head} is {mine[document, head]:.3g} of its absolute sum"
    return Outcome("failed", f"{text}, allowed {limit:.3g}", (document, head), numbers)


def _imbalance(inputs: Inputs, dk: np.ndarray) -> np.ndarray:
    """Norm of the sum of dK over a document, over the sum of the norms: ``(documents, heads)``."""
    x = dk.astype(np.float64)
    found = np.zeros((len(inputs.lengths), dk.shape[1]))
    for i, (start, stop) in enumerate(zip(inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:], strict=True)):
        if stop > start:
            sizes = np.linalg.norm(x[start:stop], axis=-1).sum(axis=0)
            found[i] = np.linalg.norm(x[start:stop].sum(axis=0), axis=-1) / np.maximum(sizes, 1e-300)
    return found


def check_consistency(context: Context, case: Case) -> Outcome:
    """The P that multiplies dO in the backward has the value of the P that multiplied V, where both are normal."""
    inputs, got = context.inputs(case), context.results(case)
    names = ("forward.p", "forward.p_top", "backward.p", "backward.p_scale")
    if not all(got.tiles.get(name) for name in names) or "m" not in got.arrays:
        return not_applicable("the target does not return m and the tiles of P of both passes")
    own = got.tiles["forward.p"][next(iter(got.tiles["forward.p"]))].dtype == bfloat16  # Note [Own exponents]
    # The smallest normal number itself may be a subnormal one that was rounded up.
    min_normal = 2.0**-118 if own else E4M3.min_normal
    compared = 0
    for key, codes in got.tiles["forward.p"].items():
        document, head, query_tile, key_tile = key
        if key not in got.tiles["backward.p"]:
            continue
        shown = (cut_tile(x, "p", key, inputs.lengths) for x in (codes, got.tiles["backward.p"][key]))
        p, back = (x.astype(np.float64) if own else decode(x, E4M3) for x in shown)
        top = cut_tile(got.tiles["forward.p_top"][key], "forward.p_top", key, inputs.lengths).astype(np.float64)
        start = int(inputs.cu_seqlens[document]) + 128 * query_tile
        m = got.arrays["m"][head, start : start + p.shape[1]].astype(np.float64)
        squares = decode_e8m0(got.tiles["backward.p_scale"][key]).astype(np.float64)
        scale = np.repeat(np.repeat(squares, BLOCK, 0), BLOCK, 1)[: p.shape[0], : p.shape[1]]
        with np.errstate(invalid="ignore", over="ignore"):
            mine, theirs = p * np.exp2(top - 8 - m), back * scale
        normal = (p > min_normal) & (back > min_normal)
        compared += int(normal.sum())
        wrong = np.argwhere(normal & (mine != theirs))
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            text = (
                f"P[{at[0]}, {at[1]}] of document {document}, head {head}, query tile {query_tile}, key tile {key_tile}"
                f": forward {mine[at]:.9g}, backward {theirs[at]:.9g}; {len(wrong)} differ in this tile"
            )
            return Outcome("failed", text, (*key, *at), {"compared": float(compared)})
    return Outcome(numbers={"compared": float(compared)})
