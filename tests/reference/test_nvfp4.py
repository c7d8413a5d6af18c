"""NVFP4 against a scalar transcription of TransformerEngine's order, and the Hadamard rotation against its
definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flamia.reference.formats import E2M1, E4M3, decode_table, encode
from flamia.reference.nvfp4 import (
    BLOCK,
    FLT_MAX,
    ROTATION_SIGNS,
    decode_codes,
    decode_nvfp4,
    head_scales,
    quantize_nvfp4,
    rotate_channels,
)
from tests.reference.scalar import BF16, F32, exact_code, random_tokens


def slow_block(x: list[np.float32], s_enc: np.float32, s_dec: np.float32) -> tuple[list[int], int]:
    """One finite block, every line one binary32 operation; elements by exact rationals."""
    with np.errstate(over="ignore", divide="ignore"):
        m = s_enc * F32(float.fromhex("0x1.555556p-3"))  # fl(1/6) = 0x3E2AAAAB
        amax = max(abs(v) for v in x)
        scale = exact_code(float(min(amax * m, FLT_MAX)), E4M3)
        inv = min(F32(1) / (decode_table(E4M3)[scale] * s_dec), FLT_MAX)
        products = [np.clip(v * inv, -FLT_MAX, FLT_MAX) for v in x]
    return [exact_code(float(p), E2M1) for p in products], scale


def slow_scales(h: float) -> tuple[np.float32, np.float32]:
    with np.errstate(over="ignore"):
        s_enc = min(F32(1) / F32(h), FLT_MAX)
    return s_enc, F32(1) / s_enc


def quantize_block(values: list[float], head_scale: float = 1.0) -> tuple[list[int], int]:
    x = np.zeros((1, 1, 16), F32)
    x[0, 0, : len(values)] = values
    q = quantize_nvfp4(x, [0, 1], head_scale)
    return q.payload[0, 0].tolist()[: len(values)], int(q.scale[0, 0, 0])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=4),
    dtype=st.sampled_from([F32, BF16, np.float16]),
    spread=st.sampled_from([0, 3, 30]),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 2.0), (0.3, 17.0), (2.0**-140, 2.0**120)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantizer_equals_the_scalar_transcription(lengths, dtype, spread, scales, seed):
    cu = [0, *np.cumsum(lengths).tolist()]
    x = random_tokens(np.random.default_rng(seed), (cu[-1] + 1, 2, 32), dtype, spread)
    x[-1] = np.nan
    q = quantize_nvfp4(x, cu, np.asarray(scales))
    for t in range(cu[-1]):
        for h in range(2):
            for b in range(2):
                block = slice(16 * b, 16 * b + 16)
                payload, scale = slow_block(list(x[t, h, block].astype(F32)), *slow_scales(scales[h]))
                assert q.scale[t, h, b] == scale
                assert q.payload[t, h, block].tolist() == payload
    assert not q.payload[-1].any() and not q.scale[-1].any()


def test_few_bit_inputs_meet_ties_that_the_last_bit_of_inv_decides():
    """Here the order of operations matters: exact division rounds some bfloat16 codes the other way."""
    x = np.random.default_rng(0).standard_normal((2048, 1, 256)).astype(F32).astype(BF16)
    q = quantize_nvfp4(x, [0, 2048])
    scale = decode_table(E4M3)[q.scale].astype(np.float64).repeat(16, axis=-1)
    exact = np.asarray(x, np.float64) / scale
    tie = np.isin(np.abs(exact), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert tie.sum() > 1000
    rows = np.argwhere(tie)[:200]
    for t, h, d in rows:
        first = d // 16 * 16
        payload, _ = slow_block(list(x[t, h, first : first + 16].astype(F32)), *slow_scales(1.0))
        assert q.payload[t, h, d] == payload[d - first]
    to_even = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    codes = q.payload[tie] & 7
    assert (codes != [to_even[v] for v in np.abs(exact[tie])]).any()


def test_the_reciprocal_of_six_is_folded_into_the_encoding_scale():
    """Where TransformerEngine's fl(S_enc * fl(1/6)) and fl(S_enc / 6) or amax / 6 first give another scale byte."""
    h = F32(1) / np.arange(1, 2000, 2, dtype=F32)  # odd S_enc
    s_enc = F32(1) / h
    amax = np.random.default_rng(1).integers(128, 256, 400).astype(F32) / F32(32)  # as few bits as a bfloat16 has
    amax = amax[:, None] / np.exp2(np.floor(np.log2(s_enc)))
    stated = encode(amax * (s_enc * (F32(1) / F32(6))), E4M3)
    other = encode(amax * (s_enc / F32(6)), E4M3) != stated, encode((amax / F32(6)) * s_enc, E4M3) != stated
    places = [*np.argwhere(other[0])[:20], *np.argwhere(other[1])[:20]]
    assert other[0].any() and other[1].any()
    for i, j in places:
        x = np.zeros((1, 1, 16), F32)
        x[0, 0, 3] = amax[i, j]
        q = quantize_nvfp4(x, [0, 1], h[j])
        assert (q.payload[0, 0].tolist(), q.scale[0, 0, 0]) == slow_block(list(x[0, 0]), *slow_scales(float(h[j])))


@pytest.mark.parametrize(
    ("name", "values", "codes", "scale"),
    [
        ("zero block", [0.0, -0.0, 0.0], [0, 8, 0], 0x00),
        ("underflowing block: saturated codes, zero scale", [2.0**-30, -(2.0**-31), 0.0], [7, 15, 0], 0x00),
        ("tie of the smallest scale goes to zero", [6 * 2.0**-10], [7], 0x00),
        ("smallest scale", [6 * 2.0**-9, 2.0**-10, -(2.0**-11)], [7, 1, 8], 0x01),
        ("one", [6.0, 1.0, -0.5], [7, 2, 9], 0x38),
        ("largest", [2688.0, -448.0, -0.0], [7, 10, 8], 0x7E),
        ("beyond it saturates", [1e30, 448.0], [7, 2], 0x7E),
        ("FLT_MAX", [3.4028234663852886e38, 0.0], [7, 0], 0x7E),
        ("binary32 subnormal: 2^-149 * FLT_MAX is still small", [2.0**-149, -0.0], [0, 8], 0x00),
    ],
)
def test_edge_rows(name, values, codes, scale):
    assert quantize_block(values) == (codes, scale), name


def test_zero_scale_decodes_to_zero():
    x = np.full((1, 1, 16), 2.0**-30, F32)
    assert not decode_nvfp4(quantize_nvfp4(x, [0, 1])).any()


@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hadamard", [False, True])
def test_a_token_that_is_not_finite(special, hadamard):
    x = random_tokens(np.random.default_rng(1), (5, 2, 96), F32, 1)
    want = quantize_nvfp4(x, [0, 5], hadamard=hadamard)
    x[3, 1, 40] = special
    got = quantize_nvfp4(x, [0, 5], hadamard=hadamard)
    assert not got.payload[3, 1].any() and (got.scale[3, 1] == 0x7F).all()
    want.payload[3, 1], want.scale[3, 1] = 0, 0x7F
    assert np.array_equal(got.payload, want.payload) and np.array_equal(got.scale, want.scale)
    nan = np.isnan(decode_nvfp4(got))
    assert nan[3, 1].all() and nan.sum() == 96


def test_decoding_is_code_times_scale_times_head_scale():
    x = random_tokens(np.random.default_rng(2), (7, 3, 64), BF16, 2)
    q = quantize_nvfp4(x, [0, 7], [0.25, 1.0, 3.0])
    unit = decode_codes(q.payload).astype(np.float64)
    unit *= decode_table(E4M3)[q.scale].astype(np.float64).repeat(BLOCK, axis=-1)
    s_dec = np.asarray([slow_scales(h)[1] for h in (0.25, 1.0, 3.0)])
    assert np.array_equal(q.head_scale, s_dec) and q.head_scale[0] == 0.25
    assert np.array_equal(decode_nvfp4(q), (unit * s_dec[:, None].astype(np.float64)).astype(F32))
    error = np.abs(decode_nvfp4(q) - x.astype(F32)).max(axis=-1)
    assert (error <= np.abs(x.astype(F32)).max(axis=-1) * (1 / 6 + 1 / 16)).all()


def test_power_of_two_head_scales_shift_the_range():
    x = random_tokens(np.random.default_rng(3), (4, 1, 32), BF16, 0)
    one, shifted = quantize_nvfp4(x, [0, 4]), quantize_nvfp4((x.astype(F32) * 2.0**40).astype(F32), [0, 4], 2.0**40)
    assert np.array_equal(one.payload, shifted.payload) and np.array_equal(one.scale, shifted.scale)


def test_documents_chunks_and_views_do_not_matter():
    x = random_tokens(np.random.default_rng(4), (400, 4, 64), BF16, 2)
    a = quantize_nvfp4(x[:, ::2], [0, 3, 3, 390], hadamard=True)
    for t in (0, 255, 389):
        b = quantize_nvfp4(x[t : t + 1, ::2].copy(), [0, 1], hadamard=True)
        assert np.array_equal(a.payload[t], b.payload[0]) and np.array_equal(a.scale[t], b.scale[0])
    assert not a.payload[390:].any() and not a.scale[390:].any()


def sylvester(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize(("dim", "order"), [(32, 32), (64, 64), (96, 32), (128, 128), (160, 32), (192, 64), (256, 256)])
def test_rotation_is_the_stated_matrix(dim, order):
    matrix = np.kron(np.eye(dim // order), sylvester(order)) * ROTATION_SIGNS[:dim] / np.sqrt(order)
    assert np.allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)
    got = rotate_channels(np.eye(dim, dtype=F32)).T.astype(np.float64)
    assert np.abs(got - matrix).max() <= 2.0**-24
    q, k = np.random.default_rng(5).standard_normal((2, 50, dim)).astype(F32)
    rotated = rotate_channels(q).astype(np.float64) @ rotate_channels(k).astype(np.float64).T
    assert np.allclose(rotated, q.astype(np.float64) @ k.astype(np.float64).T, atol=1e-4)


def test_rotation_follows_the_stated_order_of_operations():
    x = np.random.default_rng(6).standard_normal((3, 96)).astype(F32)
    for row, got in zip(x, rotate_channels(x), strict=True):
        y = [v * s for v, s in zip(row, ROTATION_SIGNS, strict=False)]
        for stride in (1, 2, 4, 8, 16):
            for i in range(96):
                if not i & stride:
                    y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
        want = np.asarray([v * F32(0.1767766952966369) for v in y], F32)
        assert np.array_equal(got, want)


def test_rotation_signs():
    """Legendre symbols modulo 257 by listing the squares; no Walsh function comes close to them."""
    squares = {i * i % 257 for i in range(1, 257)}
    assert ROTATION_SIGNS.tolist() == [1.0 if d + 1 in squares else -1.0 for d in range(256)]
    for n in (32, 64, 128, 256):
        assert np.abs(sylvester(n) @ ROTATION_SIGNS[:n]).max() <= 3 * n / 8


def test_rotation_spreads_an_outlier_channel():
    """An outlier rounds most of its block's other channels to zero; after the rotation no channel is an outlier."""
    x = np.random.default_rng(7).standard_normal((256, 1, 128)).astype(F32)
    x[..., 5] *= 100

    def share_of_zeros(hadamard: bool) -> float:
        payload = quantize_nvfp4(x, [0, 256], hadamard=hadamard).payload[..., :BLOCK]
        return float((payload & 7 == 0).mean())

    assert share_of_zeros(False) > 0.7
    assert share_of_zeros(True) < 0.1


OK = np.ones((4, 2, 32), F32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((OK.astype(np.float64), [0, 4]), TypeError, "x must be float32.*got float64"),
        (([1.0], [0, 1]), TypeError, "x must be a NumPy array.*got list"),
        ((OK[..., :24], [0, 4]), ValueError, r"D a multiple of 16, got \(4, 2, 24\)"),
        ((OK[0], [0, 2]), ValueError, r"x must have shape \(T, H, D\).*got \(2, 32\)"),
        ((OK, [0, 5]), ValueError, r"cu_seqlens\[-1\].*got 5"),
        ((OK, [0, 4], 0.0), ValueError, r"head_scale must be positive and finite in float32, got 0\.0"),
        ((OK, [0, 4], 1e39), ValueError, "head_scale must be positive and finite"),
        ((OK, [0, 4], np.nan), ValueError, "head_scale must be positive and finite"),
        ((OK, [0, 4], [1.0, 1.0, 1.0]), ValueError, r"shape \(2,\), got shape \(3,\)"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize_nvfp4(*arguments)


def test_rotation_refuses_more_channels_than_signs():
    with pytest.raises(ValueError, match=r"x must have 1 to 256 channels to be rotated, got shape \(2, 272\)"):
        rotate_channels(np.ones((2, 272), F32))


def test_head_scales_clamp_at_the_ends():
    s_enc, s_dec = head_scales([2.0**-149, 2.0**-127, 1.0, 2.0**127], 4)
    assert s_enc.tolist() == [FLT_MAX, 2.0**127, 1.0, 2.0**-127]
    assert s_dec[1:].tolist() == [2.0**-127, 1.0, 2.0**127] and s_dec[0] == F32(1) / FLT_MAX
