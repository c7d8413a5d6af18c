"""64-bit descriptors of matrices in shared memory.

Note [Matrix descriptor]
~~~~~~~~~~~~~~~~~~~~~~~~
======  ==================================  ===================================
bits    tcgen05 (PTX 9.7.16.4.1)            wgmma (PTX 9.7.15.5.1.2.2)
======  ==================================  ===================================
0-13    start address >> 4                  the same
16-29   leading dimension byte offset >> 4  the same
32-45   stride dimension byte offset >> 4   the same
46-48   constant 0b001                      0
49-51   base offset                         the same
52      leading dimension mode              0
53-60   constant 0                          0
61-63   swizzle: 0 none, 1 128 B with 32 B  62-63: 0 none, 1 128 B, 2 64 B,
        atoms, 2 128 B, 4 64 B, 6 32 B      3 32 B
======  ==================================  ===================================

The base offset is ``(start of the swizzle pattern >> 7) & 7`` where that pattern does not begin on a multiple of its
period of 8 rows: 1024, 512 or 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flamia.conformance.simulator.tensor.illegal import Illegal

NONE, B128_BASE32, B128, B64, B32 = "none", "128B, atoms of 32 B", "128B", "64B", "32B"
"""Swizzle modes."""
WIDTH = {NONE: 16, B128_BASE32: 128, B128: 128, B64: 64, B32: 32}
"""Bytes of one row of the swizzle pattern."""

_TCGEN05_SWIZZLE = {0: NONE, 1: B128_BASE32, 2: B128, 4: B64, 6: B32}
_WGMMA_SWIZZLE = {0: NONE, 1: B128, 2: B64, 3: B32}


@dataclass(frozen=True)
class Descriptor:
    """A decoded matrix descriptor; addresses and offsets in bytes.

    :param start: shared-memory address of element (0, 0), before the swizzle.
    :param leading, stride: byte offsets between groups of rows or columns; `operand_addresses` says which.
    :param base_offset: phase of the swizzle pattern, 0..7.
    :param swizzle: one of the modes above.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: str


@lru_cache(maxsize=4096)
def decode_tcgen05(bits: int) -> Descriptor:
    """Decode a descriptor of ``tcgen05.mma`` or ``tcgen05.cp``. :raises Illegal: for wrong constants or modes."""
    if (version := bits >> 46 & 7) != 1:
        raise Illegal("descriptor", f"bits 46-48 of a tcgen05 matrix descriptor must be 0b001, got {version:#05b}")
    if bits >> 52 & 1:
        raise Illegal("unsupported", "leading dimension mode 1 (absolute address, for K = 96) is not simulated")
    if bits >> 53 & 0xFF or bits >> 14 & 3 or bits >> 30 & 3:
        raise Illegal("descriptor", f"bits 14-15, 30-31 and 53-60 of a matrix descriptor must be 0, got {bits:#018x}")
    if (mode := bits >> 61) not in _TCGEN05_SWIZZLE:
        raise Illegal("descriptor", f"swizzle mode must be one of 0, 1, 2, 4, 6 in bits 61-63, got {mode}")
    return _finish(bits, _TCGEN05_SWIZZLE[mode])


@lru_cache(maxsize=4096)
def decode_wgmma(bits: int) -> Descriptor:
    """Decode a descriptor of ``wgmma.mma_async``. :raises Illegal: for bits that must be 0."""
    if bits >> 52 & 0x3FF or bits >> 46 & 7 or bits >> 14 & 3 or bits >> 30 & 3:
        raise Illegal(
            "descriptor", f"bits 14-15, 30-31, 46-48 and 52-61 of a wgmma descriptor must be 0, got {bits:#018x}"
        )
    return _finish(bits, _WGMMA_SWIZZLE[bits >> 62])


def _finish(bits: int, swizzle: str) -> Descriptor:
    found = Descriptor(
        start=(bits & 0x3FFF) << 4,
        leading=(bits >> 16 & 0x3FFF) << 4,
        stride=(bits >> 32 & 0x3FFF) << 4,
        base_offset=bits >> 49 & 7,
        swizzle=swizzle,
    )
    phases = {NONE: 1, B128_BASE32: 8, B128: 8, B64: 4, B32: 2}[swizzle]
    if swizzle == NONE:
        if found.base_offset:
            raise Illegal("descriptor", f"base offset must be 0 without a swizzle, got {found.base_offset}")
    elif (found.start >> 7) % phases != found.base_offset % phases:
        raise Illegal(
            "descriptor",
            f"a {swizzle} pattern for start address {found.start:#x} begins {found.start % (128 * phases)} bytes "
            f"past a multiple of {128 * phases}: base offset must be {(found.start >> 7) % phases}, "
            f"got {found.base_offset}",
            found.start,
        )
    return found
