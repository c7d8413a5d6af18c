"""Shared memory as asynchronous operations use it: who filled it, who still reads it.

Note [Shared memory traffic]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two things are known of every 16 bytes, the unit of all asynchronous operations. *Filled by*: the mbarrier, and the
phase of it, whose completion announces the copy that last wrote them; whoever uses them must have observed that phase
(or synchronised with someone who had). *Read by*: the last pipelined operation that takes them as an operand; whoever
overwrites them must know that it is done. *Sent by*: the bulk copy that last read them on its way to global memory;
whoever overwrites them must know that its thread waited for it. All three are tested when an asynchronous operation is
issued and at every generic access, whatever the timing. Before that, the states of `memory.Space` find those generic
accesses that come while an operation is under way. A warp knows what happened before the last release that reached it,
through any chain of barriers, mbarriers, fences and flags; lanes are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.asyncorder import KINDS, PIPE
from flamia.conformance.simulator.machine.mbarriers import Mbarriers
from flamia.conformance.simulator.machine.memory import APPROXIMATE, Space, Token

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.order import Order
    from flamia.conformance.simulator.machine.warp import Warp


_BYTES = np.arange(16)
_UNKNOWN = np.iinfo(np.int64).max
_MANY = 256


class SharedTraffic:
    """Asynchronous use of the shared memory of one CTA."""

    def __init__(self, cta: Cta) -> None:
        self.space: Space = cta.shared
        granules = self.space.data.size // 16
        self._filled_by = np.full(granules, -1, np.int32)
        self._filled_phase = np.zeros(granules, np.int64)
        self._read_by = np.full(granules, -1, np.int32)
        self._read_number = np.zeros(granules, np.int64)
        self._sent_by = np.full(granules, -1, np.int32)
        self._sent_epoch = np.zeros(granules, np.int64)
        self._copies: list[tuple[Callable[[], bool], str]] = []
        self._cta = cta
        cta.at_end(self._check_end)
        self.space.check_traffic = self.check_generic

    def granules(self, address: int, size: int) -> NDArray[np.int64]:
        """The 16-byte units of a range, relative to the CTA's memory."""
        first = address - self.space.base >> 4
        return np.arange(first, first + (size >> 4))

    def bytes_of(self, granules: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the bytes of some units, sorted if they are."""
        return (granules[:, None] * 16 + _BYTES).ravel()

    def check_range(self, granules: NDArray[np.int64], what: str) -> None:
        """:raises BadDescriptor: if a unit lies outside the memory of the CTA."""
        if granules[0] < 0 or granules[-1] * 16 + 16 > self.space.size:
            outside = granules[(granules < 0) | (granules * 16 + 16 > self.space.size)]
            raise asyncfaults.BadDescriptor(
                f"{what} reaches outside the shared memory of {self._cta}", (), int(outside[0]) * 16 + self.space.base
            )

    # --- uses --------------------------------------------------------------------------------------------------------

    def begin_read(self, warp: Warp, granules: NDArray[np.int64], what: str, pipelined: int | None = None) -> Token:
        """An operation of ``warp`` will read these units.

        :param pipelined: its number, if a later overwrite must wait for it.
        :raises Fault: if they are not filled, not fenced, or not waited for.
        """
        self.check_read(warp, granules, what)
        if pipelined is not None:
            self._read_by[granules] = warp.order.asynchronous.entry(PIPE)
            self._read_number[granules] = pipelined
        return self.space.begin_read(self.bytes_of(granules), what)

    def check_read(self, warp: Warp, granules: NDArray[np.int64], what: str) -> None:
        """Whether an asynchronous operation of ``warp`` may read these units. :raises Fault: otherwise."""
        self._check_filled(warp.order, granules, what)
        self._check_fenced(warp, granules, what)

    def begin_fill(self, warp: Warp, address: int, size: int, what: str, mbarrier: int, phase: int) -> Token:
        """A copy issued by ``warp`` will write a range and announce it on phase ``phase`` of an mbarrier.

        :param mbarrier: its number in the cluster.
        :raises Fault: if an operation may still read the range, or has not been waited for.
        """
        granules = self.granules(address, size)
        where = self.space.where(address, size)
        self._check_done(warp.order, granules, what)
        self._check_filled(warp.order, granules, what)
        token = self.space.begin_write(where, what)
        self._filled_by[granules] = mbarrier
        self._filled_phase[granules] = phase + 1
        self._read_by[granules] = -1
        self._sent_by[granules] = -1
        return token

    def send(self, warp: Warp, granules: NDArray[np.int64], what: str) -> tuple[Token, Callable[[], None]]:
        """A bulk copy of ``warp`` reads these units on their way to global memory.

        :returns: what `memory.Space.complete` takes, and what to call when a wait of its thread covered it.
        :raises Fault: as `begin_read`.
        """
        token = self.begin_read(warp, granules, what)
        self._sent_by[granules] = warp.order.slot
        self._sent_epoch[granules] = _UNKNOWN

        def waited() -> None:
            mine = granules[(self._sent_by[granules] == warp.order.slot) & (self._sent_epoch[granules] == _UNKNOWN)]
            self._sent_epoch[mine] = warp.order.epoch

        return token, waited

    def check_generic(self, order: Order, offsets: NDArray[np.int64], writes: bool) -> None:
        """A generic access of a warp with these clocks, at these offsets. :raises Fault: see the note above."""
        granules = offsets >> 4
        what = "a generic store" if writes else "a generic load"
        self._check_filled(order, granules, what)
        if writes:
            self._check_done(order, granules, what)

    def _check_done(self, order: Order, granules: NDArray[np.int64], what: str) -> None:
        """Whether whoever reads these units is known to be done."""
        by = self._read_by[granules]
        if (by >= 0).any():
            late = (by >= 0) & (self._read_number[granules] > order.asynchronous.seen[by])
            if late.any():
                reader = self._warp(int(by[int(np.argmax(late))]) // KINDS)
                self._find(
                    faults.OperandOverwritten,
                    late,
                    granules,
                    f"{what} writes an operand of a tensor-core operation that the warp does not know to be done; "
                    f"{reader} issued it: either it is not waited for, or it came too early, for what is written now",
                )
        by = self._sent_by[granules]
        if (by >= 0).any():
            epoch = self._sent_epoch[granules]
            known = np.where(by == order.slot, order.epoch, order.known[by])
            self._find(
                faults.OperandOverwritten,
                (by >= 0) & (epoch > known),
                granules,
                f"{what} writes the source of a bulk copy that the warp does not know to have been waited for",
            )

    def _warp(self, slot: int) -> Warp:
        """By its number in the cluster."""
        per_cta = len(self._cta.warps)
        return self._cta.cluster.ctas[slot // per_cta].warps[slot % per_cta]

    def _find(self, fault: type[faults.Fault], bad: NDArray[np.bool_], granules: NDArray[np.int64], text: str) -> None:
        if bad.any():
            raise fault(text, (), int(granules[int(np.argmax(bad))]) * 16 + self.space.base)

    def _check_filled(self, order: Order, granules: NDArray[np.int64], what: str) -> None:
        by = self._filled_by[granules]
        if (by < 0).all():
            return
        clocks = order.asynchronous
        late = (by >= 0) & (self._filled_phase[granules] > clocks.seen[clocks.mbarrier_entry(0) + by])
        if not late.any():
            return
        first = int(np.argmax(late))
        number, phase = int(by[first]), int(self._filled_phase[granules][first]) - 1
        barrier = next(m for m in self._cta.cluster.unit(Mbarriers).live.values() if m.number == number)
        raise asyncfaults.Unobserved(
            f"{what} uses bytes of a bulk copy, and phase {phase} of {barrier}, which announces it, was not waited for "
            f"by the warp, nor by one that it synchronised with: they saw {barrier.observed} of its phases, the last "
            "maybe by a wait with a wrong parity",
            (),
            int(granules[first]) * 16 + self.space.base,
        )

    def _check_fenced(self, warp: Warp, granules: NDArray[np.int64], what: str) -> None:
        writer = self.space.writer
        if writer is None:
            return
        tags = writer.reshape(-1, 4)[granules]
        if tags.any() and (unfenced := warp.order.unfenced(tags)).any():
            word = int(np.flatnonzero(unfenced.ravel())[0])
            at = int(granules[word // 4]) * 16 + word % 4 * 4 + self.space.base
            raise faults.MissingProxyFence(
                f"{what} reads through the async proxy what a generic store wrote, with no fence.proxy.async between",
                (),
                at,
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    def watch(self, is_over: Callable[[], bool], what: str) -> None:
        """A bulk copy uses the memory until ``is_over`` says that somebody waited for it, whenever it is done."""
        if len(self._copies) > _MANY:
            self._copies = [copy for copy in self._copies if not copy[0]()]
        self._copies.append((is_over, what))

    def _check_end(self) -> None:
        for is_over, what in self._copies:
            if not is_over():
                raise asyncfaults.UnterminatedCopy(f"{self._cta} ended, and nothing waited for {what}")


def copy_state(source: Space, at: Any, target: Space, to: Any) -> None:
    """Bytes that depend on results of approximate instructions stay marked when they are copied."""
    marks = source.state[at] & APPROXIMATE
    target.state[to] = (target.state[to] & ~np.uint8(APPROXIMATE)) | marks
    target.has_approximate |= bool(marks.any())
