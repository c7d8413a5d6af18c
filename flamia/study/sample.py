"""The study's input: packed q, k, v and dO, from the package's sample or from a file.

The sample was cut from a training run: q, k (after the rotary embedding), v and the gradient dO of the attention of
three layers (1, 5 and 11) of a Llama-style model of 100M parameters, trained on source code; 3 query heads, 1 KV head
and head_dim 128 per layer. The layers saw the same tokens, so they lie side by side as heads: 9 query heads, 3 KV
heads. 402 consecutive tokens were taken: whole documents of 33 tokens and of a single one, and the first 368 tokens of
a third. That is as many tokens of three layers as 2 MB hold; layers differ more from each other than tokens do.

A file (``.npz``) holds ``q (T, Hq, D)``, ``k`` and ``v (T, Hkv, D)``; optionally ``dout (T, Hq, D)`` and ``cu_seqlens
(documents + 1,)``. Elements are bfloat16 (also as uint16 bits, or as the 2-byte void that NumPy makes of it on disk),
float16 or float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference.arguments import check_qkv
from flamia.reference.documents import validate_cu_seqlens

TENSORS = ("q", "k", "v", "dout")


@dataclass(frozen=True)
class Sample:
    """Checked input: finite, of one dtype (bfloat16, or float32 if any tensor was not bfloat16).

    :param q: ``(T, Hq, D)``.
    :param k: ``(T, Hkv, D)``.
    :param v: ``(T, Hkv, D)``.
    :param dout: ``(T, Hq, D)``, scaled by the power of two that brings its maximum to 1/2..1.
    :param cu_seqlens: int64 ``(documents + 1,)``, ending at ``T``.
    :param source: where it is from, for people.
    :param random_dout: True if dO was not given: it is standard normal then.
    """

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    dout: NDArray[Any]
    cu_seqlens: NDArray[np.int64]
    source: str
    random_dout: bool = False

    @property
    def qkv(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def lengths(self) -> list[int]:
        """Tokens per document."""
        return [int(n) for n in np.diff(self.cu_seqlens)]

    @property
    def head_counts(self) -> tuple[int, int]:
        """Hq and Hkv."""
        return self.q.shape[1], self.k.shape[1]

    def first_tokens(self, tokens: int) -> Sample:
        """The first ``tokens`` tokens; a document that they end in is cut there.

        :raises ValueError: if there are not that many, or none is asked for.
        """
        total = int(self.cu_seqlens[-1])
        if not 0 < tokens <= total:
            raise ValueError(f"tokens must be 1 to {total}, the number in {self.source}, got {tokens}")
        cu = np.append(self.cu_seqlens[self.cu_seqlens < tokens], tokens)
        cut = {name: getattr(self, name)[:tokens] for name in TENSORS}
        return replace(self, **cut, cu_seqlens=cu)

    def longest_document(self) -> tuple[int, slice]:
        """Index and tokens of the longest document."""
        index = int(np.argmax(np.diff(self.cu_seqlens)))
        return index, slice(int(self.cu_seqlens[index]), int(self.cu_seqlens[index + 1]))


def load(path: str | Path | None = None, seed: int = 0) -> Sample:
    """Read a file, or the package's sample.

    :param path: an ``.npz`` file as the module describes; None: the sample.
    :param seed: of the standard normal dO of a file without one.
    :raises ValueError, TypeError: naming the file, the key, its value and what is allowed.
    """
    if path is None:
        with resources.as_file(resources.files("flamia.study") / "data" / "sample.npz") as file, np.load(file) as data:
            return from_arrays(dict(data), "the package's sample", seed)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"input must be an .npz file, got {path}, which does not exist")
    if not is_zipfile(path):
        raise ValueError(f"input must be an .npz file, as numpy.savez writes it, got {path}")
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = dict(data)
    except Exception as error:  # NumPy and zipfile raise many kinds
        raise ValueError(f"input must be an .npz file of plain arrays, got {path}: {error}") from error
    return from_arrays(arrays, path.name, seed)


def from_arrays(arrays: Mapping[str, NDArray[Any]], source: str, seed: int = 0) -> Sample:
    """A sample of arrays by key; see `load`."""
    known = (*TENSORS, "cu_seqlens")
    for name in ("q", "k", "v"):
        if name not in arrays:
            raise ValueError(f"{source} must hold q, k and v, and may hold dout and cu_seqlens, got {sorted(arrays)}")
    for name in arrays:
        if name not in known:
            raise ValueError(f"{source} must hold no keys but {', '.join(known)}, got {name!r}")
    given = {name: _as_tensor(name, arrays[name], source) for name in TENSORS if name in arrays}
    kind = np.dtype(bfloat16 if all(x.dtype == bfloat16 for x in given.values()) else np.float32)
    tensors = {name: x.astype(kind, copy=False) for name, x in given.items()}
    try:
        check_qkv(tensors["q"], tensors["k"], tensors["v"])
        cu = validate_cu_seqlens(arrays.get("cu_seqlens", np.array([0, len(tensors["q"])])), len(tensors["q"]))
        if cu[-1] == 0:
            raise ValueError("q must have at least one token in a document, got none")
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from error
    q = tensors["q"]
    random_dout = "dout" not in tensors
    if random_dout:
        tensors["dout"] = np.random.default_rng(seed).standard_normal(q.shape, np.float32).astype(kind)
    elif tensors["dout"].shape != q.shape:
        raise ValueError(f"{source}: dout must have the shape of q {q.shape}, got {tensors['dout'].shape}")
    total = int(cu[-1])
    for name, x in tensors.items():
        tensors[name] = x = np.ascontiguousarray(x[:total])
        lost = np.argwhere(~np.isfinite(x.astype(np.float32)))
        if len(lost):
            at = tuple(int(i) for i in lost[0])
            raise ValueError(f"{source}: {name} must be finite, got {x[at]} at {list(at)} and {len(lost) - 1} more")
    tensors["dout"] = _scaled_to_one(tensors["dout"])
    return Sample(**tensors, cu_seqlens=cu, source=source, random_dout=random_dout)


def join(samples: list[Sample]) -> Sample:
    """Samples of the same tokens (layers of one model, say) side by side as heads.

    :raises ValueError: unless documents, head_dim and query heads per KV head agree.
    """
    first = samples[0]
    for other in samples[1:]:
        for what, a, b in (
            ("cu_seqlens", first.cu_seqlens.tolist(), other.cu_seqlens.tolist()),
            ("head_dim", first.q.shape[2], other.q.shape[2]),
            ("query heads per KV head", *(s.q.shape[1] // s.k.shape[1] for s in (first, other))),
        ):
            if a != b:
                raise ValueError(f"{other.source} must have the {what} of {first.source}, {a}, to be joined, got {b}")
    kind = np.dtype(bfloat16 if all(s.q.dtype == bfloat16 for s in samples) else np.float32)
    joined = {name: np.concatenate([getattr(s, name).astype(kind) for s in samples], axis=1) for name in TENSORS}
    return Sample(
        **joined,
        cu_seqlens=first.cu_seqlens,
        source=", ".join(s.source for s in samples),
        random_dout=any(s.random_dout for s in samples),
    )


def _as_tensor(name: str, x: NDArray[Any], source: str) -> NDArray[Any]:
    """bfloat16 or float32."""
    if x.dtype == np.uint16 or (x.dtype.kind == "V" and x.dtype.itemsize == 2 and x.dtype.names is None):
        return np.ascontiguousarray(x).view(bfloat16)
    if x.dtype == np.float16:
        return x.astype(np.float32)
    if x.dtype in (np.dtype(np.float32), np.dtype(bfloat16)):
        return x
    raise TypeError(f"{source}: {name} must be bfloat16 (or its bits as uint16), float16 or float32, got {x.dtype}")


def _scaled_to_one(dout: NDArray[Any]) -> NDArray[Any]:
    """dO times a power of two, so exact: gradients of a loss averaged over many tokens are tiny."""
    largest = float(np.abs(dout.astype(np.float32)).max(initial=0))
    if largest == 0:
        return dout
    _, exponent = math.frexp(largest)
    return np.ldexp(dout.astype(np.float32), -exponent).astype(dout.dtype)
