"""Levels 1 to 3: stages and outputs against the reference, bit for bit, under the target's recipe and profile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from flamia.conformance.calls import GRADIENTS, Array, Inputs, Results, TileKey
from flamia.conformance.cases import Case, PlanRequest
from flamia.conformance.comparison import Difference, compare_bits
from flamia.conformance.levels.check import Check, Context, Outcome, first_failure, not_applicable
from flamia.conformance.stages import LEVEL_OF_ARRAY, LEVEL_OF_TILE, TOKEN_AXES, ReferenceEngine
from flamia.reference.documents import BLOCK, TILE
from flamia.reference.formats import E4M3, decode, decode_e8m0

REFERENCE = ReferenceEngine()

MINUS_ZERO = np.uint8(0x80)
"""The E4M3 code of -0."""

NO_BITS = "the target does not promise the reference's bits"
NO_STAGES = "the target has no stage hooks"


def plan_bytes(context: Context, case: Case) -> list[Check]:
    """Level 1: payloads, scales, layout and schedule."""
    return [Check(1, case.name, "bytes", partial(_bytes, context, case))]


def plan_forward(context: Context, case: Case) -> list[Check]:
    """Level 2: out, LSE, m, l and the tiles of P."""
    return [Check(2, case.name, "forward", partial(_outputs, context, case, 2))]


def plan_backward(context: Context, case: Case) -> list[Check]:
    """Level 3: dQ, dK, dV, delta and the tiles of P and dS."""
    return [Check(3, case.name, "backward", partial(_outputs, context, case, 3))]


def expected_results(context: Context, case: Case) -> Results:
    """What the reference returns for a case, with all stages if the target has stages."""
    stages = context.target.stages
    found: Results = context.keep(
        (case.name, "reference"),
        lambda: REFERENCE.run(context.inputs(case), context.recipe, context.profile.name, stages=stages),
    )
    return found


def _bytes(context: Context, case: Case) -> Outcome:
    if not context.target.bits:
        return not_applicable(NO_BITS)
    if case.plan is not None:
        return _plan(context, case.plan)
    if not context.target.stages:
        return not_applicable(NO_STAGES)
    inputs, got, expected = context.inputs(case), context.results(case), expected_results(context, case)
    found = list(_compare_arrays(got, expected, inputs, 1))
    if not found:
        return not_applicable("the target returns no payloads, scales, layouts or schedules")
    return first_failure(found, {"stages": float(len(found))})


def _plan(context: Context, request: PlanRequest) -> Outcome:
    given = (request.cu_seqlens, request.heads, request.head_dim, request.causal)
    got = context.target.plan(*given)
    if got is None:
        return not_applicable("the target does not offer its offsets and schedules")
    expected = REFERENCE.plan(*given)
    found = [
        compare_bits(name, np.asarray(x).astype(np.int64), expected[name])
        for name, x in got.items()
        if name in expected
    ]
    return first_failure(found, {"stages": float(len(found))})


def _outputs(context: Context, case: Case, level: int) -> Outcome:
    target = context.target
    if not target.bits:
        return not_applicable(NO_BITS)
    if level == 3 and not target.backward:
        return not_applicable("the target has no backward")
    inputs, got, expected = context.inputs(case), context.results(case), expected_results(context, case)
    # stages first: the earliest stage that differs is the cause
    found = [*_compare_arrays(got, expected, inputs, level), *_compare_tiles(got, expected, inputs, level)]
    for name in ("out", "lse") if level == 2 else GRADIENTS:
        mine, theirs = getattr(got, name), getattr(expected, name)
        if mine is not None:
            axis = 1 if name == "lse" else 0
            found.append(compare_bits(name, mine, theirs, cu_seqlens=inputs.cu_seqlens, token_axis=axis))
    return first_failure(found, {"stages": float(len(found))})


def _compare_arrays(got: Results, expected: Results, inputs: Inputs, level: int) -> Iterator[Difference | None]:
    for name, mine in got.arrays.items():
        if LEVEL_OF_ARRAY.get(name, 1) != level or name not in expected.arrays:
            continue
        kind = name.split(".")[-1]
        axis = TOKEN_AXES.get(kind)
        yield compare_bits(
            name,
            mine,
            expected.arrays[name],
            cu_seqlens=inputs.cu_seqlens,
            token_axis=axis,
            decode=_decoder(name, mine),
        )


def _decoder(name: str, x: Array) -> object:
    """How to show the values of codes: E4M3 payloads and E8M0 scales per token."""
    if x.dtype != np.uint8:
        return None
    if name.endswith((".payload", ".p", ".ds")):
        return lambda codes: decode(codes, E4M3)
    return decode_e8m0 if name.endswith("_scale") or (name.endswith(".scale") and x.ndim == 2) else None


def _compare_tiles(got: Results, expected: Results, inputs: Inputs, level: int) -> Iterator[Difference | None]:
    for stage, tiles in got.tiles.items():
        if LEVEL_OF_TILE.get(stage) != level:
            continue
        theirs = expected.tiles[stage]
        missing = sorted(set(theirs) - set(tiles))
        if missing:
            yield Difference(f"{stage}: tile {_show_key(missing[0])} is missing", missing[0], len(missing))
        for key in sorted(theirs):
            if key in tiles:
                a, b = (_shown_tile(results, stage, key, inputs.lengths) for results in (got, expected))
                yield compare_bits(f"{stage} of {_show_key(key)}, ", a, b, decode=_decoder(stage, a))


def _shown_tile(results: Results, stage: str, key: TileKey, lengths: list[int]) -> Array:
    """`cut_tile` without what shows in no product: the sign of a zero, and the scale of numbers that are all zero."""
    x = cut_tile(results.tiles[stage][key], stage, key, lengths)
    if stage in ("backward.p", "backward.ds"):
        return np.where(x == (MINUS_ZERO if x.dtype == np.uint8 else 0), 0, x).astype(x.dtype)
    values = stage.removesuffix("_scale")
    if values == stage or values not in results.tiles:
        return x
    codes = cut_tile(results.tiles[values][key], values, key, lengths)
    if codes.dtype != np.uint8:
        return x
    codes = codes & ~MINUS_ZERO
    padded = np.pad(codes, [(0, -n % BLOCK) for n in codes.shape])
    used = padded.reshape(len(x), BLOCK, -1, BLOCK).any(axis=(1, 3))
    return np.where(used, x, 0).astype(x.dtype)


def cut_tile(x: Array, stage: str, key: TileKey, lengths: list[int]) -> Array:
    """The part of a tile that belongs to existing tokens."""
    document, _, query_tile, key_tile = key
    rows = [min(TILE, lengths[document] - tile * TILE) for tile in (key_tile, query_tile)]
    if stage == "forward.p_top":
        return x[: rows[1]]
    if stage.endswith("_scale"):
        rows = [-(-n // 32) for n in rows]
    return x[: rows[0], : rows[1]]


def _show_key(key: TileKey) -> str:
    return f"document {key[0]}, head {key[1]}, query tile {key[2]}, key tile {key[3]}"
