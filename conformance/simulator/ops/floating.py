"""FP32 and FP64 arithmetic (PTX ISA, "Floating-Point Instructions").

Subnormals are kept unless ``.ftz`` says otherwise, which flushes operands and results. Every NaN that an FP32
instruction returns is 0x7FFFFFFF.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL, Row
from flamia.conformance.simulator.ops import rounding
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.rounding import fix_nan, flush, has_nan

FLOATS = ("f32", "f32x2", "f64")
MODES = ("rn", "rz", "rm", "rp")


def store_float(target: int, function: Callable[..., Row], sources: tuple[int, ...], pairs: bool) -> Run:
    """``target = function(*sources)`` of float32 lanes, with canonical NaN.

    :param pairs: whether the rows are uint64 and hold two float32 each.
    """

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        if pairs:
            value = function(*[rows[s].view(np.float32) for s in sources])
        else:
            value = function(*[rows[s] for s in sources])
        fix_nan(value)
        if pairs:
            value = value.view(np.uint64)
        if mask is FULL:
            rows[target][...] = value
        else:
            np.copyto(rows[target], value, where=mask)

    return run


def _nearest(ufunc: Any, target: int, a: int, b: int) -> Run:
    """A float32 operation that NumPy rounds as PTX does; the fast case of `store_float`."""

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        if mask is FULL:
            out = rows[target]
            ufunc(rows[a], rows[b], out)
            if has_nan(out):
                fix_nan(out)
        else:
            value = ufunc(rows[a], rows[b])
            fix_nan(value)
            np.copyto(rows[target], value, where=mask)

    return run


def finish(
    function: Callable[..., Row], ftz: bool, saturate: bool, exact: Callable[..., Row] | None = None
) -> Callable[..., Row]:
    """Around a function of float32 lanes: ``.ftz`` and ``.sat`` (to [0, 1], NaN to +0).

    :param exact: the value before rounding, as float64. A result is flushed if that is below 2^-126, even where it
        rounds up to 2^-126 (so on an H200; PTX does not say).
    """
    if not ftz and not saturate:
        return function

    def run(*values: Row) -> Row:
        if ftz:
            values = tuple([flush(v) for v in values])
        result = function(*values)
        if ftz:
            magnitude = result.view(np.uint32) & _MAGNITUDE
            if magnitude.min() <= _SMALLEST:
                result = _flush_result(result, magnitude, values)
        if saturate:
            result = np.where(result > 0, np.minimum(result, np.float32(1)), np.float32(0))
        return result

    def _flush_result(result: Row, magnitude: Row, values: tuple[Row, ...]) -> Row:
        result = flush(result)
        edge = magnitude == _SMALLEST
        if exact is not None and edge.any():
            small = edge & (np.abs(exact(*values)) < 2.0**-126)
            result = np.where(small, np.copysign(np.float32(0), result), result)
        return result

    return run


_MAGNITUDE, _SMALLEST = np.uint32(0x7FFFFFFF), np.uint32(0x00800000)
"""Bits of a magnitude, and those of 2^-126."""

_UFUNC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_WIDE: dict[str, Callable[..., Row]] = {
    "mul": lambda a, b: a.astype(np.float64) * b,
    "div": lambda a, b: a.astype(np.float64) / b,
    "fma": lambda a, b, c: rounding.to_odd(*rounding.two_sum(a.astype(np.float64) * b, c.astype(np.float64))),
}
"""Values before rounding; a sum below 2^-126 is exact."""
_EXACT: dict[str, Callable[[Row, Row, str], Row]] = {
    "add": rounding.add,
    "sub": lambda a, b, mode: rounding.add(a, -b, mode),
    "mul": rounding.multiply,
    "div": rounding.divide,
}


@op("add", "sub", "mul", types=FLOATS)
def compile_binary(site: Site) -> Run:
    """``{add,sub,mul}{.rnd}{.ftz}{.sat}.{f32,f32x2,f64}``."""
    kind = site.take_type(*FLOATS)
    return _compile_arithmetic(site, site.instruction.base, kind)


def _compile_arithmetic(site: Site, name: str, kind: str) -> Run:
    mode = site.take(*MODES) or "rn"
    ftz, saturate = site.flag("ftz"), site.flag("sat")
    site.expect_operands(3)
    target, a, b = site.target(0, kind), site.row(1, kind), site.row(2, kind)
    ufunc = _UFUNC[name]
    if kind == "f64":
        return _compile_double(site, name, mode)
    if mode == "rn" and not ftz and not saturate and kind == "f32":
        return _nearest(ufunc, target, a, b)
    exact = _EXACT[name]
    function = ufunc if mode == "rn" else (lambda x, y: exact(x, y, mode))
    return store_float(target, finish(function, ftz, saturate, _WIDE.get(name)), (a, b), kind == "f32x2")


@op("div.rn", "div.rz", "div.rm", "div.rp", types=("f32", "f64"))
def compile_div(site: Site) -> Run:
    """``div.rnd{.ftz}.{f32,f64}``."""
    return _compile_arithmetic(site, "div", site.take_type("f32", "f64"))


@op("fma", "mad.rn", "mad.rz", "mad.rm", "mad.rp", types=FLOATS)
def compile_fma(site: Site) -> Run:
    """``fma.rnd{.ftz}{.sat}.{f32,f32x2,f64}``: rounded once."""
    kind = site.take_type(*FLOATS)
    mode = site.take(*MODES)
    if not mode:
        raise site.refuse("a rounding mode is missing")
    ftz, saturate = site.flag("ftz"), site.flag("sat")
    site.expect_operands(4)
    if kind == "f64":
        return _compile_double(site, "fma", mode)
    rows = tuple(site.row(i, kind) for i in (1, 2, 3))

    def function(a: Row, b: Row, c: Row) -> Row:
        return rounding.fma(a, b, c, mode)

    around = finish(function, ftz, saturate, _WIDE["fma"])
    return store_float(site.target(0, kind), around, rows, kind == "f32x2")


@op("rcp.rn", "rcp.rz", "rcp.rm", "rcp.rp", "sqrt.rn", "sqrt.rz", "sqrt.rm", "sqrt.rp", types=("f32", "f64"))
def compile_root(site: Site) -> Run:
    """``rcp.rnd``, ``sqrt.rnd``: rounded once."""
    kind = site.take_type("f32", "f64")
    mode = site.take(*MODES)
    ftz = site.flag("ftz")
    site.expect_operands(2)
    if kind == "f64":
        return _compile_double(site, site.instruction.base, mode)
    one = np.ones(32, np.float32)

    def function(a: Row) -> Row:
        if site.instruction.base == "rcp":
            return one / a if mode == "rn" else rounding.divide(one, a, mode)
        return np.sqrt(a) if mode == "rn" else rounding.square_root(a, mode)

    return store_float(site.target(0, kind), finish(function, ftz, False), (site.row(1, kind),), False)


def _compile_double(site: Site, name: str, mode: str) -> Run:
    """FP64: only to nearest. NaN payloads are those of NumPy."""
    if mode != "rn":
        raise site.refuse("FP64 is rounded to nearest only")
    rows = [site.row(i, "f64") for i in range(1, len(site.operands))]
    target = site.target(0, "f64")
    functions: dict[str, Any] = {
        **_UFUNC,
        "fma": _fma64,
        "rcp": lambda a: 1.0 / a,
        "sqrt": np.sqrt,
    }
    function = functions[name]

    def run(warp: Any, mask: Any) -> None:
        np.copyto(warp.rows[target], function(*[warp.rows[r] for r in rows]), where=mask)

    return run


def _fma64(a: Row, b: Row, c: Row) -> Row:
    """Lane by lane, in rational numbers."""
    out = a * b + c
    for i in range(len(out)):
        if np.isfinite([a[i], b[i], c[i]]).all():
            exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            if exact != 0:
                try:
                    out[i] = float(exact)
                except OverflowError:
                    out[i] = np.inf if exact > 0 else -np.inf
    return out


def minimum(a: Row, b: Row) -> Row:
    """The smaller of floats of one type: a number before NaN, -0 before +0."""
    return _with_signed_zeros(np.fmin(a, b), a, b, np.bitwise_or)


def maximum(a: Row, b: Row) -> Row:
    """The larger of floats of one type: a number before NaN, +0 before -0."""
    return _with_signed_zeros(np.fmax(a, b), a, b, np.bitwise_and)


def _with_signed_zeros(out: Row, a: Row, b: Row, combine: Any) -> Row:
    """``out`` where both operands are zeros becomes the one whose sign ``combine`` gives; NumPy takes any of them."""
    zero = out == 0
    if zero.any():
        both, bits = zero & (a == b), np.dtype(f"u{out.itemsize}")
        out.view(bits)[both] = combine(a.view(bits), b.view(bits))[both]
    return out


@op("min", "max", types=("f32", "f64"))
def compile_min_max(site: Site) -> Run:
    """``{min,max}{.ftz}{.NaN}{.xorsign.abs}.f32 d, a, b{, c}``.

    ``.NaN``: NaN if an operand is NaN. ``.xorsign.abs``: of the magnitudes, with the product's sign.
    """
    kind = site.take_type("f32", "f64")
    pick = minimum if site.instruction.base == "min" else maximum
    ftz, propagate = site.flag("ftz"), site.flag("NaN")
    xorsign, magnitude = site.flag("xorsign"), site.flag("abs")
    site.expect_operands(3, 4)
    sources = tuple(site.row(i, kind) for i in range(1, len(site.operands)))
    if kind == "f64":
        if propagate or xorsign or magnitude or len(sources) != 2:
            raise site.refuse("a form for f32")
        return _double_pair(site.target(0, kind), pick, sources)
    if xorsign and len(sources) == 3:
        raise site.refuse("'.xorsign' takes two operands")

    def function(*values: Row) -> Row:
        plain = [np.abs(v) for v in values] if magnitude else [np.ascontiguousarray(v) for v in values]
        out = pick(plain[0], plain[1])
        for v in plain[2:]:
            out = pick(out, v)
        if xorsign:
            sign = (values[0].view(np.uint32) ^ values[1].view(np.uint32)) & np.uint32(0x80000000)
            out = (out.view(np.uint32) | sign).view(np.float32)
        if propagate:
            for v in values:
                out = np.where(np.isnan(v), v, out)
        return out

    return store_float(site.target(0, kind), finish(function, ftz, False), sources, False)


def _double_pair(target: int, function: Any, sources: tuple[int, ...]) -> Run:
    def run(warp: Any, mask: Any) -> None:
        np.copyto(warp.rows[target], function(*[warp.rows[s] for s in sources]), where=mask)

    return run


@op("abs", "neg", types=("f32", "f64"))
def compile_sign(site: Site) -> Run:
    """``abs{.ftz}``, ``neg{.ftz}``."""
    kind = site.take_type("f32", "f64")
    function: Any = np.abs if site.instruction.base == "abs" else np.negative
    ftz = site.flag("ftz")
    site.expect_operands(2)
    if kind == "f64":
        return _double_pair(site.target(0, kind), function, (site.row(1, kind),))
    return store_float(site.target(0, kind), finish(function, ftz, False), (site.row(1, kind),), False)


@op("copysign", types=("f32", "f64"))
def compile_copysign(site: Site) -> Run:
    """``copysign d, a, b``: b with the sign of a."""
    kind = site.take_type("f32", "f64")
    site.expect_operands(3)
    bits = f"u{kind[1:]}"
    sign = np.array(1 << (int(kind[1:]) - 1), f"u{int(kind[1:]) // 8}")[()]

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        np.copyto(rows[target], (rows[b] & ~sign) | (rows[a] & sign), where=mask)

    target, a, b = site.target(0, bits), site.row(1, bits), site.row(2, bits)
    return run


@op("testp", types=("f32", "f64"))
def compile_testp(site: Site) -> Run:
    """``testp.{finite,infinite,number,notanumber,normal,subnormal}``."""
    kind = site.take_type("f32", "f64")
    name = site.take("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    site.expect_operands(2)
    target, source = site.target(0, "pred"), site.row(1, kind)
    smallest = 2.0**-126 if kind == "f32" else 2.0**-1022
    tests: dict[str, Callable[[Row], Row]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= smallest),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < smallest),
    }
    test = tests[name]

    def run(warp: Any, mask: Any) -> None:
        np.copyto(warp.rows[target], test(warp.rows[source]), where=mask)

    return run
