"""The address map.

Global memory, variables, constants and parameters lie in one arena, and their generic addresses are their addresses. A
shared address is 32 bits: the rank of the CTA in its cluster in bits 24 and up, the offset below; so an address of
``shared::cta`` is a valid address of ``shared::cluster``, as PTX says. The first `RESERVED` bytes belong to the system,
as on the chip. Generic addresses of shared and local memory are those plus the base of a window.
"""

from __future__ import annotations

GLOBAL_BASE = 0x7_0000_0000_00
SHARED_WINDOW = 0x7E_0000_0000
LOCAL_WINDOW = 0x7D_0000_0000
RANK_SHIFT = 24
RESERVED = 1024
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one CTA may have (compute capability 9.0 and 10.x), without `RESERVED`."""
