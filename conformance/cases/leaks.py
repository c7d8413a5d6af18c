"""Leak cases: documents in which later tokens are changed."""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import TENSORS, Inputs
from flamia.conformance.cases.draw import BF16, gaussian
from flamia.conformance.cases.registry import Variant, case
from flamia.reference.operands import BFLOAT16_LARGEST


@case("leak/every_residue", classes=("future-leak",), levels=(), promises=("leak", "suffix", "prefix"))
def every_residue(rng: np.random.Generator) -> Inputs:
    """32 documents of 40 tokens; document i is cut after token i, so that every residue modulo 32 occurs.

    future-leak: tokens that share a 32-token block with later ones, in Q, K or V, move with the block's scale.
    """
    return gaussian(rng, [40] * 32, (1, 1))


@case("leak/tiles", classes=("future-leak", "causal-alignment"), levels=(), promises=("leak", "suffix", "prefix"))
def tiles(rng: np.random.Generator) -> Inputs:
    """Documents of one to three tiles, cut at several places: past and diagonal tiles, with a group of heads.

    future-leak: a scale or a maximum per tile. causal-alignment: a mask that is off by one shows the next token.
    """
    return gaussian(rng, [300, 65, 130, 129], (3, 1))


@case("leak/every_position", size="full", classes=("future-leak",), levels=(), promises=("leak", "suffix"))
def every_position(rng: np.random.Generator) -> Inputs:
    """32 documents of 200 tokens; all cuts modulo 32, in every block.

    future-leak: as above, over tile boundaries.
    """
    return gaussian(rng, [200] * 32, (2, 1))


def vary_transformer_engine_3248(inputs: Inputs) -> list[Variant]:
    """V[16] = 1, then V[32] = 1."""
    variants = []
    for token in (16, 32):
        changed = inputs.copied()
        changed.v[token] = 1
        variants.append(Variant(f"v[{token}] = 1", changed, np.array([token - 1]), single=1))
    return variants


@case(
    "leak/transformer_engine_3248",
    classes=("future-leak",),
    levels=(),
    promises=("leak",),
    tiny=True,
    vary=vary_transformer_engine_3248,
)
def transformer_engine_3248(rng: np.random.Generator) -> Inputs:
    """The published example of TransformerEngine issue 3248: V is zero but for 2^-20 at token 0.

    future-leak: V in MXFP8 blocks of 32 tokens per channel. V[16] = 1 raises the block's scale, 2^-20 is rounded to
    zero, and the outputs of tokens 0 to 15 change; V[32] = 1 lies in the next block and changes none of them.
    """
    inputs = gaussian(rng, [64], (1, 1)).copied()
    inputs.v[...] = 0
    inputs.v[0] = 2.0**-20
    return inputs


def _largest(name: str) -> None:
    token = 20 if name == "dout" else 57

    def without(inputs: Inputs) -> list[Variant]:
        changed = inputs.copied()
        getattr(changed, name)[token] = 0
        cuts = np.array(inputs.lengths) - 1
        cuts[1] = token - int(inputs.cu_seqlens[1]) - 1
        return [Variant(f"{name}[{token}] = 0", changed, cuts)]

    @case(
        f"leak/largest_in_{name}",
        classes=("unsaturated-cast",),
        levels=(1, 2, 3),
        promises=("containment",) if name == "dout" else ("leak", "containment"),
        tiny=True,
        vary=None if name == "dout" else without,
    )
    def build(rng: np.random.Generator) -> Inputs:
        """bfloat16's largest number, with both signs, in one head of one token of the second document.

        unsaturated-cast: E4M3 rounds it up to 256, with a scale of 2^120. Decoded, that is 2^128, infinite in bfloat16
        and FP32, and 0 x Inf reaches the rows that do not see the token (*largest-number-decodes-to-infinity*). The
        channels are zero in what they are multiplied with, so that rows that see the token stay finite, but for the row
        of a dO. It is that of the document's first token, whose row sum is 1, because dO is divided by it: a score of 0
        for itself alone.
        """
        inputs = gaussian(rng, [20, 70, 13], (2, 2)).copied()
        channels = [9, 10]
        getattr(inputs, name)[token, 1, channels] = BF16.type(BFLOAT16_LARGEST) * np.array([1, -1], BF16)
        partner = {"q": "k", "k": "q", "v": "dout", "dout": "v"}[name]
        getattr(inputs, partner)[..., channels] = 0
        if name == "dout":
            inputs.q[token, 1] = 0
        return inputs


for _name in TENSORS:
    _largest(_name)
