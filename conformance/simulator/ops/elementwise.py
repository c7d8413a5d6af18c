"""Closures for instructions that treat every lane alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL, Row
from flamia.conformance.simulator.ops.registry import Run


def ufunc1(function: Any, target: int, a: int) -> Run:
    """``target = function(a)`` by a NumPy ufunc of the rows' own types."""

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        if mask is FULL:
            function(rows[a], rows[target])
        else:
            function(rows[a], out=rows[target], where=mask)

    return run


def ufunc2(function: Any, target: int, a: int, b: int) -> Run:
    """``target = function(a, b)`` by a NumPy ufunc of the rows' own types."""
    if function in (np.minimum, np.maximum):  # they warn of a third argument by position

        def run_extreme(warp: Any, mask: Any) -> None:
            rows = warp.rows
            function(rows[a], rows[b], out=rows[target], where=mask)

        return run_extreme

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        if mask is FULL:
            function(rows[a], rows[b], rows[target])
        else:
            function(rows[a], rows[b], out=rows[target], where=mask)

    return run


def assign(target: int, function: Callable[..., Row], *sources: int) -> Run:
    """``target = function(*sources)``, computed for all lanes and kept for those of the mask.

    The result is converted to the target's type as NumPy casts integers: low bytes, or extended by its own sign.
    """
    if len(sources) == 1:
        (a,) = sources

        def run1(warp: Any, mask: Any) -> None:
            rows = warp.rows
            if mask is FULL:
                rows[target][...] = function(rows[a])
            else:
                np.copyto(rows[target], function(rows[a]), where=mask, casting="unsafe")

        return run1
    if len(sources) == 2:
        first, second = sources

        def run2(warp: Any, mask: Any) -> None:
            rows = warp.rows
            if mask is FULL:
                rows[target][...] = function(rows[first], rows[second])
            else:
                np.copyto(rows[target], function(rows[first], rows[second]), where=mask, casting="unsafe")

        return run2

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        value = function(*[rows[s] for s in sources])
        if mask is FULL:
            rows[target][...] = value
        else:
            np.copyto(rows[target], value, where=mask, casting="unsafe")

    return run


def compile_unary(site: Site, function: Any, kind: str) -> Run:
    """``op d, a`` of one type by a ufunc."""
    site.expect_operands(2)
    return ufunc1(function, site.target(0, kind), site.row(1, kind))


def compile_binary(site: Site, function: Any, kind: str) -> Run:
    """``op d, a, b`` of one type by a ufunc."""
    site.expect_operands(3)
    return ufunc2(function, site.target(0, kind), site.row(1, kind), site.row(2, kind))
