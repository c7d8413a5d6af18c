"""Which registers may depend on results whose bits PTX leaves to the chip, Note [Approximate] of `ops.approximate`.

A register is tainted if some instruction writes it that is approximate or reads a tainted register. The order of
instructions is not looked at, so that the answer errs on the side of more. Followed are data: operands, and the guard
``@p`` of an instruction, which decides whether it writes. Not followed are branches, so that what is written behind a
branch on a tainted predicate counts as being as exact as its operands, and addresses. Through memory the mark travels
byte by byte (`memory.APPROXIMATE`): a load of marked bytes taints its registers from then on. Tensor memory has one
mark for all of it; tensor cores that read shared memory are tainted if anything tainted is ever stored there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flamia.conformance.simulator.ptx.syntax import (
    Address,
    Function,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
)

_NO_RESULT = ("st", "red", "bra", "bar", "barrier", "fence", "membar", "prefetch", "nanosleep", "cp", "ret", "exit")


class Taint:
    """The tainted registers of a launch.

    :param registers: their names.
    """

    def __init__(self, function: Function) -> None:
        self._facts = [_facts(i) for i in function.instructions]
        self.registers: set[str] = set()
        self._spaces: set[str] = set()
        for source, _, writes, _, writes_spaces in self._facts:
            if source:
                self.registers |= writes
                self._spaces |= writes_spaces
        self._spread()

    def add(self, names: frozenset[str]) -> None:
        """These registers hold something approximate, too."""
        if not names <= self.registers:
            self.registers |= names
            self._spread()

    def covers(self, names: frozenset[str]) -> bool:
        """Whether any of these registers is tainted."""
        return bool(self.registers) and not self.registers.isdisjoint(names)

    def _spread(self) -> None:
        before = -1
        while before != len(self.registers) + len(self._spaces):
            before = len(self.registers) + len(self._spaces)
            if not before:
                return
            for _, reads, writes, reads_spaces, writes_spaces in self._facts:
                if not self.registers.isdisjoint(reads) or not self._spaces.isdisjoint(reads_spaces):
                    self.registers |= writes
                    self._spaces |= writes_spaces


def is_approximate(instruction: Instruction) -> bool:
    """Whether its result is one whose bits PTX leaves open."""
    modifiers = instruction.modifiers
    return "approx" in modifiers or (instruction.base == "div" and "full" in modifiers)


def _facts(i: Instruction) -> tuple[bool, set[str], set[str], set[str], set[str]]:
    """Whether it is a source; registers read and written; spaces read and written."""
    reduces = i.base in ("bar", "barrier") and "red" in i.modifiers
    no_result = (i.base in _NO_RESULT and not reduces) or i.opcode.startswith(
        ("tcgen05.st", "tcgen05.mma", "tcgen05.cp", "mbarrier.init")
    )
    targets, sources = ((), i.operands) if no_result else (i.operands[:1], i.operands[1:])
    # Addresses are no data: what is read through a tainted address is as exact as it was.
    reads = {n for o in sources if not isinstance(o, Address) for n in _names(o)}
    writes = {n for o in targets for n in _names(o)}
    if i.guard is not None and i.base not in ("bra", "ret", "exit", "call"):
        reads.add(i.guard.register.name)
    if i.base == "wgmma":
        reads |= {n for o in i.operands for n in _names(o)}
    space_reads, space_writes = _spaces(i)
    return is_approximate(i), reads, writes, space_reads, space_writes


def _spaces(i: Instruction) -> tuple[set[str], set[str]]:
    """Of those that are marked as a whole."""
    if i.base in ("st", "stmatrix", "red", "atom"):
        return set(), set() if "global" in i.modifiers or "local" in i.modifiers else {"shared"}
    if i.base == "wgmma":
        return {"shared"}, set()
    if i.opcode.startswith("tcgen05.ld"):
        return {"tmem"}, set()
    if i.opcode.startswith("tcgen05.st"):
        return set(), {"tmem"}
    if i.opcode.startswith("tcgen05.mma"):
        return {"shared", "tmem"}, {"tmem"}
    if i.opcode.startswith("tcgen05.cp"):
        return {"shared"}, {"tmem"}
    return set(), set()


def names_of(operands: Iterable[Operand]) -> frozenset[str]:
    """Names of the registers in some operands, addresses left out."""
    return frozenset(n for o in operands for n in _names(o))


def guard_of(instruction: Instruction) -> frozenset[str]:
    """The register that guards an instruction, if one does."""
    return frozenset() if instruction.guard is None else frozenset({instruction.guard.register.name})


def _names(operand: Operand) -> Iterator[str]:
    match operand:
        case Register(name):
            yield name
        case Negated(register):
            yield register.name
        case Vector(items):
            for item in items:
                yield from _names(item)
        case Pair(first, second):
            yield from _names(first)
            yield from _names(second)
