"""The study-only scaling schemes: values against slow scalar ones, and which of them leak."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from flamia.reference import scaling
from flamia.reference.formats import E4M3, decode, encode
from tests.reference.scalar import F32, exact_floor, exact_rceil, random_tokens

SCHEMES = {
    "channels": (scaling.fake_quantize_channels, 1, 32),
    "token_columns": (scaling.fake_quantize_token_columns, 32, 1),
    "tiles": (scaling.fake_quantize_tiles, 32, 32),
}


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_study_schemes_equal_slow_ones(scheme, rule):
    function, tokens, channels = SCHEMES[scheme]
    cu = [0, 1, 1, 34, 66, 97]
    x = random_tokens(np.random.default_rng(6), (100, 2, 64), F32, 4)
    x[70, 1, 40] = np.nan
    x[5, 0, 3] = -np.inf
    x[97:] = np.inf
    want = np.zeros(x.shape, F32)
    for begin, end in pairwise(cu):
        for t in range(begin, end, tokens):
            for d in range(0, 64, channels):
                for h in range(2):
                    where = slice(t, min(t + tokens, end)), h, slice(d, d + channels)
                    block = x[where].astype(np.float64)
                    if not np.isfinite(block).all():
                        want[where] = np.nan
                        continue
                    size = float(np.abs(block).max())
                    scale = 2.0 ** ((exact_rceil(size) if rule == "rceil" else exact_floor(size)) - 127)
                    scaled = np.clip(block / scale, -448, 448).astype(F32)
                    want[where] = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    got = function(x, cu, rule=rule)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.isnan(got).sum() == (1 + 1 if tokens == 1 else 31 + 32) * channels


def test_floor_clips_where_rceil_does_not():
    x = np.full((1, 1, 32), 500, F32)
    assert scaling.fake_quantize_channels(x, [0, 1], rule="floor").max() == 448
    assert scaling.fake_quantize_channels(x, [0, 1], rule="rceil").max() == 512


@pytest.mark.parametrize("scheme", [*SCHEMES, "tensor"])
def test_which_schemes_let_a_later_token_change_an_earlier_one(scheme):
    function = SCHEMES[scheme][0] if scheme in SCHEMES else scaling.fake_quantize_tensor
    x = random_tokens(np.random.default_rng(7), (64, 1, 64), F32, 0)
    later = x.copy()
    later[31] *= 2.0**20
    moved = np.flatnonzero((function(x, [0, 64]) != function(later, [0, 64])).any(axis=(1, 2)))
    want = {"channels": range(31, 32), "token_columns": range(32), "tiles": range(32), "tensor": range(64)}
    assert set(moved) <= set(want[scheme])
    assert (moved[0] < 31) == (scheme != "channels")


def test_tensor_scheme():
    x = random_tokens(np.random.default_rng(8), (10, 2, 8), F32, 2)
    x[7:] = np.nan
    amax = np.abs(x[:7]).max()
    scale = amax / F32(448)
    want = decode(encode(x[:7] / scale, E4M3), E4M3) * scale
    got = scaling.fake_quantize_tensor(x, [0, 3, 7])
    assert np.array_equal(got[:7], want) and not got[7:].any()
    assert np.isnan(scaling.fake_quantize_tensor(x, [0, 8])[:8]).all()
    assert not scaling.fake_quantize_tensor(np.zeros((2, 1, 4), F32), [0, 2]).any()


OK = np.ones((4, 2, 32), F32)


def test_bad_study_arguments_are_named():
    with pytest.raises(ValueError, match="rule must be 'rceil' or 'floor', got 'ceil'"):
        scaling.fake_quantize_tiles(OK, [0, 4], rule="ceil")
    with pytest.raises(ValueError, match=r"multiple of 32, got shape \(4, 2, 16\)"):
        scaling.fake_quantize_channels(OK[..., :16], [0, 4])
