"""Extremes of range: zeros, tiny, huge and non-finite values, and where a scale changes."""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import TENSORS, Inputs
from flamia.conformance.cases.draw import gaussian, transform
from flamia.conformance.cases.registry import case


@case("extremes/zero_tokens", classes=("zero-blocks",), promises=("edges",), tiny=True)
def zero_tokens(rng: np.random.Generator) -> Inputs:
    """All-zero tokens, 32-token blocks and channels in every tensor.

    zero-blocks: amax = 0 gives 0 / 0, a NaN scale from log2, or an exponent of -127 that pushes what it multiplies
    out of range.
    """
    inputs = gaussian(rng, [100, 40]).copied()
    for name in TENSORS:
        x = getattr(inputs, name)
        x[rng.integers(0, 140, 10)] = 0
        x[32:64] = 0
        x[..., 5] = 0
    return inputs


@case("extremes/zero_queries", classes=("zero-blocks",), promises=("edges",), tiny=True)
def zero_queries(rng: np.random.Generator) -> Inputs:
    """Q = 0, as with a projection that starts at zero: P is uniform, and dQ is not zero.

    zero-blocks: an exponent of its own for an all-zero token (2^-127) loses its gradient.
    """
    inputs = gaussian(rng, [100, 33]).copied()
    inputs.q[...] = 0
    return inputs


@case("extremes/zero_keys", classes=("zero-blocks",), promises=("edges",), tiny=True)
def zero_keys(rng: np.random.Generator) -> Inputs:
    """K = 0: likewise, for dK.

    zero-blocks: as above.
    """
    inputs = gaussian(rng, [100, 33]).copied()
    inputs.k[...] = 0
    return inputs


@case("extremes/zero_values", classes=("zero-blocks",), promises=("edges",), tiny=True)
def zero_values(rng: np.random.Generator) -> Inputs:
    """V = 0: out, dQ and dK are zero, dV is not.

    zero-blocks: every V block and every dS tile has amax = 0.
    """
    inputs = gaussian(rng, [100, 33]).copied()
    inputs.v[...] = 0
    return inputs


@case("extremes/tiny_blocks", classes=("zero-blocks", "e8m0-extremes"), tiny=True)
def tiny_blocks(rng: np.random.Generator) -> Inputs:
    """V with tokens from 2^-133 (subnormal in bfloat16) to 1.

    zero-blocks: subnormal amax flushed to zero. e8m0-extremes: byte 0 is 2^-127, a subnormal in FP32: its reciprocal
    2^127 is normal, but 2^(127 - byte) computed through the exponent field wraps.
    """
    inputs = gaussian(rng, [133, 20])
    return transform(inputs, v=np.exp2(-(np.arange(153) % 134)).astype(np.float32)[:, None, None])


@case("extremes/powers_up", classes=("e8m0-extremes",), tiny=True)
def powers_up(rng: np.random.Generator) -> Inputs:
    """V times 2^60: scale bytes and results far above the usual range, still finite in every product.

    e8m0-extremes: sums of two or three exponents kept in 8 bits wrap.
    """
    return transform(gaussian(rng, [140]), v=2.0**60)


@case("extremes/powers_down", classes=("e8m0-extremes",), tiny=True)
def powers_down(rng: np.random.Generator) -> Inputs:
    """V times 2^-60.

    e8m0-extremes: a scale computed as a quotient underflows.
    """
    return transform(gaussian(rng, [140]), v=2.0**-60)


@case("extremes/gradient_down", classes=("e8m0-extremes",), tiny=True)
def gradient_down(rng: np.random.Generator) -> Inputs:
    """dO times 2^-60, as an unscaled loss gives it.

    e8m0-extremes: as above.
    """
    return transform(gaussian(rng, [140]), dout=2.0**-60)


@case("extremes/product_down", classes=("e8m0-extremes",), levels=(1, 2, 3), tiny=True)
def product_down(rng: np.random.Generator) -> Inputs:
    """V and dO times 2^-60: dP and dS lie near 2^-120, at the edge of FP32, where only bits are compared.

    e8m0-extremes: the scales of dS come from maxima near FP32's smallest normal number.
    """
    return transform(gaussian(rng, [140]), v=2.0**-60, dout=2.0**-60)


@case("extremes/opposite_scales", classes=("e8m0-extremes",), tiny=True)
def opposite_scales(rng: np.random.Generator) -> Inputs:
    """Q times 2^60 and K times 2^-60: normal scores from far scales, and gradients that are far apart.

    e8m0-extremes: as above.
    """
    return transform(gaussian(rng, [140]), q=2.0**60, k=2.0**-60)


@case("extremes/scale_boundaries", classes=("floor-clipping", "unsaturated-cast"), tiny=True)
def scale_boundaries(rng: np.random.Generator) -> Inputs:
    """Token maxima on both sides of 448, 464, 480 and 512, the largest E4M3 value and its neighbours, times 2^n.

    floor-clipping: FLOOR gives 448 < amax < 512 the scale 1, and clips by up to an eighth. unsaturated-cast: what is
    at least 464 becomes NaN in a cast that does not saturate.
    """
    inputs = gaussian(rng, [140], dtype=np.float32).copied()
    edges = np.array([447.9, 448, 448.0001, 449, 463.9, 464, 465, 479, 480, 496, 511.9, 512, 513], np.float32)
    for i, name in enumerate(TENSORS):
        x = getattr(inputs, name)
        x[...] = np.clip(x, -3, 3)
        token = np.arange(inputs.total)
        x[token, :, i] = (edges[token % 13] * np.exp2((token % 5) - 9))[:, None]
    return inputs


@case("extremes/large_scores", classes=("stale-maximum", "unsaturated-cast"), promises=("edges",), tiny=True)
def large_scores(rng: np.random.Generator) -> Inputs:
    """Scores of hundreds: P is one-hot in most rows.

    stale-maximum: 2^(x - m) overflows under any maximum but the true one. unsaturated-cast: and becomes NaN.
    """
    return transform(gaussian(rng, [200, 31]), q=16.0, k=4.0)


@case("extremes/scale_zero", levels=(1, 2, 3), promises=("zero_scale",), tiny=True)
def scale_zero(rng: np.random.Generator) -> Inputs:
    """softmax_scale = 0: P is uniform, dQ = dK = 0."""
    return gaussian(rng, [100, 33], softmax_scale=0.0)


@case("extremes/scale_tiny", tiny=True)
def scale_tiny(rng: np.random.Generator) -> Inputs:
    """softmax_scale = 2^-40."""
    return gaussian(rng, [100, 33], softmax_scale=2.0**-40)


@case("extremes/scale_large", classes=("stale-maximum",), tiny=True)
def scale_large(rng: np.random.Generator) -> Inputs:
    """softmax_scale = 8, sixty-four times the usual.

    stale-maximum: each new maximum is many octaves above the last.
    """
    return gaussian(rng, [100, 33], softmax_scale=8.0)


def _lost(name: str, value: float, causal: bool) -> None:
    kind = "inf" if np.isinf(value) else "nan"

    @case(
        f"extremes/{kind}_in_{name}{'' if causal else '_full_attention'}",
        classes=("e8m0-nan", "padding"),
        levels=(1, 2, 3),
        promises=("containment",),
        tiny=True,
    )
    def build(rng: np.random.Generator) -> Inputs:
        """One number that is not finite, in one head of one token of the second document.

        e8m0-nan: a scale byte 255 is NaN; taken as 2^128, or lost by a maximum that ignores NaN, the token looks
        finite. padding: 0 x NaN reaches rows that do not attend to the token, unless it is masked by selection.
        """
        inputs = gaussian(rng, [20, 140, 33], (4, 2), causal=causal).copied()
        getattr(inputs, name)[57, 1, 9] = value
        return inputs


for _name in TENSORS:
    _lost(_name, np.nan, True)
    _lost(_name, np.inf, True)
    _lost(_name, np.nan, False)
