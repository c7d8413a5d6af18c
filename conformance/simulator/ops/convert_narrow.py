"""``cvt`` to and from pairs and quadruples: f16x2, bf16x2, e4m3x2, e5m2x2, e2m3x2, e3m2x2, e2m1x2, ue8m0x2.

Of two operands, the first goes to the upper half. E2M1 pairs are a byte, 8-bit and 6-bit pairs two bytes. NaN becomes
0x7FFF, 0x7F, 0xFF of UE8M0, and the largest positive value where a format has none. ``.relu`` makes negative numbers 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL, Row
from flamia.conformance.simulator.ops.formats import BF16, F16, FORMATS, Format, decode, encode, encode_ue8m0
from flamia.conformance.simulator.ops.halves import to_pieces
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.rounding import flush

_EIGHTS = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2")
_NARROW = (*_EIGHTS, "e2m1x2", "ue8m0x2")
_HALVES = ("f16x2", "bf16x2")
PAIRS = (*_HALVES, *_NARROW)


def _format(kind: str) -> Format:
    return FORMATS[kind[:-2]]


def _store(site: Site, kind: str, function: Callable[..., Row], sources: list[int]) -> Run:
    target = site.target(0, kind)

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        value = function(*[rows[s] for s in sources])
        if mask is FULL:
            rows[target][...] = value
        else:
            np.copyto(rows[target], value, where=mask, casting="unsafe")

    return run


def _prepare(value: Row, relu: bool) -> Row:
    return np.where(value <= 0, 0.0, value) if relu else value


@op("cvt", types=PAIRS)
def compile_pairs(site: Site) -> Run:
    """Every form with a pair on either side; see `compile_cvt` for scalars."""
    source = site.take_type("f32", *PAIRS)
    target = site.take_type(*PAIRS)
    mode = site.take("rn", "rz", "rp", "rna")
    finite, relu, ftz = site.flag("satfinite"), site.flag("relu"), site.flag("ftz")
    if source in _NARROW:
        if mode != "rn" or target not in _HALVES:
            raise site.refuse("narrow pairs are widened by .rn.f16x2 and .rn.bf16x2")
        return _widen(site, source, target, relu)
    if target == "ue8m0x2":
        if mode not in ("rp", "rz") or relu:
            raise site.refuse("ue8m0x2 takes .rp or .rz")
        return _compile_pack(site, source, target, lambda v: encode_ue8m0(v, mode, finite), 8, ftz)
    f = _format(target)
    if target not in _HALVES and (mode != "rn" or not finite):
        raise site.refuse(f"{target} takes .rn.satfinite")
    width = {"e2m1x2": 4}.get(target, 8 if target in _EIGHTS else 16)
    return _compile_pack(site, source, target, lambda v: encode(_prepare(v, relu), f, mode, finite), width, ftz)


def _compile_pack(site: Site, source: str, target: str, codes: Callable[[Row], Row], width: int, ftz: bool) -> Run:
    """Encode two values and put the first above the second.

    :param width: bits from one to the other.
    """
    bits = {4: "u8", 8: "u16", 16: "u32"}[width]
    shift = np.uint32(width)
    if source == "f32":
        site.expect_operands(3)
        rows = [site.row(1, "f32"), site.row(2, "f32")]

        def pack(upper: Row, lower: Row) -> Row:
            both = np.concatenate((lower, upper))
            both = flush(both) if ftz else both
            code = codes(both.astype(np.float64))
            return code[:32] | (code[32:] << shift)

        return _store(site, bits, pack, rows)
    site.expect_operands(2)
    f = _format(source)

    def convert(a: Row) -> Row:
        code = codes(decode(to_pieces(a), f))
        return code[0::2] | (code[1::2] << shift)

    return _store(site, bits, convert, [site.row(1, "u32")])


def _widen(site: Site, source: str, target: str, relu: bool) -> Run:
    site.expect_operands(2)
    out = BF16 if target == "bf16x2" else F16
    if source == "ue8m0x2":
        if target != "bf16x2":
            raise site.refuse("ue8m0x2 is widened to bf16x2")
        values: Row = np.ldexp(1.0, np.arange(256) - 127)
        values[255] = np.nan
    else:
        if target != "f16x2":
            raise site.refuse(f"{source} is widened to f16x2")
        f = _format(source)
        values = decode(np.arange(1 << f.bits), f)
    table = encode(_prepare(values, relu), out)
    step = 4 if source == "e2m1x2" else 8
    ones = np.uint32(len(table) - 1)

    def run(a: Row) -> Row:
        wide = a.astype(np.uint32)
        return table[wide & ones] | (table[(wide >> np.uint32(step)) & ones] << np.uint32(16))

    return _store(site, "u32", run, [site.row(1, "u8" if step == 4 else "u16")])
