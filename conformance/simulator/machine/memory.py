"""Byte-addressed memory with a state per byte.

Every space is an array of bytes beside an array of states of the same shape. A lane's access looks at the states of
all of its bytes at once: both arrays are viewed with the width of the access. Addresses outside the array are
clipped into guard bytes at its ends, whose state is 0, so that one test finds them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.types import FULL, LANES, lanes_of

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.order import Order

ALLOCATED, WRITTEN, READ_ONLY, IN_FLIGHT, BEING_READ, APPROXIMATE = 1, 2, 4, 8, 16, 32
GUARD = 1024
"""Bytes at either end of a space that belong to nobody."""

_UNIT: dict[int, Any] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def _spread(bits: int, width: int) -> int:
    """The state byte repeated over ``width`` bytes, at most 8."""
    return int.from_bytes(bytes([bits]) * width, "little")


@dataclass(eq=False)
class Token:
    """A range that an asynchronous operation reads or writes.

    :param where: slice or indices into the arrays of the space.
    """

    space: Space
    where: Any
    writes: bool
    label: str
    done: bool = False


class Space:
    """One memory: ``size`` bytes from address ``base``, guards included.

    :param name: for messages.
    """

    def __init__(self, name: str, base: int, size: int) -> None:
        self.name, self.base, self.size = name, base, size
        padded = -(-size // 64) * 64
        self.data: NDArray[np.uint8] = np.zeros(padded, np.uint8)
        self.state: NDArray[np.uint8] = np.zeros(padded, np.uint8)
        self.writer: NDArray[np.uint32] | None = None  # per 4 bytes: warp << 16 | epoch, see Note [Proxy order]
        self.has_approximate = False  # whether any byte may be so marked
        # Of shared memory that asynchronous operations use: (who, int64 offsets of the lanes, whether they write).
        self.check_traffic: Callable[[Order, NDArray[np.int64], bool], None] | None = None
        self._readers: NDArray[np.uint8] | None = None
        self._views: dict[tuple[int, int], tuple[Any, Any, int]] = {}
        self.tokens: list[Token] = []

    def view(self, unit: int, count: int) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Data and states as ``(cells, count)`` units, and log2 of the bytes of a cell."""
        key = (unit, count)
        if key not in self._views:
            cell = unit * count
            shape = (-1,) if count == 1 else (-1, count)
            cut = self.data.size // cell * cell
            dtype = _UNIT[unit]
            self._views[key] = (
                self.data[:cut].view(dtype).reshape(shape),
                self.state[:cut].view(dtype).reshape(shape),
                cell.bit_length() - 1,
            )
        return self._views[key]

    # --- accesses of lanes -------------------------------------------------------------------------------------------

    def load(
        self,
        address: NDArray[np.int64],
        unit: int,
        count: int,
        mask: NDArray[np.bool_],
        by: Order | None = None,
    ) -> NDArray[Any]:
        """What the lanes of ``mask`` read: (32,) or (32, count) unsigned units; other lanes give anything.

        :param address: int64 (32,).
        :param by: clocks of the warp, Note [Shared memory traffic].
        :raises Fault: for a lane whose bytes it may not read.
        """
        data, state, shift = self.view(unit, count)
        relative = address - self.base if self.base else address
        cell = relative >> shift
        need = _NEED_LOAD[unit, count]
        if mask is FULL:
            found = state.take(cell, 0, mode="clip")
            wrong = (found & need[0]).tobytes() != need[1] or (relative & (unit * count - 1)).tobytes() != _ZEROS
        else:
            found = state.take(cell[mask], 0, mode="clip")
            wrong = bool(((found & need[0]) != need[2]).any() or (relative[mask] & (unit * count - 1)).any())
        if wrong:
            self._check(relative, unit * count, mask, writes=False)
        if self.check_traffic is not None and by is not None:
            self.check_traffic(by, relative if mask is FULL else relative[mask], False)
        return data.take(cell, 0, mode="clip")

    def store(
        self,
        address: NDArray[np.int64],
        values: NDArray[Any],
        unit: int,
        count: int,
        mask: NDArray[np.bool_],
        writer: int = 0,
        state: int = WRITTEN,
        by: Order | None = None,
    ) -> None:
        """The lanes of ``mask`` write (32,) or (32, count) unsigned units.

        :param writer: of Note [Proxy order].
        :param state: bits to set, `APPROXIMATE` among them for such values.
        :param by: clocks of the warp, Note [Shared memory traffic].
        :raises Fault: for a lane whose bytes it may not write.
        """
        data, states, shift = self.view(unit, count)
        relative = address - self.base if self.base else address
        if mask is not FULL:
            relative, values = relative[mask], values[mask]
        cell = relative >> shift
        found = states.take(cell, 0, mode="clip")
        need = _NEED_STORE[unit, count]
        size = unit * count
        if mask is FULL:
            wrong = (found & need[0]).tobytes() != need[1] or (relative & (size - 1)).tobytes() != _ZEROS
        else:
            wrong = bool(((found & need[0]) != need[2]).any() or (relative & (size - 1)).any())
        if wrong:
            self._check(address - self.base, size, mask, writes=True)
        if self.check_traffic is not None and by is not None:
            self.check_traffic(by, relative, True)
        data[cell] = values
        self.has_approximate |= bool(state & APPROXIMATE)
        states[cell] = (
            (found | _spread(state, unit))
            if state & APPROXIMATE
            else (found & _NOT_APPROXIMATE[unit]) | (_spread(state, unit))
        )
        if self.writer is not None:
            if size <= 4:
                self.writer[relative >> 2] = writer
            else:
                self.writer.reshape(-1, size // 4)[cell] = writer

    def finds_approximate(self, address: NDArray[np.int64], unit: int, count: int, mask: NDArray[np.bool_]) -> bool:
        """Whether any byte that the lanes of ``mask`` read there is marked."""
        if not self.has_approximate:
            return False
        _, state, shift = self.view(unit, count)
        found = state.take((address[mask] - self.base) >> shift, 0, mode="clip")
        return bool((found & _UNIT[unit].type(_spread(APPROXIMATE, unit))).any())

    def _check(self, relative: NDArray[np.int64], size: int, mask: NDArray[np.bool_], writes: bool) -> None:
        """Find the first rule that lanes of ``mask`` break, if they do."""
        bad = mask & ((relative & (size - 1)) != 0)
        if bad.any():
            self._fail(faults.Misaligned, f"{self._verb(writes)} of {size} bytes in {self.name}", bad, relative)
        index = relative[:, None] + np.arange(size)
        outside = (index < 0) | (index >= self.size)
        state = np.where(outside, 0, self.state[np.clip(index, 0, self.state.size - 1)])
        for fault, wrong, text in self._rules(state, writes):
            bad = mask & wrong.any(1)
            if bad.any():
                self._fail(fault, f"{self._verb(writes)} of {size} bytes in {self.name} {text}", bad, relative)

    @staticmethod
    def _verb(writes: bool) -> str:
        return "write" if writes else "read"

    @staticmethod
    def _rules(state: NDArray[np.uint8], writes: bool) -> list[tuple[type[faults.Fault], NDArray[np.bool_], str]]:
        outside = (faults.OutOfBounds, (state & ALLOCATED) == 0, "outside every allocation")
        flight = faults.InFlightWrite if writes else faults.InFlightRead
        flying = (flight, (state & IN_FLIGHT) != 0, "that an asynchronous operation is still writing")
        if not writes:
            return [outside, flying, (faults.UnwrittenRead, (state & WRITTEN) == 0, "that was never written")]
        return [
            outside,
            flying,
            (faults.OperandOverwritten, (state & BEING_READ) != 0, "that an asynchronous operation is still reading"),
            (faults.ReadOnly, (state & READ_ONLY) != 0, "that are read-only"),
        ]

    def _fail(self, kind: type[faults.Fault], text: str, bad: NDArray[np.bool_], relative: NDArray[np.int64]) -> None:
        lanes = lanes_of(bad)
        raise kind(text, lanes, int(relative[lanes[0]]) + self.base)

    # --- ranges of asynchronous operations ---------------------------------------------------------------------------

    def where(self, address: int, size: int) -> slice:
        """Slice into the arrays, of ``size`` bytes from ``address``.

        :raises OutOfBounds: if it leaves the space.
        """
        start = address - self.base
        if start < 0 or start + size > self.size:
            raise faults.OutOfBounds(f"{size} bytes from {address:#x} leave {self.name}", (), address)
        return slice(start, start + size)

    def check_range(self, where: Any, writes: bool) -> None:
        """The rules of a lane's access, for the bytes ``where`` (slice or indices)."""
        state = self.state[where].reshape(-1, 1)
        for fault, wrong, text in self._rules(state, writes):
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                at = where.start + first if isinstance(where, slice) else int(np.ravel(where)[first])
                raise fault(f"asynchronous {self._verb(writes)} in {self.name} of bytes {text}", (), at + self.base)

    def begin_read(self, where: Any, label: str) -> Token:
        """An asynchronous operation starts to read: from now on a write is a fault, until `complete`."""
        self.check_range(where, writes=False)
        if self._readers is None:
            self._readers = np.zeros(self.data.size, np.uint8)
        if isinstance(where, slice):
            self._readers[where] += 1
        else:
            if (np.diff(where) <= 0).any():
                where = np.unique(where)
            self._readers[where] += 1
        self.state[where] |= BEING_READ
        return self._open(where, False, label)

    def begin_write(self, where: Any, label: str) -> Token:
        """An asynchronous operation starts to write: from now on any access is a fault, until `complete`."""
        self.check_range(where, writes=True)
        self.state[where] |= IN_FLIGHT
        return self._open(where, True, label)

    def _open(self, where: Any, writes: bool, label: str) -> Token:
        token = Token(self, where, writes, label)
        self.tokens.append(token)
        return token

    def complete(self, token: Token) -> None:
        """The operation is done: its bytes count as written, or may be written again."""
        token.done = True
        self.tokens.remove(token)
        where = token.where
        if token.writes:
            # Written by the async proxy: no proxy fence is needed to read it there.
            self.state[where] = (self.state[where] & ~np.uint8(IN_FLIGHT)) | WRITTEN
            if self.writer is not None:
                if isinstance(where, slice):
                    self.writer[where.start >> 2 : -(-where.stop // 4)] = 0
                else:
                    self.writer[np.unique(np.asarray(where) >> 2)] = 0
            return
        assert self._readers is not None
        self._readers[where] -= 1
        self.state[where] &= np.where(self._readers[where] == 0, ~np.uint8(BEING_READ), np.uint8(255))

    # --- the host's side ---------------------------------------------------------------------------------------------

    def allocate(self, address: int, size: int, state: int = 0) -> slice:
        """Give ``size`` bytes from ``address`` to somebody."""
        where = self.where(address, size)
        self.state[where] = ALLOCATED | state
        return where


_ZEROS = bytes(8 * LANES)
_NOT_APPROXIMATE = {u: np.array(_spread(255 & ~APPROXIMATE, u), _UNIT[u])[()] for u in _UNIT}


def _needs(look: int, want: int) -> dict[tuple[int, int], tuple[Any, bytes, Any]]:
    """By unit and count: the bits to look at, what 32 lanes must show, and the same for one unit."""
    out = {}
    for unit, dtype in _UNIT.items():
        for count in (1, 2, 4, 8):
            one = np.array(_spread(want, unit), dtype)[()]
            out[unit, count] = (
                np.array(_spread(look, unit), dtype)[()],
                np.full(LANES * count, one, dtype).tobytes(),
                one,
            )
    return out


_NEED_LOAD = _needs(ALLOCATED | WRITTEN | IN_FLIGHT, ALLOCATED | WRITTEN)
_NEED_STORE = _needs(ALLOCATED | IN_FLIGHT | BEING_READ | READ_ONLY, ALLOCATED)
