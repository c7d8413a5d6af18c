"""Where an instruction is compiled: its modifiers and operands, and the rows they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flamia.conformance.simulator.machine.types import DTYPES, LANES, width_of
from flamia.conformance.simulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.program import Program


class Site:
    """One instruction of a program while it is compiled.

    A *row* is an index into ``warp.rows``: registers, immediates, special registers and addresses of variables are
    all arrays of 32 lanes there, so that a closure needs only the index.
    """

    def __init__(self, program: Program, instruction: Instruction) -> None:
        self.program, self.instruction = program, instruction
        self.left = list(instruction.modifiers)

    # --- modifiers ---------------------------------------------------------------------------------------------------

    def take(self, *names: str) -> str:
        """The first of ``names`` that is a modifier, which is thereby dealt with; empty if none is."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return ""

    def flag(self, name: str) -> bool:
        """Whether the modifier is there; it is thereby dealt with."""
        return bool(self.take(name))

    def take_type(self, *allowed: str) -> str:
        """The last modifier, a type among ``allowed`` (all, for none).

        :raises PtxError: if it is no such type.
        """
        if not self.left or self.left[-1] not in (allowed or (*DTYPES, "b128")):
            raise self.refuse(f"the type {self.left[-1] if self.left else ''!r} is not known here")
        return self.left.pop()

    def finish(self) -> None:
        """Check that every modifier was dealt with.

        :raises PtxError: otherwise.
        """
        if self.left:
            raise self.refuse(f"the modifier {'.' + self.left[0]!r} is not known here")

    def refuse(self, why: str) -> PtxError:
        """The error that names this instruction."""
        return PtxError(f"{self.instruction.opcode!r}: {why}", self.instruction.line)

    # --- operands ----------------------------------------------------------------------------------------------------

    @property
    def operands(self) -> tuple[Operand, ...]:
        """As parsed."""
        return self.instruction.operands

    def operand(self, index: int) -> Operand:
        """One operand.

        :raises PtxError: if there are fewer.
        """
        if index >= len(self.operands):
            raise self.refuse(f"operand {index} is missing")
        return self.operands[index]

    def expect_operands(self, *counts: int) -> None:
        """Check their number.

        :raises PtxError: for another.
        """
        if len(self.operands) not in counts:
            raise self.refuse(f"{len(self.operands)} operands where {' or '.join(map(str, counts))} are expected")

    def row(self, operand: int | Operand, kind: str) -> int:
        """Row to read an operand as lanes of type ``kind``.

        A register that is wider is read through its low bytes.

        :param operand: itself, or its index.
        :raises PtxError: for an operand that has no such row.
        """
        item = self.operand(operand) if isinstance(operand, int) else operand
        match item:
            case Register(name):
                return self.program.register_row(name, kind, self)
            case Immediate():
                return self.program.constant_row(self.immediate_lanes(item, kind))
            case Special(name):
                return self.program.special_row(name, kind, self)
            case Symbol():
                return self.program.symbol_row(item, kind, self)
        raise self.refuse(f"{item} cannot be read as {kind}")

    def target(self, operand: int | Operand, kind: str) -> int:
        """Row to write an operand as lanes of type ``kind``; a `Sink` gets a row of its own.

        :raises PtxError: for what is no register, or of another width.
        """
        item = self.operand(operand) if isinstance(operand, int) else operand
        if isinstance(item, Sink):
            return self.program.scratch_row(kind)
        if not isinstance(item, Register):
            raise self.refuse(f"{item} cannot be written")
        if self.register_width(item) != width_of(kind):
            raise self.refuse(f"{item.name} is no register of {width_of(kind)} bytes")
        return self.program.register_row(item.name, kind, self)

    def target_kind(self, operand: Operand, kind: str) -> str:
        """The type that a register takes a value of type ``kind`` as: wider, with the same signedness, if it is."""
        if isinstance(operand, Register):
            width = self.register_width(operand)
            if width > width_of(kind):
                if kind in ("f32", "f16", "bf16", "f64"):
                    raise self.refuse(f"{operand.name} is wider than {kind}")
                return f"{'s' if kind.startswith('s') else 'u'}{8 * width}"
        return kind

    def part(self, operand: int | Operand, kind: str, index: int) -> int:
        """Row of the piece ``index``, from the lowest, of an operand that is several times as wide as ``kind``."""
        item = self.operand(operand) if isinstance(operand, int) else operand
        if isinstance(item, Register):
            return self.program.register_row(item.name, kind, self, index)
        if isinstance(item, Immediate):
            return self.row(Immediate(item.value >> (8 * width_of(kind) * index)), kind)
        raise self.refuse(f"{item} has no pieces")

    def predicate(self, operand: int | Operand) -> tuple[int, bool]:
        """Row of a predicate, and whether it is negated."""
        item = self.operand(operand) if isinstance(operand, int) else operand
        if isinstance(item, Negated):
            return self.row(item.register, "pred"), True
        return self.row(item, "pred"), False

    def register_width(self, register: Register) -> int:
        """Bytes of a register."""
        return width_of(self.program.function.registers[register.name])

    def immediate_lanes(self, item: Immediate, kind: str) -> Any:
        """32 lanes of a constant."""
        if kind == "pred":
            return np.full(LANES, bool(item.value))
        if kind == "b128":
            words = [item.value & (2**64 - 1), item.value >> 64 & (2**64 - 1)]
            return np.tile(np.array(words, np.uint64), (LANES, 1))
        dtype = np.dtype(DTYPES[kind])
        bits = item.value
        if item.kind == "f64" and kind in ("f32", "f16"):  # a double literal is converted
            double = np.array([bits], np.uint64).view(np.float64)
            return np.full(LANES, double.astype(dtype)[0], dtype)
        if item.kind == "f32" and kind == "f64":
            return np.full(LANES, np.array([bits], np.uint32).view(np.float32).astype(np.float64)[0])
        if item.kind == "int" and kind in ("f32", "f64"):
            return np.full(LANES, bits, dtype)
        word = (bits & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")
        return np.frombuffer(word * LANES, dtype)

    def integer(self, operand: int | Operand) -> int:
        """The value of an operand that must be a constant."""
        item = self.operand(operand) if isinstance(operand, int) else operand
        if not isinstance(item, Immediate):
            raise self.refuse(f"{item} must be a constant")
        return item.value

    def address(self, operand: int | Operand) -> tuple[int, int, str]:
        """Row, constant offset and row type (``u32`` or ``u64``) of ``[base + offset]``; also of a bare register."""
        item = self.operand(operand) if isinstance(operand, int) else operand
        base, offset = (item.base, item.offset) if isinstance(item, Address) else (item, 0)
        match base:
            case Register():
                kind = "u32" if self.register_width(base) == 4 else "u64"
                return self.row(base, kind), offset, kind
            case Symbol(name, more):
                return self.row(Symbol(name, more + offset), "u64"), 0, "u64"
            case Immediate(value):
                return self.row(Immediate(value + offset), "u64"), 0, "u64"
        raise self.refuse(f"{item} is no address")

    def items(self, operand: int | Operand) -> tuple[Operand, ...]:
        """Elements of a vector operand, or the operand alone."""
        item = self.operand(operand) if isinstance(operand, int) else operand
        return item.items if isinstance(item, Vector) else (item,)

    def pair(self, operand: int | Operand) -> tuple[Operand, Operand | None]:
        """``a|b``, or ``a`` and None."""
        item = self.operand(operand) if isinstance(operand, int) else operand
        return (item.first, item.second) if isinstance(item, Pair) else (item, None)
