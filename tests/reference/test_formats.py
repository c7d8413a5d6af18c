"""Encoders, decoders and tables against ml_dtypes, exact rationals and the named corners of the formats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flamia.reference.formats import (
    CHUNK,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    UE4M3,
    ElementFormat,
    decode,
    decode_e8m0,
    decode_table,
    decode_ue4m3,
    encode,
    encode_e8m0_rp,
    encode_ue4m3,
    round_to,
)
from tests.reference.scalar import F32, exact_code

PEERS = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
element_formats = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)


def peer_encode(x: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """ml_dtypes inside its valid domain: finite values clipped to the range, NaN set aside."""
    with np.errstate(invalid="ignore"):
        x = x.astype(F32)
        nan = np.isnan(x)
        clipped = np.clip(np.where(nan, F32(0), x), F32(-fmt.max_finite), F32(fmt.max_finite))
        codes = clipped.astype(PEERS[fmt.name]).view(np.uint8).copy()
    codes[nan] = fmt.nan_encodes_to
    return codes


def random_bits(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32).view(F32)


def all_16_bit(dtype: type) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def assert_same_codes(got: np.ndarray, want: np.ndarray, x: np.ndarray) -> None:
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        i = wrong[0]
        raise AssertionError(f"{wrong.size} codes differ; first at {i}: x={x[i]!r} got {got[i]:#x} want {want[i]:#x}")


@element_formats
def test_decode_table_equals_ml_dtypes_for_all_codes(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    want = codes.view(PEERS[fmt.name]).astype(F32)
    got = decode(codes, fmt)
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32))
    assert tuple(np.flatnonzero(nan)) == fmt.nan_codes
    assert tuple(np.flatnonzero(np.isinf(want))) == fmt.inf_codes


@element_formats
def test_format_literals_describe_their_table(fmt):
    table = decode_table(fmt)
    positive = table[: table.size // 2]
    finite = positive[np.isfinite(positive)]
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert finite.max() == fmt.max_finite
    assert finite[finite > 0].min() == fmt.min_subnormal
    assert positive[1 << fmt.mantissa_bits] == fmt.min_normal == 2.0 ** (1 - fmt.bias)
    assert 2.0**fmt.max_exponent <= fmt.max_finite < 2.0 ** (fmt.max_exponent + 1)
    assert not table.flags.writeable


@element_formats
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_encode_equals_ml_dtypes_on_all_16_bit_inputs(fmt, dtype):
    x = all_16_bit(dtype)
    assert_same_codes(encode(x, fmt), peer_encode(x, fmt), x)


@element_formats
def test_encode_equals_ml_dtypes_on_ten_million_float32(fmt):
    x = random_bits(10_000_000)
    assert_same_codes(encode(x, fmt), peer_encode(x, fmt), x)


@element_formats
def test_encode_equals_ml_dtypes_where_codes_change(fmt):
    """Random bits seldom fall near the format's range: log-uniform magnitudes from 2^-3 quanta to 4 max."""
    rng = np.random.default_rng(1)
    size = np.exp2(rng.uniform(np.log2(fmt.min_subnormal) - 3, np.log2(fmt.max_finite) + 2, 2_000_000)).astype(F32)
    x = np.where(rng.random(size.size) < 0.5, -size, size)
    assert_same_codes(encode(x, fmt), peer_encode(x, fmt), x)


@element_formats
def test_every_tie_and_its_neighbours(fmt):
    """All midpoints of adjacent values, subnormals and the saturation tie included, and one ulp to each side."""
    positive = decode_table(fmt)[: (1 << fmt.bits) // 2]
    values = positive[np.isfinite(positive)]
    beyond = values[-1] + (values[-1] - values[-2])
    upper = np.append(values[1:], beyond)
    ties = (values + upper) / F32(2)
    lower_code = np.arange(values.size)
    upper_code = np.minimum(lower_code + 1, values.size - 1)
    even = np.where(lower_code % 2 == 0, lower_code, upper_code)
    sign = 1 << (fmt.bits - 1)
    for x, want in (
        (ties, even),
        (np.nextafter(ties, F32(0)), lower_code),
        (np.nextafter(ties, F32(np.inf)), upper_code),
    ):
        assert_same_codes(encode(x, fmt), want, x)
        assert_same_codes(encode(-x, fmt), want | sign, -x)


@element_formats
@given(x=st.floats(width=32, allow_nan=False))
def test_encode_equals_exact_rationals(fmt, x):
    want = exact_code(x if np.isfinite(x) else np.copysign(fmt.max_finite, x), fmt)
    assert int(encode(np.asarray([x], F32), fmt)[0]) == want


@element_formats
@given(x=st.floats(width=32, allow_nan=False), y=st.floats(width=32, allow_nan=False))
def test_round_to_is_monotonic(fmt, x, y):
    lo, hi = round_to(np.asarray([min(x, y), max(x, y)], F32), fmt)
    assert lo <= hi


@element_formats
def test_every_finite_code_survives_a_round_trip(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    finite = codes[np.isfinite(decode_table(fmt))]
    assert np.array_equal(encode(decode(finite, fmt), fmt), finite)


CORNERS = [
    ("E4M3 zero", E4M3, 0.0, 0x00),
    ("E4M3 minus zero", E4M3, -0.0, 0x80),
    ("E4M3 smallest subnormal", E4M3, 2.0**-9, 0x01),
    ("E4M3 half of it ties to zero", E4M3, 2.0**-10, 0x00),
    ("E4M3 above half of it", E4M3, 2.0**-10 * (1 + 2.0**-23), 0x01),
    ("E4M3 one and a half ties up", E4M3, 1.5 * 2.0**-9, 0x02),
    ("E4M3 largest subnormal", E4M3, 7 * 2.0**-9, 0x07),
    ("E4M3 subnormal rounds to normal", E4M3, 7.5 * 2.0**-9, 0x08),
    ("E4M3 smallest normal", E4M3, 2.0**-6, 0x08),
    ("E4M3 negative underflow keeps its sign", E4M3, -(2.0**-20), 0x80),
    ("E4M3 binary32 subnormal", E4M3, 2.0**-149, 0x00),
    ("E4M3 one", E4M3, 1.0, 0x38),
    ("E4M3 4.25 ties to 4", E4M3, 4.25, 0x48),
    ("E4M3 mantissa carry", E4M3, 15.5, 0x58),
    ("E4M3 448", E4M3, 448.0, 0x7E),
    ("E4M3 464, the saturation tie", E4M3, 464.0, 0x7E),
    ("E4M3 465", E4M3, 465.0, 0x7E),
    ("E4M3 512", E4M3, 512.0, 0x7E),
    ("E4M3 -FLT_MAX", E4M3, -3.4028234663852886e38, 0xFE),
    ("E4M3 Inf", E4M3, np.inf, 0x7E),
    ("E4M3 -Inf", E4M3, -np.inf, 0xFE),
    ("E4M3 NaN", E4M3, np.nan, 0x7F),
    ("E4M3 -NaN", E4M3, -np.nan, 0x7F),
    ("E5M2 57344", E5M2, 57344.0, 0x7B),
    ("E5M2 61440, where IEEE gives Inf", E5M2, 61440.0, 0x7B),
    ("E5M2 Inf", E5M2, np.inf, 0x7B),
    ("E5M2 -Inf", E5M2, -np.inf, 0xFB),
    ("E5M2 NaN", E5M2, np.nan, 0x7F),
    ("E5M2 -NaN", E5M2, -np.nan, 0x7F),
    ("E5M2 smallest subnormal", E5M2, 2.0**-16, 0x01),
    ("E5M2 half of it ties to zero", E5M2, 2.0**-17, 0x00),
    ("E5M2 minus zero", E5M2, -0.0, 0x80),
    ("E2M1 0.25 ties to 0", E2M1, 0.25, 0x0),
    ("E2M1 0.75 ties to 1", E2M1, 0.75, 0x2),
    ("E2M1 1.25 ties to 1", E2M1, 1.25, 0x2),
    ("E2M1 1.75 ties to 2", E2M1, 1.75, 0x4),
    ("E2M1 2.5 ties to 2", E2M1, 2.5, 0x4),
    ("E2M1 3.5 ties to 4", E2M1, 3.5, 0x6),
    ("E2M1 5 ties to 4", E2M1, 5.0, 0x6),
    ("E2M1 7 saturates", E2M1, 7.0, 0x7),
    ("E2M1 minus zero", E2M1, -0.0, 0x8),
    ("E2M1 -6", E2M1, -6.0, 0xF),
    ("E2M1 Inf", E2M1, np.inf, 0x7),
    ("E2M1 -Inf", E2M1, -np.inf, 0xF),
    ("E2M1 NaN is +6", E2M1, np.nan, 0x7),
    ("E2M1 -NaN is +6", E2M1, -np.nan, 0x7),
]


@pytest.mark.parametrize(("fmt", "x", "code"), [c[1:] for c in CORNERS], ids=[c[0] for c in CORNERS])
def test_corner(fmt, x, code):
    assert encode(np.asarray([x], F32), fmt)[0] == code


def assert_round_to_equals_codes(x: np.ndarray, fmt: ElementFormat) -> None:
    nan = np.isnan(x.astype(F32))
    got, want = round_to(x, fmt), decode(encode(x, fmt), fmt)
    assert got.dtype == F32
    assert np.isnan(got[nan]).all()
    assert_same_codes(got[~nan].view(np.uint32), want[~nan].view(np.uint32), x[~nan])


@element_formats
def test_round_to_equals_decode_of_encode(fmt):
    assert_round_to_equals_codes(random_bits(1_000_000, seed=2), fmt)
    assert_round_to_equals_codes(all_16_bit(ml_dtypes.bfloat16), fmt)
    assert_round_to_equals_codes(all_16_bit(np.float16), fmt)


@element_formats
def test_round_to_in_place_and_into_strided_arrays(fmt):
    x = random_bits(2 * CHUNK + 6, seed=3).reshape(2, -1)
    want = round_to(x, fmt).view(np.uint32)
    other, strided, inplace = np.empty_like(x), np.empty((x.shape[1], 2), F32).T, x.copy()
    assert round_to(x, fmt, out=other) is other
    assert round_to(x, fmt, out=strided) is strided
    assert round_to(inplace, fmt, out=inplace) is inplace
    assert np.array_equal(other.view(np.uint32), want)
    assert np.array_equal(np.ascontiguousarray(strided).view(np.uint32), want)
    assert np.array_equal(inplace.view(np.uint32), want)
    transposed = x.copy().T
    assert np.array_equal(round_to(transposed, fmt, out=transposed).T.view(np.uint32), want)


@element_formats
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (CHUNK - 1,), (CHUNK + 1,), (2, CHUNK, 2)])
def test_shapes(fmt, shape):
    x = random_bits(int(np.prod(shape)), seed=4).reshape(shape)
    want = peer_encode(x.reshape(-1), fmt).reshape(shape)
    codes = encode(x, fmt)
    assert codes.shape == shape and codes.dtype == np.uint8
    assert np.array_equal(codes, want)
    assert decode(codes, fmt).shape == round_to(x, fmt).shape == shape


def test_encode_into_out():
    x = random_bits(1000, seed=5).reshape(10, 100)
    want = encode(x, E4M3)
    out, strided = np.empty((10, 100), np.uint8), np.empty((100, 10), np.uint8).T
    assert encode(x, E4M3, out=out) is out
    assert encode(x[:, ::-1], E4M3, out=strided) is strided
    assert np.array_equal(out, want)
    assert np.array_equal(strided, want[:, ::-1])


@pytest.mark.parametrize("function", [encode, round_to])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64, np.uint8])
def test_types_that_would_round_twice_are_refused(function, dtype):
    with pytest.raises(TypeError, match=f"x must be float32.*got {np.dtype(dtype)}.*rounded twice"):
        function(np.ones(3, dtype), E4M3)


def test_out_of_another_type_or_shape_is_refused():
    x = np.ones(3, F32)
    with pytest.raises(TypeError, match="out must be float32, got float64"):
        round_to(x, E4M3, out=np.empty(3))
    with pytest.raises(ValueError, match=r"out must have the shape \(3,\) of x, got \(4,\)"):
        encode(x, E4M3, out=np.empty(4, np.uint8))


def test_decode_refuses_wide_codes_and_other_types():
    with pytest.raises(ValueError, match=r"codes of E2M1 must be 0\.\.15, got 16"):
        decode(np.asarray([3, 16], np.uint8), E2M1)
    with pytest.raises(TypeError, match="codes of E4M3 must be a uint8 array, got int64"):
        decode(np.asarray([1], np.int64), E4M3)
    with pytest.raises(TypeError, match="scale must be a uint8 array, got list"):
        decode_e8m0([1])


def test_e8m0_table():
    codes = np.arange(256, dtype=np.uint8)
    got = decode_e8m0(codes)
    assert np.array_equal(got[:255].astype(np.float64), 2.0 ** (np.arange(255) - 127.0))
    assert got[0].view(np.uint32) == 0x00400000  # a binary32 subnormal
    assert np.isnan(got[E8M0.nan_code]) and np.isnan(got).sum() == 1
    assert got[:255].max() == E8M0.max_finite and got[:255].min() == E8M0.min_positive
    assert np.array_equal(got[1:255], codes[1:255].view(ml_dtypes.float8_e8m0fnu).astype(F32))


@pytest.mark.parametrize(
    ("x", "byte"),
    [
        (0.0, 0),
        (-0.0, 0),
        (2.0**-149, 0),
        (2.0**-127, 0),
        (2.0**-127 + 2.0**-149, 1),
        (2.0**-126 - 2.0**-149, 1),
        (2.0**-126, 1),
        (2.0**-126 + 2.0**-149, 2),
        (1.0, 127),
        (1.0000001, 128),
        (2.0, 128),
        (-3.0, 129),
        (2.0**127, 254),
        (2.0**127 * 1.0000001, 254),
        (3.4028234663852886e38, 254),
        (np.inf, 254),
        (-np.inf, 254),
        (np.nan, 255),
        (-np.nan, 255),
    ],
)
def test_e8m0_round_up(x, byte):
    assert encode_e8m0_rp(np.asarray([x], F32))[0] == byte


def test_e8m0_round_up_is_the_smallest_power_not_below():
    x = np.abs(random_bits(1_000_000, seed=6))
    x = x[x <= F32(2.0**127)].astype(np.float64)
    byte = encode_e8m0_rp(x.astype(F32)).astype(np.float64)
    assert (x <= 2.0 ** (byte - 127)).all()
    assert ((byte == 0) | (x > 2.0 ** (byte - 128))).all()


def test_ue4m3():
    codes = np.arange(128, dtype=np.uint8)
    values = decode_ue4m3(codes)
    assert np.array_equal(values[:127], decode_table(E4M3)[:127]) and np.isnan(values[UE4M3.nan_code])
    assert values[:127].max() == UE4M3.max_finite and values[1] == UE4M3.min_positive
    assert np.array_equal(encode_ue4m3(values), codes)
    x = np.asarray([-0.0, 2.0**-10, 1000.0, np.inf, -np.nan], F32)
    assert encode_ue4m3(x).tolist() == [0, 0, 0x7E, 0x7E, 0x7F]
    with pytest.raises(ValueError, match=r"x must not be negative for UE4M3, got -2\.0"):
        encode_ue4m3(np.asarray([1, -2, np.nan], F32))
    with pytest.raises(ValueError, match=r"scale of UE4M3 must be 0\.\.127, got 128"):
        decode_ue4m3(np.asarray([128], np.uint8))
