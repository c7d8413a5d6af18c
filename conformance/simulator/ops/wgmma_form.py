"""The forms of ``wgmma.mma_async``: types, shape, operands and immediates (PTX 9.7.15.5.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.ptx.syntax import Immediate, Operand, Register, Vector
from flamia.conformance.simulator.tensor.elements import BF16, E4M3, E5M2, F16, Element

_TYPES = {"bf16": BF16, "f16": F16, "e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Form:
    """What the instruction says.

    :param n: columns of D; M is 64, K 16 for elements of 16 bits and 32 for those of 8.
    :param d_names, d_rows: registers of D, one FP32 each.
    :param a_names, a_rows: registers of A, or empty; then ``a_row`` is the row of its descriptor.
    :param scale_row, scale_negated: the predicate scale-d, or -1; then ``accumulate`` is its constant.
    """

    a: Element
    b: Element
    n: int
    d_names: tuple[str, ...]
    d_rows: tuple[int, ...]
    a_names: tuple[str, ...]
    a_rows: tuple[int, ...]
    a_row: int
    b_row: int
    scale_row: int
    scale_negated: bool
    accumulate: bool
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool

    @property
    def names(self) -> frozenset[str]:
        """Registers of D and A."""
        return frozenset((*self.d_names, *self.a_names))


def take_form(site: Site) -> Form:
    """Read ``.m64nNkK.f32.atype.btype  d, a, b-desc, scale-d, imm-scale-a, imm-scale-b{, imm-trans-a}{, imm-trans-b}``.

    Transposes exist for elements of 16 bits, that of A for an A in shared memory.

    :raises PtxError: for a type, shape or number of operands that does not exist, or is not simulated.
    """
    b_type, a_type = site.take_type(*_TYPES), site.take_type(*_TYPES)
    if not site.flag("f32"):
        raise site.refuse("D of another type than .f32 is not simulated")
    a, b = _TYPES[a_type], _TYPES[b_type]
    depth = 256 // a.bits
    if a.bits != b.bits or (a.bits == 16 and a is not b):
        raise site.refuse(f".{a_type}.{b_type} does not exist")
    n = _take_n(site, depth)
    d_names = _registers(site, site.operand(0), n // 2)
    a_in_registers = isinstance(site.operand(1), Vector)
    a_names = _registers(site, site.operand(1), 4) if a_in_registers else ()
    immediates = 2 + (a.bits == 16) * (1 if a_in_registers else 2)
    site.expect_operands(4 + immediates)
    scale = site.operand(3)
    scale_row, scale_negated, accumulate = -1, False, True
    if isinstance(scale, Immediate):
        accumulate = bool(scale.value)
    else:
        scale_row, scale_negated = site.predicate(scale)
    signs = [_one_of(site, i, (-1, 1)) for i in (4, 5)]
    transposes = [_one_of(site, i, (0, 1)) for i in range(6, 4 + immediates)]
    return Form(
        a=a,
        b=b,
        n=n,
        d_names=d_names,
        d_rows=tuple(site.program.register_row(name, "f32", site) for name in d_names),
        a_names=a_names,
        a_rows=tuple(site.program.register_row(name, "u32", site) for name in a_names),
        a_row=-1 if a_in_registers else site.row(1, "u64"),
        b_row=site.row(2, "u64"),
        scale_row=scale_row,
        scale_negated=scale_negated,
        accumulate=accumulate,
        negate_a=signs[0] < 0,
        negate_b=signs[1] < 0,
        a_mn_major=len(transposes) == 2 and bool(transposes[0]),
        b_mn_major=bool(transposes) and bool(transposes[-1]),
    )


def _take_n(site: Site, depth: int) -> int:
    for modifier in site.left:
        if found := re.fullmatch(r"m64n(\d+)k(\d+)", modifier):
            site.flag(modifier)
            n, k = int(found[1]), int(found[2])
            if n % 8 or not 8 <= n <= 256 or k != depth:
                raise site.refuse(f"N must be a multiple of 8 in 8..256 and K {depth}, got n{n} k{k}")
            return n
    raise site.refuse("a shape m64nNkK is missing")


def _registers(site: Site, operand: Operand, count: int) -> tuple[str, ...]:
    items = site.items(operand)
    names = tuple(item.name for item in items if isinstance(item, Register))
    if len(names) != count or len(items) != count:
        raise site.refuse(f"{len(items)} registers where {count} are needed")
    if len(set(names)) != count:
        raise site.refuse("a register stands twice in a vector")
    return names


def _one_of(site: Site, operand: int, allowed: tuple[int, ...]) -> int:
    value = site.integer(operand)
    if value not in allowed:
        raise site.refuse(f"operand {operand} must be one of {allowed}, got {value}")
    return value
