"""Where the elements of a matrix operand lie in shared memory.

Note [Canonical layouts]
~~~~~~~~~~~~~~~~~~~~~~~~
PTX 9.7.16.10.6 (and 9.7.15.5.1.2 for wgmma, which is the same) gives CuTe layouts over 16-byte units. Written out for
the element in row r (along M or N) and contracted position k, with W the bytes of one row of the swizzle pattern, as
the byte offset from the start address::

    K-major,  none      (r % 8) 16 + (r / 8) stride + (kb % 16) + (kb / 16) leading     kb: byte of k within its row
    K-major,  swizzled  (r % 8) W  + (r / 8) stride + kb                                kb < W
    MN-major, none      (rb % 16) + (rb / 16) stride + (k % 8) 16 + (k / 8) leading     rb: byte of r within its line
    MN-major, swizzled  (rb % W)  + (rb / W) leading + (k % 8) W + (k / 8) stride

The 128-byte pattern with 32-byte atoms has 4 lines (k % 4, k / 4) and exists for MN-major only. The swizzle then
exchanges bits of the *absolute* address: 16-byte units by the line within the pattern::

    128B: bits 4-6 ^= bits 7-9     64B: bits 4-5 ^= bits 7-8     32B: bit 4 ^= bit 7     128B/32: bits 5-6 ^= bits 7-8

A base offset is subtracted from bits 7-9 before they are used.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.tensor.descriptors import (
    B32,
    B64,
    B128,
    B128_BASE32,
    NONE,
    WIDTH,
    Descriptor,
)
from flamia.conformance.simulator.tensor.illegal import Illegal

Addresses = NDArray[np.int64]

_XOR = {NONE: (0, 4), B128_BASE32: (3, 5), B128: (7, 4), B64: (3, 4), B32: (1, 4)}
"""Mask of the line number, and the bit to which it is applied."""


def swizzle_addresses(address: Addresses, swizzle: str, base_offset: int = 0) -> Addresses:
    """Exchange address bits as the swizzle mode says. :param address: absolute byte addresses, any shape."""
    mask, to = _XOR[swizzle]
    line = (address >> 7) - base_offset & mask
    return address ^ line << to


@lru_cache(maxsize=512)
def operand_addresses(
    descriptor: Descriptor, rows: int, row_bytes: int, element_bytes: int, mn_major: bool
) -> Addresses:
    """Absolute address of every byte of an operand, ``(rows, row_bytes)``, in the order of (row, K); read-only.

    :param rows: extent along M or N.
    :param row_bytes: bytes along K: 32 for one step.
    :param element_bytes: 1 or 2; elements are kept whole.
    :param mn_major: whether M or N, not K, is contiguous ("transposed").
    :raises Illegal: for a K-major row that does not fit the pattern, or a mode without this majorness.
    """
    width = WIDTH[descriptor.swizzle]
    byte = np.arange(row_bytes, dtype=np.int64)
    row = np.arange(rows, dtype=np.int64)[:, None]
    if not mn_major:
        if descriptor.swizzle == B128_BASE32:
            raise Illegal("majorness", "a 128B swizzle with 32-byte atoms exists for MN-major operands only")
        if descriptor.swizzle == NONE:
            along = byte % 16 + byte // 16 * descriptor.leading
        else:
            along = byte
            if descriptor.start % width + row_bytes > width:
                raise Illegal(
                    "descriptor",
                    f"a K-major row of {row_bytes} bytes from {descriptor.start:#x} does not fit a swizzle "
                    f"of {width} bytes",
                    descriptor.start,
                )
        offset = row % 8 * width + row // 8 * descriptor.stride + along
    else:
        k, part = byte // element_bytes, byte % element_bytes
        at = row * element_bytes + part
        lines = 4 if descriptor.swizzle == B128_BASE32 else 8
        across, down = (
            (descriptor.stride, descriptor.leading)
            if descriptor.swizzle == NONE
            else (descriptor.leading, descriptor.stride)
        )
        offset = at % width + at // width * across + k % lines * width + k // lines * down
    found = swizzle_addresses(descriptor.start + offset, descriptor.swizzle, descriptor.base_offset)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=512)
def operand_granules(
    descriptor: Descriptor, rows: int, row_bytes: int, element_bytes: int, mn_major: bool
) -> NDArray[np.int64]:
    """The 16-byte units that an operand touches, sorted, as ``address >> 4``; read-only."""
    found = np.unique(operand_addresses(descriptor, rows, row_bytes, element_bytes, mn_major) >> 4)
    found.flags.writeable = False
    return found
