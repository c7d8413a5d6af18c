"""Which registers a segment uses, for those that asynchronous operations hold; see `Warp.in_flight`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from flamia.conformance.simulator.machine import asyncfaults
from flamia.conformance.simulator.ptx.syntax import (
    Address,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
)

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.program import Program, Segment
    from flamia.conformance.simulator.machine.warp import Warp

_OWN_CHECK = ("tcgen05.ld", "tcgen05.wait", "wgmma")
_NO_TARGET = frozenset({"st", "red", "bra", "bar", "barrier", "fence", "membar", "prefetch", "ret", "exit", "trap"})


def find_register_uses(program: Program) -> None:
    """Fill `Segment.touched` and `Segment.written`."""
    for segment in program.segments:
        touched: set[str] = set()
        written: set[str] = set()
        for instruction in segment.instructions:
            if not instruction.opcode.startswith(_OWN_CHECK):
                touched.update(registers_of(instruction))
                if instruction.base != "mov":  # the assembler places copies: they are no accesses of the kernel's
                    written.update(written_by(instruction))
        segment.touched, segment.written = frozenset(touched), frozenset(written)


def registers_of(instruction: Instruction) -> Iterator[str]:
    """Names of every register that an instruction uses, guard included."""
    if instruction.guard is not None:
        yield instruction.guard.register.name
    for operand in instruction.operands:
        yield from _names(operand)


def written_by(instruction: Instruction) -> Iterator[str]:
    """Names of the registers that an instruction writes."""
    if instruction.operands and instruction.base not in _NO_TARGET:
        first = instruction.operands[0]
        if not isinstance(first, Address):
            yield from _names(first)


def _names(operand: Operand) -> Iterator[str]:
    match operand:
        case Register(name):
            yield name
        case Negated(register):
            yield register.name
        case Address(base):
            yield from _names(base)
            for coordinate in operand.coordinates:
                yield from _names(coordinate)
        case Vector(items):
            for item in items:
                yield from _names(item)
        case Pair(first, second):
            yield from _names(first)
            yield from _names(second)


def raise_in_flight(warp: Warp, segment: Segment) -> NoReturn:
    """The fault for a segment that uses a register which an asynchronous operation holds."""
    for instruction in segment.instructions:
        for name in registers_of(instruction):
            if name in warp.in_flight:
                fault = asyncfaults.RegisterInFlight(
                    f"register {name.split('@')[0]} is used while {warp.in_flight[name]} is under way"
                )
                fault.place(instruction, str(warp))
                raise fault
    raise AssertionError("no register of this segment is in flight")
