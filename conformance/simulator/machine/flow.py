"""Control flow: where lanes that part meet again."""

from __future__ import annotations


def find_joins(successors: list[list[int]]) -> list[int]:
    """Immediate post-dominators.

    :param successors: of each node; ``len(successors)`` is the end.
    :returns: for each node the first node that every path from it to the end passes; -1 if that is the end, or if no
        path leads there.

    By the iteration of Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph.
    """
    end = len(successors)
    predecessors: list[list[int]] = [[] for _ in range(end + 1)]
    for node, nexts in enumerate(successors):
        for n in nexts:
            predecessors[n].append(node)
    order = _postorder(predecessors, end)
    rank = {node: i for i, node in enumerate(order)}
    parent: dict[int, int] = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == end:
                continue
            best = -1
            for n in successors[node]:
                if n in parent:
                    best = n if best < 0 else _meet(parent, rank, n, best)
            if best >= 0 and parent.get(node) != best:
                parent[node] = best
                changed = True
    return [-1 if parent.get(node, end) == end else parent[node] for node in range(end)]


def _meet(parent: dict[int, int], rank: dict[int, int], a: int, b: int) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = parent[a]
        while rank[b] < rank[a]:
            b = parent[b]
    return a


def _postorder(graph: list[list[int]], root: int) -> list[int]:
    """Nodes reachable from ``root``, each after those reached through it."""
    out: list[int] = []
    seen = {root}
    stack = [(root, iter(graph[root]))]
    while stack:
        node, nexts = stack[-1]
        for n in nexts:
            if n not in seen:
                seen.add(n)
                stack.append((n, iter(graph[n])))
                break
        else:
            out.append(node)
            stack.pop()
    return out
