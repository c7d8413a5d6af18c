"""Faults of the forward pass: masks, maxima, P, row sums and what is written."""

from __future__ import annotations

from flamia.conformance.self_test.copies import Edit
from flamia.conformance.self_test.fault import Fault, accuracy, bits, promise

MASK = "if hidden is not None: np.copyto(scores, F32(-np.inf), where=hidden) largest = np.fmax.reduce(scores, axis=-2)"
MAXIMUM = "tile_top = pr.ceiling(largest, self.constant) new_top = np.fmax(self.top, tile_top)"
DIAGONAL = "return index[:, None] > index[None, :]"
TAIL = "if not causal and (key_tile + 1) * TILE > length:"

FAULTS = (
    Fault(
        "v32-in-the-diagonal-tile",
        "The diagonal tile multiplies V under 32-token scales, which later tokens of the block set.",
        kills=(promise("leak/every_residue", "leak"), bits(2, "extremes/rising_values")),
        edits=(Edit("forward", "diagonal_values is not None and causal", "diagonal_values is None and causal"),),
        bug_class="future-leak",
    ),
    Fault(
        "folding-sees-the-future",
        "The exponent against which V1 is folded is the maximum over the whole block, not over the visible tokens.",
        kills=(promise("leak/every_residue", "leak"), bits(2, "extremes/rising_values")),
        edits=(
            Edit(
                "probabilities",
                "seen = np.where(causal_mask, F32(-np.inf), exponents[..., :, None])",
                "seen = np.where(causal_mask, exponents[..., :, None], exponents[..., :, None])",
            ),
        ),
        bug_class="future-leak",
    ),
    Fault(
        "mask-after-the-maximum",
        "The tile's maximum is taken before the mask is applied: later keys scale P.",
        kills=(promise("leak/tiles", "leak"), bits(2, "values/gaussian")),
        edits=(
            Edit(
                "forward",
                MASK,
                """largest = np.fmax.reduce(scores, axis=-2)
if hidden is not None:
    np.copyto(scores, F32(-np.inf), where=hidden)""",
            ),
        ),
        bug_class="future-leak",
    ),
    Fault(
        "additive-mask",
        "Hidden scores get -10000 added, which a large score outweighs and a NaN survives.",
        kills=(promise("extremes/nan_in_k", "containment"), promise("leak/tiles", "leak")),
        edits=(
            Edit(
                "forward",
                MASK,
                """if hidden is not None:
    scores += np.where(hidden, F32(-1e4), F32(0))
largest = np.fmax.reduce(scores, axis=-2)""",
            ),
            Edit("forward", "if hidden is not None: np.copyto(scores, F32(0), where=hidden)", ""),
            Edit("forward", "if hidden is not None: np.copyto(codes, F32(0), where=hidden)", ""),
        ),
        bug_class="masked-rows",
    ),
    Fault(
        "bottom-right-mask",
        "The causal mask is aligned with the bottom right corner of the padded tile.",
        kills=(promise("leak/tiles", "leak"), bits(2, "values/one_hot"), accuracy("documents/odd_lengths")),
        edits=(Edit("probabilities", DIAGONAL, "return index[:, None] > index[None, :] + -length % TILE"),),
        bug_class="causal-alignment",
    ),
    Fault(
        "strict-mask",
        "A query does not see its own key.",
        kills=(promise("documents/one_token", "edges"), accuracy("values/gaussian")),
        edits=(Edit("probabilities", DIAGONAL, "return index[:, None] >= index[None, :]"),),
        bug_class="causal-alignment",
    ),
    Fault(
        "permuted-mask",
        "The mask is applied by the column that a thread's fragment holds: neighbouring keys change places.",
        kills=(promise("leak/tiles", "leak"), bits(2, "values/one_hot"), accuracy("values/one_hot")),
        edits=(Edit("probabilities", DIAGONAL, "return (index ^ 1)[:, None] > index[None, :]"),),
        bug_class="permuted-mask",
    ),
    Fault(
        "mask-off-by-one-from-the-third-tile",
        "The causal diagonal is shifted by one in query tiles after the second.",
        kills=(promise("leak/third_tile", "leak"), bits(2, "values/gaussian")),
        edits=(Edit("probabilities", DIAGONAL, "return index[:, None] > index[None, :] + (query_tile > 1)"),),
        bug_class="causal-alignment",
    ),
    Fault(
        "padding-keys-have-score-0",
        "Without the causal mask, the last tile's missing keys take part as keys of zeros.",
        kills=(bits(2, "documents/full_attention"), accuracy("documents/full_attention")),
        edits=(Edit("probabilities", TAIL, "if not causal and length < 0:"),),
        bug_class="masked-rows",
    ),
    Fault(
        "tiles-reach-into-the-next-document",
        "A document's last tile holds the next one's tokens, and nothing hides them.",
        kills=(promise("documents/full_attention", "pack"), accuracy("documents/full_attention")),
        edits=(
            Edit("probabilities", TAIL, "if not causal and length < 0:"),
            Edit(
                "operands",
                "rows = slice(document.start, document.stop)",
                "rows = slice(document.start, document.start + document.tiles * TILE)",
            ),
            Edit(
                "operands",
                "out[:, : document.length] = np.moveaxis(x, 1, 0)",
                "out[:, : len(x)] = np.moveaxis(x, 1, 0)",
            ),
        ),
        bug_class="joined-documents",
    ),
    Fault(
        "stale-maximum",
        "P is held against the maximum of the first key tile, and saturates where later scores are larger.",
        kills=(bits(2, "values/rising_logits"), accuracy("values/rising_logits")),
        edits=(
            Edit(
                "forward",
                MAXIMUM,
                """tile_top = np.where(np.isfinite(self.top), self.top, pr.ceiling(largest, self.constant))
new_top = np.fmax(self.top, tile_top)""",
            ),
        ),
        bug_class="stale-maximum",
    ),
    Fault(
        "one-scale-for-the-row",
        "P is held against the row's maximum so far: beside a sink, whole tiles of it underflow.",
        kills=(bits(2, "values/sink"), accuracy("values/sink_alone")),
        edits=(
            Edit(
                "forward",
                MAXIMUM,
                """new_top = np.fmax(self.top, pr.ceiling(largest, self.constant))
tile_top = new_top""",
            ),
        ),
        bug_class="sink-underflow",
    ),
    Fault(
        "maximum-is-no-integer",
        "The tile's maximum is not rounded up to an integer, so that rescaling rounds.",
        kills=(bits(2, "values/gaussian"), promise("values/gaussian", "consistency")),
        edits=(Edit("forward", MAXIMUM, "tile_top = largest * self.constant\nnew_top = np.fmax(self.top, tile_top)"),),
    ),
    Fault(
        "row-sum-before-rounding",
        "l sums P before it is rounded, O after: V = 1 does not give 1.",
        kills=(promise("values/gaussian_full_attention", "ones"), promise("values/sink", "ones")),
        edits=(Edit("recipes", 'row_sum: str = "quantized"', 'row_sum: str = "exact"'),),
        bug_class="sink-underflow",
    ),
    Fault(
        "row-sum-not-rescaled",
        "When the maximum grows, O is rescaled and l is not.",
        kills=(promise("values/rising_logits", "ones"), accuracy("values/rising_logits")),
        edits=(Edit("forward", "self.l = self.l * factor", ""),),
        bug_class="stale-maximum",
    ),
    Fault(
        "hardware-exponential",
        "P comes from another 2^x than the contract's two FMAs.",
        kills=(bits(2, "values/gaussian"),),
        edits=(
            Edit(
                "probabilities",
                "return r, exp2_mantissa(scores, out=scores, bits=bits)",
                "return r, np.exp2(scores, out=scores)",
            ),
        ),
    ),
    Fault(
        "exponent-wraps",
        "The exponent of P is not clamped: far below the maximum the addition to the exponent bits wraps.",
        kills=(bits(2, "extremes/large_scores"), accuracy("extremes/large_scores")),
        edits=(Edit("probabilities", "np.maximum(exponent, FLOOR_EXPONENT, out=exponent)", ""),),
    ),
    Fault(
        "softmax-scale-ignored",
        "The default scale is used, whatever the caller gives.",
        kills=(
            promise("extremes/scale_zero", "zero_scale"),
            bits(2, "extremes/scale_tiny"),
            accuracy("extremes/scale_large"),
        ),
        edits=(Edit("arguments", "return float(softmax_scale)", "return 1.0 / math.sqrt(head_dim)"),),
    ),
    Fault(
        "reciprocal-of-the-row-sum",
        "out is O times the rounded 1 / l in place of O / l: a difference of one bit of FP32.",
        kills=(bits(2, "values/gaussian_float32"), promise("values/gaussian_float32", "ones")),
        edits=(
            Edit(
                "forward",
                "return self.o.astype(F32) / sums[..., None], sums",
                "return self.o.astype(F32) * (F32(1) / sums)[..., None], sums",
            ),
        ),
    ),
    Fault(
        "tail-block-skipped",
        "The last 32 columns of a document's last key tile are skipped if they are not all there.",
        kills=(
            promise("documents/odd_lengths", "prefix"),
            bits(2, "documents/tile_edges"),
            accuracy("documents/tile_edges"),
        ),
        edits=(
            Edit(
                "forward",
                "diagonal = v1 if a.causal and key_tile == query_tile else None",
                """left = document.length - key_tile * TILE
if BLOCK < left < TILE and left % BLOCK:
    scores[..., left // BLOCK * BLOCK :, :] = -np.inf
diagonal = v1 if a.causal and key_tile == query_tile else None""",
            ),
        ),
    ),
    Fault(
        "boundaries-ignored",
        "The pack is taken for one document: every token sees all tokens before it.",
        kills=(promise("documents/block_edges", "pack"), accuracy("documents/block_edges")),
        edits=(
            Edit(
                "documents",
                "for i in np.flatnonzero(np.diff(cu_seqlens) > 0):",
                "for cu_seqlens, i in [(cu_seqlens[[0, -1]], 0)] if cu_seqlens[-1] else []:",
            ),
        ),
        bug_class="joined-documents",
    ),
    Fault(
        "empty-document-ends-the-pack",
        "Documents after an empty one are not computed.",
        kills=(promise("documents/empty_middle", "edges"), bits(2, "documents/empty_first")),
        edits=(
            Edit(
                "documents",
                "np.flatnonzero(np.diff(cu_seqlens) > 0)",
                "np.flatnonzero(np.logical_and.accumulate(np.diff(cu_seqlens) > 0))",
            ),
        ),
        bug_class="empty-documents",
    ),
    Fault(
        "one-token-document-skipped",
        "A document of one token, over which softmax is trivial, is taken for nothing to do.",
        kills=(promise("documents/one_token", "edges"), bits(2, "documents/one_token")),
        edits=(
            Edit("documents", "np.flatnonzero(np.diff(cu_seqlens) > 0)", "np.flatnonzero(np.diff(cu_seqlens) > 1)"),
        ),
        bug_class="one-token",
    ),
    Fault(
        "padding-rows-not-cleared",
        "out of rows past the last document holds what was in the memory.",
        kills=(promise("documents/padding", "edges"), bits(2, "documents/padding")),
        edits=(
            Edit(
                "forward",
                "out = np.zeros((total, hq, dim), a.q.dtype)",
                "out = np.full((total, hq, dim), 7, a.q.dtype)",
            ),
        ),
        bug_class="padding",
    ),
    Fault(
        "lse-of-padding-rows-is-zero",
        "LSE of rows past the last document is 0 instead of -inf.",
        kills=(promise("documents/padding", "edges"),),
        edits=(Edit("forward", "lse = np.full((hq, total), -np.inf, F32)", "lse = np.zeros((hq, total), F32)"),),
        bug_class="padding",
    ),
    Fault(
        "lse-in-base-2",
        "LSE is the base-2 logarithm.",
        kills=(bits(2, "values/lse"), accuracy("values/lse")),
        edits=(Edit("forward", "natural = np.log(2.0) * (", "natural = ("),),
        bug_class="lse-base",
    ),
)
