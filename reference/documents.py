"""Packed documents: where each document lies, and how it is cut into tiles.

Note [Documents]
~~~~~~~~~~~~~~~~
Tensors are packed: q is ``(T, Hq, D)``, k and v are ``(T, Hkv, D)``, and ``cu_seqlens`` (int32 or int64, shape
``(n + 1,)``) holds the boundaries: document ``i`` owns the tokens ``cu_seqlens[i] <= t < cu_seqlens[i + 1]``.
``cu_seqlens[0]`` is 0, the sequence never decreases, and its last entry may be smaller than ``T``: the rows past it
are *padding*. A padding row has output 0, LSE -inf and gradient 0, and whatever it holds (NaN included) changes
nothing. Empty documents and documents of one token are legal anywhere.

Everything is *document-local*: blocks of 32 tokens and tiles of 128 tokens start at the first token of their document,
wherever that lies in the packed buffer. A document alone and the same document inside any pack therefore give the same
bits, forward and backward. KV head of query head ``h`` is ``h // (Hq // Hkv)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 128
"""Tokens per tile, along queries and along keys."""

BLOCK = 32
"""Tokens per token block, and edge of a square scale tile of P and dS."""


@dataclass(frozen=True)
class Document:
    """One non-empty document of a pack: tokens ``start <= t < stop``."""

    index: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def tiles(self) -> int:
        """Number of 128-token tiles, the last one possibly partial."""
        return -(-self.length // TILE)


def validate_cu_seqlens(cu_seqlens: Any, total: int) -> NDArray[np.int64]:
    """Return ``cu_seqlens`` as int64 after checking every rule of Note [Documents].

    :param cu_seqlens: integer array-like of shape ``(n + 1,)``, ``n >= 0``.
    :param total: ``T``, the number of packed rows.
    :raises TypeError: if the entries are not integers.
    :raises ValueError: if the shape, the first entry, the order or the last entry is illegal.
    """
    cu = np.asarray(cu_seqlens)
    if cu.ndim != 1 or cu.size == 0:
        raise ValueError(f"cu_seqlens must have shape (documents + 1,), got shape {cu.shape}")
    if cu.dtype.kind not in "iu":
        raise TypeError(f"cu_seqlens must hold integers (int32 or int64), got dtype {cu.dtype}")
    if cu.max() > np.iinfo(np.int64).max:
        raise ValueError(f"cu_seqlens must be at most the number of packed tokens {total}, got {cu.max()}")
    cu = cu.astype(np.int64)
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens[0] must be 0, got {cu[0]}")
    falls = np.flatnonzero(np.diff(cu) < 0)
    if falls.size:
        i = int(falls[0])
        raise ValueError(f"cu_seqlens must not decrease, got cu_seqlens[{i}]={cu[i]} > cu_seqlens[{i + 1}]={cu[i + 1]}")
    if cu[-1] > total:
        raise ValueError(f"cu_seqlens[-1] must be at most the number of packed tokens {total}, got {cu[-1]}")
    return cu


def iter_documents(cu_seqlens: NDArray[np.int64]) -> Iterator[Document]:
    """Yield the non-empty documents in order; ``index`` counts the empty ones too."""
    for i in np.flatnonzero(np.diff(cu_seqlens) > 0):
        yield Document(int(i), int(cu_seqlens[i]), int(cu_seqlens[i + 1]))
