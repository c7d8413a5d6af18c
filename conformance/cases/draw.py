"""Drawing tensors: what the cases share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.calls import Inputs

BF16 = np.dtype(bfloat16)


def boundaries(lengths: Sequence[int]) -> NDArray[np.int64]:
    """cu_seqlens of documents of the given lengths."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def gaussian(
    rng: np.random.Generator,
    lengths: Sequence[int],
    heads: tuple[int, int] = (2, 1),
    dim: int = 64,
    padding: int = 0,
    dtype: Any = BF16,
    **options: Any,
) -> Inputs:
    """Standard normal q, k, v and dO of documents of the given lengths; padding rows hold NaN."""
    cu = boundaries(lengths)
    total = int(cu[-1]) + padding
    hq, hkv = heads
    tensors = [rng.standard_normal((total, h, dim), np.float32).astype(dtype) for h in (hq, hkv, hkv, hq)]
    for x in tensors:
        x[cu[-1] :] = np.nan
    q, k, v, dout = tensors
    return Inputs(q, k, v, dout, cu, **options)


def transform(inputs: Inputs, **factors: Any) -> Inputs:
    """Multiply tensors by arrays that broadcast over ``(T, H, D)``, in float32, rounded to their dtype."""
    return inputs.replace(**{name: scaled(getattr(inputs, name), factor) for name, factor in factors.items()})


def scaled(x: NDArray[Any], factor: Any) -> NDArray[Any]:
    """``x * factor`` in float32, rounded to the dtype of x."""
    product: NDArray[Any] = (x.astype(np.float32) * np.asarray(factor, np.float32)).astype(x.dtype)
    return product
