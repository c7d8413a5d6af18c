"""Arithmetic of f16, bf16 and their pairs (PTX ISA, "Half Precision Floating-Point Instructions").

Operands are widened to float64, where a product or a sum is an exact pair (Note [Exact pairs]), and the result is
rounded once. NaN is 0x7FFF.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL, Row
from flamia.conformance.simulator.ops.formats import BF16, F16, Format, decode, encode
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.rounding import to_odd, two_sum

KINDS = ("f16", "f16x2", "bf16", "bf16x2")
_SIGN, _MAGNITUDE = np.uint16(0x8000), np.uint16(0x7FFF)


def format_of(kind: str) -> Format:
    """The format of an element."""
    return BF16 if kind.startswith("bf16") else F16


def to_pieces(row: Row) -> Row:
    """16-bit codes of a row of 16- or 32-bit lanes, in memory order."""
    return (row if row.flags.c_contiguous else np.ascontiguousarray(row)).view(np.uint16)


def store_codes(site: Site, kind: str, function: Callable[..., Row], count: int) -> Run:
    """``d = function(operands)`` on 16-bit codes."""
    bits = "u32" if kind.endswith("x2") else "u16"
    target = site.target(0, bits)
    sources = [site.row(i, bits) for i in range(1, count + 1)]
    dtype = np.dtype(f"u{4 if bits == 'u32' else 2}")

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        value = function(*[to_pieces(rows[s]) for s in sources]).astype(np.uint16, copy=False).view(dtype)
        if mask is FULL:
            rows[target][...] = value
        else:
            np.copyto(rows[target], value, where=mask)

    return run


def flush_halves(codes: Row) -> Row:
    """Subnormal binary16 as zeros of their sign."""
    return np.where((codes & np.uint16(0x7C00)) == 0, codes & _SIGN, codes)


def halves_function(site: Site, kind: str, exact: Callable[..., Row], count: int, mode: str = "rn") -> Run:
    """``d = exact(operands)`` in float64, rounded to the format."""
    f = format_of(kind)
    return store_codes(site, kind, lambda *v: encode(exact(*[decode(c, f) for c in v]), f, mode), count)


def _sum(a: Row, b: Row) -> Row:
    return to_odd(*two_sum(a, b))


_FUNCTIONS: dict[str, tuple[Callable[..., Row], int]] = {
    "add": (_sum, 2),
    "sub": (lambda a, b: _sum(a, -b), 2),
    "mul": (lambda a, b: a * b, 2),
    "fma": (lambda a, b, c: _sum(a * b, c), 3),
}


@op("add", "sub", "mul", "fma", types=KINDS)
def compile_arithmetic(site: Site) -> Run:
    """``{add,sub,mul}{.rnd}{.ftz}{.sat}``, ``fma.rn{.ftz}{.sat}{.relu}``."""
    kind = site.take_type(*KINDS)
    exact, count = _FUNCTIONS[site.instruction.base]
    site.take("rn")
    ftz, saturate, relu = site.flag("ftz"), site.flag("sat"), site.flag("relu")
    site.expect_operands(count + 1)
    f = format_of(kind)
    if ftz and f is BF16:
        raise site.refuse("'.ftz' is for f16")

    def function(*codes: Row) -> Row:
        values = [decode(flush_halves(c) if ftz else c, f) for c in codes]
        result = exact(*values)
        if saturate:
            result = np.where(result > 0, np.minimum(result, 1.0), 0.0)
        if relu:
            result = np.where(result <= 0, 0.0, result)
        out = encode(result, f)
        return flush_halves(out.astype(np.uint16)) if ftz else out

    return store_codes(site, kind, function, count)


@op("min", "max", types=KINDS)
def compile_min_max(site: Site) -> Run:
    """``{min,max}{.ftz}{.NaN}{.xorsign.abs}`` of two or three operands: a number before NaN, -0 before +0."""
    kind = site.take_type(*KINDS)
    largest = site.instruction.base == "max"
    ftz, propagate = site.flag("ftz"), site.flag("NaN")
    xorsign, magnitude = site.flag("xorsign"), site.flag("abs")
    site.expect_operands(3, 4)
    f = format_of(kind)

    choose: Any = np.maximum if largest else np.minimum
    infinity = np.uint16(f.infinity)

    def pick(a: Row, b: Row) -> Row:
        """Of numbers: by int16 keys that order the codes, -0 below +0; the key of a key is the code."""
        if magnitude:
            return choose(a, b)
        x, y = a.view(np.int16), b.view(np.int16)
        key = choose(x ^ ((x >> 15) & 0x7FFF), y ^ ((y >> 15) & 0x7FFF))
        return (key ^ ((key >> 15) & 0x7FFF)).view(np.uint16)

    def pick_any(a: Row, b: Row) -> Row:
        """A number before NaN."""
        nan_a, nan_b = (a & _MAGNITUDE) > infinity, (b & _MAGNITUDE) > infinity
        return np.where(nan_b, a, np.where(nan_a, b, pick(a, b)))

    def function(*codes: Row) -> Row:
        values = [flush_halves(c) if ftz else c for c in codes]
        plain = [c & _MAGNITUDE for c in values] if magnitude else values
        nan = np.logical_or.reduce([(c & _MAGNITUDE) > infinity for c in values])
        some = nan.any()
        out = plain[0]
        for c in plain[1:]:
            out = pick_any(out, c) if some else pick(out, c)
        if xorsign:
            out = (out & _MAGNITUDE) | ((values[0] ^ values[1]) & _SIGN)
        if some:
            lost = nan if propagate else (out & _MAGNITUDE) > infinity
            out = np.where(lost, np.uint16(f.nan), out)
        return out

    return store_codes(site, kind, function, len(site.operands) - 1)


@op("abs", "neg", types=KINDS)
def compile_sign(site: Site) -> Run:
    """``abs``, ``neg``: of the sign bit; NaN becomes 0x7FFF (so on an H200; PTX leaves it open)."""
    kind = site.take_type(*KINDS)
    ftz = site.flag("ftz")
    site.expect_operands(2)
    absolute, f = site.instruction.base == "abs", format_of(kind)

    def function(codes: Row) -> Row:
        codes = flush_halves(codes) if ftz else codes
        out = codes & _MAGNITUDE if absolute else codes ^ _SIGN
        return np.where((codes & _MAGNITUDE) > f.infinity, f.nan, out)

    return store_codes(site, kind, function, 1)
