"""Compiled twins of the two longest elementwise loops: the same bits (one NaN is like another) in one pass.

They are used where numba is installed (extra ``fast``); the NumPy versions in `probabilities` and `formats` are the
specification.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


@cache
def loops() -> SimpleNamespace | None:
    """The functions below, compiled on their first call; they take flat arrays.

    None without a numba that works, and where this module was made from text, as planted faults are: no cache is there.
    """
    if find_spec("numba") is None or not Path(_exponential.__code__.co_filename).is_file():
        return None
    try:
        import numba
    except Exception:  # numba raises several kinds where NumPy or LLVM does not suit it
        return None

    def compiled(function: Callable[..., None]) -> Any:
        try:
            return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # no folder to cache in
            return numba.njit(nogil=True, error_model="numpy")(function)

    return SimpleNamespace(exponential=compiled(_exponential), round_to=compiled(_round_to))


def _exponential(scores: Any, c: Any, r: Any, bounds: Any, coefficients: Any) -> None:
    """`probabilities.exponential`: float32 ``scores`` become p.

    :param bounds: ``(LOWEST, LARGE)``.
    :param coefficients: ``(C1, C2, grid constant of p)`` of Note [FMA exponential].
    """
    lowest, large = bounds
    c1, c2, to_grid = coefficients
    to_2_24 = 1.5 * 2.0**28
    for i in range(scores.size):
        exact = np.float64(scores[i]) * c
        x = exact
        if not abs(exact) < large:
            x = np.float64(np.float32(max(lowest, min(exact, -lowest))))
            x = x if abs(exact) < np.inf else np.nan
        floor = np.floor(x)
        f = 1.0 + np.rint(x * 2.0**24) * 2.0**-24 if -(2.0**-5) < x < 0.0 else x - floor
        f = np.float64(np.float32(f))
        t = (f * c2 + (c1 + to_2_24)) - to_2_24
        r[i] = floor
        scores[i] = (t * f + (1.0 + to_grid)) - to_grid


def _round_to(source: Any, bits: Any, out: Any, out_bits: Any, constants: Any) -> None:
    """`formats.round_to` of float32 numbers, given as numbers and as bits.

    Normal numbers are rounded as integers, to even in the last place that is kept; below them one constant of
    Note [Quantum] serves all.

    :param constants: ``(bits of max_finite, dropped bits, min_normal, 2^23 quanta of min_normal)``.
    """
    limit, dropped, min_normal, quanta = constants
    half = (np.uint32(1) << (dropped - np.uint32(1))) - np.uint32(1)
    for i in range(source.size):
        sign = bits[i] & np.uint32(0x80000000)
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        if magnitude <= np.uint32(0x7F800000):  # not NaN
            magnitude = min(magnitude, limit)
            magnitude = ((magnitude + half + ((magnitude >> dropped) & np.uint32(1))) >> dropped) << dropped
        value = abs(source[i])
        if value < min_normal:
            out[i] = np.copysign((value + quanta) - quanta, source[i])
        else:
            out_bits[i] = magnitude | sign
