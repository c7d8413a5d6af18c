"""Comparison and selection (PTX ISA, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import DTYPES, FULL, Row
from flamia.conformance.simulator.ops.elementwise import assign
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.rounding import flush
from flamia.conformance.simulator.ptx.syntax import Sink

_ORDERED: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMPARISONS = (*_ORDERED, *_UNSIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_FLOATS = ("f16", "bf16", "f32", "f64")
_BOOLEAN: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_INTEGERS = tuple(f"{k}{bits}" for k in "bus" for bits in (16, 32, 64))


def _comparison(name: str, kind: str) -> Callable[[Row, Row], Row]:
    """By name: for floats, ``eq`` ... are false with a NaN (``ne`` too), ``equ`` ... are true."""
    if kind not in _FLOATS:
        chosen: Callable[[Row, Row], Row] = _ORDERED[_UNSIGNED.get(name, name)]
        return chosen
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in _ORDERED:
        ordered: Callable[[Row, Row], Row] = _ORDERED[name]
        return ordered
    opposite = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}[name]
    inner = _comparison(opposite, kind)
    return lambda a, b: ~inner(a, b)


def _compile_comparison(site: Site) -> tuple[Any, int, int]:
    """The comparison of a setp or set, whose type was not taken yet, and its rows."""
    kind = site.take_type(*_INTEGERS, *_FLOATS)
    name = site.take(*_COMPARISONS)
    if not name:
        raise site.refuse("no comparison is named")
    if kind not in _FLOATS and name in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        raise site.refuse(f"{name!r} is for floats")
    compare = _comparison(name, kind)
    ftz = site.flag("ftz")
    if kind == "bf16":
        return (lambda a, b: compare(widen_bf16(a), widen_bf16(b))), site.row(1, kind), site.row(2, kind)
    if ftz:
        return (lambda a, b: compare(flush(a), flush(b))), site.row(1, kind), site.row(2, kind)
    return compare, site.row(1, kind), site.row(2, kind)


def widen_bf16(a: Row) -> Row:
    """bfloat16 bits as float32."""
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


@op("setp")
def compile_setp(site: Site) -> Run:
    """``setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, {!}c}``: p = (a cmp b) bool c, q = !(a cmp b) bool c."""
    compare, a, b = _compile_comparison(site)
    boolean = site.take(*_BOOLEAN)
    site.expect_operands(4 if boolean else 3)
    first, second = site.pair(0)
    p = site.target(first, "pred")
    q = site.target(second, "pred") if second is not None and not isinstance(second, Sink) else -1
    if boolean == "" and q < 0:
        if isinstance(compare, np.ufunc):

            def run_simple(warp: Any, mask: Any) -> None:
                rows = warp.rows
                if mask is FULL:
                    compare(rows[a], rows[b], rows[p])
                else:
                    compare(rows[a], rows[b], out=rows[p], where=mask)

            return run_simple
        return assign(p, compare, a, b)
    combine = _BOOLEAN.get(boolean)
    c, negated = site.predicate(3) if boolean else (-1, False)

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        result = compare(rows[a], rows[b])
        other = ~result
        if combine is not None:
            third = ~rows[c] if negated else rows[c]
            result, other = combine(result, third), combine(other, third)
        np.copyto(rows[p], result, where=mask)
        if q >= 0:
            np.copyto(rows[q], other, where=mask)

    return run


@op("set")
def compile_set(site: Site) -> Run:
    """``set.cmp{.bool}{.ftz}.dtype.stype d, a, b{, c}``: all ones or 1.0 for true."""
    compare, a, b = _compile_comparison(site)
    kind = site.take_type("u32", "s32", "f32")
    boolean = site.take(*_BOOLEAN)
    site.expect_operands(4 if boolean else 3)
    combine = _BOOLEAN.get(boolean)
    c, negated = site.predicate(3) if boolean else (-1, False)
    dtype = DTYPES[kind]
    true = np.array(1.0, dtype) if kind == "f32" else np.array(-1).astype(dtype)
    target = site.target(0, kind)

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        result = compare(rows[a], rows[b])
        if combine is not None:
            result = combine(result, ~rows[c] if negated else rows[c])
        np.copyto(rows[target], np.where(result, true, dtype.type(0)), where=mask)

    return run


@op("selp")
def compile_selp(site: Site) -> Run:
    """``selp.type d, a, b, c``: a where c is true."""
    kind = site.take_type(*_INTEGERS, "f32", "f64")
    site.expect_operands(4)
    c, negated = site.predicate(3)
    first, second = (2, 1) if negated else (1, 2)
    return assign(
        site.target(0, kind), lambda p, a, b: np.where(p, a, b), c, site.row(first, kind), site.row(second, kind)
    )


@op("slct")
def compile_slct(site: Site) -> Run:
    """``slct{.ftz}.dtype.{s32,f32} d, a, b, c``: a where c >= 0 (-0 too, NaN not)."""
    test = site.take_type("s32", "f32")
    kind = site.take_type(*_INTEGERS, "f32", "f64")
    site.flag("ftz")
    site.expect_operands(4)
    return assign(
        site.target(0, kind),
        lambda c, a, b: np.where(c >= 0, a, b),
        site.row(3, test),
        site.row(1, kind),
        site.row(2, kind),
    )
