"""Which registers may depend on results whose bits PTX leaves to the chip, Note [Approximate] of `ops.approximate`.

A register is tainted if some instruction writes it that is approximate, or that reads a tainted register or a tainted
space. A space is tainted if something tainted is stored to it. The order of instructions is not looked at, so that
the answer errs on the side of more.
"""

from __future__ import annotations

from collections.abc import Iterator

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
_SPACES = ("global", "shared", "local", "tmem", "param", "const")


def find_approximate(function: Function) -> frozenset[str]:
    """Names of the tainted registers."""
    tainted: set[str] = set()
    spaces: set[str] = set()
    facts = [_facts(i) for i in function.instructions]
    while True:
        before = len(tainted) + len(spaces)
        for source, reads, writes, reads_spaces, writes_spaces in facts:
            if source or not tainted.isdisjoint(reads) or not spaces.isdisjoint(reads_spaces):
                tainted.update(writes)
                spaces.update(writes_spaces)
        if len(tainted) + len(spaces) == before:
            return frozenset(tainted)


def is_approximate(instruction: Instruction) -> bool:
    """Whether its result is one whose bits PTX leaves open."""
    modifiers = instruction.modifiers
    return "approx" in modifiers or (instruction.base == "div" and "full" in modifiers)


def _facts(i: Instruction) -> tuple[bool, set[str], set[str], set[str], set[str]]:
    """Whether it is a source; registers read and written; spaces read and written."""
    no_result = i.base in _NO_RESULT or i.opcode.startswith(
        ("tcgen05.st", "tcgen05.mma", "tcgen05.cp", "mbarrier.init")
    )
    targets, sources = ((), i.operands) if no_result else (i.operands[:1], i.operands[1:])
    # Addresses are no data: what is read through a tainted address is as exact as it was.
    reads = {n for o in sources if not isinstance(o, Address) for n in _names(o)}
    writes = {n for o in targets for n in _names(o)}
    if i.base == "wgmma":
        reads = {n for o in i.operands for n in _names(o)}
    space_reads, space_writes = _spaces(i)
    return is_approximate(i), reads, writes, space_reads, space_writes


def _spaces(i: Instruction) -> tuple[set[str], set[str]]:
    named = [m.split("::")[0] for m in i.modifiers if m.split("::")[0] in _SPACES]
    everywhere = {"global", "shared", "local"}
    if i.base in ("ld", "ldu", "ldmatrix"):
        return (set(named) or everywhere), set()
    if i.base in ("st", "stmatrix", "red"):
        return set(), (set(named) or everywhere)
    if i.base == "atom":
        return (set(named) or everywhere), (set(named) or everywhere)
    if i.base == "cp" and len(named) >= 2:
        return {named[1]}, {named[0]}
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
