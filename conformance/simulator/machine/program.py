"""A function made executable: rows for its operands, closures for its instructions, and its control flow.

Straight runs of simple instructions become one `Segment`, a tuple of closures without any checks between them; a
control instruction is a segment of its own; a branch ends one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia.conformance.simulator.machine.calls import inline_calls
from flamia.conformance.simulator.machine.flow import find_joins
from flamia.conformance.simulator.machine.registeruse import find_register_uses
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import ALL_LANES, DTYPES, FULL, NO_LANES, width_of
from flamia.conformance.simulator.ops.registry import Run, find_family
from flamia.conformance.simulator.ptx.syntax import Function, Guard, Instruction, Module, PtxError, Symbol, Variable

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class Segment:
    """A run of instructions.

    :param simple: closures of simple instructions.
    :param control: of one control instruction; then ``simple`` is empty.
    :param target: segment that a branch at the end goes to, -1 without one.
    :param predicate: row that says which lanes take it, -1 for all; ``negated``: those where it is false.
    :param join: segment where diverged lanes meet again, -1 at the end of the function.
    :param touched: registers that it reads or writes; empty for instructions that look after asynchronous registers
        themselves. ``written``: those written by other instructions than ``mov``. ``copies``: rows of target and source
        of the ``mov`` between registers, by position. See Note [Registers in flight].
    """

    simple: tuple[Run, ...] = ()
    control: Run | None = None
    target: int = -1
    predicate: int = -1
    negated: bool = False
    join: int = -1
    touched: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)
    instructions: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class RowSpec:
    """What a row is.

    :param kind: ``register``, ``constant``, ``special``, ``symbol`` or ``scratch``.
    :param part: which of the pieces of that type, from the lowest, of a wider register.
    """

    kind: str
    name: str
    type: str
    lanes: Any = None
    symbol: Symbol | None = None
    part: int = 0


@dataclass(eq=False)
class Program:
    """An entry, compiled.

    :param rows: how `Warp.rows` is built.
    :param storage: index of a register within those of its width, by name.
    """

    module: Module
    function: Function
    segments: list[Segment] = field(default_factory=list)
    rows: list[RowSpec] = field(default_factory=list)
    storage: dict[str, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    _known: dict[Any, int] = field(default_factory=dict)

    @property
    def uses_async_proxy(self) -> bool:
        """Whether any instruction reads memory through the async proxy."""
        return any(
            i.opcode.startswith(("cp.async.bulk", "cp.reduce.async", "tcgen05", "wgmma"))
            for i in self.function.instructions
        )

    @cached_property
    def uses_wgmma(self) -> bool:
        """Whether the tensor cores take accumulators from registers."""
        return any(i.opcode.startswith("wgmma.mma_async") for i in self.function.instructions)

    @cached_property
    def holds_registers(self) -> bool:
        """Whether asynchronous operations write registers."""
        return any(i.opcode.startswith(("wgmma.mma_async", "tcgen05.ld")) for i in self.function.instructions)

    # --- rows --------------------------------------------------------------------------------------------------------

    def _add(self, key: Any, spec: RowSpec) -> int:
        if key not in self._known:
            self._known[key] = len(self.rows)
            self.rows.append(spec)
        return self._known[key]

    def register_row(self, name: str, kind: str, site: Site, part: int = 0) -> int:
        """Row of a register, or of a part of it, as ``kind``."""
        width = width_of(self.function.registers[name])
        is_predicate = self.function.registers[name] == "pred"
        if (kind == "pred") != is_predicate or width_of(kind) * (part + 1) > width:
            raise site.refuse(f"{name} is no {kind}")
        key = ("register", name, DTYPES.get(kind, kind), part)
        return self._add(key, RowSpec("register", name, kind, part=part))

    def constant_row(self, lanes: NDArray[Any]) -> int:
        """Row of 32 constant lanes."""
        return self._add(("constant", lanes.dtype.str, lanes.tobytes()), RowSpec("constant", "", "", lanes))

    def special_row(self, name: str, kind: str, site: Site) -> int:
        """Row of a special register that does not change while a warp runs."""
        if name.startswith(("%clock", "%globaltimer")):
            raise site.refuse(f"{name} can only be moved")
        return self._add(("special", name, kind), RowSpec("special", name, kind))

    def symbol_row(self, symbol: Symbol, kind: str, site: Site) -> int:
        """Row of the address of a variable."""
        if self.find_variable(symbol.name) is None:
            raise site.refuse(f"{symbol.name!r} is not declared")
        if kind not in ("u32", "b32", "s32", "u64", "b64", "s64"):
            raise site.refuse(f"the address of {symbol.name!r} is no {kind}")
        return self._add(("symbol", symbol, DTYPES[kind]), RowSpec("symbol", symbol.name, kind, symbol=symbol))

    def scratch_row(self, kind: str) -> int:
        """Row for results that nobody reads."""
        return self._add(("scratch", kind), RowSpec("scratch", "", kind))

    def find_variable(self, name: str) -> Variable | None:
        """The variable or parameter that a symbol names."""
        for v in (*self.function.variables, *self.function.parameters):
            if v.name == name:
                return v
        return self.module.variables.get(name)


def build_program(module: Module, function: Function) -> Program:
    """Compile every instruction of ``function``.

    :raises PtxError: for an instruction, modifier or operand that is not known.
    """
    function = inline_calls(module, function)
    program = Program(module, function)
    for name, kind in function.registers.items():
        width = 0 if kind == "pred" else width_of(kind)
        program.storage[name] = program.counts.get(width, 0)
        program.counts[width] = program.storage[name] + 1
    _cut(program)
    find_register_uses(program)
    return program


def _cut(program: Program) -> None:
    """Fill ``program.segments``."""
    function = program.function
    starts = set(function.labels.values())
    pieces: list[tuple[list[Run], list[Instruction], Segment]] = []
    first: dict[int, int] = {}  # instruction index to segment
    branches: list[tuple[int, Instruction]] = []
    open_piece = False
    for index, instruction in enumerate(function.instructions):
        if index in starts or not open_piece:
            pieces.append(([], [], Segment()))
            first[index] = len(pieces) - 1
            open_piece = True
        if instruction.base == "bra":
            pieces[-1][1].append(instruction)
            branches.append((len(pieces) - 1, instruction))
            open_piece = False
            continue
        family = find_family(instruction)
        run = _compile(program, instruction, family.compile)
        if family.control:
            if pieces[-1][1]:
                pieces.append(([], [], Segment()))
            pieces[-1][2].control = run
            open_piece = False
        else:
            pieces[-1][0].append(run)
        pieces[-1][1].append(instruction)
    end = len(pieces)
    first.setdefault(len(function.instructions), end)  # a label behind the last instruction
    for number, instruction in branches:
        segment = pieces[number][2]
        target = instruction.operands[0]
        if not isinstance(target, Symbol) or target.name not in function.labels:
            raise PtxError(f"'bra': {target} is no label of this function", instruction.line)
        if set(instruction.modifiers) - {"uni"}:
            raise PtxError(f"the instruction {instruction.opcode!r} is not known", instruction.line)
        segment.target = first[function.labels[target.name]]
        if instruction.guard is not None:
            segment.predicate = program.register_row(
                instruction.guard.register.name, "pred", Site(program, instruction)
            )
            segment.negated = instruction.guard.negated
    for runs, instructions, segment in pieces:
        segment.simple, segment.instructions = tuple(runs), tuple(instructions)
        program.segments.append(segment)
    _find_joins(program)


def _compile(program: Program, instruction: Instruction, step: Any) -> Run:
    site = Site(program, instruction)
    run: Run = step(site)
    site.finish()
    if instruction.guard is not None:
        return _guarded(run, instruction.guard, site)
    return run


def _guarded(run: Run, guard: Guard, site: Site) -> Run:
    """``run`` for the lanes whose guard is true."""
    row = site.row(guard.register, "pred")
    negated = guard.negated

    def run_guarded(warp: Any, mask: Any) -> Any:
        lanes = warp.rows[row]
        active = np.greater(mask, lanes) if negated else np.logical_and(mask, lanes)
        word = active.tobytes()
        if word == NO_LANES:
            return None
        return run(warp, FULL if word == ALL_LANES else active)

    return run_guarded


def _find_joins(program: Program) -> None:
    segments = program.segments
    successors = []
    for number, s in enumerate(segments):
        if s.control is not None and _ends(s):
            successors.append([len(segments)])
        elif s.target < 0:
            successors.append([number + 1])
        elif s.predicate < 0:
            successors.append([s.target])
        else:
            successors.append([s.target, number + 1])
    joins = find_joins(successors)
    for number, s in enumerate(segments):
        s.join = joins[number]


def _ends(segment: Segment) -> bool:
    """Whether no lane goes on behind it."""
    (instruction,) = segment.instructions
    return instruction.base in ("ret", "exit", "trap") and instruction.guard is None
