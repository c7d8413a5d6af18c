"""Calls of device functions: each becomes a copy of the function's body in the caller.

Parameters of a call are ``.param`` variables of the caller, which are local to the thread; the copy reads and writes
them under the caller's names. So the machine needs no stack; recursion and calls through pointers are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flamia.conformance.simulator.ptx.syntax import (
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Vector,
)

MOST_INSTRUCTIONS = 200_000
"""Of an entry with all of its calls."""


def inline_calls(module: Module, function: Function) -> Function:
    """``function`` with every call replaced by the body of its function.

    :raises PtxError: for recursion, a call through a pointer, or a function without a body.
    """
    if not any(i.base == "call" for i in function.instructions):
        return function
    out = replace(function, registers=dict(function.registers), variables=list(function.variables))
    out.instructions, out.labels = [], {}
    _Inliner(module, out).copy(function, "", {}, (function.name,))
    return out


class _Inliner:
    def __init__(self, module: Module, out: Function) -> None:
        self.module, self.out, self.count = module, out, 0

    def copy(self, body: Function, suffix: str, names: dict[str, str], stack: tuple[str, ...]) -> None:
        """Append a body.

        :param suffix: of its registers, labels and variables. :param names: parameters by the caller's names.
        """
        out = self.out
        local = {v.name for v in body.variables} | set(body.labels)

        def rename(name: str) -> str:
            return names.get(name, name + suffix if name in local else name)

        for name, kind in body.registers.items():
            out.registers[name + suffix] = kind
        if suffix:
            out.variables += [replace(v, name=v.name + suffix) for v in body.variables if v.name not in names]
        starts: dict[int, list[str]] = {}
        for label, index in body.labels.items():
            starts.setdefault(index, []).append(label + suffix)
        for index, instruction in enumerate(body.instructions):
            for label in starts.get(index, ()):
                out.labels[label] = len(out.instructions)
            self._append(instruction, suffix, rename, stack)
            if len(out.instructions) > MOST_INSTRUCTIONS:
                raise PtxError("the calls of this entry grow too large", instruction.line)
        for label in (*starts.get(len(body.instructions), ()), f"$end{suffix}"):
            out.labels[label] = len(out.instructions)

    def _append(
        self, instruction: Instruction, suffix: str, rename: Callable[[str], str], stack: tuple[str, ...]
    ) -> None:
        operands = tuple(_renamed(o, suffix, rename) for o in instruction.operands)
        guard = instruction.guard
        if guard is not None:
            guard = Guard(Register(guard.register.name + suffix), guard.negated)
        if instruction.base == "ret" and suffix:
            jump = replace(instruction, opcode="bra", operands=(Symbol(f"$end{suffix}"),), guard=guard)
            self.out.instructions.append(jump)
        elif instruction.base == "call":
            self._call(instruction, operands, guard, stack)
        else:
            self.out.instructions.append(replace(instruction, operands=operands, guard=guard))

    def _call(
        self, instruction: Instruction, operands: tuple[Operand, ...], guard: Guard | None, stack: tuple[str, ...]
    ) -> None:
        target, results, arguments = operands
        if not isinstance(target, Symbol):
            raise PtxError(f"{instruction.opcode!r} through a pointer is not known", instruction.line)
        callee = self.module.functions.get(target.name)
        if callee is None or not callee.has_body:
            raise PtxError(f"the function {target.name!r} has no body here", instruction.line)
        if target.name in stack:
            raise PtxError(f"{target.name!r} calls itself", instruction.line)
        assert isinstance(results, Vector) and isinstance(arguments, Vector)
        formal = (*callee.results, *callee.parameters)
        actual = (*results.items, *arguments.items)
        if len(formal) != len(actual) or not all(isinstance(a, Symbol) for a in actual):
            raise PtxError(f"{target.name!r} is called with other parameters than it has", instruction.line)
        self.count += 1
        suffix = f"@call{self.count}"
        names = {f.name: a.name for f, a in zip(formal, actual, strict=True) if isinstance(a, Symbol)}
        if guard is not None:
            skip = Guard(guard.register, not guard.negated)
            jump = Instruction("bra", (Symbol(f"$end{suffix}"),), skip, instruction.line, instruction.source)
            self.out.instructions.append(jump)
        self.copy(callee, suffix, names, (*stack, target.name))


def _renamed(operand: Operand, suffix: str, rename: Callable[[str], str]) -> Operand:
    match operand:
        case Register(name):
            return Register(name + suffix)
        case Symbol(name, offset):
            return Symbol(rename(name), offset)
        case Address(base, offset, coordinates):
            inner = _renamed(base, suffix, rename)
            assert isinstance(inner, Register | Symbol | Immediate)
            moved = tuple(Register(c.name + suffix) if isinstance(c, Register) else c for c in coordinates)
            return replace(operand, base=inner, coordinates=moved)
        case Vector(items):
            return Vector(tuple(_renamed(i, suffix, rename) for i in items))
        case Pair(first, second):
            return Pair(_renamed(first, suffix, rename), _renamed(second, suffix, rename))
        case Negated(register):
            return Negated(Register(register.name + suffix))
    return operand
