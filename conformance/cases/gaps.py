"""Cases that planted faults asked for: each fault passed all other cases of the quick class.

The name of the fault (`self_test.faults`) stands in the case's docstring.
"""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import TENSORS, Inputs
from flamia.conformance.cases.draw import BF16, gaussian, scaled, transform
from flamia.conformance.cases.registry import Variant, case


@case("extremes/rising_values", classes=("e8m0-extremes", "future-leak"), tiny=True)
def rising_values(rng: np.random.Generator) -> Inputs:
    """V rises along the tokens from 2^-133, the smallest bfloat16, to 1: early rows see nothing but tiny values.

    e8m0-extremes: byte 0 decoded as 0 (*scale-code-0-is-zero*) shows only in rows that see no larger token.
    future-leak: the exponents of V are largest in the future (*folding-sees-the-future*).
    """
    inputs = gaussian(rng, [134, 20])
    return transform(inputs, v=np.exp2(np.arange(154) % 134 - 133.0).astype(np.float32)[:, None, None])


@case("documents/unequal_neighbours", classes=("joined-documents",), promises=("pack", "edges"), tiny=True)
def unequal_neighbours(rng: np.random.Generator) -> Inputs:
    """V and dO of every second document are 2^20 times larger; no length is a multiple of 32.

    joined-documents: a scale block that reaches into the next document (*scale-shared-across-documents*) moves only if
    that one is larger.
    """
    inputs = gaussian(rng, [31, 5, 33, 70, 1, 40])
    documents = np.repeat(np.arange(6), inputs.lengths)
    sizes = np.exp2(20 * (documents % 2)).astype(np.float32)[:, None, None]
    return transform(inputs, v=sizes, dout=sizes)


@case("extremes/outlier_anywhere", tiny=True)
def outlier_anywhere(rng: np.random.Generator) -> Inputs:
    """Every token of every tensor has one element 16 times larger, in channel (5 t) mod 64: each channel has its turn.

    A maximum that misses some channels (*maximum-misses-a-channel*) saturates, and the error is as large as the value.
    """
    inputs = gaussian(rng, [128, 70]).copied()
    token = np.arange(inputs.total)
    for name in TENSORS:
        x = getattr(inputs, name)
        x[token, :, 5 * token % 64] = scaled(x[token, :, 5 * token % 64], 16.0)
    return inputs


@case("values/sink_alone", classes=("sink-underflow",), promises=("consistency",))
def sink_alone(rng: np.random.Generator) -> Inputs:
    """A sink 20 octaves above the other keys, and V = 0 in its tile of keys: out comes from tiles without the sink.

    sink-underflow: those tiles vanish altogether under one scale for the row (*one-scale-for-the-row*). Where the
    sink's own tile has values too, as in ``values/sink``, every scheme loses some of them.
    """
    inputs = gaussian(rng, [400], (1, 1), causal=False).copied()
    inputs.q[...] = scaled(inputs.q, 0.25)
    inputs.k[..., 0] = 0
    inputs.q[..., 0] = 8
    inputs.k[0] = 0
    inputs.k[0, :, 0] = BF16.type(20 * np.log(2))  # the score is q_0 k_0 / 8
    inputs.v[:128] = 0
    return inputs


@case("arguments/repeated_float32", classes=("nondeterminism",), levels=(), promises=("determinism",), may_refuse=True)
def repeated_float32(rng: np.random.Generator) -> Inputs:
    """One document of five tiles in float32, again and again.

    nondeterminism: sums of three and more terms in another order (*dq-in-the-order-of-arrival*) differ in the last bits
    of FP32, which bfloat16 results round away all but once in 100,000 numbers.
    """
    return gaussian(rng, [600], (2, 1), dtype=np.float32)


def vary_third_tile(inputs: Inputs) -> list[Variant]:
    """Everything after token 256 + 7 i of document i times 2^20."""
    cuts = 256 + 7 * np.arange(len(inputs.lengths))
    changed = inputs.copied()
    for start, stop, cut in zip(inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:], cuts, strict=True):
        for x in (changed.q, changed.k, changed.v):
            x[start + cut + 1 : stop] = scaled(x[start + cut + 1 : stop], 2.0**20)
    return [Variant("q, k, v times 2^20", changed, cuts)]


@case("leak/third_tile", classes=("causal-alignment",), levels=(), promises=("leak",), vary=vary_third_tile)
def third_tile(rng: np.random.Generator) -> Inputs:
    """Six documents of 300 tokens, cut at six places of their third tile.

    causal-alignment: a mask that is right in the first two tiles (*mask-off-by-one-from-the-third-tile*).
    """
    return gaussian(rng, [300] * 6, (1, 1))


@case("leak/idle_rows", classes=("future-leak",), levels=(), promises=("suffix",))
def idle_rows(rng: np.random.Generator) -> Inputs:
    """45 documents whose first 32 keys score 17 octaves below the rest; document i is cut after token i.

    future-leak: P of the rows from 32 up to the cut is tiny in the first 32 keys, and fits its tile's scale. Rows after
    the cut, without gradient, must not take part in that scale (*idle-rows-move-the-scale*): with q times -2^-10 their
    P is of the order of 1 there, and the others' underflows.
    """
    inputs = gaussian(rng, [64] * 45, (1, 1)).copied()
    inputs.q[...] = scaled(inputs.q, 0.25)
    inputs.q[..., 0] = 8
    inputs.k[..., 0] = 0
    inputs.k[np.arange(inputs.total) % 64 < 32, :, 0] = -12
    return inputs


@case("extremes/cancelling_channels", levels=(1, 2, 3), tiny=True)
def cancelling_channels(rng: np.random.Generator) -> Inputs:
    """The scores' largest products cancel exactly: the first 16 channels of q and k give 1792 x 1792 with both signs.

    What remains lies 20 octaves and more below the largest product, where an adder keeps some of its bits or drops them
    (*nvfp4-accumulates-25-bits*, *accumulates-24-bits*), and softmax_scale makes their loss visible.
    """
    inputs = gaussian(rng, [70, 30], softmax_scale=4.0).copied()
    inputs.q[...] = scaled(inputs.q, 0.5)
    inputs.k[...] = scaled(inputs.k, 0.5)
    inputs.q[..., :16] = 1792
    inputs.k[..., :16] = 1792 * np.where(np.arange(16) % 2, -1, 1)
    return inputs
