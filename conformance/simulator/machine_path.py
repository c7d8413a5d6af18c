"""The shortest way through a loop of machine code on which given work is done.

A kernel's hot loop has side ways for what is rare. What one turn of the loop usually costs is the number of
instructions on the shortest closed way on which all of its work is done: so many multiplications, conversions, stores.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_LABEL = re.compile(r"^\s*(\.L\w+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)\s*(?P<rest>.*?);")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_CONDITION = re.compile(r"^!?U?P\w")
JUMPS, ENDS = {"BRA"}, {"EXIT", "RET"}


@dataclass
class Stretch:
    """Instructions without a jump between them.

    :param counts: by the first word of their opcodes, without padding.
    :param after: the stretches that may follow, by the number of their first instruction.
    """

    counts: Counter[str]
    after: list[int]


def read_stretches(sass: str) -> dict[int, Stretch]:
    """Stretches of a kernel's machine code by the number of their first instruction."""
    lines: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for text in sass.splitlines():
        if (label := _LABEL.match(text)) is not None:
            waiting.append(label[1])
        elif (line := _LINE.match(text)) is not None:
            labels |= dict.fromkeys(waiting, len(lines))
            waiting = []
            lines.append(line)
    words = [line["opcode"].split(".")[0] for line in lines]
    starts = {0, *labels.values(), *(i + 1 for i, word in enumerate(words) if word in JUMPS | ENDS)}
    heads = sorted(i for i in starts if i < len(lines))
    found = {}
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        last = lines[end - 1]
        after = [end] if end < len(lines) else []
        if words[end - 1] in ENDS and not last["guard"]:
            after = []
        if words[end - 1] in JUMPS:
            if not last["guard"] and not _CONDITION.match(last["rest"]):
                after = []
            target = _TARGET.search(last["rest"])
            after += [labels[target[1]]] if target is not None and target[1] in labels else []
        found[head] = Stretch(Counter(word for word in words[head:end] if word != "NOP"), after)
    return found


def shortest_turn(sass: str, work: Mapping[str, int], never: Collection[str] = ()) -> Counter[str]:
    """Instructions, by the first word of their opcodes, of the shortest turn of any loop that does the work.

    :param work: how many instructions of an opcode a turn has, exactly.
    :param never: opcodes that it has none of.
    :raises ValueError: if there is no such loop.
    """
    stretches = {head: s for head, s in read_stretches(sass).items() if not any(s.counts[opcode] for opcode in never)}
    best: tuple[int, tuple[int, ...]] | None = None
    for start in sorted({after for head, s in stretches.items() for after in s.after if after <= head}):
        turn = _shortest_from(start, stretches, work, best[0] if best else None)
        best = turn or best
    if best is None:
        raise ValueError(f"machine code must have a loop with {dict(work)} and without {sorted(never)}, found none")
    return sum((stretches[head].counts for head in best[1]), Counter())


def _shortest_from(
    start: int, stretches: Mapping[int, Stretch], work: Mapping[str, int], limit: int | None
) -> tuple[int, tuple[int, ...]] | None:
    """Length and stretches of the shortest turn from ``start`` to ``start``, if it is below ``limit``."""
    if start not in stretches:
        return None
    names = sorted(work)
    goal = tuple(work[name] for name in names)
    heap: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, start, (0,) * len(names), ())]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    while heap:
        length, head, done, way = heapq.heappop(heap)
        if head == start and way:
            return (length, way) if done == goal else None
        if limit is not None and length >= limit:
            return None
        if (head, done) in seen or head in way:
            continue
        seen.add((head, done))
        s = stretches[head]
        done = tuple(have + s.counts[name] for have, name in zip(done, names, strict=True))
        if any(have > wanted for have, wanted in zip(done, goal, strict=True)):
            continue
        for after in s.after:
            if after in stretches and (after != start or done == goal):
                heapq.heappush(heap, (length + s.counts.total(), after, done, (*way, head)))
    return None
