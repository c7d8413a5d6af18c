"""Schedule: the work of one attention call as a list of items, longest first.

Note [Schedule]
~~~~~~~~~~~~~~~
A *work item* is what one CTA does without talking to another:

* forward: two adjacent 128-row query tiles of one document and one query head. Pair ``u`` holds query tiles
  ``2u`` and ``2u + 1``, the second only if it exists;
* backward: one 128-key tile of one document and one KV head, for all query heads of the group.

Its *cost* is the number of 128 x 128 tiles that it visits. With ``n = ceil(length / 128)`` tiles in the
document:

=====================================  =======================================  ========================
item                                   causal                                   full
=====================================  =======================================  ========================
forward, query tile ``a``              ``a + 1`` (keys up to the diagonal)      ``n``
forward, pair ``u``                    the sum over its one or two query tiles  the sum over its tiles
backward, key tile ``t``, group ``g``  ``g (n - t)`` (queries on and below it)  ``g n``
=====================================  =======================================  ========================

Items are sorted by cost, largest first; items of equal cost by document, then head, then tile, smallest
first. Persistent CTAs take the next item of the list whenever they are free. Taken longest first by ``m``
CTAs, the list ends no later than ``4/3 - 1/(3m)`` times the best possible (R. L. Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969).

The backward of ``g = 1`` counts the cost by its leading binary digit alone (1, 2, 4, 8, ...): the key tiles of one
head, which read the same queries, then come together and share them in a cache. With ``g`` query heads per KV head
there are fewer and longer items, and the exact order is the better one, as measured on an H200
(docs/tuning_hopper_backward.md). The keys by which items are sorted differ by less than a factor of two from their
costs, so the bound is then that of any list, ``2 - 1/m``.

Everything is integer arithmetic. The item's place is the number of items of larger key, plus the number of
items of equal key before it in the order (document, head, tile): a counting sort, which a GPU reproduces
without sorting. No result depends on the schedule; only the time does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference.documents import TILE, validate_cu_seqlens

Index = NDArray[np.int64]

QUERY_TILES = 2
"""Adjacent query tiles of one forward item."""


@dataclass(frozen=True)
class Schedule:
    """Work items in the order in which they are taken: four int64 arrays of shape ``(items,)``.

    :param document: index into ``cu_seqlens``, empty documents counted.
    :param head: query head (forward) or KV head (backward).
    :param tile: the item's first query tile ``2u`` (forward) or its key tile (backward), counted within the
        document.
    :param cost: number of 128 x 128 tiles visited.
    """

    document: Index
    head: Index
    tile: Index
    cost: Index

    def __len__(self) -> int:
        return len(self.cost)


@dataclass(frozen=True)
class Makespan:
    """The time that a list of items takes, in units of one visited tile.

    :param makespan: when the last CTA ends.
    :param lower_bound: no assignment ends earlier: ``max(ceil(sum(cost) / num_sms), max(cost))``.
    :param balance: the fraction of the CTAs' time spent at work, ``sum(cost) / (num_sms * makespan)``; 1 for
        no items.
    """

    makespan: int
    lower_bound: int
    balance: float


def forward_schedule(cu_seqlens: Any, num_q_heads: int, causal: bool) -> Schedule:
    """Work items of the forward pass. See Note [Schedule].

    :param cu_seqlens: integers ``(n + 1,)``.
    :param num_q_heads: ``Hq``.
    :param causal: whether key tiles past the diagonal are skipped.
    :raises TypeError, ValueError: for an illegal ``cu_seqlens`` or fewer than one head.
    """
    tiles = _tiles(cu_seqlens)
    document, head, pair = _enumerate_items(-(-tiles // QUERY_TILES), num_q_heads, "num_q_heads")
    first, n = QUERY_TILES * pair, tiles[document]
    second = first + 1 < n
    cost = first + 1 + second * (first + 2) if causal else n * (1 + second)
    return _sort_items(document, head, first, cost, cost)


def backward_schedule(cu_seqlens: Any, num_kv_heads: int, group: int, causal: bool) -> Schedule:
    """Work items of the backward pass. See Note [Schedule].

    :param cu_seqlens: integers ``(n + 1,)``.
    :param num_kv_heads: ``Hkv``.
    :param group: ``Hq // Hkv``, the query heads of each KV head.
    :param causal: whether query tiles before the diagonal are skipped.
    :raises TypeError, ValueError: for an illegal ``cu_seqlens``, or fewer than one head or group member.
    """
    _require_positive("group", group)
    tiles = _tiles(cu_seqlens)
    document, head, tile = _enumerate_items(tiles, num_kv_heads, "num_kv_heads")
    n = tiles[document]
    cost = group * (n - tile if causal else n)
    return _sort_items(document, head, tile, cost, _leading_digit(cost) if group == 1 else cost)


def max_items(num_tokens: int, num_documents: int, heads: int, tokens_per_item: int) -> int:
    """An upper bound of the number of items that needs no ``cu_seqlens``: ``heads * (T // tokens_per_item +
    n)``.

    ``tokens_per_item`` is 256 for the forward and 128 for the backward; the proof is that of
    `layout.max_tiles`.
    """
    return heads * (num_tokens // tokens_per_item + num_documents)


def makespan(costs: Any, num_sms: int) -> Makespan:
    """Let ``num_sms`` persistent CTAs take items in the given order, each as soon as it is free.

    :param costs: non-negative integers ``(items,)``, for instance `Schedule.cost`.
    :param num_sms: number of CTAs, one per SM.
    :raises ValueError: for fewer than one CTA or a negative cost.
    """
    _require_positive("num_sms", num_sms)
    cost = np.asarray(costs, np.int64)
    if cost.size == 0:
        return Makespan(0, 0, 1.0)
    if cost.min() < 0:
        raise ValueError(f"costs must not be negative, got {cost.min()}")
    total = int(cost.sum())
    lower_bound = max(-(-total // num_sms), int(cost.max()))
    free_at = [0] * num_sms  # a heap: the CTA that is free first takes the next item
    for c in cost.tolist():
        heapq.heapreplace(free_at, free_at[0] + c)
    end = max(free_at)
    return Makespan(end, lower_bound, total / (num_sms * end) if end else 1.0)


def _tiles(cu_seqlens: Any) -> Index:
    """128-token tiles of each document, ``(n,)``."""
    return -(-np.diff(validate_cu_seqlens(cu_seqlens, np.iinfo(np.int64).max)) // TILE)


def _enumerate_items(units: Index, heads: int, name: str) -> tuple[Index, Index, Index]:
    """Document, head and unit of every item in the order (document, head, unit), ``units[i]`` for each head
    of ``i``."""
    _require_positive(name, heads)
    per_document = units * heads
    document = np.repeat(np.arange(len(units)), per_document)
    first = np.cumsum(per_document) - per_document
    within = np.arange(len(document)) - first[document]
    head, unit = np.divmod(within, units[document])
    return document, head, unit


def _leading_digit(cost: Index) -> Index:
    """The largest power of two that is not above a cost >= 1."""
    return np.int64(1) << (np.frexp(cost.astype(np.float64))[1].astype(np.int64) - 1)


def _sort_items(document: Index, head: Index, tile: Index, cost: Index, key: Index) -> Schedule:
    order = np.argsort(-key, kind="stable")
    return Schedule(document[order], head[order], tile[order], cost[order])


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
