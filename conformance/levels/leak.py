"""The leak check: what comes after a token must not move its output.

Note [Leak check]
~~~~~~~~~~~~~~~~~
Every document of the pack has its own cut t. All tokens after the cut are changed, in the whole pack at once, and out
and LSE of the rows up to the cuts must keep their bits. Document i is cut after token i, so that a pack of 32 documents
meets every residue modulo 32: scale blocks hide a leak where one ends at the cut. Further rounds cut at the end of the
first tile and further on. The changes are finite (numbers that are not finite are the business of *containment*):
everything times 2^20 or 2^-20, and V or K alone.

Once a row has moved, tokens after the cut are changed one by one, at distance 1, 2, ... behind it, to find the smallest
distance between a changed token and a row that it moved. The map holds one row per document and one column per
position: 0 where a bit never moved, else how many of the row's numbers moved at most; NaN where nothing was compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Inputs, Results
from flamia.conformance.cases import Case, Variant
from flamia.conformance.cases.draw import scaled
from flamia.conformance.comparison import as_bits, compare_bits, is_nan
from flamia.conformance.levels.check import Context, Outcome
from flamia.reference.documents import BLOCK, TILE

CHANGES: dict[str, tuple[str, float]] = {
    "q, k, v times 2^20": ("qkv", 2.0**20),
    "q, k, v times -2^-20": ("qkv", -(2.0**-20)),
    "v times 2^20": ("v", 2.0**20),
    "k times -1": ("k", -1.0),
}
"""Label -> tensors and factor."""

ROUNDS = {"quick": 2, "full": 8, "stress": 32}
"""Cuts per document, by size class."""

SINGLES = BLOCK
"""Distances tried one by one behind a cut after which something moved."""


def check_leak(context: Context, case: Case) -> Outcome:
    """Note [Leak check]."""
    inputs = context.inputs(case)
    variants = case.vary(inputs) if case.vary is not None else list(default_variants(inputs, context.size))
    before = context.target.run(inputs)
    moved = _LeakMap(inputs)
    first: tuple[Variant, Results] | None = None
    for variant in variants:
        after = context.target.run(variant.inputs)
        if moved.add(before, after, variant.cuts, variant.single) and first is None:
            first = variant, after
    numbers = {"positions": float(moved.positions), "calls": float(len(variants) + 1)}
    if first is None:
        return Outcome(numbers=numbers, arrays={"leak_map": moved.map})
    if not moved.distance:
        _try_single_tokens(context, inputs, before, first[0], moved)
    numbers |= {"smallest_distance": float(moved.distance), "moved_rows": float(np.nansum(moved.map > 0))}
    message, at = _describe(inputs, before, first[1], first[0])
    far = f"{moved.distance} token{'s' if moved.distance > 1 else ''}" if moved.distance else f"over {SINGLES} tokens"
    text = f"{message}\nsmallest distance at which a future token moved an output: {far}"
    return Outcome("failed", text, at, numbers, {"leak_map": moved.map})


def default_variants(inputs: Inputs, size: str) -> Iterator[Variant]:
    """The cuts and changes of Note [Leak check]."""
    lengths = np.array(inputs.lengths)
    index = np.arange(len(lengths))
    rounds = min(ROUNDS[size], -(-int(lengths.max(initial=1)) // BLOCK))
    for r in range(rounds):
        # an odd number of blocks further each time, so that the rounds meet other blocks and tiles
        cuts = (index + 5 * BLOCK * r) % np.maximum(lengths - 1, 1)
        if r == 1:
            cuts = np.where(lengths > TILE, TILE - 1 + index % 2, cuts)
        cuts = np.where(lengths > 1, cuts, -1)
        for label, (names, factor) in CHANGES.items():
            yield Variant(label, change_after(inputs, cuts, names, factor), cuts)


def change_after(inputs: Inputs, cuts: NDArray[np.int64], names: str, factor: float) -> Inputs:
    """Multiply the tokens after the cuts, to the end of their documents."""
    chosen = np.zeros(inputs.total, bool)
    for start, stop, cut in zip(inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:], cuts, strict=True):
        chosen[start + cut + 1 : stop] = True
    factors = np.where(chosen, factor, 1.0)[:, None, None]
    return inputs.replace(**{name: scaled(getattr(inputs, name), factors) for name in names})


def take_single(inputs: Inputs, variant: Variant, count: int) -> Inputs:
    """Of a variant's changes only those to the ``count``-th token after each cut."""
    rows = inputs.cu_seqlens[:-1] + variant.cuts + count
    rows = rows[rows < inputs.cu_seqlens[1:]]
    taken = inputs.copied()
    for name in "qkv":
        getattr(taken, name)[rows] = getattr(variant.inputs, name)[rows]
    return taken


class _LeakMap:
    """What moved, by document and position, and the smallest distance."""

    def __init__(self, inputs: Inputs) -> None:
        self.cu = inputs.cu_seqlens
        lengths = inputs.lengths
        self.map = np.full((len(lengths), max(lengths, default=0)), np.nan)
        self.distance = 0
        self.positions = 0

    def add(self, before: Results, after: Results, cuts: NDArray[np.int64], single: int) -> bool:
        """Compare the rows up to the cuts; ``single``: which token after the cut was changed, 0 for all of them."""
        counts = moved_numbers(before, after)
        found = False
        for document, cut in enumerate(cuts):
            start = int(self.cu[document])
            row = counts[start : start + int(cut) + 1]
            self.map[document, : len(row)] = np.fmax(self.map[document, : len(row)], row)
            self.positions += 1
            where = np.flatnonzero(row)
            if len(where):
                found = True
                if single:
                    distance = int(cut) + single - int(where[-1])
                    self.distance = min(self.distance or distance, distance)
        return found


def moved_numbers(before: Results, after: Results) -> NDArray[np.float64]:
    """How many numbers of out and LSE differ in their bits, by packed row."""
    counts = np.zeros(before.out.shape[0])
    a, b = before.outputs(), after.outputs()
    for name in ("out", "lse"):
        if name in a:
            differs = (as_bits(a[name]) != as_bits(b[name])) & ~(is_nan(a[name]) & is_nan(b[name]))
            counts += differs.sum(axis=(1, 2))
    return counts


def _try_single_tokens(context: Context, inputs: Inputs, before: Results, variant: Variant, moved: _LeakMap) -> None:
    for count in range(1, SINGLES + 1):
        if count >= moved.distance > 0:
            break  # every row that can still move is at least this far away
        after = context.target.run(take_single(inputs, variant, count))
        moved.add(before, after, variant.cuts, count)


def _describe(inputs: Inputs, before: Results, after: Results, variant: Variant) -> tuple[str, tuple[int, ...] | None]:
    """The first number that moved."""
    kept = np.zeros(inputs.total, bool)
    for start, cut in zip(inputs.cu_seqlens[:-1], variant.cuts, strict=True):
        kept[start : start + cut + 1] = True
    a, b = before.outputs(), after.outputs()
    for name in ("out", "lse"):
        if name in a:
            shown = np.where(kept[:, None, None], b[name], a[name])
            found = compare_bits(name, shown, a[name], cu_seqlens=inputs.cu_seqlens, token_axis=0)
            if found is not None and found.coordinate is not None:
                token = found.coordinate[0]
                document = int(np.searchsorted(inputs.cu_seqlens, token, side="right")) - 1
                changed = int(inputs.cu_seqlens[document] + variant.cuts[document]) + 1
                return f"{variant.label} from token {changed} on moved {found.message}", found.coordinate
    return variant.label, None
