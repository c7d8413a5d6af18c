"""Bodies of functions: scopes, labels, instructions and their operands."""

from __future__ import annotations

from flamia.conformance.simulator.ptx.opcodes import OPCODES
from flamia.conformance.simulator.ptx.stream import Stream
from flamia.conformance.simulator.ptx.syntax import (
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Sink,
    Source,
    Special,
    Symbol,
    Variable,
    Vector,
)
from flamia.conformance.simulator.ptx.variables import WIDTHS, parse_variable

SPECIAL = frozenset(
    "%tid %ntid %laneid %warpid %nwarpid %ctaid %nctaid %smid %nsmid %gridid %clusterid %nclusterid %cluster_ctaid "
    "%cluster_nctaid %cluster_ctarank %cluster_nctarank %is_explicit_cluster %lanemask_eq %lanemask_le %lanemask_lt "
    "%lanemask_ge %lanemask_gt %clock %clock_hi %clock64 %globaltimer %globaltimer_lo %globaltimer_hi "
    "%total_smem_size %aggr_smem_size %dynamic_smem_size %reserved_smem_offset_0".split()
)
"""Special registers, without ``.x``."""


class _Scope:
    """A pair of braces: its registers and labels by the name written in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.registers: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.variables: dict[str, str] = {}


class _Body:
    """State while a body is parsed."""

    def __init__(self, stream: Stream, function: Function, files: dict[int, str]) -> None:
        self.stream, self.function, self.files = stream, function, files
        self.scopes: list[_Scope] = []
        self.count = 0
        self.source: Source | None = None
        self.families: dict[str, str] = {}  # %r<5>: prefix and type

    def parse(self) -> None:
        """From the opening to the closing brace."""
        self.stream.expect("{")
        self._open()
        while self.scopes:
            self._statement()

    def _open(self) -> None:
        scope = _Scope(self.count)
        self.count += 1
        self.scopes.append(scope)
        depth, ahead = 0, 0  # labels are used before they are defined
        while depth >= 0:
            token = self.stream.peek(ahead)
            if token.text == "{":
                depth += 1
            elif token.text == "}":
                depth -= 1
            elif depth == 0 and token.kind == "word" and self.stream.peek(ahead + 1).text == ":":
                scope.labels[token.text] = self._scoped(token.text, scope)
            ahead += 1

    def _scoped(self, name: str, scope: _Scope) -> str:
        return name if scope.number == 0 else f"{name}@{scope.number}"

    def _statement(self) -> None:
        stream = self.stream
        token = stream.peek()
        if stream.accept("{"):
            self._open()
        elif stream.accept("}"):
            self.scopes.pop()
        elif stream.accept(";"):
            pass
        elif token.kind == "dot":
            self._directive()
        elif token.kind == "word" and stream.peek(1).text == ":":
            stream.next()
            stream.next()
            self.function.labels[self.scopes[-1].labels[token.text]] = len(self.function.instructions)
        else:
            self._instruction()

    def _directive(self) -> None:
        stream = self.stream
        token = stream.next()
        match token.text:
            case ".reg":
                self._registers()
            case ".loc":
                self._location(token.line)
            case ".pragma" | ".callprototype" | ".calltargets":
                stream.skip_past(";")
            case ".shared" | ".local" | ".param" | ".global" | ".const":
                for v in parse_variable(stream, token.text[1:], False):
                    self._declare(v)
            case other:
                raise PtxError(f"{other!r} is not known in a body", token.line)

    def _declare(self, v: Variable) -> None:
        scope = self.scopes[-1]
        name = self._scoped(v.name, scope)
        scope.variables[v.name] = name
        self.function.variables.append(
            Variable(name, v.space, v.type, v.nbytes, v.align, v.initial, v.references, v.external)
        )

    def _registers(self) -> None:
        stream = self.stream
        token = stream.next()
        kind = token.text[1:]
        if kind not in WIDTHS:
            raise PtxError(f"{token.text!r} is not the type of a register", token.line)
        scope = self.scopes[-1]
        while True:
            name = stream.next().text
            if stream.accept("<"):
                count = stream.integer()
                stream.expect(">")
                names = [f"{name}{i}" for i in range(count)]
            else:
                names = [name]
            for n in names:
                scope.registers[n] = self._scoped(n, scope)
                self.function.registers[scope.registers[n]] = kind
            if not stream.accept(","):
                break
        stream.expect(";")

    def _location(self, line: int) -> None:
        stream = self.stream
        file, at = self.files.get(stream.integer(), "?"), stream.integer()
        inlined = None
        while stream.peek().line == line:
            token = stream.next()
            if token.text == "inlined_at":
                inlined = Source(self.files.get(stream.integer(), "?"), stream.integer())
        # Line 0 is code of no line: it keeps the last one.
        self.source = Source(file, at, inlined) if at else self.source

    def _instruction(self) -> None:
        stream = self.stream
        guard = None
        if stream.accept("@"):
            negated = stream.accept("!")
            name = stream.next()
            register = self._find_register(name.text)
            if register is None:
                raise PtxError(f"the guard {name.text!r} is no register", name.line)
            guard = Guard(register, negated)
        token = stream.next()
        base = token.text.split(".", 1)[0]
        if base not in OPCODES:
            raise PtxError(f"the opcode {token.text!r} is not known", token.line)
        operands: list[Operand] = []
        if base == "call":
            operands = self._call()
        while not stream.accept(";"):
            operands.append(self._operand())
            if stream.peek().text != ";":
                stream.expect(",")
        self.function.instructions.append(Instruction(token.text, tuple(operands), guard, token.line, self.source))

    def _call(self) -> list[Operand]:
        results: tuple[Operand, ...] = ()
        if self.stream.peek().text == "(":
            results = self._list("(", ")")
            self.stream.expect(",")
        target = self._operand()
        arguments: tuple[Operand, ...] = ()
        if self.stream.accept(","):
            arguments = self._list("(", ")")
            while self.stream.accept(","):  # prototype of an indirect call
                self._operand()
        return [target, Vector(results), Vector(arguments)]

    def _list(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.stream.expect(opening)
        out = []
        while not self.stream.accept(closing):
            out.append(self._operand())
            self.stream.accept(",")
        return tuple(out)

    def _operand(self) -> Operand:
        first = self._single()
        if self.stream.accept("|"):
            return Pair(first, self._single())
        return first

    def _single(self) -> Operand:
        stream = self.stream
        token = stream.peek()
        if token.text == "{":
            return Vector(self._list("{", "}"))
        if stream.accept("["):
            return self._address()
        if stream.accept("!"):
            inner = self._single()
            if not isinstance(inner, Register):
                raise PtxError(f"'!' before {inner}", token.line)
            return Negated(inner)
        if token.kind == "number" or token.text == "-":
            return self._immediate()
        if token.kind != "word":
            raise PtxError(f"{token.text!r} is no operand", token.line)
        stream.next()
        if token.text == "_":
            return Sink()
        return self._named(token.text, token.line)

    def _immediate(self) -> Immediate:
        token = self.stream.peek()
        if token.text[:2].lower() in ("0f", "0d"):
            self.stream.next()
            return Immediate(int(token.text[2:], 16), "f32" if token.text[1] in "fF" else "f64")
        return Immediate(self.stream.integer())

    def _named(self, name: str, line: int) -> Operand:
        register = self._find_register(name)
        if register is not None:
            return register
        if name.startswith("%"):
            if name.split(".")[0] not in SPECIAL:
                raise PtxError(f"the register {name!r} is not known", line)
            return Special(name)
        if name == "WARP_SZ":
            return Immediate(32)
        for scope in reversed(self.scopes):
            if name in scope.labels or name in scope.variables:
                return Symbol(scope.labels.get(name) or scope.variables[name], self._offset())
        return Symbol(name, self._offset())

    def _offset(self) -> int:
        stream = self.stream
        if stream.peek().text in ("+", "-") and stream.peek(1).kind in ("number", "mark"):
            stream.accept("+")
            return stream.integer()
        return 0

    def _address(self) -> Address:
        stream = self.stream
        base = self._single()
        offset = self._offset() if not isinstance(base, Symbol) else 0
        coordinates: tuple[Operand, ...] = ()
        if stream.accept(","):
            coordinates = self._list("{", "}")
        stream.expect("]")
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset
        if not isinstance(base, Register | Symbol | Immediate):
            raise PtxError(f"{base} is no address", stream.peek().line)
        checked = tuple(c for c in coordinates if isinstance(c, Register | Immediate))
        return Address(base, offset, checked)

    def _find_register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return Register(scope.registers[name])
        return None


def parse_body(stream: Stream, function: Function, files: dict[int, str]) -> None:
    """Fill ``function`` from its body, braces included."""
    _Body(stream, function, files).parse()
