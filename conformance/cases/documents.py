"""Document shapes: where documents begin and end, and what lies past the last."""

from __future__ import annotations

import numpy as np

from flamia.conformance.calls import Inputs
from flamia.conformance.cases.draw import gaussian
from flamia.conformance.cases.registry import PlanRequest, case

SHAPES = ("pack", "edges", "prefix")


@case("documents/one_token", classes=("one-token",), promises=SHAPES, tiny=True)
def one_token(rng: np.random.Generator) -> Inputs:
    """Documents of one token each: softmax over one key, so out is V itself as quantized, and dS is zero.

    one-token: kernels that assume a full tile, or two tokens, fail here.
    """
    return gaussian(rng, [1, 1, 1])


@case("documents/empty_first", classes=("empty-documents",), promises=SHAPES, tiny=True)
def empty_first(rng: np.random.Generator) -> Inputs:
    """An empty document before the others.

    empty-documents: a search of cu_seqlens that returns the first of two equal entries assigns tokens to it.
    """
    return gaussian(rng, [0, 33, 5])


@case("documents/empty_middle", classes=("empty-documents",), promises=SHAPES, tiny=True)
def empty_middle(rng: np.random.Generator) -> Inputs:
    """Empty documents, two in a row, between others.

    empty-documents: a tile scheduler that gives each document at least one tile shifts all later ones.
    """
    return gaussian(rng, [20, 0, 0, 40])


@case("documents/empty_last", classes=("empty-documents",), promises=SHAPES, tiny=True)
def empty_last(rng: np.random.Generator) -> Inputs:
    """An empty document at the end, where its first token would be past the tensors.

    empty-documents: loads of "the first tile" read out of bounds.
    """
    return gaussian(rng, [40, 0])


@case("documents/all_empty", classes=("empty-documents", "padding"), promises=("edges",), tiny=True)
def all_empty(rng: np.random.Generator) -> Inputs:
    """Only empty documents, and padding rows of NaN: nothing to compute, everything to clear.

    empty-documents: an empty grid is a launch error in CUDA. padding: outputs of rows that no tile covers stay
    uninitialised.
    """
    return gaussian(rng, [0, 0, 0], padding=7)


@case("documents/no_tokens", classes=("empty-documents",), promises=("edges",), tiny=True)
def no_tokens(rng: np.random.Generator) -> Inputs:
    """No documents and tensors without rows.

    empty-documents: division by the number of documents, pointers of empty tensors.
    """
    return gaussian(rng, [])


@case("documents/block_edges", classes=("joined-documents",), promises=SHAPES, tiny=True)
def block_edges(rng: np.random.Generator) -> Inputs:
    """Documents of 31, 32 and 33 tokens: around a 32-token scale block.

    joined-documents: blocks counted from the start of the pack, not of the document, join neighbours.
    """
    return gaussian(rng, [31, 32, 33])


@case("documents/tile_edges", classes=("joined-documents", "causal-alignment"), promises=SHAPES)
def tile_edges(rng: np.random.Generator) -> Inputs:
    """Documents of 127, 128 and 129 tokens: around a 128-token tile.

    joined-documents: a tile loaded past the end of its document holds the next one's tokens. causal-alignment: the
    129th query is alone in its tile, and sees all keys.
    """
    return gaussian(rng, [127, 128, 129])


@case("documents/full_attention", classes=("joined-documents", "masked-rows"), promises=("pack", "edges"))
def full_attention(rng: np.random.Generator) -> Inputs:
    """Not causal, lengths around blocks and tiles.

    joined-documents: without the causal mask only the length hides the next document. masked-rows: keys past the end
    must be removed by selection; as zero keys they would have score 0, not -inf.
    """
    return gaussian(rng, [1, 31, 33, 129, 0, 64], causal=False)


@case("documents/odd_lengths", classes=("causal-alignment", "joined-documents"), promises=SHAPES)
def odd_lengths(rng: np.random.Generator) -> Inputs:
    """Lengths and a total that are multiples of nothing, so that no document starts at a block or tile of the pack.

    causal-alignment: a mask from packed positions, or aligned to the end of a tile, is off by the document's offset.
    joined-documents: tiles cut from the pack, not from the document, straddle every boundary.
    """
    return gaussian(rng, [7, 161, 3, 53, 97], padding=5)


@case("documents/padding", classes=("padding", "joined-documents"), promises=SHAPES, tiny=True)
def padding(rng: np.random.Generator) -> Inputs:
    """60 padding rows of NaN past the last document.

    padding: rows past cu_seqlens[-1] that are read, for a scale or as masked keys (0 x NaN), turn results into NaN;
    rows that are not cleared hold old memory. joined-documents: the last tile reaches into the padding.
    """
    return gaussian(rng, [50, 18], padding=60)


@case("documents/padding_full_attention", classes=("padding",), promises=("pack", "edges"), tiny=True)
def padding_full_attention(rng: np.random.Generator) -> Inputs:
    """The same without the causal mask, and a padding longer than a tile.

    padding: as above, where only the length hides the rows.
    """
    return gaussian(rng, [50, 18], padding=150, causal=False)


@case("documents/one_long_many_short", classes=("joined-documents", "one-token"), promises=("edges",))
def one_long_many_short(rng: np.random.Generator) -> Inputs:
    """One document of 300 tokens among 40 of 1 to 9.

    joined-documents, one-token: schedulers that bound the number of tiles by total / 128, or by the longest document,
    skip some or run past the end.
    """
    return gaussian(rng, [*rng.integers(1, 10, 20), 300, *rng.integers(0, 10, 20)])


@case("documents/one_long_thousand_short", size="full", classes=("joined-documents",), promises=("edges", "pack"))
def one_long_thousand_short(rng: np.random.Generator) -> Inputs:
    """One document of 1500 tokens and 1000 of 0 to 12.

    joined-documents: as above, with more documents than tokens / 128 or than CTAs.
    """
    return gaussian(rng, [*rng.integers(0, 13, 500), 1500, *rng.integers(0, 13, 500)])


@case("documents/long", size="full", classes=("nondeterminism",), promises=("determinism", "prefix"))
def long(rng: np.random.Generator) -> Inputs:
    """One document of 2000 tokens: 16 tiles.

    nondeterminism: dQ gathers 16 key tiles, which atomics add in the order of arrival.
    """
    return gaussian(rng, [2000], (2, 1))


@case("documents/very_long", size="stress", classes=("nondeterminism",), promises=("determinism",))
def very_long(rng: np.random.Generator) -> Inputs:
    """Two documents of 8,000 and 5,000 tokens.

    nondeterminism: many CTAs work on one document.
    """
    return gaussian(rng, [8000, 5000], (2, 1), dim=128)


@case(
    "offsets/past_2_31",
    classes=("offsets",),
    levels=(1,),
    tiny=True,
    plan=PlanRequest(np.array([0, 100_000, 100_001, 400_001], np.int64), (64, 64), 128, True),
)
def offsets(rng: np.random.Generator) -> Inputs:
    """64 heads of 400,001 tokens and 128 channels: 3.3 GB of payload, planned without allocating it.

    offsets: byte offsets past 2^31, computed as 32-bit products of tile, head and stride, wrap.
    """
    return gaussian(rng, [])
