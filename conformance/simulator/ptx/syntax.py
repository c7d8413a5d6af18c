"""What a parsed PTX module is made of: operands, instructions, functions, variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


class PtxError(ValueError):
    """PTX that this machine refuses; the message names the construct and its line."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Register:
    """A register, by its name within the function: a name declared in a nested scope ends in ``@<scope>``."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer (any width, two's complement later), or the bits of a float literal.

    :param value: the integer, or the bits for ``0f`` and ``0d`` literals.
    :param kind: ``int``, ``f32`` or ``f64``.
    """

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or function, plus an offset; or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``, or ``[base, {coordinates}]`` of a tensor."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Register | Immediate, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """``!p``."""

    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a result that nobody wants."""


Operand: TypeAlias = Register | Special | Immediate | Symbol | Address | Vector | Pair | Negated | Sink


@dataclass(frozen=True, slots=True)
class Source:
    """A line of CUDA C++, from ``.loc``.

    :param inlined_at: where the function that holds the line was inlined, if it was.
    """

    file: str
    line: int
    inlined_at: Source | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (inlined at {self.inlined_at})" if self.inlined_at else "")


@dataclass(frozen=True, slots=True)
class Guard:
    """``@p`` or ``@!p``."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    :param opcode: as written, for example ``add.rn.f32``.
    :param operands: in order; a call has its function first, then a vector of results and one of arguments.
    :param line: of the PTX, from 1.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    source: Source | None

    @property
    def base(self) -> str:
        """First part of the opcode."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Parts of the opcode after the first: ``rn``, ``f32``."""
        return tuple(self.opcode.split(".")[1:])


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or parameter.

    :param space: ``global``, ``const``, ``shared``, ``local`` or ``param``.
    :param type: of an element, for example ``u32``.
    :param nbytes: in all; 0 for an unsized ``extern`` array.
    :param initial: bytes of the initial value; empty for none. References to symbols are in ``references``.
    :param references: (byte offset, symbol, addend) of addresses in the initial value.
    """

    name: str
    space: str
    type: str
    nbytes: int
    align: int
    initial: bytes = b""
    references: tuple[tuple[int, str, int], ...] = ()
    external: bool = False


@dataclass(slots=True)
class Function:
    """An ``.entry`` or a ``.func``.

    :param registers: type by name.
    :param variables: shared, local and param variables declared in the body.
    :param labels: index into ``instructions`` by name.
    :param directives: such as ``maxntid`` with their integers.
    """

    name: str
    entry: bool
    parameters: tuple[Variable, ...] = ()
    results: tuple[Variable, ...] = ()
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    has_body: bool = True


@dataclass(slots=True)
class Module:
    """A PTX module.

    :param target: for example ``sm_100a``.
    """

    version: str
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    text: str

    def entry(self, name: str) -> Function:
        """The entry of that name.

        :raises ValueError: if there is none.
        """
        found = self.functions.get(name)
        if found is None or not found.entry:
            entries = [f.name for f in self.functions.values() if f.entry]
            raise ValueError(f"entry must be one of {entries}, got {name!r}")
        return found
