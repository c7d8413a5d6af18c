"""``wgmma.mma_async`` of Hopper, its fence and its groups (PTX 9.7.15).

Note [wgmma registers]
~~~~~~~~~~~~~~~~~~~~~~
The four warps of a warpgroup issue a product together: it begins when the last of them comes, and is executed after a
random delay, in the order of issue. Until a ``wait_group`` that covers it, D, and A if it is in registers, are in
flight (Note [Registers in flight]); exempt are a ``wgmma`` with the same D, which is pipelined behind, and one that
reads the same A. Registers that an instruction wrote since the last ``wgmma.fence`` may not enter a product, and the
first product needs a fence in any case; ``mov`` does not count here either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.asyncorder import PIPE
from flamia.conformance.simulator.machine.memory import Token
from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.registeruse import Holder
from flamia.conformance.simulator.machine.sharedtraffic import SharedTraffic
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.ops.asynchronous import Mask, later, line_of, need_converged, translate
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.tcgen05_alloc import take_aligned
from flamia.conformance.simulator.ops.wgmma_form import Form, take_form
from flamia.conformance.simulator.tensor.descriptors import Descriptor, decode_wgmma
from flamia.conformance.simulator.tensor.evaluate import evaluate_wgmma
from flamia.conformance.simulator.tensor.fragments import gather_accumulator, operand_bytes, scatter_accumulator
from flamia.conformance.simulator.tensor.swizzle import operand_addresses, operand_granules

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.warp import Warp

_WARPS = 4
_STEP_BYTES = 32


@dataclass(eq=False)
class _Product:
    """One ``wgmma.mma_async`` of a warpgroup.

    :param a, b: descriptors; ``a`` None if A is in registers.
    :param numbers: of the operation among those of each warp, by its slot in the cluster.
    """

    form: Form
    a: Descriptor | None
    b: Descriptor
    accumulate: bool
    what: str
    warps: dict[int, Warp] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    holders: dict[int, Holder] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    done: bool = False

    def same(self, other: _Product) -> bool:
        """Whether two warps mean the same product."""
        return (self.form, self.a, self.b, self.accumulate) == (other.form, other.a, other.b, other.accumulate)

    def operands(self) -> list[tuple[Descriptor, int, int, bool]]:
        """Operands in shared memory: descriptor, rows, bytes of an element, majorness."""
        f = self.form
        b = (self.b, f.n, max(f.b.bits // 8, 1), f.b_mn_major)
        return [b] if self.a is None else [(self.a, 64, max(f.a.bits // 8, 1), f.a_mn_major), b]


class _Group:
    """A warpgroup: the products of which not all warps came yet, by their number."""

    def __init__(self) -> None:
        self.open: dict[int, _Product] = {}


class _Warpgroups:
    """The warpgroups of a CTA."""

    def __init__(self, cta: Cta) -> None:
        self.groups: dict[int, _Group] = {}

    def of(self, warp: Warp) -> _Group:
        return self.groups.setdefault(warp.index // _WARPS, _Group())


class _Pending:
    """What one warp has issued and not waited for. :param fenced: whether it executed a ``wgmma.fence`` at all."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.fenced = False
        self.issued = 0
        self.open: list[_Product] = []
        self.groups: list[list[_Product]] = []

    def products(self) -> list[_Product]:
        return [p for group in (*self.groups, self.open) for p in group]

    def hold_registers(self) -> None:
        """Registers of what is pending are in flight, and no others of wgmma."""
        self.warp.in_flight.clear()
        for product in self.products():
            product.holders[self.warp.index % _WARPS].hold(self.warp)


@op("wgmma.mma_async", control=True)
def compile_mma(site: Site) -> Run:
    """``wgmma.mma_async.sync.aligned.m64nNkK.f32.atype.btype``; see `take_form`."""
    site.flag("mma_async")
    if site.flag("sp"):
        raise site.refuse("sparse products (.sp) are not simulated")
    take_aligned(site)
    form = translate(take_form)(site)
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, what)
        pending = warp.unit(_Pending)
        _check_registers(warp, pending, form, what)
        product = _read(warp, mask, form, what)
        group = warp.cta.unit(_Warpgroups).of(warp)
        shared = group.open.setdefault(pending.issued, product)
        if not shared.same(product):
            raise asyncfaults.WarpgroupMismatch(f"{what}: {warp} and another warp of its warpgroup differ in operands")
        number = warp.order.asynchronous.issue(PIPE)
        at = warp.index % _WARPS
        shared.warps[at], shared.numbers[warp.order.slot] = warp, number
        shared.holders[at] = Holder(what, list(form.d_names), form.a_names)
        traffic = warp.cta.unit(SharedTraffic)
        for operand in product.operands():
            granules = operand_granules(operand[0], operand[1], _STEP_BYTES, *operand[2:])
            traffic.check_range(granules, what)
            traffic.check_read(warp, granules, what)
        if len(shared.warps) == _WARPS:
            del group.open[pending.issued]
            _launch(site, warp, shared, traffic, number)
        pending.issued += 1
        pending.open.append(shared)
        pending.hold_registers()

    return translate(run)


def _check_registers(warp: Warp, pending: _Pending, form: Form, what: str) -> None:
    """See Note [wgmma registers]. :raises Fault: for registers that may not enter the product now."""
    if not pending.fenced:
        raise asyncfaults.MissingWgmmaFence(f"{what}: no wgmma.fence was executed before it")
    mine = form.names
    assert warp.log is not None
    segments = warp.program.segments
    for at in warp.log:
        if not (written := segments[at].written).isdisjoint(mine):
            name = min(written & mine).split("@")[0]
            raise asyncfaults.MissingWgmmaFence(f"{what} takes register {name}, written since the last wgmma.fence")
    for product in pending.products():
        other = product.form
        if other.d_names != form.d_names and not other.names.isdisjoint(form.d_names):
            clash = set(other.names) & set(form.d_names)
        else:
            clash = set(form.a_names) & set(other.d_names)
        if clash:
            raise asyncfaults.RegisterInFlight(
                f"{what} uses register {min(clash).split('@')[0]}, held by {product.what}"
            )


def _read(warp: Warp, mask: Mask, form: Form, what: str) -> _Product:
    rows = warp.rows
    a = None if form.a_rows else decode_wgmma(warp.uniform(form.a_row, mask))
    accumulate = form.accumulate
    if form.scale_row >= 0:
        lanes = rows[form.scale_row][mask]
        if lanes.any() != lanes.all():
            raise faults.NotUniform(f"{what}: scale-d differs between lanes")
        accumulate = bool(lanes[0]) != form.scale_negated
    return _Product(form, a, decode_wgmma(warp.uniform(form.b_row, mask)), accumulate, what)


def _launch(site: Site, warp: Warp, product: _Product, traffic: SharedTraffic, number: int) -> None:
    for operand in product.operands():
        granules = operand_granules(operand[0], operand[1], _STEP_BYTES, *operand[2:])
        product.tokens.append(traffic.begin_read(warp, granules, product.what, number))
    cta, fast = warp.cta, warp.machine.fast_mma

    def execute() -> None:
        _execute(product, cta, fast)
        for token in product.tokens:
            token.space.complete(token)
        product.done = True

    later(site, warp, f"{cta} tensor core of warpgroup {warp.index // _WARPS}", execute, product.what)


def _execute(product: _Product, cta: Cta, fast: bool) -> None:
    """Compute D from shared memory and registers as they are now."""
    form = product.form
    warps = [product.warps[w] for w in range(_WARPS)]
    read = [cta.shared.data[operand_addresses(d, rows, _STEP_BYTES, e, mn)] for d, rows, e, mn in product.operands()]
    if product.a is None:
        read.insert(0, operand_bytes(_stack(warps, form.a_rows)))
    acc = gather_accumulator(_stack(warps, form.d_rows), form.n) if product.accumulate else None
    result = evaluate_wgmma(
        form.a, form.b, read[0], read[1], acc, negate_a=form.negate_a, negate_b=form.negate_b, fast=fast
    )
    for warp, values in zip(warps, scatter_accumulator(result), strict=True):
        for row, value in zip(form.d_rows, values, strict=True):
            warp.rows[row][...] = value
    for holder in product.holders.values():
        holder.finish()


def _stack(warps: list[Warp], rows: tuple[int, ...]) -> NDArray[Any]:
    """Registers ``(4 warps, registers, 32)``."""
    return np.stack([np.stack([warp.rows[row] for row in rows]) for warp in warps])


@op("wgmma.fence", control=True)
def compile_fence(site: Site) -> Run:
    """``wgmma.fence.sync.aligned``."""
    site.flag("fence")
    take_aligned(site)
    site.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, "wgmma.fence")
        warp.unit(_Pending).fenced = True
        if warp.log is not None:
            warp.log.clear()

    return run


@op("wgmma.commit_group", control=True)
def compile_commit(site: Site) -> Run:
    """``wgmma.commit_group.sync.aligned``: what was issued since the last one is a group, an empty one if nothing."""
    site.flag("commit_group")
    take_aligned(site)
    site.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        need_converged(warp, mask, "wgmma.commit_group")
        pending = warp.unit(_Pending)
        pending.groups.append(pending.open)
        pending.open = []

    return run


@op("wgmma.wait_group", control=True)
def compile_wait(site: Site) -> Run:
    """``wgmma.wait_group.sync.aligned N``: until at most the N latest groups are under way."""
    site.flag("wait_group")
    take_aligned(site)
    site.expect_operands(1)
    most = site.integer(0)

    def run(warp: Warp, mask: Mask) -> Blocked | None:
        need_converged(warp, mask, "wgmma.wait_group")
        pending = warp.unit(_Pending)
        older = pending.groups[: max(0, len(pending.groups) - most)]
        awaited = [product for group in older for product in group]

        def ready() -> bool:
            return all(product.done for product in awaited)

        def finish() -> None:
            order = warp.order.asynchronous
            for product in awaited:
                for slot, number in product.numbers.items():
                    order.finished(slot, number)
            del pending.groups[: len(older)]
            pending.hold_registers()

        if not ready():
            return Blocked(f"wgmma.wait_group {most}", ready, finish)
        finish()
        return None

    return run
