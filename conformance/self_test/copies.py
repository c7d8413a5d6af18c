"""A copy of the reference with a fault planted in its source.

The modules of ``flamia.reference`` are read as text, the fault's edits are made in it, and the result is imported as a
package of its own, `PACKAGE`, beside the original: the suite compares the copy with the original, in one process. The
original is never touched, so that nothing has to be restored.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

import flamia.reference

ORIGINAL = "flamia.reference"
PACKAGE = "flamia_faulty_reference"
"""Import name of the copy, while `planted` is active."""


class EditError(ValueError):
    """An edit that does not fit the source."""


@dataclass(frozen=True)
class Edit:
    """A passage of a module of the reference, and what takes its place.

    Any run of white space in ``old`` matches any other, so that reformatting does not matter. Lines of ``new`` after
    the first are indented like the line in which ``old`` begins.

    :param module: such as ``"forward"``.
    :param old: occurs exactly once.
    """

    module: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The module's text with the edit made.

        :raises EditError: unless ``old`` occurs exactly once.
        """
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            raise EditError(
                f"{ORIGINAL}.{self.module} must contain exactly once, but contains {len(found)} times: {self.old!r}"
            )
        start, stop = found[0].span()
        line_start = text.rfind("\n", 0, start) + 1
        indent = re.match(r"[ \t]*", text[line_start:])
        assert indent is not None
        first, *others = self.new.strip("\n").split("\n")
        lines = textwrap.indent("\n".join(others), indent.group()) if others else ""
        return text[:start] + first + ("\n" + lines if others else "") + text[stop:]


@contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[str]:
    """The import name of a copy of the reference with the edits made; the copy is gone afterwards.

    :raises EditError: for an edit that does not fit the source, see `Edit.apply`.
    """
    if any(name.partition(".")[0] == PACKAGE for name in sys.modules):
        raise RuntimeError("planted must not be nested: a copy of the reference is already in use")
    finder = _Finder({module: _edited(module, edits) for module in {e.module for e in edits}})
    sys.meta_path.insert(0, finder)
    try:
        yield PACKAGE
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]


def _edited(module: str, edits: Sequence[Edit]) -> str:
    text = _source(module)
    for edit in edits:
        if edit.module == module:
            text = edit.apply(text)
    return text


def _source(module: str) -> str:
    """Text of a module of the reference; ``__init__`` is the package."""
    folder = Path(str(flamia.reference.__file__)).parent
    return (folder / f"{module}.py").read_text(encoding="utf-8")


@cache
def _compile(module: str, text: str) -> CodeType:
    """Code of a module of the copy; cached, because most modules of most copies are the same."""
    renamed = re.sub(r"\bflamia\.reference\b", PACKAGE, text)
    return compile(renamed, f"<{PACKAGE}.{module}>", "exec", dont_inherit=True)


class _Finder(MetaPathFinder, Loader):
    """Imports `PACKAGE` and its modules from source text."""

    def __init__(self, edited: dict[str, str]) -> None:
        self.edited = edited

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != PACKAGE:
            return None
        try:
            _source(module or "__init__")
        except OSError:
            return None
        return ModuleSpec(name, self, is_package=not module)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2] or "__init__"
        exec(_compile(name, self.edited.get(name) or _source(name)), module.__dict__)
