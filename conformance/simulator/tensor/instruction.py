"""The 32-bit instruction descriptor of ``tcgen05.mma`` and the shapes, types and ids that each kind allows.

Note [Instruction descriptor]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
=======  ===================================  =========================  ==========================
bits     f16, f8f6f4                          mxf8f6f4                   mxf4, mxf4nvf4
=======  ===================================  =========================  ==========================
0-1      sparsity selector                    0                          0
2        sparse                               the same                   the same
3        saturate (integers)                  0                          0
4-5      D: F16 0, F32 1                      SFB id                     SFB id: 0 or 2
7-9      A type                               the same                   E2M1 = 1
10-12    B type                               the same                   10-11: E2M1 = 1
13, 14   negate A, B                          the same                   the same
15, 16   A, B MN-major                        the same                   0
17-22    N >> 3                               the same                   the same
23       0                                    scale: UE8M0 = 1           UE4M3 = 0, UE8M0 = 1
24-28    M >> 4                               27-28: M >> 7              27-28: M >> 7
29-30    0 (30-31: max shift of .ws)          SFA id                     SFA id: 0 or 2
31                                            0                          0: K = 64, 1: K = 96
=======  ===================================  =========================  ==========================

A types: F16 0, BF16 1 in kind f16; E4M3 0, E5M2 1, E2M3 3, E3M2 4, E2M1 5 in f8f6f4 and mxf8f6f4.
Source: PTX 9.7.16.4.2, tables 42 and 43; shapes from 9.7.16.2.1, table 41.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flamia.conformance.simulator.tensor.elements import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, Element
from flamia.conformance.simulator.tensor.illegal import Illegal

KINDS = ("f16", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4")
"""The kinds that are simulated; ``tf32`` and ``i8`` are refused by name."""

_EIGHT = {0: E4M3, 1: E5M2, 3: E2M3, 4: E3M2, 5: E2M1}
_TYPES = {
    "f16": {0: F16, 1: BF16},
    "f8f6f4": _EIGHT,
    "mxf8f6f4": _EIGHT,
    "mxf4": {1: E2M1},
    "mxf4nvf4": {1: E2M1},
}
_STEP_K = {"f16": 16, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


@dataclass(frozen=True)
class Instruction:
    """A decoded, checked instruction descriptor together with what the opcode says.

    :param kind: one of `KINDS`.
    :param cta_group: 1 or 2.
    :param a, b: element types.
    :param m, n, k: shape of the product; with ``cta_group`` 2, of both CTAs together.
    :param a_mn_major, b_mn_major: whether an operand in shared memory is MN-major.
    :param negate_a, negate_b: signs.
    :param scales: scales per row, 0 (dense kinds), 1, 2 or 4.
    :param e8m0: whether scales are UE8M0, else UE4M3.
    :param sfa_id, sfb_id: byte of the tensor memory word where a row's scales begin.
    """

    kind: str
    cta_group: int
    a: Element
    b: Element
    m: int
    n: int
    k: int
    a_mn_major: bool
    b_mn_major: bool
    negate_a: bool
    negate_b: bool
    scales: int
    e8m0: bool
    sfa_id: int
    sfb_id: int

    @property
    def block_scaled(self) -> bool:
        return self.scales > 0

    @property
    def padded(self) -> bool:
        """Whether sub-byte elements come in padded containers; see Note [Element containers]."""
        return self.kind in ("f8f6f4", "mxf8f6f4")

    @property
    def rows_per_cta(self) -> int:
        """Rows of A that each CTA holds."""
        return self.m // self.cta_group


def scales_per_row(kind: str, vector: str | None) -> int:
    """Scales per row and step for the modifier ``vector``: ``1X``, ``2X``, ``4X``, ``block16``, ``block32`` or None.

    :raises Illegal: for a combination outside table 55 of the PTX text.
    """
    by_kind: dict[str, dict[str | None, int]] = {
        "mxf8f6f4": {None: 1, "1X": 1, "block32": 1},
        "mxf4": {None: 2, "2X": 2, "block32": 2},
        "mxf4nvf4": {"2X": 2, "block32": 2, "4X": 4, "block16": 4},
    }
    allowed = by_kind[kind]
    if vector not in allowed:
        raise Illegal("shape", f"kind::{kind} takes a scale vector of {sorted(map(str, allowed))}, got {vector}")
    return allowed[vector]


@lru_cache(maxsize=4096)
def decode_instruction(bits: int, kind: str, cta_group: int, vector: str | None) -> Instruction:
    """Decode and check an instruction descriptor.

    :param bits: the 32-bit value.
    :param kind: of the opcode, without ``kind::``.
    :param vector: the scale vector modifier, as `scales_per_row` takes it; None for the dense kinds.
    :raises Illegal: with kind ``shape``, ``majorness``, ``scale-id``, ``descriptor`` or ``unsupported``.
    """
    if kind not in KINDS:
        raise Illegal("unsupported", f"kind::{kind} is not simulated; these are: {', '.join(KINDS)}")
    scaled = kind.startswith("mx")
    scales = scales_per_row(kind, vector) if scaled else 0
    if bits & 0b100:
        raise Illegal("unsupported", "sparse A (bit 2 of the instruction descriptor) is not simulated")
    if bits & 0b1011 or bits & (1 << 6):
        raise Illegal("descriptor", f"bits 0, 1, 3 and 6 of the instruction descriptor must be 0, got {bits:#010x}")
    types = _TYPES[kind]
    codes = bits >> 7 & 7, bits >> 10 & (3 if kind in ("mxf4", "mxf4nvf4") else 7)
    for name, code in zip("AB", codes, strict=True):
        if code not in types:
            known = {c: e.name for c, e in types.items()}
            raise Illegal("descriptor", f"type code of {name} must be one of {known} for kind::{kind}, got {code}")
    a, b = types[codes[0]], types[codes[1]]
    if kind == "f16" and a is not b:
        raise Illegal("unsupported", f"kind::f16 with A {a.name} and B {b.name} is not simulated")

    if scaled:
        if bits & 0x07000000:
            raise Illegal("shape", f"M of kind::{kind} must be 128 or 256 (bits 27-28), got {bits >> 24 & 31} * 16")
        if bits >> 31:
            raise Illegal("unsupported", f"bit 31 (K = {96 if scales > 1 else 64}) of kind::{kind} is not simulated")
    elif bits >> 29 or bits & 1 << 23:
        raise Illegal("descriptor", f"bits 23 and 29-31 must be 0 for kind::{kind}, got {bits:#010x}")
    elif (dtype := bits >> 4 & 3) != 1:
        raise Illegal("unsupported", f"D must be F32 (1 in bits 4-5) for kind::{kind}, got {dtype}")

    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    found = Instruction(
        kind=kind,
        cta_group=cta_group,
        a=a,
        b=b,
        m=m,
        n=n,
        k=_STEP_K[kind],
        a_mn_major=bool(bits >> 15 & 1),
        b_mn_major=bool(bits >> 16 & 1),
        negate_a=bool(bits >> 13 & 1),
        negate_b=bool(bits >> 14 & 1),
        scales=scales,
        e8m0=scaled and bool(bits >> 23 & 1),
        sfa_id=bits >> 29 & 3 if scaled else 0,
        sfb_id=bits >> 4 & 3 if scaled else 0,
    )
    _check_shape(found)
    _check_majorness(found)
    if scaled:
        _check_scales(found)
    return found


def _check_shape(found: Instruction) -> None:
    rows: tuple[int, ...] = (64, 128) if found.cta_group == 1 else (128, 256)
    if found.block_scaled and found.cta_group == 1:
        rows = (128,)
    if found.m not in rows:
        raise Illegal(
            "shape", f"M must be one of {rows} for kind::{found.kind} with cta_group::{found.cta_group}, got {found.m}"
        )
    fine = found.cta_group == 1 and (found.block_scaled or found.m == 64)
    step = 8 if fine else 16
    if not step <= found.n <= 256 or found.n % step:
        raise Illegal(
            "shape",
            f"N must be a multiple of {step} in {step}..256 for kind::{found.kind}, M = {found.m}, "
            f"cta_group::{found.cta_group}, got {found.n}",
        )


def _check_majorness(found: Instruction) -> None:
    for name, element, mn_major in (("A", found.a, found.a_mn_major), ("B", found.b, found.b_mn_major)):
        if mn_major and element.bits < 8:
            raise Illegal(
                "majorness", f"{name} of type {element.name} in kind::{found.kind} must be K-major, got MN-major"
            )
    step = 16 * found.cta_group
    if found.b_mn_major and found.b.bits == 8 and found.n % step:
        raise Illegal("shape", f"N must be a multiple of {step} with an MN-major 8-bit B, got {found.n}")


def _check_scales(found: Instruction) -> None:
    if not found.e8m0 and (found.kind != "mxf4nvf4" or found.scales != 4):
        raise Illegal(
            "descriptor",
            f"the scale type must be UE8M0 (bit 23 = 1) for kind::{found.kind} with {found.scales} scales per row",
        )
    allowed = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[found.scales]
    for name, number in (("SFA", found.sfa_id), ("SFB", found.sfb_id)):
        if number not in allowed:
            raise Illegal(
                "scale-id", f"{name} id must be one of {allowed} with {found.scales} scales per row, got {number}"
            )
