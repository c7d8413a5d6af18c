"""Global memory as the host sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.memory import GUARD, READ_ONLY, WRITTEN, Space
from flamia.conformance.simulator.machine.windows import GLOBAL_BASE


@dataclass(frozen=True)
class Uninitialised:
    """A buffer of ``nbytes`` that nothing has written: reading it before a kernel writes it is a fault."""

    nbytes: int


@dataclass(eq=False)
class Buffer:
    """A piece of global memory.

    :param array: of the host, read before and written after a launch; None for bytes that live here alone.
    :param written: whether the host wrote it.
    """

    address: int
    nbytes: int
    name: str
    array: NDArray[Any] | None
    written: bool
    read_only: bool = False


class DeviceMemory:
    """Buffers with addresses. They outlast a launch, so that kernels can follow each other.

    Variables of a module (``__device__``, ``__constant__``) are no buffers: every launch begins with their initial
    values.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._next = GLOBAL_BASE + GUARD
        self._kept: tuple[Space, int] | None = None

    def allocate(
        self,
        what: NDArray[Any] | Uninitialised,
        name: str = "",
        read_only: bool = False,
        initialised: bool = True,
    ) -> int:
        """Give a buffer an address.

        :param what: a C-contiguous array, which launches read and write in place; or `Uninitialised`. The same array
            once more is the same buffer.
        :param read_only: whether a store is a fault; always so for an array that cannot be written.
        :param initialised: whether what an array holds may be read.
        :returns: the address, a multiple of 256.
        :raises ValueError: for an array that is not contiguous, or that overlaps another one.
        """
        array = None if isinstance(what, Uninitialised) else what
        if array is not None:
            if not array.flags.c_contiguous:
                raise ValueError(f"buffer {name or '?'} must be C-contiguous, got strides {array.strides}")
            known = self._find(array, name or "?")
            if known is not None:
                known.read_only |= read_only
                return known.address
            read_only |= not array.flags.writeable
        nbytes = what.nbytes
        address = self._next
        number = len(self.buffers)
        self.buffers.append(
            Buffer(address, nbytes, name or f"buffer {number}", array, array is not None and initialised, read_only)
        )
        self._next = -(-(address + max(nbytes, 1) + GUARD) // 256) * 256
        return address

    def _find(self, array: NDArray[Any], name: str) -> Buffer | None:
        """The buffer that is the same memory of the host. :raises ValueError: for one that overlaps."""
        for b in self.buffers:
            if b.array is None or not np.may_share_memory(array, b.array):
                continue
            if (array.ctypes.data, array.nbytes) == (b.array.ctypes.data, b.nbytes):
                return b
            raise ValueError(f"buffer {name} must be the array of buffer {b.name} or apart from it, got an overlap")
        return None

    def open(self) -> Space:
        """The arena of a launch, filled from the arrays."""
        size = self._next - GLOBAL_BASE + GUARD
        space = Space("global memory", GLOBAL_BASE, size)
        if self._kept is not None:
            old, n = self._kept
            space.data[:n], space.state[:n] = old.data[:n], old.state[:n]
        known = 0 if self._kept is None else self._kept[1]
        for b in self.buffers:
            at = slice(b.address - GLOBAL_BASE, b.address - GLOBAL_BASE + b.nbytes)
            if at.stop > known:
                space.allocate(b.address, b.nbytes)
            space.state[at] = (space.state[at] & ~np.uint8(READ_ONLY)) | (READ_ONLY if b.read_only else 0)
            if b.written:
                space.state[at] |= WRITTEN
            if b.array is not None:
                space.data[at] = np.frombuffer(b.array.tobytes(), np.uint8)
        return space

    def close(self, space: Space) -> None:
        """Write an arena back into the arrays."""
        self._kept = (space, self._next - GLOBAL_BASE)
        for b in self.buffers:
            where = slice(b.address - GLOBAL_BASE, b.address - GLOBAL_BASE + b.nbytes)
            if b.array is not None and not b.read_only:
                flat = b.array.reshape(-1).view(np.uint8)
                flat[:] = space.data[where]

    def read(self, address: int, dtype: Any, count: int) -> NDArray[Any]:
        """What the last launch left at ``address``.

        :raises UnwrittenRead: for bytes that no kernel wrote.
        """
        if self._kept is None:
            raise ValueError("nothing was launched on this memory yet")
        space = self._kept[0]
        where = space.where(address, count * np.dtype(dtype).itemsize)
        if not (space.state[where] & WRITTEN).all():
            raise faults.UnwrittenRead(f"bytes from {address:#x} were never written", (), address)
        return space.data[where].copy().view(dtype)

    def name_of(self, address: int) -> str:
        """The buffer that holds an address."""
        for b in self.buffers:
            if b.address <= address < b.address + b.nbytes:
                return b.name
        return "no buffer"
