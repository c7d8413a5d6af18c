"""Values that occur in training: distributions, activations of a real model, sinks, ties and one-hot vectors."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.calls import Inputs
from flamia.conformance.cases.draw import BF16, gaussian, scaled, transform
from flamia.conformance.cases.registry import case


@case("values/gaussian", classes=("backward-p",), promises=("consistency", "shift", "determinism", "suffix"))
def normal(rng: np.random.Generator) -> Inputs:
    """Standard normal numbers in documents of one to three tiles.

    backward-p: a backward that recomputes P with another rounding or scale differentiates another function.
    """
    return gaussian(rng, [300, 128, 40])


@case("values/gaussian_float32", promises=("ones", "consistency", "shift"), tiny=True)
def normal_float32(rng: np.random.Generator) -> Inputs:
    """The same in float32: inputs with 24 bits are rounded once, results hardly at all."""
    return gaussian(rng, [150, 33], dtype=np.float32)


@case("values/gaussian_full_attention", promises=("ones", "consistency", "determinism"))
def normal_full(rng: np.random.Generator) -> Inputs:
    """Standard normal numbers without the causal mask."""
    return gaussian(rng, [200, 61], (4, 2), causal=False)


@case("values/activations", classes=("backward-p",), promises=("consistency", "suffix"))
def activations(rng: np.random.Generator) -> Inputs:
    """q, k, v and dO of three layers of a language model trained on source code: nine query heads, 128 channels.

    backward-p: trained heads are peaked, so that most of P is tiny; rounding it elsewhere shows in dQ and dK.
    """
    file = resources.files("flamia") / "study" / "data" / "sample.npz"
    with resources.as_file(file) as path, np.load(path) as data:
        arrays = dict(data)
    tensors: dict[str, Any] = {}
    for name in ("q", "k", "v", "dout"):
        x = arrays[name]
        tensors[name] = x.view(bfloat16) if x.dtype.kind in "uV" else x.astype(BF16)
    largest = float(np.abs(tensors["dout"].astype(np.float32)).max())
    tensors["dout"] = scaled(tensors["dout"], 2.0 ** -np.ceil(np.log2(largest)))
    return Inputs(**tensors, cu_seqlens=arrays["cu_seqlens"].astype(np.int64))


@case("values/outlier_channels")
def outlier_channels(rng: np.random.Generator) -> Inputs:
    """Two channels of q and k 20 times larger, as rotary embeddings and trained models have them."""
    channels = np.ones(64, np.float32)
    channels[[5, 37]] = 20
    return transform(gaussian(rng, [200, 70]), q=channels / 8, k=channels / 8)


@case("values/uneven_tokens")
def uneven_tokens(rng: np.random.Generator) -> Inputs:
    """Token norms that spread over eight octaves, in all tensors: neighbours in a scale block differ most."""
    inputs = gaussian(rng, [200, 70])

    def norms() -> Any:
        return np.exp2(rng.integers(-4, 5, (inputs.total, 1, 1)))

    return transform(inputs, q=norms() / 16, k=norms() / 16, v=norms(), dout=norms())


@case("values/sink", classes=("sink-underflow",), promises=("ones", "consistency"))
def sink(rng: np.random.Generator) -> Inputs:
    """Every query attends to token 0, 14 to 20 octaves above the other keys.

    sink-underflow: P of the flat keys lies below E4M3's smallest value times a constant scale and is lost, though
    together they hold a share of the sum; one scale per row and tile of keys keeps it. With V = 1, a row sum of P
    before rounding counts what P as rounded has lost.
    """
    inputs = gaussian(rng, [520], (1, 1)).copied()
    direction = np.zeros(64, np.float32)
    direction[0] = 1
    inputs.q[...] = scaled(inputs.q, 0.25)
    inputs.q[..., 0] = 8
    inputs.k[...] = scaled(inputs.k, 1 - direction)
    inputs.k[0] = 0
    inputs.k[0, :, 0] = 12
    inputs.v[0] = 0
    return inputs


@case("values/ones", promises=("ones",), tiny=True)
def ones(rng: np.random.Generator) -> Inputs:
    """V = 1 under normal scores: out is exactly 1, whatever the rounding of P."""
    inputs = gaussian(rng, [170, 40], (4, 2)).copied()
    inputs.v[...] = 1
    return inputs


@case("values/one_hot", classes=("permuted-mask", "causal-alignment"), tiny=True)
def one_hot(rng: np.random.Generator) -> Inputs:
    """V of token j is the unit vector of channel j mod 64, so that out shows the columns of P.

    permuted-mask: a mask applied in the fragment's column order hides other keys than those after the query, and a
    channel is not zero whose tokens are all later. causal-alignment: the same for a shifted diagonal.
    """
    inputs = gaussian(rng, [64, 40, 128]).copied()
    for start, stop in zip(inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:], strict=True):
        position = np.arange(stop - start)
        inputs.v[start:stop] = 0
        inputs.v[start + position, :, position % 64] = 1
    return inputs


@case("values/equal_scores", tiny=True)
def equal_scores(rng: np.random.Generator) -> Inputs:
    """All keys equal: every visible key ties for the row maximum, P is uniform, and x lies exactly on integers."""
    inputs = gaussian(rng, [140], (1, 1)).copied()
    inputs.k[...] = inputs.k[:1]
    inputs.q[...] = 0
    return inputs


@case("values/tied_maximum", tiny=True)
def tied_maximum(rng: np.random.Generator) -> Inputs:
    """Every key occurs twice, 64 tokens apart: pairs of scores tie for the maximum in different blocks and tiles."""
    inputs = gaussian(rng, [256], (2, 1)).copied()
    for first in (0, 128):
        inputs.k[first + 64 : first + 128] = inputs.k[first : first + 64]
    return inputs


@case("values/rounding_ties", classes=("tie-bias",), tiny=True)
def rounding_ties(rng: np.random.Generator) -> Inputs:
    """Elements that lie exactly between two E4M3 codes under their token's scale, in all tensors.

    tie-bias: rounding half away from zero, or up, moves every element in the same direction; to even does not.
    """
    inputs = gaussian(rng, [128, 40]).copied()
    for name in ("q", "k", "v", "dout"):
        x = getattr(inputs, name)
        # 1.m + half a quantum, five significant bits, over three binades; 448 in channel 0 fixes the token's scale
        odd = (2 * rng.integers(8, 16, x.shape) + 1) / 16
        x[...] = (rng.choice([-1, 1], x.shape) * odd * np.exp2(rng.integers(4, 7, x.shape)) / 256).astype(BF16)
        x[..., 0] = 448 / 256
    return inputs


@case("values/rising_logits", classes=("stale-maximum",), promises=("ones", "consistency"), tiny=True)
def rising_logits(rng: np.random.Generator) -> Inputs:
    """Scores that rise along the keys by 12 octaves per 128-key tile, so that each tile has a new row maximum.

    stale-maximum: a kernel that rescales only when the maximum grew by more than a threshold, and meanwhile holds P
    against the old one, saturates P at the format's largest value.
    """
    inputs = gaussian(rng, [400], (1, 1), causal=True).copied()
    position = np.arange(inputs.total, dtype=np.float32)
    inputs.q[...] = scaled(inputs.q, 0.5)
    inputs.q[..., 0] = 8
    inputs.k[..., 0] = (position * (12 * np.log(2) / 128))[:, None].astype(BF16)
    return inputs


@case("values/falling_logits", tiny=True)
def falling_logits(rng: np.random.Generator) -> Inputs:
    """The same, falling: the maximum is in the first tile, and later tiles vanish step by step."""
    inputs = rising_logits(rng)
    inputs.k[..., 0] = inputs.k[::-1, :, 0].copy()
    return inputs


@case("values/low_lse", classes=("lse-overflow", "masked-rows"), tiny=True)
def low_lse(rng: np.random.Generator) -> Inputs:
    """All scores near -250, hence LSE below -88.7.

    lse-overflow: a backward that forms exp(s) * exp(-lse) overflows to Inf, then Inf * 0. masked-rows: rows whose
    scores all lie below an "empty row" threshold, or below the finite number that stands for -inf, vanish.
    """
    inputs = gaussian(rng, [130, 40]).copied()
    inputs.q[..., :32], inputs.k[..., :32] = BF16.type(8), BF16.type(-7.8125)
    return inputs


@case("values/high_lse", tiny=True)
def high_lse(rng: np.random.Generator) -> Inputs:
    """All scores near +250: exp without a maximum would overflow."""
    inputs = low_lse(rng)
    inputs.k[..., :32] = BF16.type(7.8125)
    return inputs


@case("values/lse", classes=("lse-base",), promises=("edges",), tiny=True)
def lse(rng: np.random.Generator) -> Inputs:
    """Unequal lengths and head counts with scores of a few units, for the row statistics.

    lse-base: LSE in base 2 differs by a factor 1.44, in units of the scaled score by an offset; its layout
    ``(heads, tokens)`` cannot be mistaken here, as no two sizes are equal.
    """
    return transform(gaussian(rng, [50, 3, 77], (6, 2)), q=2.0)


@case("values/no_gradient", promises=("edges",), tiny=True)
def no_gradient(rng: np.random.Generator) -> Inputs:
    """dO is zero in a document, in single rows, and in a head: the backward has rows, blocks and tiles to skip."""
    inputs = gaussian(rng, [60, 30, 129], (4, 2)).copied()
    inputs.dout[:60] = 0
    inputs.dout[70:75] = 0
    inputs.dout[:, 1] = 0
    return inputs


@case("values/long_sink", size="full", classes=("sink-underflow",))
def long_sink(rng: np.random.Generator) -> Inputs:
    """A sink before 4,096 flat keys.

    sink-underflow: the more keys, the more of the sum lies below a constant scale's range.
    """
    return _flat_context(rng, 4096)


@case("values/very_long_sink", size="stress", classes=("sink-underflow",), levels=(2, 5))
def very_long_sink(rng: np.random.Generator) -> Inputs:
    """A sink before 16,384 flat keys; the sink holds about three quarters of the sum.

    sink-underflow: as above.
    """
    return _flat_context(rng, 16384)


def _flat_context(rng: np.random.Generator, keys: int) -> Inputs:
    """Token 0 as a sink of about three times the mass of ``keys`` flat keys."""
    inputs = gaussian(rng, [keys], (1, 1)).copied()
    inputs.q[...] = scaled(inputs.q, 0.25)
    inputs.q[..., 0] = 8
    inputs.k[..., 0] = 0
    inputs.k[0] = 0
    inputs.k[0, :, 0] = np.log(3 * keys)  # the score is q_0 k_0 / 8
    return inputs
