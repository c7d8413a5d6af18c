"""What goes into one call of attention and what comes out of it: the vocabulary of targets, cases and levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TileKey = tuple[int, int, int, int]
"""(document, query head, query tile, key tile); documents are counted with the empty ones."""

TENSORS = ("q", "k", "v", "dout")
GRADIENTS = ("dq", "dk", "dv")
OUTPUTS = ("out", "lse", *GRADIENTS)

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Inputs:
    """One call. Arrays may be views with any strides that are not negative; a target must not write to them.

    :param q: ``(T, Hq, D)`` float32 or bfloat16.
    :param k: ``(T, Hkv, D)``, dtype of q.
    :param v: as k.
    :param dout: ``(T, Hq, D)``, the gradient of out.
    :param cu_seqlens: int64 ``(documents + 1,)``.
    :param softmax_scale: None: ``1 / sqrt(D)``.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    cu_seqlens: NDArray[np.int64]
    causal: bool = True
    softmax_scale: float | None = None

    @property
    def total(self) -> int:
        """T, the number of packed rows, padding included."""
        return int(self.q.shape[0])

    @property
    def head_counts(self) -> tuple[int, int]:
        """Hq and Hkv."""
        return int(self.q.shape[1]), int(self.k.shape[1])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.q.shape[2])

    @property
    def lengths(self) -> list[int]:
        """Tokens per document, empty ones included."""
        return [int(n) for n in np.diff(self.cu_seqlens)]

    def copied(self) -> Inputs:
        """The same with contiguous copies of the tensors, to be changed in place."""
        return self.replace(**{name: getattr(self, name).copy(order="C") for name in TENSORS})

    def replace(self, **changes: Any) -> Inputs:
        """A copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Results:
    """What a target returned, as NumPy arrays; None where it offers nothing.

    :param out: ``(T, Hq, D)``, dtype of q.
    :param lse: float32 ``(Hq, T)``, natural logarithm.
    :param dq: ``(T, Hq, D)``.
    :param dk: ``(T, Hkv, D)``.
    :param dv: ``(T, Hkv, D)``.
    :param arrays: intermediate results by stage name, see `stages`.
    :param tiles: tiles of P and dS by stage name and `TileKey`, see `stages`.
    """

    out: Array
    lse: Array | None = None
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    arrays: Mapping[str, Array] = field(default_factory=dict)
    tiles: Mapping[str, Mapping[TileKey, Array]] = field(default_factory=dict)

    def outputs(self) -> dict[str, Array]:
        """The outputs that exist, by name, tokens first: LSE as ``(T, Hq, 1)``."""
        found = {name: getattr(self, name) for name in OUTPUTS}
        if found["lse"] is not None:
            found["lse"] = found["lse"].T[..., None]
        return {name: x for name, x in found.items() if x is not None}
