"""PTX text to tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from flamia.conformance.simulator.ptx.syntax import PtxError


class Token(NamedTuple):
    """A token: its kind, its text and its line.

    Kinds: ``word`` (identifiers, registers, opcodes with their modifiers), ``dot`` (directives and types that begin
    with a dot), ``number``, ``string``, ``mark`` (punctuation).
    """

    kind: str
    text: str
    line: int


# A word may hold dots and double colons, so that an opcode or %tid.x is one token.
_PATTERN = re.compile(
    r"""
    (?P<skip>[ \t\r\f]+|//[^\n]*|/\*.*?\*/)
  | (?P<newline>\n)
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|[0-9]+\.[0-9]+|[0-9]+U?)
  | (?P<word>[%$A-Za-z_][\w$]*(?:(?:\.|::)[A-Za-z0-9_]+)*)
  | (?P<dot>\.[A-Za-z_][\w]*(?:::[A-Za-z0-9_]+)*)
  | (?P<string>"[^"]*")
  | (?P<mark>[{}()\[\];:,=+\-@!|<>~*])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokenize(text: str) -> Iterator[Token]:
    """Tokens of a PTX text, without comments and white space.

    :raises PtxError: for a character that begins no token.
    """
    line, position = 1, 0
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None:
            raise PtxError(f"cannot read {text[position : position + 20]!r}", line)
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind == "skip":
            line += match.group().count("\n")
        else:
            yield Token(kind, match.group(), line)
        position = match.end()
