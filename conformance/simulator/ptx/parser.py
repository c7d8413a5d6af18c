"""PTX text to a `Module`: modules as NVRTC and nvcc 13 emit them (PTX ISA 9.0, sections 4 and 5)."""

from __future__ import annotations

from flamia.conformance.simulator.ptx.body import parse_body
from flamia.conformance.simulator.ptx.lexer import tokenize
from flamia.conformance.simulator.ptx.stream import Stream
from flamia.conformance.simulator.ptx.syntax import Function, Module, PtxError, Variable
from flamia.conformance.simulator.ptx.variables import parse_parameter, parse_variable

_LINKAGE = (".visible", ".extern", ".weak", ".common")
_SPACES = (".global", ".const", ".shared")


def parse(text: str) -> Module:
    """The module of a PTX text.

    :raises PtxError: for whatever this machine does not know, by name and line.
    """
    stream = Stream(list(tokenize(text.rstrip("\0"))))
    module = Module(version="", target="", functions={}, variables={}, text=text)
    files = _files(text)
    while not stream.done:
        external = False
        while stream.peek().text in _LINKAGE:
            external |= stream.next().text == ".extern"
        token = stream.next()
        match token.text:
            case ".version":
                module.version = _rest_of_line(stream, token.line)
            case ".target":
                module.target = _rest_of_line(stream, token.line)
            case ".address_size":
                if stream.next().text != "64":
                    raise PtxError("only 64-bit addresses are known", token.line)
            case ".entry" | ".func":
                function = _parse_function(stream, token.text == ".entry", files)
                if function.has_body or function.name not in module.functions:
                    module.functions[function.name] = function
            case ".file":
                _rest_of_line(stream, token.line)
            case ".section":
                _skip_section(stream)
            case ".pragma" | ".alias":
                stream.skip_past(";")
            case text if text in _SPACES:
                for variable in parse_variable(stream, text[1:], external):
                    module.variables[variable.name] = variable
            case other:
                raise PtxError(f"{other!r} is not known here", token.line)
    return module


def _rest_of_line(stream: Stream, line: int) -> str:
    words = []
    while not stream.done and stream.peek().line == line:
        words.append(stream.next().text)
    return "".join(words)


def _files(text: str) -> dict[int, str]:
    """File names by the number that ``.loc`` uses."""
    out = {}
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and words[0] == ".file":
            out[int(words[1])] = words[2].split('"')[1]
    return out


def _skip_section(stream: Stream) -> None:
    stream.skip_past("{")
    stream.skip_past("}")


def _parse_function(stream: Stream, entry: bool, files: dict[int, str]) -> Function:
    results: tuple[Variable, ...] = ()
    if stream.peek().text == ".attribute":
        stream.skip_past(")")
    if stream.peek().text == "(":
        results = _parse_parameters(stream)
    name = stream.next().text
    function = Function(name, entry, results=results)
    if stream.peek().text == "(":
        function.parameters = _parse_parameters(stream)
    while stream.peek().text not in ("{", ";"):
        token = stream.next()
        if token.kind != "dot":
            raise PtxError(f"{token.text!r} where a directive of {name} or its body was expected", token.line)
        numbers = []
        while stream.peek().kind == "number" or stream.peek().text == ",":
            if (word := stream.next()).kind == "number":
                numbers.append(int(word.text, 0))
        function.directives[token.text[1:]] = tuple(numbers)
    if stream.accept(";"):
        function.has_body = False
    else:
        parse_body(stream, function, files)
    return function


def _parse_parameters(stream: Stream) -> tuple[Variable, ...]:
    stream.expect("(")
    out: list[Variable] = []
    while not stream.accept(")"):
        out.append(parse_parameter(stream))
        stream.accept(",")
    return tuple(out)
