"""Logic, shifts and bit fields (PTX ISA, "Logic and Shift Instructions", "prmt", "bfe", ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import DTYPES, Row
from flamia.conformance.simulator.ops.elementwise import assign, compile_binary, compile_unary, ufunc2
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Immediate

_LOGIC: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@op("and", "or", "xor")
def compile_logic(site: Site) -> Run:
    """``and``, ``or``, ``xor`` of b16, b32, b64, pred."""
    kind = site.take_type("pred", "b16", "b32", "b64")
    return compile_binary(site, _LOGIC[site.instruction.base], kind)


@op("not")
def compile_not(site: Site) -> Run:
    """``not``."""
    return compile_unary(site, np.invert, site.take_type("pred", "b16", "b32", "b64"))


@op("cnot")
def compile_cnot(site: Site) -> Run:
    """``cnot``: 1 for 0, else 0."""
    kind = site.take_type("b16", "b32", "b64")
    site.expect_operands(2)
    return assign(site.target(0, kind), lambda a: a == 0, site.row(1, kind))


@op("shl", "shr")
def compile_shift(site: Site) -> Run:
    """``shl``, ``shr``: shifts by more than the width give 0, or the sign."""
    left = site.instruction.base == "shl"
    kind = site.take_type(*(f"{k}{bits}" for k in ("b" if left else "bus") for bits in (16, 32, 64)))
    site.expect_operands(3)
    bits = int(kind[1:])
    dtype = np.dtype(DTYPES[kind])
    target, a = site.target(0, kind), site.row(1, kind)
    amount = site.operand(2)
    if isinstance(amount, Immediate) and 0 <= amount.value < bits:
        constant = site.row(amount, kind)
        shift: Any = np.left_shift if left else np.right_shift
        return ufunc2(shift, target, a, constant)
    last = dtype.type(bits - 1)

    def run(value: Row, by: Row) -> Row:
        large = by > np.uint32(bits - 1)
        near = np.minimum(by, np.uint32(bits - 1)).astype(dtype)
        if dtype.kind == "i":  # numpy shifts signed values arithmetically
            return value << near if left else value >> np.where(large, last, near)
        return np.where(large, dtype.type(0), value << near if left else value >> near)

    return assign(target, run, a, site.row(2, "u32"))


@op("shf")
def compile_funnel(site: Site) -> Run:
    """``shf.{l,r}.{clamp,wrap}.b32 d, a, b, c``: 32 bits of b:a shifted by c."""
    site.take_type("b32")
    left = site.take("l", "r") == "l"
    wrap = site.take("clamp", "wrap") == "wrap"
    site.expect_operands(4)
    word = np.uint64(32)

    def run(a: Row, b: Row, c: Row) -> Row:
        both = (b.astype(np.uint64) << word) | a
        n = ((c & np.uint32(31)) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        return (both << n) >> word if left else both >> n

    # NumPy's casts keep the low bytes.
    return assign(site.target(0, "u32"), lambda *v: run(*v).astype(np.uint32), *(site.row(i, "u32") for i in (1, 2, 3)))


@op("lop3")
def compile_lop3(site: Site) -> Run:
    """``lop3{.bool}.b32 d{|p}, a, b, c, table{, q}``: bit by bit, table[4a + 2b + c]; p = (d != 0) bool q."""
    site.take_type("b32")
    boolean = site.take("and", "or", "xor")
    site.expect_operands(6 if boolean else 5)
    first, second = site.pair(0)
    table = site.integer(4)
    rows = [site.row(i, "u32") for i in (1, 2, 3)]
    target = site.target(first, "u32")
    p = site.target(second, "pred") if second is not None else -1
    q, negated = site.predicate(5) if boolean else (-1, False)

    def run(warp: Any, mask: Any) -> None:
        a, b, c = (warp.rows[r] for r in rows)
        out = np.zeros(32, np.uint32)
        for index in range(8):
            if table >> index & 1:
                term = a if index & 4 else ~a
                term = term & (b if index & 2 else ~b)
                out |= term & (c if index & 1 else ~c)
        other = warp.rows[q] if boolean else None
        if p >= 0:
            result = out != 0
            if other is not None:
                result = _LOGIC[boolean](result, ~other if negated else other)
            np.copyto(warp.rows[p], result, where=mask)
        np.copyto(warp.rows[target], out, where=mask)

    return run


_SELECTIONS: dict[str, Any] = {
    "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
    "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
    "rc8": [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]],
    "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
    "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
    "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
}
"""Bytes chosen by each mode of prmt, from the lowest, by the low two bits of the selector."""


@op("prmt")
def compile_prmt(site: Site) -> Run:
    """``prmt.b32{.mode} d, a, b, c``: four of the eight bytes of b:a; a selector with bit 3 repeats the byte's sign."""
    mode = site.take(*_SELECTIONS)
    site.take_type("b32")
    site.expect_operands(4)
    table = np.array(_SELECTIONS[mode]) if mode else None

    def run(a: Row, b: Row, c: Row) -> Row:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        selected = np.ascontiguousarray(both).view(np.uint8).reshape(32, 8)
        if table is not None:
            index = table[c & np.uint32(3)]
            chosen = np.take_along_axis(selected, index, 1)
        else:
            selector = (c[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
            chosen = np.take_along_axis(selected, (selector & 7).astype(np.intp), 1)
            sign = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
            chosen = np.where(selector & 8, sign, chosen)
        return np.ascontiguousarray(chosen).view(np.uint32)[:, 0]

    return assign(site.target(0, "u32"), run, *(site.row(i, "u32") for i in (1, 2, 3)))


def _field_mask(length: Row, dtype: Any) -> Row:
    """``length`` ones at the bottom; the whole width from its number of bits on."""
    bits = 8 * dtype.itemsize
    near = np.minimum(length, bits - 1).astype(dtype)
    return np.where(length >= bits, ~dtype.type(0), (dtype.type(1) << near) - dtype.type(1))


def _shift_right(value: Row, by: Row, bits: int) -> Row:
    near = np.minimum(by, bits - 1).astype(value.dtype)
    return np.where(by >= bits, value.dtype.type(0), value >> near)


@op("bfe")
def compile_bfe(site: Site) -> Run:
    """``bfe.type d, a, b, c``: c bits from bit b on.

    Signed types repeat the field's top bit, or the sign beyond the end.
    """
    kind = site.take_type("u32", "s32", "u64", "s64")
    site.expect_operands(4)
    bits, unsigned = int(kind[1:]), np.dtype(DTYPES[f"u{kind[1:]}"])

    def run(a: Row, position: Row, length: Row) -> Row:
        position, length = position & np.uint32(255), length & np.uint32(255)
        word = np.ascontiguousarray(a).view(unsigned)
        ones = _field_mask(length, unsigned)
        field = _shift_right(word, position, bits) & ones
        if kind.startswith("s"):
            top = np.minimum(position + length - np.uint32(1), np.uint32(bits - 1))
            sign = ((word >> top.astype(unsigned)) & unsigned.type(1)).astype(np.bool_) & (length > 0)
            # Beyond the end of the word there are copies of the sign.
            inside = np.minimum(length, np.maximum(np.int64(bits) - position.astype(np.int64), 0))
            field = np.where(sign, field | ~_field_mask(inside, unsigned), field)
        return np.where(length == 0, unsigned.type(0), field).view(a.dtype)

    return assign(site.target(0, kind), run, site.row(1, kind), site.row(2, "u32"), site.row(3, "u32"))


@op("bfi")
def compile_bfi(site: Site) -> Run:
    """``bfi.type f, a, b, c, d``: b with d bits from bit c on replaced by the low bits of a."""
    kind = site.take_type("b32", "b64")
    site.expect_operands(5)
    bits, dtype = int(kind[1:]), np.dtype(DTYPES[kind])

    def run(a: Row, b: Row, position: Row, length: Row) -> Row:
        position, length = position & np.uint32(255), length & np.uint32(255)
        near = np.minimum(position, np.uint32(bits - 1)).astype(dtype)
        ones = np.where(position >= bits, dtype.type(0), _field_mask(length, dtype) << near)
        return (b & ~ones) | ((a << near) & ones)

    rows = (site.row(1, kind), site.row(2, kind), site.row(3, "u32"), site.row(4, "u32"))
    return assign(site.target(0, kind), run, *rows)


@op("bmsk")
def compile_bmsk(site: Site) -> Run:
    """``bmsk.{clamp,wrap}.b32 d, a, b``: b ones from bit a on."""
    site.take_type("b32")
    wrap = site.take("clamp", "wrap") == "wrap"
    site.expect_operands(3)

    def run(a: Row, b: Row) -> Row:
        if wrap:
            a, b = a & np.uint32(31), b & np.uint32(31)
        near = np.minimum(a, np.uint32(31))
        ones = _field_mask(np.minimum(b, np.uint32(32)), np.dtype(np.uint32)) << near
        return np.where(a >= 32, np.uint32(0), ones)

    return assign(site.target(0, "u32"), run, site.row(1, "u32"), site.row(2, "u32"))


def _count_leading(a: Row) -> Row:
    bits = 8 * a.dtype.itemsize
    if bits == 32:
        return np.uint32(32) - np.frexp(a.astype(np.float64))[1].astype(np.uint32)
    high = (a >> np.uint64(32)).astype(np.uint32)
    low = (a & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.where(high != 0, _count_leading(high), np.uint32(32) + _count_leading(low))


def _reverse(a: Row) -> Row:
    size = a.dtype.itemsize
    pieces = np.ascontiguousarray(a).view(np.uint8).reshape(-1, size)
    flipped = np.packbits(np.unpackbits(pieces, axis=1, bitorder="little")[:, ::-1], axis=1, bitorder="little")
    return np.ascontiguousarray(flipped).view(a.dtype)[:, 0]


def _count_ones(a: Row) -> Row:
    return np.bitwise_count(a)


_COUNTS: dict[str, Callable[[Row], Row]] = {"popc": _count_ones, "clz": _count_leading}


@op("popc", "clz")
def compile_count(site: Site) -> Run:
    """``popc``, ``clz``: a count, in 32 bits."""
    kind = site.take_type("b32", "b64")
    site.expect_operands(2)
    return assign(site.target(0, "u32"), _COUNTS[site.instruction.base], site.row(1, kind))


@op("brev")
def compile_brev(site: Site) -> Run:
    """``brev``: bits in reverse."""
    kind = site.take_type("b32", "b64")
    site.expect_operands(2)
    return assign(site.target(0, kind), _reverse, site.row(1, kind))


@op("bfind")
def compile_bfind(site: Site) -> Run:
    """``bfind{.shiftamt}.type d, a``: position of the top bit that is not the sign; all ones without one."""
    kind = site.take_type("u32", "s32", "u64", "s64")
    shift = site.flag("shiftamt")
    site.expect_operands(2)
    bits, unsigned = int(kind[1:]), np.dtype(DTYPES[f"u{kind[1:]}"])

    def run(a: Row) -> Row:
        word = np.ascontiguousarray(np.where(a < 0, ~a, a)).view(unsigned)
        leading = _count_leading(word)
        position = leading if shift else np.uint32(bits - 1) - leading
        return np.where(word == 0, np.uint32(0xFFFFFFFF), position)

    return assign(site.target(0, "u32"), run, site.row(1, kind))


@op("fns")
def compile_fns(site: Site) -> Run:
    """``fns.b32 d, mask, base, offset``: position of the offset-th set bit, counted from base."""
    site.take_type("b32")
    site.expect_operands(4)

    def find(word: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if word >> base & 1 else 0xFFFFFFFF
        step, left = (1 if offset > 0 else -1), abs(offset)
        for position in range(base, 32 if step > 0 else -1, step):
            left -= word >> position & 1
            if left == 0:
                return position
        return 0xFFFFFFFF

    def run(words: Row, bases: Row, offsets: Row) -> Row:
        lanes = zip(words, bases, offsets, strict=True)
        return np.array([find(int(w), int(b) & 31, int(o)) for w, b, o in lanes], np.uint32)

    return assign(site.target(0, "u32"), run, site.row(1, "u32"), site.row(2, "u32"), site.row(3, "s32"))


@op("szext")
def compile_szext(site: Site) -> Run:
    """``szext.{clamp,wrap}.{u32,s32} d, a, b``: the low b bits, extended by zeros or by their top bit."""
    kind = site.take_type("u32", "s32")
    wrap = site.take("clamp", "wrap") == "wrap"
    site.expect_operands(3)

    def run(a: Row, b: Row) -> Row:
        length = (b & np.uint32(31)) if wrap else np.minimum(b, np.uint32(32))
        shift = (np.uint32(32) - length).astype(np.uint64)
        wide = (np.ascontiguousarray(a).view(np.uint32).astype(np.uint64) << shift).astype(np.uint32)
        if kind == "u32":
            return (wide.astype(np.uint64) >> shift).astype(np.uint32)
        return (wide.view(np.int32).astype(np.int64) >> shift.astype(np.int64)).astype(np.int32)

    return assign(site.target(0, kind), run, site.row(1, kind), site.row(2, "u32"))
