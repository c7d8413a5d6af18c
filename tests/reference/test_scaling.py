"""Scale rules against exact integers, and the quantizers against slow scalar ones."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flamia.reference.formats import E2M1, E4M3, E5M2, decode
from flamia.reference.scaling import (
    block_amax,
    block_starts,
    dequantize_tokens,
    exponent_of,
    floor_scale,
    quantize_tokens,
    rceil,
    tile_amax,
    token_amax,
)
from tests.reference.scalar import BF16, F32, exact_floor, exact_rceil, random_tokens, slow_quantize

FLT_MAX = 3.4028234663852886e38
ONLY_EXCEPTION = 0x04600001
element_formats = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)


def f32(*bits: int) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(F32)


@element_formats
def test_rceil_equals_an_integer_rule_on_all_mantissas(fmt):
    """For amax = M 2^(e-150), M a 24-bit integer, and max = m 2^k, the byte steps exactly where M passes m's
    mantissa."""
    fraction, exponent = np.frexp(fmt.max_finite)
    threshold = int(fraction * (1 << 24))  # max as a 24-bit integer
    mantissa = np.arange(1 << 23, dtype=np.uint32)
    for field in (127, 30):
        amax = (mantissa | np.uint32(field << 23)).view(F32)
        significand = mantissa.astype(np.int64) + (1 << 23)
        want = field - 126 - int(exponent) + 127 + (significand > threshold)
        assert np.array_equal(rceil(amax, fmt), want.astype(np.uint8))


@pytest.mark.parametrize("rule, exact", [(rceil, exact_rceil), (floor_scale, exact_floor)])
@element_formats
def test_rules_equal_exact_ones_at_every_exponent(fmt, rule, exact):
    """Mantissas 0, 1, the ends, the neighbourhood of max's own, and random ones; the one exception is
    documented."""
    top = int(F32(fmt.max_finite).view(np.uint32)) & 0x7FFFFF
    near = [top + d for d in (-2, -1, 0, 1, 2)]
    mantissas = [0, 1, 2, 3, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF, *near]
    mantissas += np.random.default_rng(0).integers(0, 1 << 23, 8).tolist()
    wrong = []
    for field in range(255):
        amax = f32(*(field << 23 | m for m in sorted(set(mantissas))))
        for value, byte in zip(amax, rule(amax, fmt), strict=True):
            if exact(float(value), fmt) != byte:
                wrong.append(int(value.view(np.uint32)))
    first_above = int(np.nextafter(F32(fmt.max_finite * 2.0**-127), F32(1)).view(np.uint32))
    assert wrong == ([first_above] if rule is rceil else [])


def test_the_only_exception_of_rceil_is_harmless():
    amax = f32(ONLY_EXCEPTION)
    assert np.nextafter(F32(448 * 2.0**-127), F32(1)) == amax[0]
    assert rceil(amax)[0] == 0 and exact_rceil(float(amax[0])) == 1
    q = quantize_tokens(amax.reshape(1, 1, 1), [0, 1], 1)
    assert q.scale[0, 0] == 0 and q.payload[0, 0, 0] == 0x7E
    assert dequantize_tokens(q)[0, 0, 0] == F32(448 * 2.0**-127)  # its rounding to E4M3's mantissa


def test_reciprocals_are_those_of_the_source():
    assert (F32(1) / F32(448)).view(np.uint32) == 0x3B124925
    assert (F32(1) / F32(57344)).view(np.uint32) == 0x37924925
    assert (F32(1) / F32(6)).view(np.uint32) == 0x3E2AAAAB


@pytest.mark.parametrize(
    ("amax", "floor", "ceiling"),
    [
        (0.0, 0, 0),
        (2.0**-149, 0, 0),
        (2.0**-127, 0, 0),
        (2.0**-126, 0, 0),
        (2.0**-119, 0, 0),
        (2.0**-118, 1, 1),
        (1.0, 119, 119),
        (448.0, 127, 127),
        (448.00003, 127, 128),
        (495.0, 127, 128),
        (496.0, 127, 128),
        (512.0, 128, 128),
        (FLT_MAX, 246, 247),
        (np.inf, 254, 254),
        (np.nan, 255, 255),
    ],
)
def test_edge_table(amax, floor, ceiling):
    value = np.asarray([amax], F32)
    assert (floor_scale(value)[0], rceil(value)[0]) == (floor, ceiling)


def test_exponent_of_every_byte():
    exponents = exponent_of(np.arange(256, dtype=np.uint8))
    assert exponents.dtype == F32
    assert np.array_equal(exponents[:255], np.arange(255) - 127.0) and np.isnan(exponents[255])


lengths = st.lists(st.sampled_from([0, 1, 2, 5, 31, 32, 33, 63, 64, 65]), min_size=0, max_size=5)
dtypes = st.sampled_from([F32, BF16, np.float16])


@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths,
    padding=st.integers(0, 3),
    heads=st.integers(1, 3),
    block=st.sampled_from([1, 32]),
    dtype=dtypes,
    spread=st.sampled_from([0, 3, 40]),
    seed=st.integers(0, 2**32 - 1),
    specials=st.integers(0, 4),
)
def test_quantizer_equals_the_slow_one(lengths, padding, heads, block, dtype, spread, seed, specials):
    rng = np.random.default_rng(seed)
    cu = [0, *np.cumsum(lengths).tolist()]
    x = random_tokens(rng, (cu[-1] + padding, heads, 8), dtype, spread)
    for _ in range(specials if cu[-1] else 0):
        place = rng.integers(cu[-1]), rng.integers(heads), rng.integers(8)
        x[place] = rng.choice(np.asarray([np.nan, np.inf, -np.inf], F32)).astype(dtype)
    x[cu[-1] :] = np.nan
    q = quantize_tokens(x, np.asarray(cu), block)
    payload, scale = slow_quantize(x, cu, block)
    assert np.array_equal(q.scale, scale)
    assert np.array_equal(q.payload, payload)
    # amax: what the finite tokens of each block hold.
    finite = np.isfinite(x.astype(F32)).all(axis=-1)
    amax = block_amax(x, cu, block)
    assert np.array_equal(rceil(amax)[scale != 255], scale[scale != 255])
    assert (amax[cu[-1] :] == 0).all()
    held = np.where(finite[..., None], np.abs(x.astype(F32)), F32(0)).max(axis=-1)
    assert (amax[: cu[-1]] >= held[: cu[-1]]).all()


@settings(max_examples=25, deadline=None)
@given(
    before=st.integers(0, 70),
    length=st.sampled_from([1, 31, 32, 33, 64]),
    seed=st.integers(0, 99),
    after=st.integers(0, 40),
)
@pytest.mark.parametrize("block", [1, 32])
def test_a_document_alone_and_in_a_pack_give_the_same_bytes(block, before, length, seed, after):
    x = random_tokens(np.random.default_rng(seed), (before + length + after, 2, 16), BF16, 5)
    alone = quantize_tokens(x[before : before + length].copy(), [0, length], block)
    if after:
        x[-1, 0, 0] = np.nan
    cu = [0, before, before + length, before + length + after]
    packed = quantize_tokens(x, cu, block)
    assert np.array_equal(packed.payload[before : before + length], alone.payload)
    assert np.array_equal(packed.scale[before : before + length], alone.scale)


@pytest.mark.parametrize("dtype", [F32, BF16, np.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite(dtype, special):
    """Token 40 lies in the second block: payload 0 and byte 255; with B=32 the byte takes its block, and only
    that."""
    x = random_tokens(np.random.default_rng(0), (100, 2, 32), dtype, 3)
    zeroed, lost = x.copy(), x.copy()
    zeroed[40, 1], lost[40, 1, 7] = 0, special
    for block, taken in ((1, [40]), (32, range(32, 64))):
        want, got = quantize_tokens(zeroed, [0, 100], block), quantize_tokens(lost, [0, 100], block)
        assert np.array_equal(got.payload, want.payload) and not got.payload[40, 1].any()
        want.scale[taken, 1] = 255
        assert np.array_equal(got.scale, want.scale)
        nan = np.isnan(dequantize_tokens(got))
        assert nan[taken, 1].all() and nan.sum() == len(taken) * 32


def test_a_signalling_nan_is_a_nan():
    x = np.ones((2, 1, 4), BF16)
    x.view(np.uint16)[1, 0, 2] = 0x7F81
    q = quantize_tokens(x, [0, 2], 1)
    assert q.scale[:, 0].tolist() == [119, 255] and not q.payload[1].any()


def test_padding_is_zero_and_changes_nothing():
    x = random_tokens(np.random.default_rng(1), (50, 2, 16), BF16, 3)
    x[33:] = np.nan
    for block in (1, 32):
        q, alone = quantize_tokens(x, [0, 33], block), quantize_tokens(x[:33], [0, 33], block)
        assert np.array_equal(q.payload[:33], alone.payload) and np.array_equal(q.scale[:33], alone.scale)
        assert not q.payload[33:].any() and not q.scale[33:].any()


@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0]])
@pytest.mark.parametrize("block", [1, 32])
def test_no_tokens(cu, block):
    for rows in (0, 3):
        q = quantize_tokens(np.full((rows, 2, 4), np.nan, F32), cu, block)
        assert q.payload.shape == (rows, 2, 4) and not q.payload.any() and not q.scale.any()


def test_views_and_large_heads_are_quantized_like_copies():
    x = random_tokens(np.random.default_rng(2), (40, 6, 256), BF16, 3)
    view = x[:, ::2, ::-1]
    wide = random_tokens(np.random.default_rng(3), (3, 300, 256), BF16, 3)  # one token exceeds a chunk
    for array, cu in ((view, [0, 5, 40]), (wide, [0, 3])):
        a, b = quantize_tokens(array, cu, 32), quantize_tokens(array.copy(), cu, 32)
        assert np.array_equal(a.payload, b.payload) and np.array_equal(a.scale, b.scale)
    assert np.array_equal(a.payload[1], slow_quantize(wide[:, :, :], [0, 3], 32)[0][1])


def test_dequantize_is_exact_and_close():
    x = random_tokens(np.random.default_rng(4), (64, 2, 32), F32, 5)
    q = quantize_tokens(x, [0, 64], 1)
    got = dequantize_tokens(q)
    exact = decode(q.payload, E4M3).astype(np.float64) * 2.0 ** (q.scale[..., None].astype(np.float64) - 127)
    assert np.array_equal(got.astype(np.float64), exact)
    amax = np.abs(x).max(axis=-1, keepdims=True)
    # Half a unit of a 3-bit mantissa; below, half of E4M3's quantum 2^-9 at a scale of at most amax * 2 / 448.
    assert (np.abs(got - x) <= np.maximum(np.abs(x) / 16, amax * 2.0**-17)).all()


def test_token_amax_orders_finite_inf_nan():
    x = np.asarray([[[1, -3]], [[np.inf, 5]], [[np.inf, np.nan]], [[-0.0, 0.0]]])
    for dtype in (F32, BF16, np.float16):
        amax = token_amax(x.astype(dtype))
        assert amax.dtype == F32
        assert amax[[0, 1, 3], 0].tolist() == [3, np.inf, 0] and np.isnan(amax[2, 0])


@given(lengths=st.lists(st.integers(0, 100), max_size=6), block=st.sampled_from([1, 32]))
def test_block_starts(lengths, block):
    cu = np.cumsum([0, *lengths])
    want = [t for a, b in pairwise(cu) for t in range(a, b, block)]
    assert block_starts(cu, block).tolist() == want


@pytest.mark.parametrize("shape", [(64, 96), (2, 3, 128, 128), (33, 31), (1, 1), (2, 40, 64)])
def test_tile_amax(shape):
    x = np.random.default_rng(5).standard_normal(shape).astype(F32)
    x[..., 0, 0] = -np.inf
    x[..., -1, -1] = np.nan
    before = x.copy()
    got = tile_amax(x)
    assert np.array_equal(x, before, equal_nan=True)
    size = np.where(np.isfinite(x), np.abs(x), 0)
    for i in range(got.shape[-2]):
        for j in range(got.shape[-1]):
            tile = size[..., 32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
            assert np.array_equal(got[..., i, j], tile.max(axis=(-2, -1)))
    assert got.shape == (*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 32))


OK = np.ones((4, 2, 32), F32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((OK.astype(np.float64), [0, 4], 1), TypeError, "x must be float32.*got float64"),
        (([[[1.0]]], [0, 1], 1), TypeError, r"x must be a NumPy array \(T, H, D\), got list"),
        ((OK[0], [0, 4], 1), ValueError, r"x must have shape \(T, H, D\).*got \(2, 32\)"),
        ((OK[:, :0], [0, 4], 1), ValueError, r"x must have shape \(T, H, D\).*got \(4, 0, 32\)"),
        ((OK, [0, 4], 16), ValueError, r"block must be one of \(1, 32\) tokens, got 16"),
        ((OK, [0, 5], 1), ValueError, r"cu_seqlens\[-1\].*got 5"),
        ((OK, [0.0, 4.0], 1), TypeError, "cu_seqlens must hold integers.*got dtype float64"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize_tokens(*arguments)


def test_many_tiny_documents_cost_no_more_than_one():
    """A Python loop over documents would be over ten times slower here; bytes are held by the tests above."""
    x = np.random.default_rng(9).standard_normal((100_000, 1, 64)).astype(F32).astype(BF16)

    def seconds(cu: np.ndarray) -> float:
        best = np.inf
        for _ in range(3):
            begin = time.perf_counter()
            quantize_tokens(x, cu, 32)
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(np.arange(100_001)) < 5 * seconds(np.asarray([0, 100_000]))


def test_no_full_size_temporaries():
    x = np.ones((16_384, 8, 128), BF16)
    quantize_tokens(x[:1], [0, 1], 32)
    tracemalloc.start()
    try:
        q = quantize_tokens(x, [0, 16_384], 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < q.payload.nbytes + 8_000_000  # float32 of x alone would be 67 MB
