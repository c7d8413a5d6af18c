"""Evaluation of one MMA: exact cases, the reference's model, and the formats it does not know itself."""

import ml_dtypes
import numpy as np
import pytest

from flamia.conformance.simulator.tensor import elements
from flamia.conformance.simulator.tensor.elements import decode_bytes, decode_table
from flamia.conformance.simulator.tensor.evaluate import evaluate, evaluate_wgmma
from flamia.conformance.simulator.tensor.instruction import decode_instruction
from flamia.reference.tensorcore import MXF4NVF4, MXF8F6F4, mma

DTYPES = {
    elements.E4M3: ml_dtypes.float8_e4m3fn,
    elements.E5M2: ml_dtypes.float8_e5m2,
    elements.E2M3: ml_dtypes.float6_e2m3fn,
    elements.E3M2: ml_dtypes.float6_e3m2fn,
    elements.E2M1: ml_dtypes.float4_e2m1fn,
    elements.BF16: ml_dtypes.bfloat16,
    elements.F16: np.float16,
}


@pytest.mark.parametrize("element", DTYPES, ids=lambda e: e.name)
def test_every_code(element):
    codes = np.arange(1 << element.bits, dtype=np.uint16 if element.bits == 16 else np.uint8)
    want = codes.view(DTYPES[element]).astype(np.float32)
    assert np.array_equal(decode_table(element), want, equal_nan=True)
    assert np.array_equal(np.signbit(decode_table(element)), np.signbit(want)) or element.bits > 6


def test_padded_containers():
    """16 elements per 16 bytes, codes packed from bit 0 up."""
    rng = np.random.default_rng(0)
    for element in (elements.E2M1, elements.E2M3, elements.E3M2):
        codes = rng.integers(0, 1 << element.bits, (3, 32))
        raw = np.zeros((3, 32), np.uint8)
        for row in range(3):
            for group in range(2):
                word = sum(int(codes[row, 16 * group + i]) << (element.bits * i) for i in range(16))
                raw[row, 16 * group : 16 * group + 16] = list(word.to_bytes(16, "little"))
        assert np.array_equal(decode_bytes(raw, element, padded=True), decode_table(element)[codes])


def test_packed_fp4():
    raw = np.array([[0x21, 0x7F]], np.uint8)
    assert decode_bytes(raw, elements.E2M1, padded=False).tolist() == [[0.5, 1.0, -6.0, 6.0]]


def mxf8(a=0, b=0, n=32, **kw):
    word = 1 << 23 | n // 8 << 17 | 8 << 24 | a << 7 | b << 10 | kw.get("neg", 0) << 13
    return decode_instruction(word, "mxf8f6f4", 1, "1X")


def finite_codes(rng, shape, element):
    codes = rng.integers(0, 1 << 8, shape, dtype=np.uint8)
    return np.where(np.isfinite(decode_table(element)[codes]), codes, 0).astype(np.uint8)


def test_mxf8f6f4_is_the_reference():
    rng = np.random.default_rng(1)
    a, b = (finite_codes(rng, (n, 32), elements.E4M3) for n in (128, 32))
    sa, sb = rng.integers(100, 150, (128, 1), np.uint8), rng.integers(100, 150, (32, 1), np.uint8)
    acc = rng.standard_normal((128, 32)).astype(np.float32)
    x, y = decode_table(elements.E4M3)[a], decode_table(elements.E4M3)[b]
    want = mma(x, y, acc, MXF8F6F4, sa, sb)
    assert np.array_equal(evaluate(mxf8(), a, b, acc, sa, sb), want)
    assert np.array_equal(evaluate(mxf8(neg=1), a, b, acc, sa, sb), mma(-x, y, acc, MXF8F6F4, sa, sb))
    fast = evaluate(mxf8(), a, b, acc, sa, sb, fast=True)
    assert np.abs(fast - want).max() <= 2.0**-20 * np.abs(want).max()
    f8 = decode_instruction(1 << 4 | 4 << 17 | 8 << 24, "f8f6f4", 1, None)
    ones = np.full((128, 1), 127, np.uint8)
    assert np.array_equal(evaluate(f8, a, b, acc), mma(x, y, acc, MXF8F6F4, ones, ones[:32]))


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 0), (1, 1), (3, 0), (4, 1), (5, 3)])
def test_mixed_formats_where_nothing_is_cut(a, b):
    """Few significant terms of like size: every model must give the exact sum."""
    types = {0: elements.E4M3, 1: elements.E5M2, 3: elements.E2M3, 4: elements.E3M2, 5: elements.E2M1}
    rng = np.random.default_rng(a * 8 + b)
    raws, values = [], []
    for code, rows in ((a, 128), (b, 32)):
        element = types[code]
        ones = {0: (0x38, 0x3C), 1: (0x3C, 0x3E), 3: (0x08, 0x0C), 4: (0x0C, 0x0E), 5: (0x2, 0x3)}[code]  # 1.0, 1.5
        codes = rng.choice(ones, (rows, 32)) * (rng.random((rows, 32)) < 0.5)
        values.append(decode_table(element)[codes])
        raw = np.zeros((rows, 32), np.uint8)
        for row in range(rows):
            for group in range(2):
                word = sum(int(codes[row, 16 * group + i]) << (element.bits * i) for i in range(16))
                raw[row, 16 * group : 16 * group + 16] = list(word.to_bytes(16, "little"))
        raws.append(raw)
    sa, sb = (np.full((n, 1), 130, np.uint8) for n in (128, 32))
    want = 64 * (values[0].astype(np.float64) @ values[1].T.astype(np.float64))
    assert set(np.unique(np.abs(values[0]))) == {0.0, 1.0, 1.5}
    assert np.array_equal(evaluate(mxf8(a, b), *raws, None, sa, sb), want)


def test_mixed_subnormals_are_aligned_by_their_own_format():
    """E4M3 subnormals have exponent -6, E5M2 ones -14. 2^-9 x 1 then stands at 2^-6, and F = 25 keeps down to 2^-31."""
    a, b = np.zeros((128, 32), np.uint8), np.zeros((32, 32), np.uint8)
    a[:, 0], b[:, 0] = 0x01, 0x3C  # 2^-9 (E4M3) x 1 (E5M2)
    a[:, 1], b[:, 1] = 0x01, 0x01  # 2^-9 x 2^-16: lowest bit 2^-25
    sa, sb = (np.full((n, 1), 127, np.uint8) for n in (128, 32))
    acc = np.full((128, 32), 2.0**-32, np.float32)  # one bit below the quantum 2^-31
    got = evaluate(mxf8(0, 1), a, b, acc, sa, sb)
    assert (got == np.float32(2.0**-9 + 2.0**-25)).all()
    a[:, 0] = 0  # now the largest exponent is -6 - 14 = -20: the quantum is 2^-45
    got = evaluate(mxf8(0, 1), a, b, acc, sa, sb)
    assert (got == np.float32(2.0**-25 + 2.0**-32)).all()


def test_mxf4_agrees_with_nvfp4_on_common_scales():
    """UE8M0 2^e and UE4M3 2^e are the same number: exponents -6..8 of both kinds must give the same bits."""
    rng = np.random.default_rng(3)
    nv = decode_instruction(1 << 7 | 1 << 10 | 16 << 17 | 8 << 24, "mxf4nvf4", 1, "4X")
    mx = decode_instruction(1 << 7 | 1 << 10 | 16 << 17 | 8 << 24 | 1 << 23, "mxf4nvf4", 1, "4X")
    a, b = rng.integers(0, 256, (128, 32), np.uint8), rng.integers(0, 256, (128, 32), np.uint8)
    ea, eb = rng.integers(-6, 9, (128, 4)), rng.integers(-6, 9, (128, 4))
    acc = (rng.standard_normal((128, 128)) * 2.0 ** rng.integers(-30, 20, (128, 128))).astype(np.float32)
    want = evaluate(nv, a, b, acc, ((ea + 7) << 3).astype(np.uint8), ((eb + 7) << 3).astype(np.uint8))
    got = evaluate(mx, a, b, acc, (ea + 127).astype(np.uint8), (eb + 127).astype(np.uint8))
    assert np.array_equal(got, want)
    x, y = (decode_bytes(side, elements.E2M1, padded=False) for side in (a, b))
    scales = ((ea + 7) << 3).astype(np.uint8), ((eb + 7) << 3).astype(np.uint8)
    assert np.array_equal(want, mma(x, y, acc, MXF4NVF4, *scales))


def test_mxf4_scales_of_32_and_specials():
    mx = decode_instruction(1 << 7 | 1 << 10 | 1 << 17 | 8 << 24 | 1 << 23, "mxf4", 1, "2X")
    a, b = np.full((128, 32), 0x22, np.uint8), np.full((8, 32), 0x22, np.uint8)  # all 1.0
    sa, sb = np.full((128, 2), 127, np.uint8), np.full((8, 2), 127, np.uint8)
    sa[:, 1], sb[3, 1], sa[7, 0] = 128, 255, 255
    acc = np.zeros((128, 8), np.float32)
    acc[9] = np.inf
    got = evaluate(mx, a, b, acc, sa, sb)
    assert got[0, 0] == 32 + 64 and np.isnan(got[:, 3]).all() and np.isnan(got[7]).all() and got[9, 0] == np.inf
    assert (got.view(np.uint32)[np.isnan(got)] == 0x7FFFFFFF).all()


def test_wgmma_mixed_fp8_is_exact_where_nothing_is_cut():
    rng = np.random.default_rng(4)
    a = rng.choice(np.array([0x38, 0xB8, 0x40], np.uint8), (64, 32))  # 1, -1, 2
    b = rng.choice(np.array([0x3C, 0xBC, 0x00], np.uint8), (16, 32))  # 1, -1, 0
    x, y = decode_table(elements.E4M3)[a].astype(np.float64), decode_table(elements.E5M2)[b].astype(np.float64)
    got = evaluate_wgmma(elements.E4M3, elements.E5M2, a, b, None)
    assert np.array_equal(got, x @ y.T)
    acc = np.ones((64, 16), np.float32)
    got = evaluate_wgmma(elements.E4M3, elements.E5M2, a, b, acc, negate_b=True)
    assert np.array_equal(got, 1 - x @ y.T)
