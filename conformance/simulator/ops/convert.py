"""``cvt`` between scalar types (PTX ISA, "cvt"); pairs of narrow formats are in `convert_narrow`.

Integers: cut or extended; ``.sat`` clamps. Float to integer: rounded by ``.r{n,z,m,p}i``, clamped to the range, NaN
gives 0 (1 << 63 for 64-bit targets and from FP64). Float to float: rounded once; ``.r{n,z,m,p}i`` rounds to an integral
value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import DTYPES, Row
from flamia.conformance.simulator.ops.convert_narrow import PAIRS, compile_pairs
from flamia.conformance.simulator.ops.elementwise import assign
from flamia.conformance.simulator.ops.formats import BF16, F16, TF32, decode, encode
from flamia.conformance.simulator.ops.movement import copy_row
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.rounding import fix_nan, flush, round_pair

INTEGERS = tuple(f"{k}{bits}" for k in "us" for bits in (8, 16, 32, 64))
FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGER_MODES = ("rni", "rzi", "rmi", "rpi")
_FLOAT_MODES = ("rn", "rna", "rz", "rm", "rp")
_ROUND: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@op("cvt", types=(*INTEGERS, *FLOATS))
def compile_cvt(site: Site) -> Run:
    """``cvt{.rnd}{.ftz}{.sat}.dtype.atype d, a``."""
    if site.instruction.modifiers[-2:-1] and site.instruction.modifiers[-2] in PAIRS:
        return compile_pairs(site)
    source = site.take_type(*INTEGERS, *FLOATS)
    target = site.take_type(*INTEGERS, *FLOATS, "tf32")
    mode = site.take(*_INTEGER_MODES, *_FLOAT_MODES)
    ftz, saturate = site.flag("ftz"), site.flag("sat")
    finite, relu = site.flag("satfinite"), site.flag("relu")
    site.expect_operands(2)
    if target in INTEGERS:
        kind = site.target_kind(site.operand(0), target)
        d = site.target(0, kind)
        if source in INTEGERS:
            a = site.row(1, source)
            if not saturate and kind == target:
                return copy_row(d, a)
            return assign(d, _integers(target, saturate), a)
        return assign(d, _to_integer(site, source, target, mode, ftz), site.row(1, _bits(source)))
    d = site.target(0, _bits(target))
    a = site.row(1, source if source in INTEGERS else _bits(source))
    if source in INTEGERS:
        return assign(d, _from_integer(target, mode, saturate), a)
    return assign(d, _between_floats(site, source, target, mode, (ftz, saturate, finite, relu)), a)


def _bits(kind: str) -> str:
    """The row type in which a float is held here: f16 and bf16 by their codes."""
    return {"f16": "u16", "bf16": "u16", "tf32": "u32"}.get(kind, kind)


def _integers(target: str, saturate: bool) -> Callable[[Row], Row]:
    dtype = np.dtype(DTYPES[target])
    limits = np.iinfo(dtype)

    def run(a: Row) -> Row:
        if saturate:
            low = max(int(limits.min), int(np.iinfo(a.dtype).min))
            high = min(int(limits.max), int(np.iinfo(a.dtype).max))
            a = np.clip(a, a.dtype.type(low), a.dtype.type(high))
        return a.astype(dtype)

    return run


def widen(codes: Row, kind: str) -> Row:
    """Values of a row of `_bits` as float64."""
    if kind in ("f16", "bf16"):
        return decode(codes, F16 if kind == "f16" else BF16)
    return codes.astype(np.float64)


def _to_integer(site: Site, source: str, target: str, mode: str, ftz: bool) -> Callable[[Row], Row]:
    if mode not in _ROUND:
        raise site.refuse("a rounding to an integer is missing")
    rounding = _ROUND[mode]
    dtype = np.dtype(DTYPES[target])
    limits = np.iinfo(dtype)
    # The largest values of 64 bits are no float64: compare with the next power of two.
    top = float(limits.max) if dtype.itemsize < 8 else 2.0 ** (63 if target == "s64" else 64)
    # PTX: NaN gives 0, or the top bit for 64-bit integers and from f64.
    top_bit = 1 << (8 * dtype.itemsize - 1)
    nan = np.array([top_bit if source == "f64" or dtype.itemsize == 8 else 0], np.uint64).astype(dtype)[0]

    def run(a: Row) -> Row:
        if ftz and source == "f32":
            a = flush(a)
        value = rounding(widen(a, source) if source != "f32" else a.astype(np.float64))
        low, high = value <= float(limits.min), value >= top
        inside = np.where(low | high | np.isnan(value), 0.0, value)
        out = inside.astype(dtype)
        out = np.where(low, limits.min, np.where(high, limits.max, out)).astype(dtype)
        return np.where(np.isnan(value), nan, out)

    return run


def _from_integer(target: str, mode: str, saturate: bool) -> Callable[[Row], Row]:
    mode = mode or "rn"

    def run(a: Row) -> Row:
        if target == "f64":
            return a.astype(np.float64)
        if a.dtype.itemsize == 8:  # more bits than float64 has: the upper and lower halves, an exact pair
            high = (a >> a.dtype.type(32)).astype(np.float64) * 4294967296.0
            low = (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64)
            total = high + low
            pair = (total, low - (total - high))
        else:
            pair = (a.astype(np.float64), np.zeros(32))
        if target == "f32":
            out = round_pair(*pair, mode)
            return np.clip(out, 0, 1).astype(np.float32) if saturate else out
        return encode(pair[0], F16 if target == "f16" else BF16, mode).astype(np.uint16)

    return run


def _between_floats(
    site: Site, source: str, target: str, mode: str, flags: tuple[bool, bool, bool, bool]
) -> Callable[[Row], Row]:
    ftz, saturate, finite, relu = flags
    narrow = {"f16": F16, "bf16": BF16, "tf32": TF32}.get(target)
    integral = _ROUND.get(mode)
    if integral is None and mode == "" and narrow is not None and source != target:
        raise site.refuse("a rounding mode is missing")

    if (source, target) == ("bf16", "f32") and integral is None and not (saturate or relu or ftz):
        # NaN payloads stay (so on an H200).
        return lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def run(a: Row) -> Row:
        if ftz and source == "f32":
            a = flush(a)
        if source == target == "f32" and integral is None:
            value = a.copy()
        else:
            value = widen(a, source)
        if integral is not None:
            value = integral(value)
        if relu:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, 0.0))
        if saturate:
            value = np.where(value > 0, np.minimum(value, 1.0), 0.0)
        if narrow is not None:
            code = encode(value, narrow, mode if integral is None and mode else "rn", finite)
            return code << np.uint32(13) if narrow is TF32 else code.astype(np.uint16)
        if target == "f64":
            return value.astype(np.float64)
        out = (
            round_pair(value, np.zeros(32), mode if mode in ("rz", "rm", "rp") else "rn") if source == "f64" else value
        )
        out = np.ascontiguousarray(out.astype(np.float32))
        if ftz:
            out = flush(out)
        fix_nan(out)
        return out

    return run
