"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions")."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import DTYPES, Row
from flamia.conformance.simulator.ops.elementwise import assign, compile_binary, compile_unary
from flamia.conformance.simulator.ops.registry import Run, op

WORDS = ("u16", "s16", "u32", "s32", "u64", "s64")
HALVES = ("u16x2", "s16x2")
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@op("add", "sub", types=(*WORDS, *HALVES))
def compile_add(site: Site) -> Run:
    """``add{.sat}``, ``sub{.sat}``: modulo 2^N; .sat only for s32."""
    function = np.add if site.instruction.base == "add" else np.subtract
    kind = site.take_type(*WORDS, *HALVES)
    if kind in HALVES:
        return _halves(site, function, kind)
    if site.flag("sat"):
        if kind != "s32":
            raise site.refuse("'.sat' is for s32")
        site.expect_operands(3)
        limit = np.iinfo(np.int32)

        def saturate(a: Row, b: Row) -> Row:
            return np.clip(function(a.astype(np.int64), b), limit.min, limit.max)

        return assign(site.target(0, kind), saturate, site.row(1, kind), site.row(2, kind))
    return compile_binary(site, function, kind)


def _halves(site: Site, function: Any, kind: str) -> Run:
    """Two 16-bit lanes in a register."""
    site.expect_operands(3)
    dtype = np.int16 if kind == "s16x2" else np.uint16

    def run(a: Row, b: Row) -> Row:
        return np.asarray(function(_pieces(a, dtype), _pieces(b, dtype)), dtype).view(np.uint32)

    return assign(site.target(0, kind), run, site.row(1, kind), site.row(2, kind))


def _pieces(a: Row, dtype: Any) -> Row:
    return np.ascontiguousarray(a).view(dtype)


@op("min", "max", types=(*WORDS, *HALVES))
def compile_min_max(site: Site) -> Run:
    """``min``, ``max``; ``.relu`` clamps a negative result to 0."""
    function = np.minimum if site.instruction.base == "min" else np.maximum
    kind = site.take_type(*WORDS, *HALVES)
    relu = site.flag("relu")
    if relu and kind not in ("s32", "s16x2"):
        raise site.refuse("'.relu' is for s32 and s16x2")

    def clamped(a: Any, b: Any) -> Any:
        return np.maximum(function(a, b), 0)

    if kind in HALVES:
        return _halves(site, clamped if relu else function, kind)
    if relu:
        site.expect_operands(3)
        return assign(site.target(0, kind), clamped, site.row(1, kind), site.row(2, kind))
    return compile_binary(site, function, kind)


@op("abs", types=("s16", "s32", "s64"))
def compile_abs(site: Site) -> Run:
    """``abs``: the least integer stays."""
    return compile_unary(site, np.absolute, site.take_type())


@op("neg", types=("s16", "s32", "s64"))
def compile_neg(site: Site) -> Run:
    """``neg``: modulo 2^N."""
    return compile_unary(site, np.negative, site.take_type())


def high_product(a: Row, b: Row) -> Row:
    """Upper half of the exact product of two integers of one type."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return np.asarray(((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype))
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = np.ascontiguousarray(a).view(np.uint64), np.ascontiguousarray(b).view(np.uint64)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    low, middle, other = x0 * y0, x1 * y0, x0 * y1
    carry = (low >> half) + (middle & mask) + (other & mask)
    high = x1 * y1 + (middle >> half) + (other >> half) + (carry >> half)
    if a.dtype.kind == "i":  # of two's complement: subtract the operand for each negative sign
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def wide_product(a: Row, b: Row) -> Row:
    """The exact product, twice as wide."""
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return np.multiply(a, b, dtype=wide)


_PRODUCTS: dict[str, Any] = {"lo": np.multiply, "hi": high_product, "wide": wide_product}


@op("mul", types=WORDS)
def compile_mul(site: Site) -> Run:
    """``mul.{lo,hi,wide}``."""
    kind = site.take_type(*WORDS)
    part = site.take("lo", "hi", "wide")
    if part == "lo":
        return compile_binary(site, np.multiply, kind)
    if not part or (part == "wide" and kind not in _WIDER):
        raise site.refuse("a product needs '.lo', '.hi' or '.wide'")
    site.expect_operands(3)
    target = _WIDER[kind] if part == "wide" else kind
    return assign(site.target(0, target), _PRODUCTS[part], site.row(1, kind), site.row(2, kind))


@op("mad", types=WORDS)
def compile_mad(site: Site) -> Run:
    """``mad.{lo,hi,wide}``; ``mad.hi.sat.s32``."""
    kind = site.take_type(*WORDS)
    part = site.take("lo", "hi", "wide")
    if not part or (part == "wide" and kind not in _WIDER):
        raise site.refuse("a product needs '.lo', '.hi' or '.wide'")
    site.expect_operands(4)
    target = _WIDER[kind] if part == "wide" else kind
    product = _PRODUCTS[part]
    saturate = site.flag("sat")
    if saturate and (part, kind) != ("hi", "s32"):
        raise site.refuse("'.sat' is for .hi.s32")
    limit = np.iinfo(np.int32)

    def run(a: Row, b: Row, c: Row) -> Row:
        if saturate:
            return np.clip(product(a, b).astype(np.int64) + c, limit.min, limit.max)
        return np.asarray(product(a, b) + c)

    return assign(site.target(0, target), run, site.row(1, kind), site.row(2, kind), site.row(3, target))


@op("mul24", "mad24", types=("u32", "s32"))
def compile_mul24(site: Site) -> Run:
    """``mul24.{lo,hi}``: of the low 24 bits, bits 0-31 or 16-47 of the 48-bit product; ``mad24``: plus c."""
    kind = site.take_type()
    part = site.take("lo", "hi")
    count = 3 if site.instruction.base == "mad24" else 2
    site.expect_operands(count + 1)
    if not part:
        raise site.refuse("a product needs '.lo' or '.hi'")

    def low24(a: Row) -> Row:
        shift = a.dtype.type(8)
        return ((a << shift) >> shift).astype(np.int64)

    dtype = DTYPES[kind]

    def run(a: Row, b: Row, c: Row = 0) -> Row:
        return ((low24(a) * low24(b)) >> (0 if part == "lo" else 16)).astype(dtype) + c

    return assign(site.target(0, kind), run, *(site.row(i, kind) for i in range(1, count + 1)))


def divide(a: Row, b: Row) -> Row:
    """Quotient toward zero; all ones for division by zero, which PTX leaves open and the chip gives."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient = quotient + ((a % divisor != 0) & ((a < 0) != (divisor < 0)))
    return np.where(zero, np.array(-1).astype(a.dtype), quotient)


@op("div", types=WORDS)
def compile_div(site: Site) -> Run:
    """``div``: toward zero."""
    kind = site.take_type(*WORDS)
    site.expect_operands(3)
    return assign(site.target(0, kind), divide, site.row(1, kind), site.row(2, kind))


@op("rem", types=WORDS)
def compile_rem(site: Site) -> Run:
    """``rem``: with the sign of the dividend; the dividend itself for division by zero."""
    kind = site.take_type(*WORDS)
    site.expect_operands(3)

    def run(a: Row, b: Row) -> Row:
        return np.where(b == 0, a, a - divide(a, b) * b)

    return assign(site.target(0, kind), run, site.row(1, kind), site.row(2, kind))


@op("sad", types=WORDS)
def compile_sad(site: Site) -> Run:
    """``sad``: c + |a - b|."""
    kind = site.take_type(*WORDS)
    site.expect_operands(4)

    def run(a: Row, b: Row, c: Row) -> Row:
        return np.asarray(c + np.where(a < b, b - a, a - b))

    return assign(site.target(0, kind), run, *(site.row(i, kind) for i in (1, 2, 3)))


@op("dp4a", "dp2a")
def compile_dot(site: Site) -> Run:
    """``dp4a.atype.btype d, a, b, c``: four products of bytes; ``dp2a.{lo,hi}``: of words with two bytes of b."""
    second = site.take_type("u32", "s32")
    first = site.take_type("u32", "s32")
    half = site.take("lo", "hi")
    site.expect_operands(4)
    kind = "u32" if first == second == "u32" else "s32"
    count = 4 if site.instruction.base == "dp4a" else 2
    left = np.dtype(f"{first[0].replace('s', 'i')}{4 // count}")
    right = np.dtype(f"{second[0].replace('s', 'i')}1")
    start = 2 if half == "hi" else 0

    def run(a: Row, b: Row, c: Row) -> Row:
        x = np.ascontiguousarray(a).view(left).reshape(32, count).astype(np.int64)
        y = np.ascontiguousarray(b).view(right).reshape(32, 4)[:, start : start + count].astype(np.int64)
        return c + (x * y).sum(1)

    rows = (site.row(1, "u32"), site.row(2, "u32"), site.row(3, kind))
    return assign(site.target(0, kind), lambda *v: run(*v).astype(DTYPES[kind]), *rows)


class Carry:
    """The carry flag of a warp's lanes (``CC.CF``)."""

    def __init__(self, warp: Any) -> None:
        self.flag = np.zeros(32, np.bool_)


@op("add.cc", "addc", "sub.cc", "subc", "mad.lo.cc", "mad.hi.cc", "madc", types=("u32", "s32", "u64", "s64"))
def compile_carry(site: Site) -> Run:
    """Extended precision: carry out with ``.cc``, carry in with addc, subc and madc."""
    kind = site.take_type()
    out = site.flag("cc")
    base = site.instruction.base
    carry_in = base in ("addc", "subc", "madc")
    subtract = base in ("sub", "subc")
    part = site.take("lo", "hi") if base in ("mad", "madc") else ""
    unsigned = f"u{kind[1:]}"
    site.expect_operands(4 if part else 3)
    rows = [site.row(i, kind) for i in range(1, len(site.operands))]
    target = site.target(0, unsigned)
    dtype = np.dtype(DTYPES[unsigned])

    def run(warp: Any, mask: Any) -> None:
        flag = warp.unit(Carry).flag
        values = [warp.rows[r] for r in rows]
        if part:
            values = [_PRODUCTS[part](values[0], values[1]), values[2]]
        a, b = (np.ascontiguousarray(v).view(dtype) for v in values)
        more = flag.astype(dtype) if carry_in else np.zeros(32, dtype)
        if subtract:
            half = a - b
            value = half - more
            carry = (a < b) | (half < more)
        else:
            half = a + b
            value = half + more
            carry = (half < a) | (value < half)
        np.copyto(warp.rows[target], value, where=mask)
        if out:
            np.copyto(flag, carry, where=mask)

    return run
