"""Registers that asynchronous operations hold.

Note [Registers in flight]
~~~~~~~~~~~~~~~~~~~~~~~~~~
From its issue until the wait that covers it, the registers that an operation writes or reads belong to it: the results
of ``tcgen05.ld``, D and A of ``wgmma``. Any use of them is a fault, whenever the operation is in fact done. Only a
``mov`` is excepted, as the compiler copies values wherever it likes and the assembler knows what they stand for: the
copy of a result is held like the result, and gets its value with it; the copy of an operand has its value at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flamia.conformance.simulator.machine import asyncfaults
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import Row
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


@dataclass(eq=False)
class Holder:
    """An operation of one warp that holds registers.

    :param what: it is, for messages.
    :param names: of what it writes; ``lent``: of what it only reads.
    :param copies: target and source of copies that wait for its results.
    """

    what: str
    names: list[str]
    lent: tuple[str, ...] = ()
    copies: list[tuple[Row, Row]] = field(default_factory=list)
    done: bool = False

    def hold(self, warp: Warp) -> None:
        """Claim the registers."""
        for name in (*self.names, *self.lent):
            warp.in_flight[name] = self

    def follow(self, warp: Warp, target: str, to: Row, source: Row) -> None:
        """A result is copied into ``target``, which is held from now on as well."""
        self.names.append(target)
        warp.in_flight[target] = self
        if not self.done:
            self.copies.append((to, source))

    def finish(self) -> None:
        """The results are there."""
        self.done = True
        for to, source in self.copies:
            to[...] = source


def find_register_uses(program: Program) -> None:
    """Fill `Segment.touched`, `Segment.written` and `Segment.copies`."""
    for segment in program.segments:
        touched: set[str] = set()
        written: set[str] = set()
        for index, instruction in enumerate(segment.instructions):
            if instruction.opcode.startswith(_OWN_CHECK):
                continue
            touched.update(registers_of(instruction))
            if instruction.base != "mov":
                written.update(written_by(instruction))
            elif program.holds_registers and instruction.guard is None:
                rows = [_row(program, instruction, operand) for operand in instruction.operands]
                if len(rows) == 2 and min(rows) >= 0:
                    segment.copies[index] = (rows[0], rows[1])
        segment.touched, segment.written = frozenset(touched), frozenset(written)


def _row(program: Program, instruction: Instruction, operand: Operand) -> int:
    """Row of a 32- or 64-bit register as bits; -1 for another operand."""
    if not isinstance(operand, Register):
        return -1
    site = Site(program, instruction)
    width = 0 if program.function.registers[operand.name] == "pred" else site.register_width(operand)
    return program.register_row(operand.name, f"b{8 * width}", site) if width in (4, 8) else -1


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


def check_in_flight(warp: Warp, segment: Segment) -> None:
    """Whether a segment may use registers that asynchronous operations hold: see Note [Registers in flight].

    :raises RegisterInFlight: if not.
    """
    for index, instruction in enumerate(segment.instructions):
        held = [name for name in registers_of(instruction) if name in warp.in_flight]
        if not held:
            continue
        holder = warp.in_flight[held[0]]
        target = next(written_by(instruction), "")
        if index not in segment.copies or target in warp.in_flight:
            fault = asyncfaults.RegisterInFlight(
                f"register {held[0].split('@')[0]} is used while {holder.what} is under way"
            )
            fault.place(instruction, str(warp))
            raise fault
        if held[0] not in holder.lent:
            to, source = segment.copies[index]
            holder.follow(warp, target, warp.rows[to], warp.rows[source])
