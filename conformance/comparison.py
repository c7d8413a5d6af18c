"""Comparison of arrays: bytes where bits are promised, budgets elsewhere.

Bits: the first differing coordinate in C order, its byte offset in the array, both values and their bit patterns, and
the document and tile in which it lies. Two NaN are equal whatever their payload, unless the array holds codes.

Budgets: anomalies first (a NaN or Inf on one side only), then the coordinate whose error exceeds its budget most.
Never a global cosine or norm, which hide a wrong row among a million right ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference.documents import TILE

Array = NDArray[Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Difference:
    """One difference, as a message and a coordinate, with how many there are."""

    message: str
    coordinate: tuple[int, ...] | None
    count: int
    numbers: dict[str, float] = field(default_factory=dict)


def compare_bits(
    name: str,
    got: Array,
    expected: Array,
    *,
    cu_seqlens: NDArray[np.int64] | None = None,
    token_axis: int | None = None,
    decode: Any = None,
) -> Difference | None:
    """None if every bit is equal (any two NaN of a floating-point array are); else the first difference.

    :param cu_seqlens: with ``token_axis``, to name the document and the tile.
    :param decode: for arrays of codes: ``decode(codes) -> values``.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return Difference(
            f"{name} must be {expected.dtype} {expected.shape}, got {got.dtype} {got.shape}", None, max(1, got.size)
        )
    a, b = as_bits(got), as_bits(expected)
    differs = a != b
    if got.dtype.kind not in "iub":
        differs &= ~(is_nan(got) & is_nan(expected))
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    flat = int(np.argmax(differs))
    at = tuple(int(i) for i in np.unravel_index(flat, got.shape))
    digits = 2 * got.dtype.itemsize
    text = (
        f"{name}{list(at)} (byte {flat * got.dtype.itemsize}): got {_show(got[at])} (0x{int(a[at]):0{digits}x}), "
        f"expected {_show(expected[at])} (0x{int(b[at]):0{digits}x})"
    )
    if decode is not None:
        mine, theirs = decode(np.array([got[at], expected[at]], got.dtype))
        text += f", decoded {_show(mine)} and {_show(theirs)}"
    if cu_seqlens is not None and token_axis is not None:
        text += f", {locate_token(at[token_axis], cu_seqlens)}"
    return Difference(f"{text}; {count} of {got.size} differ", at, count, {"differing": float(count)})


def compare_within(
    name: str, got: Array, exact: Array, budget: Array, *, cu_seqlens: NDArray[np.int64], token_axis: int = 0
) -> tuple[Difference | None, float]:
    """Anomalies first, then the worst coordinate.

    :param exact: float64, the oracle. :param budget: float64 of the same shape, the allowed absolute error.
    :returns: the difference, or None within the budget; and the largest error over budget.
    """
    if got.shape != exact.shape:
        return Difference(f"{name} must have shape {exact.shape}, got {got.shape}", None, max(1, got.size)), np.inf
    x = got.astype(np.float64)
    found = compare_anomalies(name, x, exact, cu_seqlens=cu_seqlens, token_axis=token_axis)
    if found is not None:
        return found, np.inf
    finite = np.isfinite(exact)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(finite, np.abs(x - exact) / budget, 0.0)
    ratio = np.where(np.isnan(ratio), 0.0, ratio)  # 0 / 0: exact where the budget is nothing
    if not ratio.size or ratio.max() <= 1:
        return None, float(ratio.max(initial=0))
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    count = int(np.count_nonzero(ratio > 1))
    text = (
        f"{name}{list(at)}: got {_show(got[at])}, exact {_show(exact[at])}, error {abs(x[at] - exact[at]):.3g} is "
        f"{ratio[at]:.3g} times the budget {budget[at]:.3g}, {locate_token(at[token_axis], cu_seqlens)}; "
        f"{count} of {x.size} exceed it"
    )
    return Difference(text, at, count, {"over_budget": float(ratio[at])}), float(ratio[at])


def compare_anomalies(
    name: str, got: Array, exact: Array, *, cu_seqlens: NDArray[np.int64] | None = None, token_axis: int = 0
) -> Difference | None:
    """The first place where only one side is NaN, +Inf or -Inf."""
    x, y = got.astype(np.float64), exact.astype(np.float64)
    kinds = [np.where(np.isnan(z), 3, np.where(np.isposinf(z), 2, np.where(np.isneginf(z), 1, 0))) for z in (x, y)]
    wrong = kinds[0] != kinds[1]
    count = int(np.count_nonzero(wrong))
    if not count:
        return None
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), x.shape))
    where = "" if cu_seqlens is None else f", {locate_token(at[token_axis], cu_seqlens)}"
    text = f"{name}{list(at)}: got {_show(got[at])}, exact {_show(exact[at])}{where}; {count} such of {x.size}"
    return Difference(text, at, count, {"anomalies": float(count)})


def locate_token(token: int, cu_seqlens: NDArray[np.int64]) -> str:
    """``document 2, tile 1, row 5 of the tile``, or that the token is padding."""
    if token >= cu_seqlens[-1]:
        return "a padding row"
    document = int(np.searchsorted(cu_seqlens, token, side="right")) - 1
    tile, row = divmod(token - int(cu_seqlens[document]), TILE)
    return f"document {document}, tile {tile}, row {row} of the tile"


def as_bits(x: Array) -> Array:
    """The bit patterns of an array as unsigned integers."""
    return np.ascontiguousarray(x).view(UNSIGNED[x.dtype.itemsize]).reshape(x.shape)


def is_nan(x: Array) -> NDArray[np.bool_]:
    """True where a floating-point array of any width is NaN."""
    return np.isnan(x.astype(np.float64) if x.dtype.itemsize == 8 else x.astype(np.float32))


def _show(value: Any) -> str:
    if np.asarray(value).dtype.kind in "iub":
        return str(int(value))
    return f"{float(value):.9g}"
