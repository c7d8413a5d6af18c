"""Declarations of variables and parameters."""

from __future__ import annotations

from flamia.conformance.simulator.ptx.stream import Stream
from flamia.conformance.simulator.ptx.syntax import PtxError, Variable

WIDTHS = {
    **{f"{kind}{bits}": bits // 8 for kind in "usb" for bits in (8, 16, 32, 64)},
    "b128": 16,
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "f32": 4,
    "f64": 8,
    "pred": 1,
    "texref": 8,
    "samplerref": 8,
    "surfref": 8,
}
"""Bytes of a type."""


def parse_parameter(stream: Stream) -> Variable:
    """A parameter: ``.param .align 8 .b8 name[96]`` or ``.reg .b32 name``."""
    space = stream.next()
    if space.text not in (".param", ".reg"):
        raise PtxError(f"a parameter was expected, got {space.text!r}", space.line)
    (variable,) = _declaration(stream, "param", False, single=True)
    return variable


def parse_variable(stream: Stream, space: str, external: bool) -> list[Variable]:
    """The variables of one declaration, the space of which was read, up to its semicolon."""
    return _declaration(stream, space, external, single=False)


def _declaration(stream: Stream, space: str, external: bool, single: bool) -> list[Variable]:
    align, lanes, kind, pointed = 0, 1, "", False
    while stream.peek().kind == "dot":
        token = stream.next()
        match token.text:
            case ".align":
                number = stream.integer()
                align = align if pointed else number
            case ".ptr":
                pointed = True  # what follows is of the memory that it points at
            case ".managed" | ".global" | ".const" | ".local" | ".shared" | ".param":
                pass
            case ".v2" | ".v4" | ".v8":
                lanes = int(token.text[2:])
            case ".attribute":
                stream.skip_past(")")
            case text if text[1:] in WIDTHS:
                kind = text[1:]
            case other:
                raise PtxError(f"{other!r} is not known in a declaration", token.line)
    out = []
    while True:
        token = stream.next()
        if token.kind != "word" or not kind:
            raise PtxError(f"a name was expected, got {token.text!r}", token.line)
        out.append(_variable(stream, token.text, space, kind, lanes, align, external))
        if single or not stream.accept(","):
            break
    if not single:
        stream.expect(";")
    return out


def _variable(stream: Stream, name: str, space: str, kind: str, lanes: int, align: int, external: bool) -> Variable:
    width = WIDTHS[kind]
    count = lanes
    while stream.accept("["):
        if stream.accept("]"):
            count = 0
            continue
        count *= stream.integer()
        stream.expect("]")
    initial: bytes = b""
    references: tuple[tuple[int, str, int], ...] = ()
    if stream.accept("="):
        initial, references = _initial_value(stream, width)
        count = count or len(initial) // width
        initial = initial.ljust(count * width, b"\0")
    return Variable(name, space, kind, count * width, align or width * lanes, initial, references, external)


def _initial_value(stream: Stream, width: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    out = bytearray()
    references: list[tuple[int, str, int]] = []

    def read() -> None:
        if stream.accept("{"):
            while not stream.accept("}"):
                read()
                stream.accept(",")
            return
        token = stream.peek()
        if token.kind == "word":
            stream.next()
            name = token.text
            if stream.accept("("):  # generic(name)
                name = stream.next().text
                stream.expect(")")
            addend = stream.integer() if stream.accept("+") else 0
            references.append((len(out), name, addend))
            out.extend(bytes(width))
        elif token.text[:2].lower() in ("0f", "0d"):
            out.extend(int(stream.next().text[2:], 16).to_bytes(width, "little"))
        else:
            out.extend((stream.integer() % (1 << 8 * width)).to_bytes(width, "little"))

    read()
    return bytes(out), tuple(references)
