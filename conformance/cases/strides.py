"""Strides: views that callers pass, and that kernels take for contiguous."""

from __future__ import annotations

import mmap

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.calls import TENSORS, Inputs
from flamia.conformance.cases.draw import BF16, gaussian
from flamia.conformance.cases.registry import case


@case("strides/expanded_dout", classes=("expanded-dout",), promises=("strides",), tiny=True)
def expanded_dout(rng: np.random.Generator) -> Inputs:
    """dO with stride 0 in every dimension, as the gradient of ``out.sum()``.

    expanded-dout: a kernel that takes dO as contiguous reads past one element.
    """
    inputs = gaussian(rng, [60, 70])
    return inputs.replace(dout=np.broadcast_to(BF16.type(1), inputs.dout.shape))


@case("strides/expanded_over_tokens", classes=("expanded-dout",), promises=("strides",), tiny=True)
def expanded_over_tokens(rng: np.random.Generator) -> Inputs:
    """dO that is one row for all tokens, as the gradient of ``out.sum(0)``.

    expanded-dout: stride 0 along tokens only.
    """
    inputs = gaussian(rng, [60, 70])
    return inputs.replace(dout=np.broadcast_to(inputs.dout[:1], inputs.dout.shape))


@case("strides/sliced_qkv", promises=("strides",), tiny=True)
def sliced_qkv(rng: np.random.Generator) -> Inputs:
    """q, k and v as slices of one projection ``(T, Hq + 2 Hkv, D)``."""
    inputs = gaussian(rng, [60, 70], (4, 2))
    together = np.concatenate([inputs.q, inputs.k, inputs.v], axis=1)
    return inputs.replace(q=together[:, :4], k=together[:, 4:6], v=together[:, 6:])


@case("strides/sliced_channels", promises=("strides",), tiny=True)
def sliced_channels(rng: np.random.Generator) -> Inputs:
    """Heads that are wider in memory than head_dim."""
    inputs = gaussian(rng, [60, 70])
    wide = {name: np.pad(getattr(inputs, name), ((0, 0), (0, 0), (0, 64)), constant_values=np.nan) for name in TENSORS}
    return inputs.replace(**{name: x[..., :64] for name, x in wide.items()})


@case("strides/transposed_heads", promises=("strides",), tiny=True)
def transposed_heads(rng: np.random.Generator) -> Inputs:
    """Head-major memory ``(H, T, D)``, transposed to ``(T, H, D)``."""
    inputs = gaussian(rng, [60, 70], (4, 2))
    turned = {
        name: np.ascontiguousarray(getattr(inputs, name).transpose(1, 0, 2)).transpose(1, 0, 2) for name in TENSORS
    }
    return inputs.replace(**turned)


@case("strides/far_rows", size="stress", classes=("offsets",), promises=("strides",))
def far_rows(rng: np.random.Generator) -> Inputs:
    """Rows of K and V that lie 2^24 + 64 elements apart: 140 of them span 2.35e9 elements, of which few are touched.

    offsets: an element or byte offset of token * stride in 32 bits wraps past row 127.
    """
    inputs = gaussian(rng, [140], (1, 1))
    return inputs.replace(k=_spread(inputs.k, (1 << 24) + 64), v=_spread(inputs.v, (1 << 24) + 64))


def _spread(x: np.ndarray, stride: int) -> np.ndarray:
    """A copy whose rows lie ``stride`` elements apart in memory that the system maps only where it is written."""
    size = (x.shape[0] - 1) * stride + x[0].size
    memory = np.frombuffer(mmap.mmap(-1, 2 * size), np.uint16)
    view = np.lib.stride_tricks.as_strided(memory, x.shape, (2 * stride, 2 * x.shape[2], 2))
    view[...] = x.view(np.uint16)
    return view.view(bfloat16)
