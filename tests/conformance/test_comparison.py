"""Comparisons name the first difference and where it lies."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.conformance.budget import half_ulp
from flamia.conformance.comparison import compare_anomalies, compare_bits, compare_within, locate_token
from flamia.reference.formats import E4M3, decode

CU = np.array([0, 3, 3, 200], np.int64)


def test_equal_arrays_do_not_differ():
    x = np.array([1.0, np.nan, -0.0, np.inf], np.float32)
    other_nan = x.copy()
    other_nan.view(np.uint32)[1] ^= 0x80000001
    assert compare_bits("x", x, x) is None and compare_bits("x", x, other_nan) is None


def test_the_first_difference_is_named_with_bytes_values_document_and_tile():
    expected = np.zeros((200, 1, 4), bfloat16)
    got = expected.copy()
    got[150, 0, 2], got[199, 0, 3] = bfloat16(1.5), bfloat16(2)
    found = compare_bits("out", got, expected, cu_seqlens=CU, token_axis=0)
    assert found is not None and found.coordinate == (150, 0, 2) and found.count == 2
    assert found.message == (
        "out[150, 0, 2] (byte 1204): got 1.5 (0x3fc0), expected 0 (0x0000), document 2, tile 1, row 19 of the tile; "
        "2 of 800 differ"
    )


def test_signed_zeros_differ_and_codes_show_their_values():
    assert compare_bits("x", np.float32([0.0]), np.float32([-0.0])) is not None
    found = compare_bits("p", np.uint8([0x38]), np.uint8([0x7F]), decode=lambda codes: decode(codes, E4M3))
    assert found is not None and "got 56 (0x38), expected 127 (0x7f), decoded 1 and nan" in found.message


@pytest.mark.parametrize("got", [np.zeros((2, 2), np.float32), np.zeros(4, np.float64)])
def test_another_shape_or_dtype_is_a_difference(got):
    found = compare_bits("x", got, np.zeros(4, np.float32))
    assert found is not None and found.coordinate is None and "x must be float32 (4,)" in found.message


def test_anomalies_come_before_errors():
    exact = np.ones((200, 1, 1))
    got = exact.copy()
    got[5], got[20] = 100, np.nan
    found, ratio = compare_within("out", got, exact, np.full(exact.shape, 0.5), cu_seqlens=CU)
    assert found is not None and found.coordinate == (20, 0, 0) and ratio == np.inf
    found = compare_anomalies("out", -np.inf * exact, np.inf * exact)
    assert found is not None and found.count == 200


def test_the_worst_coordinate_is_the_one_furthest_over_its_own_budget():
    exact = np.zeros((200, 1, 1))
    got, budget = exact.copy(), np.ones(exact.shape)
    got[7], budget[7] = 10, 100
    got[9], budget[9] = 0.3, 0.1
    found, ratio = compare_within("out", got, exact, budget, cu_seqlens=CU)
    assert found is not None and found.coordinate == (9, 0, 0) and ratio == pytest.approx(3)
    assert compare_within("out", got, exact, np.full(exact.shape, 20.0), cu_seqlens=CU) == (None, 0.5)


def test_an_exact_result_needs_no_budget():
    zero = np.zeros((200, 1, 1))
    assert compare_within("out", zero, zero, zero, cu_seqlens=CU)[0] is None
    assert compare_within("out", zero + 1e-9, zero, zero, cu_seqlens=CU)[0] is not None


def test_tokens_are_located():
    assert locate_token(2, CU) == "document 0, tile 0, row 2 of the tile"
    assert locate_token(3, CU) == "document 2, tile 0, row 0 of the tile"
    assert locate_token(200, CU) == "a padding row"


@pytest.mark.parametrize(("dtype", "value", "expected"), [(bfloat16, 1.0, 2.0**-8), (np.float32, 3.0, 2.0**-23)])
def test_half_ulp(dtype, value, expected):
    assert half_ulp(np.array(value), dtype) == expected
    assert half_ulp(np.array(np.inf), dtype) == 0
