"""Instructions of several lanes together (PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync",
...).

Each names its lanes by a member mask and waits for them. A lane that executes it must be named.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.outcomes import NeedLanes
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import FULL, Row, lanes_of, mask_word, word_mask
from flamia.conformance.simulator.ops.floating import maximum, minimum
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.rounding import fix_nan
from flamia.conformance.simulator.ptx.syntax import Immediate, Sink

_ALL = 0xFFFFFFFF
_LANE = np.arange(32)


def together(site: Site, operand: int, action: Callable[[Any, Any], None], anywhere: bool = False) -> Run:
    """Execute ``action`` once all lanes of the member mask are here.

    :param operand: the member mask.
    :param anywhere: whether the others may be at another instruction of this kind.
    """
    item = site.operand(operand)
    row = site.row(operand, "u32")
    if isinstance(item, Immediate) and item.value & _ALL == _ALL:

        def run_all(warp: Any, mask: Any) -> NeedLanes | None:
            if mask is FULL or warp.is_converged(mask):
                action(warp, mask)
                return None
            return NeedLanes(warp.live, anywhere)

        return run_all

    def run(warp: Any, mask: Any) -> NeedLanes | None:
        members = word_mask(warp.uniform(row, mask))
        if (mask & ~members).any():
            lanes = lanes_of(mask & ~members)
            raise faults.Divergent(
                f"executed by lanes that its member mask {mask_word(members):#x} does not name", lanes
            )
        need = members & warp.live
        if (need == mask).all():
            action(warp, mask)
            return None
        return NeedLanes(need, anywhere)

    return run


@op("shfl", control=True)
def compile_shfl(site: Site) -> Run:
    """``shfl.sync.{up,down,bfly,idx}.b32 d{|p}, a, b, c, members``."""
    site.take_type("b32")
    if not site.flag("sync"):
        raise site.refuse("only the .sync form is known")
    mode = site.take("up", "down", "bfly", "idx")
    site.expect_operands(5)
    first, second = site.pair(0)
    target = site.target(first, "u32")
    p = site.target(second, "pred") if second is not None and not isinstance(second, Sink) else -1
    a, b, c = (site.row(i, "u32") for i in (1, 2, 3))

    def source(by: Row, clamp: Row) -> tuple[Row, Row]:
        by = (by & np.uint32(31)).astype(np.int64)
        limit, segment = (
            (clamp & np.uint32(31)).astype(np.int64),
            ((clamp >> np.uint32(8)) & np.uint32(31)).astype(np.int64),
        )
        last = (_LANE & segment) | (limit & ~segment)
        match mode:
            case "up":
                lane = _LANE - by
                return lane, lane >= last
            case "down":
                lane = _LANE + by
            case "bfly":
                lane = _LANE ^ by
            case _:
                lane = (_LANE & segment) | (by & ~segment)
        return lane, lane <= last

    constant = source(_constant(site, 2), _constant(site, 3)) if _is_constant(site, 2, 3) else None

    def action(warp: Any, mask: Any) -> None:
        rows = warp.rows
        lane, valid = constant if constant is not None else source(rows[b], rows[c])
        lane = np.where(valid, lane, _LANE)
        if mask is not FULL and not mask[lane][mask].all():
            warp.machine.count_unpromised("shfl from a lane that does not take part", warp)
            lane = np.where(mask[lane], lane, _LANE)
        values = rows[a][lane]
        np.copyto(rows[target], values, where=mask)
        if p >= 0:
            np.copyto(rows[p], valid, where=mask)

    return together(site, 4, action)


def _is_constant(site: Site, *operands: int) -> bool:
    return all(isinstance(site.operand(i), Immediate) for i in operands)


def _constant(site: Site, operand: int) -> Row:
    return np.full(32, site.integer(operand) & _ALL, np.uint32)


@op("vote", control=True)
def compile_vote(site: Site) -> Run:
    """``vote.sync.{all,any,uni}.pred d, {!}a, members``; ``vote.sync.ballot.b32``."""
    kind = site.take_type("pred", "b32")
    if not site.flag("sync"):
        raise site.refuse("only the .sync form is known")
    mode = site.take("all", "any", "uni", "ballot")
    if (mode == "ballot") != (kind == "b32") or not mode:
        raise site.refuse("ballot is of b32, the others of pred")
    site.expect_operands(3)
    target = site.target(0, kind)
    source, negated = site.predicate(1)

    def action(warp: Any, mask: Any) -> None:
        held = warp.rows[source] & mask if not negated else np.greater(mask, warp.rows[source])
        if mode == "ballot":
            value: Any = np.uint32(mask_word(held))
        else:
            count, lanes = int(np.count_nonzero(held)), int(np.count_nonzero(mask))
            value = {"all": count == lanes, "any": count > 0, "uni": count in (0, lanes)}[mode]
        np.copyto(warp.rows[target], value, where=mask)

    return together(site, 2, action)


@op("match", control=True)
def compile_match(site: Site) -> Run:
    """``match.{any,all}.sync.{b32,b64} d{|p}, a, members``."""
    kind = site.take_type("b32", "b64")
    mode = site.take("any", "all")
    if not site.flag("sync") or not mode:
        raise site.refuse("only the .sync forms are known")
    site.expect_operands(3)
    first, second = site.pair(0)
    target = site.target(first, "u32")
    p = site.target(second, "pred") if second is not None and not isinstance(second, Sink) else -1
    source = site.row(1, kind)

    def action(warp: Any, mask: Any) -> None:
        values = warp.rows[source]
        if mode == "any":
            equal = (values[:, None] == values) & mask
            words = np.packbits(equal, axis=1, bitorder="little").view(np.uint32)[:, 0]
            np.copyto(warp.rows[target], words, where=mask)
            return
        same = bool((values[mask] == values[mask][0]).all())
        np.copyto(warp.rows[target], np.uint32(mask_word(mask) if same else 0), where=mask)
        if p >= 0:
            np.copyto(warp.rows[p], same, where=mask)

    return together(site, 2, action)


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@op("redux", control=True)
def compile_redux(site: Site) -> Run:
    """``redux.sync.{add,min,max}.{u32,s32}``, ``.{and,or,xor}.b32``, ``.{min,max}{.abs}{.NaN}.f32``."""
    kind = site.take_type("u32", "s32", "b32", "f32")
    if not site.flag("sync"):
        raise site.refuse("only the .sync form is known")
    name = site.take(*_REDUCTIONS)
    allowed = {"b32": ("and", "or", "xor"), "f32": ("min", "max")}.get(kind, ("add", "min", "max"))
    if name not in allowed:
        raise site.refuse(f"{kind} takes {allowed}")
    magnitude, propagate = (site.flag("abs"), site.flag("NaN")) if kind == "f32" else (False, False)
    site.expect_operands(3)
    target, source = site.target(0, kind), site.row(1, kind)

    def reduce_floats(values: Row) -> Row:
        pick = minimum if name == "min" else maximum
        values = np.abs(values) if magnitude else values.copy()
        out = values[:1]
        for i in range(1, len(values)):
            out = pick(out, values[i : i + 1])
        if propagate and np.isnan(values).any():
            out = np.array([np.nan], np.float32)
        out = np.ascontiguousarray(out)
        fix_nan(out)
        return out

    def action(warp: Any, mask: Any) -> None:
        values = warp.rows[source][mask]
        result = reduce_floats(values) if kind == "f32" else _REDUCTIONS[name].reduce(values)
        np.copyto(warp.rows[target], result, where=mask, casting="unsafe")

    return together(site, 2, action)


@op("elect", control=True)
def compile_elect(site: Site) -> Run:
    """``elect.sync d|p, members``: p is true in one lane, d is its number.

    PTX leaves open which, but it is the same one for the same mask. It is the lowest with seed 0, as on the chip; with
    other seeds a lane that depends on the seed and the mask.
    """
    if not site.flag("sync"):
        raise site.refuse("only the .sync form is known")
    site.expect_operands(2)
    first, second = site.pair(0)
    target = site.target(first, "u32")
    p = site.target(second, "pred") if second is not None else -1

    def action(warp: Any, mask: Any) -> None:
        leader = elect_leader(warp.machine.seed, mask)
        np.copyto(warp.rows[target], np.uint32(leader), where=mask)
        if p >= 0:
            np.copyto(warp.rows[p], leader == _LANE, where=mask)

    return together(site, 1, action)


def elect_leader(seed: int, mask: Row) -> int:
    """The lane that ``elect.sync`` elects among those of ``mask``."""
    lanes = lanes_of(mask)
    return lanes[0] if seed == 0 else random.Random(f"{seed} {lanes}").choice(lanes)


@op("activemask")
def compile_activemask(site: Site) -> Run:
    """``activemask.b32``: the lanes that are here."""
    site.take_type("b32")
    site.expect_operands(1)
    target = site.target(0, "u32")

    def run(warp: Any, mask: Any) -> None:
        np.copyto(warp.rows[target], np.uint32(mask_word(mask)), where=mask)

    return run


@op("bar.warp.sync", control=True)
def compile_warp_barrier(site: Site) -> Run:
    """``bar.warp.sync members``: the named lanes may be at different ones."""
    site.flag("warp")
    site.flag("sync")
    site.expect_operands(1)
    return together(site, 0, lambda warp, mask: None, anywhere=True)
