"""Instruction families register here; a program asks here for the closure of an instruction."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

from flamia.conformance.simulator.ptx.syntax import Instruction, PtxError

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.site import Site
    from flamia.conformance.simulator.machine.warp import Warp

Run: TypeAlias = "Callable[[Warp, NDArray[Any]], Any]"
"""An instruction as the machine executes it: ``run(warp, mask)``. A simple one returns nothing; a control one returns
None to go on, or one of the outcomes of `machine.outcomes`."""

Compile: TypeAlias = "Callable[[Site], Run]"


@dataclass(frozen=True)
class Family:
    """A compile step, and what it is for.

    :param types: last modifiers that it takes; empty for any.
    :param control: whether its closures may block, jump, or need lanes that are elsewhere.
    """

    prefix: str
    types: frozenset[str]
    control: bool
    compile: Compile


_FAMILIES: dict[str, list[Family]] = {}


def op(*prefixes: str, types: Collection[str] = (), control: bool = False) -> Callable[[Compile], Compile]:
    """Register a compile step for opcodes that are ``prefix`` or begin with ``prefix.``; the longest prefix wins.

    The step gets a `Site`, takes every modifier from it, and returns the closure: whatever modifier it leaves is
    refused by name.
    """

    def add(step: Compile) -> Compile:
        for prefix in prefixes:
            _FAMILIES.setdefault(prefix, []).append(Family(prefix, frozenset(types), control, step))
        return step

    return add


def find_family(instruction: Instruction) -> Family:
    """The family of an instruction.

    :raises PtxError: if there is none: the opcode by name, and its line.
    """
    parts = instruction.opcode.split(".")
    for length in range(len(parts), 0, -1):
        for family in _FAMILIES.get(".".join(parts[:length]), ()):
            if not family.types or parts[-1] in family.types:
                return family
    raise PtxError(f"the instruction {instruction.opcode!r} is not known", instruction.line)


def families() -> tuple[Family, ...]:
    """Every registered family, for the table of the documentation."""
    return tuple(f for group in _FAMILIES.values() for f in group)
