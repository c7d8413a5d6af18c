"""Atomic operations (PTX ISA, "atom", "red"): lane by lane, in an order that the seed gives, as PTX promises none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine.flags import Flags
from flamia.conformance.simulator.machine.memory import APPROXIMATE, WRITTEN
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.taint import guard_of, names_of
from flamia.conformance.simulator.machine.types import DTYPES, Row, width_of
from flamia.conformance.simulator.ops import rounding
from flamia.conformance.simulator.ops.addressing import SPACES, compile_address, split_by_space
from flamia.conformance.simulator.ops.floating import maximum, minimum
from flamia.conformance.simulator.ops.formats import decode, encode
from flamia.conformance.simulator.ops.halves import format_of
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Sink

_INTEGERS = ("u32", "s32", "u64", "s64", "b32", "b64", "b16", "b128")
_FLOATS = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
_NAMES = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")

Combine = Callable[[Row, Row], Row]
"""(old, operand) -> new, of one lane as arrays of its elements."""


def _integer(name: str) -> Combine:
    table: dict[str, Combine] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, b: b,
        "inc": lambda old, b: np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1)),
        "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - old.dtype.type(1)),
    }
    return table[name]


def _float(site: Site, name: str, kind: str, flushes: bool) -> Combine:
    """:param flushes: whether ``add.f32`` flushes subnormals: in global, not in shared memory (PTX ISA, "atom")."""
    if kind == "f32" and name == "add":

        def add32(old: Row, b: Row) -> Row:
            x, y = (rounding.flush(old), rounding.flush(b)) if flushes else (old, b)
            out = np.add(x, y)
            out = np.ascontiguousarray(rounding.flush(out) if flushes else out)
            rounding.fix_nan(out)
            return out

        return add32
    if kind == "f64" and name == "add":
        return np.add
    if name not in ("add", "min", "max"):
        raise site.refuse(f"{name} of {kind}")
    f = format_of(kind)
    function: Any = {"add": np.add, "min": minimum, "max": maximum}[name]
    # The sum of two halves needs at most 51 bits, so that float64 holds it.
    return lambda old, b: encode(function(decode(old, f), decode(b, f)), f).astype(np.uint16)


def _element(kind: str) -> Any:
    """The type in which a lane's value is combined."""
    return np.dtype(np.uint16) if kind in ("f16", "f16x2", "bf16", "bf16x2") else np.dtype(DTYPES.get(kind, np.uint64))


@op("atom", "red")
def compile_atomic(site: Site) -> Run:
    """``atom{.sem}{.scope}{.space}.op{.noftz}{.vec}.type d, [a], b{, c}``; ``red`` without d."""
    kind = site.take_type(*_INTEGERS, *_FLOATS)
    is_atom = site.instruction.base == "atom"
    order = site.take("relaxed", "acquire", "release", "acq_rel")
    site.take("cta", "cluster", "gpu", "sys")
    space = site.take(*SPACES)
    name = site.take(*_NAMES)
    site.flag("noftz")
    site.flag("L2::cache_hint")
    count = int((site.take("v2", "v4", "v8") or "v1")[1:])
    if not name:
        raise site.refuse("no operation is named")
    first = 1 if is_atom else 0
    address = compile_address(site, first)
    sources = [site.row(s, _bits(kind)) for s in site.items(first + 1)]
    compare = sources if name == "cas" else None
    if compare is not None:
        sources = [site.row(s, _bits(kind)) for s in site.items(first + 2)]
    results = [] if not is_atom else list(site.items(0))
    targets = [(i, site.target(t, _bits(kind))) for i, t in enumerate(results) if not isinstance(t, Sink)]
    if len(sources) != count or (is_atom and len(results) != count and not isinstance(results[0], Sink)):
        raise site.refuse(f"{len(sources)} registers for {count} values")
    in_global = in_shared = None
    if name != "cas":
        is_float = kind in _FLOATS and name != "exch"
        in_global = _float(site, name, kind, True) if is_float else _integer(name)
        in_shared = _float(site, name, kind, False) if is_float else in_global
    given, taken = names_of(site.operands[first + 1 :]) | guard_of(site.instruction), names_of(results)
    unit = 8 if kind == "b128" else width_of(kind)
    units = 2 * count if kind == "b128" else count
    element = _element(kind)

    def run(warp: Any, mask: Any) -> None:
        rows = warp.rows
        lanes = [int(i) for i in np.flatnonzero(mask)]
        warp.machine.random.shuffle(lanes)
        values = _gather(rows, sources, unit, units)
        wanted = _gather(rows, compare, unit, units) if compare is not None else None
        old = np.zeros((32, units), values.dtype)
        for memory, where, here in split_by_space(warp, space, address(warp), mask):
            found = memory.finds_approximate(where, unit, units, here)
            if found:
                warp.machine.taint.add(taken)
            state = WRITTEN | APPROXIMATE if found or warp.machine.taint.covers(given) else WRITTEN
            # A generic address says only now which space it is in.
            combine = in_global if memory is warp.machine.global_memory else in_shared
            # A store of what is there checks the rules of writing for all lanes.
            data, _, shift = memory.view(unit, units)
            there = memory.load(where, unit, units, here)
            memory.store(where, there, unit, units, here, warp.order.tag, state, warp.order)
            flags = warp.cta.cluster.unit(Flags)
            flags.write(warp, memory, where, here, order in ("release", "acq_rel"))
            flags.read(warp, memory, where, here, order in ("acquire", "acq_rel"))
            for lane in lanes:
                if not here[lane]:
                    continue
                cell = (int(where[lane]) - memory.base) >> shift
                before = np.atleast_1d(data[cell]).copy()
                old[lane] = before
                if combine is None:
                    assert wanted is not None
                    after = values[lane] if (before == wanted[lane]).all() else before
                else:
                    after = combine(before.view(element), values[lane].view(element)).view(values.dtype)
                data[cell] = after if units > 1 else after[0]
        for i, target in targets:
            column = old if kind == "b128" else old[:, i]
            where_mask = mask[:, None] if kind == "b128" else mask
            np.copyto(rows[target], np.ascontiguousarray(column), where=where_mask)

    return run


def _bits(kind: str) -> str:
    """The row type that holds the bits."""
    return "b128" if kind == "b128" else f"u{8 * width_of(kind)}"


def _gather(rows: list[Row], sources: list[int], unit: int, units: int) -> Row:
    out = np.empty((32, units), np.dtype(f"u{unit}"))
    if rows[sources[0]].ndim == 2:
        out[...] = rows[sources[0]]
        return out
    for i, s in enumerate(sources):
        out[:, i] = rows[s]
    return out
