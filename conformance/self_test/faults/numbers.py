"""Faults of number formats and scales: how elements are rounded, and what their scales are taken from."""

from __future__ import annotations

from flamia.conformance.self_test.copies import Edit
from flamia.conformance.self_test.fault import Fault, accuracy, bits, promise

SATURATE = (
    "has_nan = bool(magnitude.max() > EXPONENT) np.minimum(magnitude, lanes.max_finite[: bits.size], out=magnitude)"
)

FAULTS = (
    Fault(
        "truncated-elements",
        "Elements are rounded toward zero: the mantissa's lower bits are cut off.",
        kills=(bits(1, "values/gaussian"), accuracy("values/gaussian")),
        edits=(
            Edit(
                "formats",
                SATURATE,
                """has_nan = bool(magnitude.max() > EXPONENT)
np.minimum(magnitude, lanes.max_finite[: bits.size], out=magnitude)
magnitude &= np.uint32(-1 << (23 - fmt.mantissa_bits) & 0xFFFFFFFF)""",
            ),
        ),
    ),
    Fault(
        "ties-away",
        "Elements halfway between two codes are rounded away from zero, not to the even code.",
        kills=(bits(1, "values/rounding_ties"),),
        edits=(
            Edit(
                "formats",
                SATURATE,
                """has_nan = bool(magnitude.max() > EXPONENT)
np.minimum(magnitude, lanes.max_finite[: bits.size], out=magnitude)
magnitude += np.uint32(1)""",
            ),
        ),
        bug_class="tie-bias",
    ),
    Fault(
        "ties-away-in-computed-tiles",
        "The same where P and dS are rounded, which happens in registers and not in the quantizer.",
        kills=(bits(2, "extremes/tiny_blocks"),),
        edits=(
            Edit(
                "formats",
                "np.minimum(magnitude, limit[: bits.size], out=magnitude)",
                """np.minimum(magnitude, limit[: bits.size], out=magnitude)
magnitude.view(np.uint32)[...] += np.uint32(1)""",
            ),
        ),
        bug_class="tie-bias",
    ),
    Fault(
        "negative-zero-lost",
        "Small negative elements are rounded to +0: the code loses its sign.",
        kills=(bits(1, "values/gaussian"),),
        edits=(Edit("formats", "power &= sign_bit", "power &= np.where(target == 0, 0, sign_bit).astype(np.uint32)"),),
    ),
    Fault(
        "subnormals-flushed",
        "Subnormal inputs are taken for zero, as GPU code compiled with flushing does.",
        kills=(bits(1, "extremes/rising_values"),),
        edits=(
            Edit(
                "scaling",
                "encode(values, E4M3, out=payload[part])",
                """values *= np.abs(values) >= np.float32(2.0**-126) * factor[part]
encode(values, E4M3, out=payload[part])""",
            ),
        ),
        bug_class="zero-blocks",
    ),
    Fault(
        "floor-scale",
        "Scales by OCP's FLOOR rule, which clips what lies above 448 times the scale.",
        kills=(bits(1, "extremes/scale_boundaries"), accuracy("extremes/scale_boundaries")),
        edits=(Edit("recipes", 'scale_rule: Rule = "rceil"', 'scale_rule: Rule = "floor"'),),
        bug_class="floor-clipping",
    ),
    Fault(
        "unsaturated-cast",
        "Scales by the FLOOR rule and a cast that does not saturate: what lies above 464 becomes NaN.",
        kills=(bits(1, "extremes/scale_boundaries"), accuracy("extremes/scale_boundaries")),
        edits=(
            Edit("recipes", 'scale_rule: Rule = "rceil"', 'scale_rule: Rule = "floor"'),
            Edit("formats", SATURATE, "has_nan = bool(magnitude.max() > EXPONENT)"),
        ),
        bug_class="unsaturated-cast",
    ),
    Fault(
        "zero-block-has-a-nan-scale",
        "The scale of amax = 0 is NaN, as a library's cast of 0 to E8M0 gives it.",
        kills=(promise("extremes/zero_tokens", "edges"), bits(1, "extremes/zero_tokens")),
        edits=(
            Edit(
                "formats",
                "byte = np.minimum(field + inexact, np.uint32(254))",
                "byte = np.where(magnitude == 0, np.uint32(255), np.minimum(field + inexact, np.uint32(254)))",
            ),
        ),
        bug_class="zero-blocks",
    ),
    Fault(
        "scale-code-0-is-zero",
        "E8M0 code 0 decodes to 0 instead of 2^-127.",
        kills=(bits(2, "extremes/rising_values"),),
        edits=(
            Edit(
                "formats",
                "table[:255] = np.ldexp(np.float32(1), np.arange(255) - 127)",
                "table[:255] = np.ldexp(np.float32(1), np.arange(255) - 127)\ntable[0] = 0",
            ),
        ),
        bug_class="e8m0-extremes",
    ),
    Fault(
        "scale-nan-is-a-number",
        "E8M0 code 255 is taken for 2^128 (here, the largest finite power): a lost token looks finite.",
        kills=(promise("extremes/nan_in_v", "containment"), promise("extremes/nan_in_q", "containment")),
        edits=(
            Edit("formats", "table = np.full(256, np.nan, np.float32)", "table = np.full(256, 2.0**127, np.float32)"),
            Edit(
                "scaling",
                "np.where(scale == 255, np.float32(np.nan), scale.astype(np.float32) - np.float32(127))",
                "scale.astype(np.float32) - np.float32(127)",
            ),
        ),
        bug_class="e8m0-nan",
    ),
    Fault(
        "nan-in-the-payload",
        "A token with a NaN keeps it in its payload, and 0 x NaN reaches rows that do not see the token.",
        kills=(promise("extremes/nan_in_v", "containment"), bits(1, "extremes/nan_in_k")),
        edits=(Edit("scaling", "payload[:tokens][lost] = 0", "pass"),),
        bug_class="padding",
    ),
    Fault(
        "infinity-saturates",
        "An infinite element becomes the largest finite one, and its token goes on as if nothing had happened.",
        kills=(bits(1, "extremes/inf_in_k"), bits(2, "extremes/inf_in_v")),
        edits=(Edit("scaling", "lost = ~np.isfinite(amax)", "lost = np.isnan(amax)"),),
        bug_class="e8m0-nan",
    ),
    Fault(
        "scale-shared-across-documents",
        "The last scale block of a document takes in the first tokens of the next one.",
        kills=(promise("documents/unequal_neighbours", "pack"), bits(1, "documents/unequal_neighbours")),
        edits=(
            Edit(
                "scaling",
                "reduced: NDArray[Any] = reduce.reduceat(x, starts, axis=0)",
                "reduced: NDArray[Any] = np.stack([reduce.reduce(x[s : s + block], axis=0) for s in starts])",
            ),
        ),
        bug_class="joined-documents",
    ),
    Fault(
        "maximum-misses-a-channel",
        "The maximum of a token is taken over all channels but the last, which then saturates.",
        kills=(bits(1, "values/gaussian"), accuracy("extremes/outlier_anywhere")),
        edits=(
            Edit(
                "scaling",
                "np.max(x[part].view(width) & magnitude, axis=-1, out=largest[part])",
                "np.max(x[part].view(width)[..., :-1] & magnitude, axis=-1, out=largest[part])",
            ),
        ),
    ),
    Fault(
        "nvfp4-scale-of-the-tensor",
        "NVFP4's second scale comes from the largest number of the whole tensor, later tokens and documents included.",
        kills=(promise("leak/tiles", "leak", "nvfp4_fp8"), promise("documents/block_edges", "pack", "nvfp4_fp8")),
        edits=(
            Edit(
                "operands",
                "four = nvfp4.quantize_nvfp4(x, cu_seqlens, recipe.head_scale, recipe.hadamard)",
                """rows = x[: cu_seqlens[-1]].astype(F32)
largest = float(np.max(np.abs(rows), initial=0, where=np.isfinite(rows))) or 1.0
four = nvfp4.quantize_nvfp4(x, cu_seqlens, largest / (448 * 6), recipe.hadamard)""",
            ),
        ),
        bug_class="future-leak",
    ),
)
