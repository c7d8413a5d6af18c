"""Tensor maps: how ``cp.async.bulk.tensor`` sees a tensor in global memory (PTX 5.5, tiled mode).

The bits of a real tensor map are not documented; the driver writes them. `TensorMap.encode` gives 128 bytes that only
this simulator understands, to be passed where a kernel takes a ``CUtensorMap``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.tensor.descriptors import B32, B64, B128, NONE, WIDTH

BYTES = 128
_MAGIC = b"simtmap1"
_SWIZZLES = (NONE, B32, B64, B128)
DTYPES = ("u8", "u16", "f16", "bf16", "u32", "s32", "f32", "u64", "s64", "f64")
_LAYOUT = "<8sQBBBx5Q4Q5H"


@dataclass(frozen=True)
class TensorMap:
    """A tensor, and the box of it that one copy moves. Dimension 0 is the innermost; its elements are adjacent.

    :param address: of element 0, a multiple of 16.
    :param dtype: one of `DTYPES`, as PTX names types.
    :param shape: elements along each of one to five dimensions.
    :param strides: bytes between neighbours along dimensions 1 and up, multiples of 16.
    :param box: elements along each dimension, at most 256; a row of it is a multiple of 16 bytes.
    :param swizzle: of shared memory; a row must fit its width.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = NONE

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not (1 <= rank <= 5 and len(self.box) == rank and len(self.strides) == rank - 1):
            raise ValueError(f"shape, strides and box must be of 1 to 5, one less, and as many dimensions: {self}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        if self.address % 16 or any(s % 16 or s <= 0 for s in self.strides):
            raise ValueError(f"address and strides must be multiples of 16: {self}")
        if self.swizzle not in _SWIZZLES:
            raise ValueError(f"swizzle must be one of {_SWIZZLES}, got {self.swizzle!r}")
        if not all(1 <= b <= 256 for b in self.box) or self.row_bytes % 16:
            raise ValueError(f"box must be 1 to 256 elements along each dimension, a row of 16-byte units: {self}")
        if self.swizzle != NONE and self.row_bytes > WIDTH[self.swizzle]:
            raise ValueError(f"a row of {self.row_bytes} bytes does not fit the {self.swizzle} swizzle")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.lstrip("busf")) // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of the box along dimension 0."""
        return self.box[0] * self.element_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes of the box, in shared memory."""
        return int(np.prod(self.box)) * self.element_bytes

    def encode(self) -> bytes:
        """The 128 bytes of a kernel's argument."""
        pad = [*self.shape, *([1] * (5 - len(self.shape)))]
        strides = [*self.strides, *([0] * (4 - len(self.strides)))]
        box = [*self.box, *([1] * (5 - len(self.box)))]
        head = (_MAGIC, self.address, len(self.shape), DTYPES.index(self.dtype), _SWIZZLES.index(self.swizzle))
        return struct.pack(_LAYOUT, *head, *pad, *strides, *box).ljust(BYTES, b"\0")

    def locate(self, start: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Global address of every byte of a box, ``(rows, row_bytes)``, and whether it is inside the tensor.

        :param start: coordinates of the box's first element; they may be negative.
        """
        byte = np.arange(self.row_bytes, dtype=np.int64)
        column = start[0] + byte // self.element_bytes
        address = self.address + start[0] * self.element_bytes + byte
        inside = (column >= 0) & (column < self.shape[0])
        for extent, first, stride, count in zip(self.shape[1:], start[1:], self.strides, self.box[1:], strict=True):
            at = first + np.arange(count, dtype=np.int64)
            address = (at * stride)[:, None] + address.reshape(1, -1)
            inside = ((at >= 0) & (at < extent))[:, None] & inside.reshape(1, -1)
        return address.reshape(-1, self.row_bytes), inside.reshape(-1, self.row_bytes)


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    """The inverse of `TensorMap.encode`. :raises Illegal: for other bytes."""
    magic, address, rank, dtype, swizzle, *rest = struct.unpack_from(_LAYOUT, raw)
    if magic != _MAGIC:
        raise faults.Illegal("the operand is no tensor map of this simulator: pass TensorMap(...).encode()")
    shape, strides, box = rest[:5], rest[5:9], rest[9:14]
    return TensorMap(
        address, DTYPES[dtype], tuple(shape[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), _SWIZZLES[swizzle]
    )
