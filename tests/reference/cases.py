"""Inputs and comparisons that the attention tests share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from flamia.reference import Gradients, attention_backward, attention_forward
from flamia.reference.forward import Forward

BF16 = ml_dtypes.bfloat16
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 300)


def random_inputs(seed: int, total: int, hq: int, hkv: int, dim: int = 64, dtype: Any = BF16) -> list[np.ndarray]:
    """q, k, v, dout of standard normal numbers."""
    rng = np.random.default_rng(seed)
    shapes = ((total, hq, dim), (total, hkv, dim), (total, hkv, dim), (total, hq, dim))
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def boundaries(lengths: Any) -> np.ndarray:
    """cu_seqlens of documents of the given lengths."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def run(inputs: list[np.ndarray], cu: Any, **options: Any) -> tuple[Forward, Gradients]:
    """Forward and backward."""
    q, k, v, dout = inputs
    forward = attention_forward(q, k, v, cu, **options)
    return forward, attention_backward(dout, forward)


def first_difference(name: str, a: np.ndarray, b: np.ndarray) -> str | None:
    """None if the bytes are equal; else the first differing coordinate and both values. All NaN are equal."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    x, y = np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits)
    nan = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    where = np.argwhere((x != y) & ~nan)
    if not len(where):
        return None
    at = tuple(int(i) for i in where[0])
    return f"{name}{list(at)}: {a[at]} (0x{int(x[at]):x}) against {b[at]} (0x{int(y[at]):x}); {len(where)} differ"


def assert_bitwise_equal(**pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """Raise with the first differing coordinate of each pair that differs."""
    found = [text for name, (a, b) in pairs.items() if (text := first_difference(name, a, b))]
    assert not found, "\n".join(found)


def relative_error(a: np.ndarray, exact: np.ndarray) -> float:
    """Frobenius norm of the error over that of the exact value."""
    return float(np.linalg.norm(a.astype(np.float64) - exact) / np.linalg.norm(exact))
