"""Faults of the machine model: how products are accumulated."""

from __future__ import annotations

from flamia.conformance.calls import TENSORS
from flamia.conformance.self_test.copies import Edit
from flamia.conformance.self_test.fault import Fault, bits, promise

FAULTS = (
    Fault(
        "accumulates-24-bits",
        "Products are aligned with 24 fractional bits instead of 25.",
        kills=(
            bits(2, "values/gaussian_float32", profile="blackwell"),
            bits(2, "extremes/cancelling_channels", profile="blackwell"),
        ),
        edits=(
            Edit(
                "tensorcore",
                'MXF8F6F4 = MmaStep("tcgen05.mma kind::mxf8f6f4", 32, 25, 24,',
                'MXF8F6F4 = MmaStep("tcgen05.mma kind::mxf8f6f4", 32, 24, 24,',
            ),
        ),
    ),
    Fault(
        "nvfp4-accumulates-25-bits",
        "Groups of NVFP4 products are aligned with 25 fractional bits instead of 35.",
        kills=(bits(2, "extremes/cancelling_channels", "nvfp4_fp8", "blackwell"),),
        edits=(
            Edit(
                "tensorcore",
                'MXF4NVF4 = MmaStep("tcgen05.mma kind::mxf4nvf4", 64, 35, 24,',
                'MXF4NVF4 = MmaStep("tcgen05.mma kind::mxf4nvf4", 64, 25, 24,',
            ),
        ),
    ),
    Fault(
        "hopper-keeps-the-accumulator",
        "FP8 products on Hopper are accumulated to 24 bits instead of 14.",
        kills=(bits(2, "values/gaussian_float32", profile="hopper"),),
        edits=(
            Edit(
                "tensorcore",
                'WGMMA_E4M3 = MmaStep("wgmma e4m3", 32, 13, 14,',
                'WGMMA_E4M3 = MmaStep("wgmma e4m3", 32, 13, 24,',
            ),
        ),
    ),
    Fault(
        "largest-number-decodes-to-infinity",
        "Hopper decodes a payload and its scale to bfloat16 without saturation: 2^128 is Inf, and 0 x Inf is NaN.",
        kills=(
            promise("leak/largest_in_v", "leak", profile="hopper"),
            *(promise(f"leak/largest_in_{name}", "containment", profile="hopper") for name in TENSORS),
        ),
        edits=(Edit("operands", "np.clip(found, -BFLOAT16_LARGEST, BFLOAT16_LARGEST, out=found)", "found"),),
        bug_class="unsaturated-cast",
    ),
    Fault(
        "accumulator-rounds-to-nearest",
        "The accumulator is rounded to nearest after each step instead of toward zero.",
        kills=(bits(2, "values/gaussian_float32", profile="blackwell"),),
        edits=(
            Edit(
                "tensorcore",
                "bits &= np.int64(-1 << (53 - significant_bits))",
                "bits += np.int64(1 << (52 - significant_bits))\nbits &= np.int64(-1 << (53 - significant_bits))",
            ),
        ),
    ),
    Fault(
        "delta-summed-in-halves",
        "delta adds the upper half of the channels to the lower, not neighbours.",
        kills=(bits(3, "values/gaussian_float32", profile="hopper"),),
        edits=(
            Edit(
                "backward",
                "x = x[..., 0::2] + x[..., 1::2]",
                "x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]",
            ),
        ),
    ),
    Fault(
        "key-tiles-in-descending-order",
        "O sums its key tiles from the last to the first.",
        kills=(bits(2, "values/gaussian_float32", profile="blackwell"),),
        edits=(
            Edit(
                "forward",
                "for key_tile in range(query_tile + 1 if a.causal else document.tiles):",
                "for key_tile in reversed(range(query_tile + 1 if a.causal else document.tiles)):",
            ),
        ),
    ),
)
