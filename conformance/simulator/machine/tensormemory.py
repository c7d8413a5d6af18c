"""Tensor memory of one CTA: words, allocations, and who last used each part of it.

Note [Tensor memory accesses]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Uses are kept for *cells* of 16 lanes by one column, 8 x 512 of them: every instruction uses whole cells, but for lanes
that ``tcgen05.mma`` is told to leave out. Of each cell the last write is known, and the last read by ``ld`` and by the
tensor core. An access is in order if the accessing warp knows of the conflicting one: Note [Asynchronous order]. If it
does not, the fault says which step is missing on the way from one to the other. Between two operations of the tensor
core that were issued in a known order, no wait may be needed, Note [Pipelined pairs]; those are returned to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import asyncfaults
from flamia.conformance.simulator.machine.asyncorder import KINDS, LOAD, PIPE, STORE, AsyncOrder
from flamia.conformance.simulator.tensor.tmem_layout import COLUMNS, LANES

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.warp import Warp

CELL_LANES = 16
_NOBODY = -1


@dataclass(frozen=True)
class Region:
    """A rectangle of cells. :param rows: in units of 16 lanes; ``step`` 2 for every other."""

    rows: slice
    columns: slice

    @staticmethod
    def of(lanes: range, column: int, width: int) -> Region:
        """From lanes (a multiple of 16 of them) and columns."""
        return Region(slice(lanes.start // CELL_LANES, lanes.stop // CELL_LANES), slice(column, column + width))

    @property
    def address(self) -> int:
        """Of its first word."""
        return int(self.rows.start) * CELL_LANES << 16 | int(self.columns.start)


class _Marks:
    """Who last did something to each cell: entry of `AsyncOrder` and number of the operation."""

    def __init__(self) -> None:
        shape = (LANES // CELL_LANES, COLUMNS)
        self.entry = np.full(shape, _NOBODY, np.int32)
        self.number = np.zeros(shape, np.int64)

    def set(self, region: Region, entry: int, number: int) -> None:
        self.entry[region.rows, region.columns] = entry
        self.number[region.rows, region.columns] = number

    def unknown(self, region: Region, order: AsyncOrder) -> list[tuple[int, int]]:
        """Operations in the region that ``order`` does not know to be done: (entry, number)."""
        entry = self.entry[region.rows, region.columns]
        number = self.number[region.rows, region.columns]
        late = number > order.after[entry]  # entry -1 is the last: always known
        if not late.any():
            return []
        return sorted(set(zip(entry[late].tolist(), number[late].tolist(), strict=True)))


@dataclass(frozen=True)
class Operation:
    """An asynchronous operation, for messages and pairs.

    :param kind: ``ld``, ``st``, ``mma`` or ``cp``.
    :param label: with its PTX line.
    :param accumulator: address, shape and cta_group of an mma's D.
    """

    kind: str
    label: str
    accumulator: tuple[int, int, int, int] | None = None


class TensorMemory:
    """The tensor memory of one CTA.

    :param words: uint32 ``(128, 512)``.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.words: NDArray[np.uint32] = np.zeros((LANES, COLUMNS), np.uint32)
        self._written = np.zeros((LANES // CELL_LANES, COLUMNS), np.bool_)
        self._owner = np.zeros(COLUMNS, np.int32)
        self._allocations: dict[int, int] = {}
        self._freed = np.zeros(COLUMNS, np.bool_)
        self.may_allocate = True
        self._writes, self._loads, self._uses = _Marks(), _Marks(), _Marks()
        cta.at_end(self._check_end)

    # --- allocation --------------------------------------------------------------------------------------------------

    def allocate(self, columns: int) -> int | None:
        """First column of a new allocation; None if there is no room now."""
        for first in range(0, COLUMNS - columns + 1, columns):
            where = slice(first, first + columns)
            if not self._owner[where].any():
                self._owner[where] = 1
                self._allocations[first] = columns
                self._written[:, where] = False
                self._freed[where] = False
                return first
        return None

    def free(self, address: int, columns: int, busy: list[str]) -> None:
        """``tcgen05.dealloc``. :param busy: operations that still use the columns.

        :raises TmemAllocation: for columns that were not allocated so. :raises TmemNotAllocated: if they are in use.
        """
        if self._allocations.get(address) != columns:
            have = ", ".join(f"{c} at {a:#x}" for a, c in self._allocations.items()) or "nothing"
            raise asyncfaults.TmemAllocation(
                f"tcgen05.dealloc of {columns} columns at {address:#x}; allocated: {have}", (), address
            )
        if busy:
            raise asyncfaults.TmemNotAllocated(f"tcgen05.dealloc while {busy[0]} still uses the columns", (), address)
        del self._allocations[address]
        where = slice(address, address + columns)
        self._owner[where] = 0
        self._freed[where] = True
        for marks in (self._writes, self._loads, self._uses):
            marks.entry[:, where] = _NOBODY
        self.cta.machine.changed = True

    def _check_end(self) -> None:
        if self._allocations:
            first, columns = next(iter(self._allocations.items()))
            raise asyncfaults.TmemLeak(f"{self.cta} ended with {columns} columns of tensor memory allocated", (), first)

    # --- accesses ----------------------------------------------------------------------------------------------------

    def read(self, warp: Warp, region: Region, number: int, pipelined: bool, what: str) -> list[Operation]:
        """An operation of ``warp`` reads a region. :param number: of the operation among the warp's of its sort.

        :returns: operations of the tensor core that it follows without a wait.
        :raises Fault: if it may not.
        """
        self._check_allocated(region, what)
        if not self._written[region.rows, region.columns].all():
            missing = ~self._written[region.rows, region.columns]
            row, column = np.argwhere(missing)[0]
            at = (region.rows.start + int(row)) * CELL_LANES << 16 | (region.columns.start + int(column))
            raise asyncfaults.TmemUnwritten(f"{what} reads tensor memory that was never written", (), at)
        before = self._conflicts(self._writes, warp, region, pipelined, what, "written")
        marks, kind = (self._uses, PIPE) if pipelined else (self._loads, LOAD)
        marks.set(region, warp.order.asynchronous.entry(kind), number)
        return before

    def write(self, warp: Warp, region: Region, number: int, pipelined: bool, what: str) -> list[Operation]:
        """An operation of ``warp`` writes a region; see `read`."""
        self._check_allocated(region, what)
        readers = self._conflicts(self._uses, warp, region, pipelined, what, "read")
        self._conflicts(self._loads, warp, region, pipelined, what, "read")
        writers = self._conflicts(self._writes, warp, region, pipelined, what, "written")
        # Who follows the last reader follows the writer that it read from.
        before = readers or writers
        self._writes.set(region, warp.order.asynchronous.entry(PIPE if pipelined else STORE), number)
        self._written[region.rows, region.columns] = True
        return before

    def _check_allocated(self, region: Region, what: str) -> None:
        owner = self._owner[region.columns]
        if owner.all():
            return
        column = region.columns.start + int(np.argmin(owner))
        when = "after its deallocation" if self._freed[column] else "outside every allocation"
        raise asyncfaults.TmemNotAllocated(f"{what} uses column {column} of tensor memory {when}", (), column)

    def _conflicts(
        self, marks: _Marks, warp: Warp, region: Region, pipelined: bool, what: str, verb: str
    ) -> list[Operation]:
        order = warp.order.asynchronous
        found = []
        for entry, number in marks.unknown(region, order):
            slot, kind = divmod(entry, KINDS)
            other = self._warp(slot)
            operation = warp.cta.cluster.unit(Operations).find(entry, number)
            issued = other is warp or order.after[order.issued_entry(slot)] >= number
            if kind == PIPE and pipelined and issued:
                found.append(operation)
                continue
            begin = f"{what} uses tensor memory {verb} by {operation.label} of {other}"
            self._explain(warp, other, kind, number, begin, region.address)
        return found

    def _warp(self, slot: int) -> Warp:
        for cta in self.cta.cluster.ctas:
            for warp in cta.warps:
                if warp.order.slot == slot:
                    return warp
        raise AssertionError(f"no warp {slot}")

    @staticmethod
    def _explain(warp: Warp, other: Warp, kind: int, number: int, begin: str, address: int) -> NoReturn:
        """Name the step that is missing between an operation of ``other`` and an access that conflicts with it."""
        order, theirs = warp.order.asynchronous, other.order.asynchronous
        entry = theirs.entry(kind)
        if order.seen[entry] >= number and (other is not warp or kind == PIPE):
            raise asyncfaults.MissingTensorFence(
                f"{begin}: tcgen05.fence::after_thread_sync is missing behind the wait", (), address
            )
        if kind == PIPE:
            raise asyncfaults.TmemInFlight(
                f"{begin}: no wait for a tcgen05.commit that covers it lies between", (), address
            )
        if other is not warp and order.seen[order.synced_entry(kind, theirs.slot)] < number:
            raise asyncfaults.TensorRace(f"{begin}: nothing orders the two", (), address)
        if not theirs.has_waited(kind, number):
            wait = "ld" if kind == LOAD else "st"
            raise asyncfaults.MissingTensorWait(f"{begin}: tcgen05.wait::{wait} is missing", (), address)
        raise asyncfaults.MissingTensorFence(
            f"{begin}: tcgen05.fence::before_thread_sync is missing behind it", (), address
        )


class Operations:
    """The asynchronous operations of a cluster's warps, for messages: by entry of `AsyncOrder` and number."""

    def __init__(self, cluster: object) -> None:
        self._known: dict[tuple[int, int], Operation] = {}

    def add(self, entry: int, number: int, operation: Operation) -> None:
        """Remember an operation."""
        self._known[entry, number] = operation

    def find(self, entry: int, number: int) -> Operation:
        """The operation with this number."""
        return self._known[entry, number]
