"""Tokens with a position."""

from __future__ import annotations

from flamia.conformance.simulator.ptx.lexer import Token
from flamia.conformance.simulator.ptx.syntax import PtxError


class Stream:
    """A list of tokens that is read from left to right."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0

    @property
    def done(self) -> bool:
        """Whether every token was read."""
        return self.position >= len(self.tokens)

    def peek(self, ahead: int = 0) -> Token:
        """The next token, or one after it, unread.

        :raises PtxError: at the end.
        """
        if self.position + ahead >= len(self.tokens):
            raise PtxError("the text ends too early", self.tokens[-1].line if self.tokens else 1)
        return self.tokens[self.position + ahead]

    def next(self) -> Token:
        """Read one token."""
        token = self.peek()
        self.position += 1
        return token

    def accept(self, text: str) -> bool:
        """Read the next token if it is ``text``."""
        if not self.done and self.tokens[self.position].text == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        """Read ``text``.

        :raises PtxError: if something else is next.
        """
        token = self.next()
        if token.text != text:
            raise PtxError(f"{text!r} was expected, got {token.text!r}", token.line)
        return token

    def skip_past(self, text: str) -> None:
        """Read up to and including ``text``."""
        while self.next().text != text:
            pass

    def integer(self) -> int:
        """Read an integer with an optional sign.

        :raises PtxError: if none is next.
        """
        negative = self.accept("-")
        token = self.next()
        if token.kind != "number" or token.text[:2].lower() in ("0f", "0d"):
            raise PtxError(f"an integer was expected, got {token.text!r}", token.line)
        value = parse_integer(token.text)
        return -value if negative else value


def parse_integer(text: str) -> int:
    """An integer literal: decimal, ``0x``, ``0b``, octal with a leading 0; an ending ``U`` is read over."""
    text = text.rstrip("U")
    if len(text) > 1 and text[0] == "0" and text[1].isdigit():
        return int(text, 8)
    return int(text, 0)
