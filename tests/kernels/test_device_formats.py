"""Every conversion of the kernels against the reference: all 65,536 bfloat16 and float16 values, all values around
every rounding boundary, and random float32 bits; and the native form against the software form."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.kernels.conversions import convert
from flamia.reference import formats, scaling


def inputs():
    """Float32 values: bfloat16 and float16 whole, neighbours of every E4M3 midpoint, random bits."""
    whole = np.arange(1 << 16, dtype=np.uint16)
    values = formats.decode_table(formats.E4M3)
    values = np.unique(values[np.isfinite(values)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([values, middles, [480.0, 464.0, 5.0, 7.0, 2.0**-127, 2.0**127]]).astype(np.float32)
    near = (edges.view(np.uint32)[:, None] + np.arange(-8, 9, dtype=np.int64)).astype(np.uint32).reshape(-1)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 4_000_000, dtype=np.uint32)
    return np.concatenate(
        [
            whole.view(bfloat16).astype(np.float32),
            whole.view(np.float16).astype(np.float32),
            near.view(np.float32),
            bits.view(np.float32),
        ]
    )


@pytest.mark.parametrize("form", ["", "_software"])
@pytest.mark.parametrize("conversion", ["e4m3", "e2m1", "e8m0_rp"])
def test_quick_conversions(poisoned, to_numpy, conversion, form):
    import torch

    x = inputs()
    with np.errstate(invalid="ignore"):
        expected = {
            "e4m3": lambda: formats.encode(x, formats.E4M3),
            "e2m1": lambda: formats.encode(x, formats.E2M1),
            "e8m0_rp": lambda: formats.encode_e8m0_rp(x),
        }[conversion]()
    got = to_numpy(convert(torch.from_numpy(x).to(poisoned), conversion + form))
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, f"{len(wrong)} differ, first {x[wrong[0]]!r}: {got[wrong[0]]}, expected {expected[wrong[0]]}"


def test_quick_rceil(poisoned, to_numpy):
    import torch

    x = np.abs(inputs())
    got = to_numpy(convert(torch.from_numpy(x).to(poisoned), "rceil_e4m3"))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, scaling.rceil(x))


def test_native_and_software_forms_agree_on_every_float32(gpu):
    import torch

    for first in range(0, 1 << 32, 1 << 28):
        bits = torch.arange(first, first + (1 << 28), dtype=torch.int64, device=gpu).to(torch.int32)
        x = bits.view(torch.float32)
        for conversion in ("e4m3", "e2m1", "e8m0_rp"):
            assert torch.equal(convert(x, conversion), convert(x, conversion + "_software")), (conversion, first)
        number = torch.where(x.isnan(), torch.zeros_like(x), x)
        assert torch.equal(convert(number, "e2m1_among_eight"), convert(number, "e2m1_software")), first


def test_quick_eight_codes_are_those_of_one_at_a_time(poisoned, to_numpy):
    import torch

    x = inputs()
    x = np.random.default_rng(1).permutation(x[~np.isnan(x)])[: len(x) // 8 * 8 - 3]
    got = to_numpy(convert(torch.from_numpy(x).to(poisoned), "e2m1_among_eight"))
    np.testing.assert_array_equal(got, formats.encode(x, formats.E2M1))
