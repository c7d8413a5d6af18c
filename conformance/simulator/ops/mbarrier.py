"""``mbarrier.*`` (PTX 9.7.13.15). See Note [mbarrier phases].

A state, the opaque 64-bit result of an arrival, holds here the phase in bits 20 and up and the pending count, before
the arrival, below.

Note [try_wait gives up]
~~~~~~~~~~~~~~~~~~~~~~~~
PTX lets ``try_wait`` return false after a time limit that the system sets, so it belongs into a loop. Here it does so
at once in one of `GIVES_UP` executions, by the seed, and otherwise waits for its phase without a limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flamia.conformance.simulator.machine import asyncfaults
from flamia.conformance.simulator.machine.mbarriers import Mbarrier, Mbarriers, find_cta
from flamia.conformance.simulator.machine.order import Knowledge
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.ops.asynchronous import Mask, compile_shared_address
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ptx.syntax import Sink

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp

_SPACES = ("shared::cta", "shared::cluster", "shared")
_STATE_SHIFT = 20
GIVES_UP = 4
"""Of so many ``try_wait`` whose phase is not complete, one returns false. See Note [try_wait gives up]."""


def _unit(warp: Warp) -> Mbarriers:
    return warp.cta.cluster.unit(Mbarriers)


def _find(warp: Warp, address: int) -> Mbarrier:
    find_cta(warp.cta.cluster, address)
    return _unit(warp).find(address, warp)


def _take_order(site: Site) -> bool:
    """Whether the operation is ``.relaxed``; its scope changes nothing here."""
    relaxed = site.take("relaxed", "release", "acquire") == "relaxed"
    site.take("cta", "cluster")
    return relaxed


@op("mbarrier.init", control=True)
def compile_init(site: Site) -> Run:
    """``mbarrier.init{.shared{::cta}}.b64 [addr], count``."""
    site.flag("init")
    site.take_type("b64")
    address = compile_shared_address(site, 0, site.take("shared::cta", "shared"))
    count = site.row(1, "u32")

    def run(warp: Warp, mask: Mask) -> None:
        at = address(warp, mask)
        for lane in lanes_of(mask):
            find_cta(warp.cta.cluster, int(at[lane]))
            _unit(warp).init(int(at[lane]), int(warp.rows[count][lane]), warp)

    return run


@op("mbarrier.inval", control=True)
def compile_inval(site: Site) -> Run:
    """``mbarrier.inval{.shared{::cta}}.b64 [addr]``."""
    site.flag("inval")
    site.take_type("b64")
    address = compile_shared_address(site, 0, site.take("shared::cta", "shared"))

    def run(warp: Warp, mask: Mask) -> None:
        at = address(warp, mask)
        for lane in lanes_of(mask):
            _unit(warp).invalidate(int(at[lane]), warp)

    return run


@op("mbarrier.expect_tx", "mbarrier.complete_tx", control=True)
def compile_tx(site: Site) -> Run:
    """``mbarrier.expect_tx`` and ``mbarrier.complete_tx``: no arrival, no order."""
    action = site.take("expect_tx", "complete_tx")
    site.take_type("b64")
    _take_order(site)
    address = compile_shared_address(site, 0, site.take(*_SPACES))
    nbytes = site.row(1, "u32")

    def run(warp: Warp, mask: Mask) -> None:
        at = address(warp, mask)
        for lane in lanes_of(mask):
            found = _find(warp, int(at[lane]))
            (found.expect if action == "expect_tx" else found.complete)(int(warp.rows[nbytes][lane]))

    return run


@op("mbarrier.arrive", "mbarrier.arrive_drop", control=True)
def compile_arrive(site: Site) -> Run:
    """``mbarrier.arrive{_drop}{.noComplete}{.expect_tx} state|_, [addr]{, count | txCount}``, remote ones included."""
    drop = site.take("arrive", "arrive_drop") == "arrive_drop"
    expect, no_complete = site.flag("expect_tx"), site.flag("noComplete")
    site.take_type("b64")
    relaxed = _take_order(site)
    space = site.take(*_SPACES)
    operands = list(site.operands)
    state = -1
    if len(operands) > 1 and not hasattr(operands[0], "base"):
        first = operands.pop(0)
        if not isinstance(first, Sink):
            if space == "shared::cluster":
                raise site.refuse("an arrival on shared::cluster gives no state: write _")
            state = site.target(first, "b64")
    address = compile_shared_address(site, operands[0], space)
    number = site.row(operands[1], "u32") if len(operands) > 1 else -1
    if (expect or no_complete) and number < 0:
        raise site.refuse("a count is missing")

    def run(warp: Warp, mask: Mask) -> None:
        at = address(warp, mask)
        knowledge = _knowledge(warp, relaxed)
        for lane in lanes_of(mask):
            found = _find(warp, int(at[lane]))
            value = int(warp.rows[number][lane]) if number >= 0 else 1
            count = 1 if expect else value
            if count < 1:
                raise asyncfaults.MbarrierMisuse(f"{found}: the count of an arrival must be positive, got {count}")
            before = found.phase << _STATE_SHIFT | found.pending
            if expect:
                found.expect(value)
            if drop:
                found.expected -= count
            found.arrive(count, knowledge, may_complete=not no_complete)
            if state >= 0:
                warp.rows[state][lane] = before

    return run


def _knowledge(warp: Warp, relaxed: bool) -> Knowledge:
    released = warp.order.release()
    if not relaxed:
        return released
    nothing = np.zeros_like(released.known)
    return Knowledge(nothing, nothing, released.seen)


@op("mbarrier.pending_count", control=True)
def compile_pending_count(site: Site) -> Run:
    """``mbarrier.pending_count.b64 count, state``."""
    site.flag("pending_count")
    site.take_type("b64")
    target, state = site.target(0, "u32"), site.row(1, "u64")

    def run(warp: Warp, mask: Mask) -> None:
        warp.rows[target][mask] = warp.rows[state][mask] & np.uint64((1 << _STATE_SHIFT) - 1)

    return run


@op("mbarrier.test_wait", "mbarrier.try_wait", control=True)
def compile_wait(site: Site) -> Run:
    """``mbarrier.{test,try}_wait{.parity} p, [addr], state | parity{, time}``."""
    blocking = site.take("test_wait", "try_wait") == "try_wait"
    parity = site.flag("parity")
    site.take_type("b64")
    relaxed = _take_order(site)
    address = compile_shared_address(site, 1, site.take("shared::cta", "shared"))
    target = site.target(0, "pred")
    wanted = site.row(2, "u32" if parity else "u64")
    if len(site.operands) == 4:
        site.row(3, "u32")

    def is_complete(found: Mbarrier, value: int) -> bool:
        if parity:
            return found.is_complete(value)
        phase = value >> _STATE_SHIFT
        if phase > found.phase or phase < found.phase - 1:
            raise asyncfaults.MbarrierMisuse(
                f"{found}: a state of phase {phase} where phase {found.phase} is current", (), found.address
            )
        return phase < found.phase

    def run(warp: Warp, mask: Mask) -> Any:
        at = address(warp, mask)
        values = warp.rows[wanted]
        tested = []
        for place, value in sorted({(int(at[lane]), int(values[lane])) for lane in lanes_of(mask)}):
            if parity and value > 1:
                raise asyncfaults.MbarrierMisuse(f"parity must be 0 or 1, got {value}", lanes_of(mask), place)
            tested.append((_find(warp, place), place, value))
        results = {(place, value): is_complete(found, value) for found, place, value in tested}
        gives_up = blocking and not any(results.values()) and warp.machine.random.randrange(GIVES_UP) == 0
        if blocking and not gives_up and not any(results.values()):
            for found, _, _ in tested:
                found.waiting.setdefault(warp, found.phase)
            found, _, value = tested[0]
            what = f"parity {value}" if parity else f"phase {value >> _STATE_SHIFT}"
            return Blocked(
                f"mbarrier {found.address:#x} {what}",
                lambda: any(is_complete(f, v) for f, _, v in tested),
            )
        for found, place, value in tested:
            if results[place, value]:
                if relaxed:
                    _observe_relaxed(found, warp)
                else:
                    found.observe(warp)
        for lane in lanes_of(mask):
            warp.rows[target][lane] = results[int(at[lane]), int(values[lane])]
        return None

    return run


def _observe_relaxed(found: Mbarrier, warp: Warp) -> None:
    """See a phase without acquiring what generic accesses others made."""
    ready = found.ready
    if ready is not None:
        nothing = np.zeros_like(ready.known)
        found.ready = Knowledge(nothing, nothing, ready.seen)
    try:
        found.observe(warp)
    finally:
        found.ready = ready
