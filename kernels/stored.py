"""Room for tiles of X, which one kernel of a backward stores for another: for how many heads at a time.

Note [Bounded X]
~~~~~~~~~~~~~~~~
X, the softmax gradient times P, has an entry for every query and key of a document and head. The host gives the kernels
as many KV heads at a time as fit a bound of memory, and launches them once per chunk of heads. It does not know where
documents begin, only how many tiles a pack has at most and, if the caller says so, how long a document is at most
(``max_seqlen``): the memory of a head is what such documents may take. Without that bound a pack counts as one
document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flamia.kernels.schedule import DeviceSchedule

STORED_BYTES = 4 << 30
"""Default bound of the memory for tiles of X."""


@dataclass(frozen=True)
class Chunks:
    """How a backward goes through the KV heads.

    :param heads: KV heads of one launch, but the last; 0 if not even one fits the bound.
    :param pairs: tiles of X of a query head.
    """

    heads: int
    pairs: int


def check_stored_bytes(stored_bytes: Any) -> None:
    """Check a bound.

    :raises TypeError, ValueError: naming the argument.
    """
    if isinstance(stored_bytes, bool) or not isinstance(stored_bytes, int):
        raise TypeError(f"stored_bytes must be an integer, got {stored_bytes!r}")
    if stored_bytes < 0:
        raise ValueError(f"stored_bytes must be at least 0, got {stored_bytes}")


def count_pairs(num_tokens: int, num_documents: int, longest: int, causal: bool) -> int:
    """Numbers of pairs in a query head, used or not: Note [Numbers of pairs] of ``common/pairs.cuh``.

    :param longest: tiles of a document at most.
    """
    return num_tokens * (longest + 2 if causal else 2 * (longest + 1)) // 256 + num_documents


def divide_heads(schedule: DeviceSchedule, stored_bytes: int, pair_bytes: int) -> Chunks:
    """As few chunks as fit the bound, and those as equal as they can be: Note [Bounded X]."""
    documents = schedule.tile_offsets.shape[0] - 1
    pairs = count_pairs(schedule.num_tokens, documents, schedule.longest, schedule.causal)
    kv_heads = schedule.num_kv_heads
    group = schedule.num_q_heads // kv_heads
    fit = min(kv_heads, stored_bytes // max(1, group * pairs * pair_bytes))
    if fit == 0:
        return Chunks(0, pairs)
    return Chunks(-(-kv_heads // -(-kv_heads // fit)), pairs)
