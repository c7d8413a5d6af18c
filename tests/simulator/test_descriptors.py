"""Descriptors and swizzles, against scalar address formulas written from the PTX text."""

import numpy as np
import pytest

from flamia.conformance.simulator.tensor.descriptors import decode_tcgen05, decode_wgmma
from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.swizzle import operand_addresses, operand_granules
from tests.simulator.layouts import WIDTHS, expect_address, tcgen05, wgmma


@pytest.mark.parametrize("mode", WIDTHS)
@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("start", [0x400, 0x8C00])
def test_every_swizzle_and_majorness(mode, mn_major, size, start):
    width, rows, depth = WIDTHS[mode], 64, 32 // size
    lbo, sbo = (0x1230, 0x2340) if width == 16 else (0x2000, 0x3000)
    found = operand_addresses(decode_tcgen05(tcgen05(start, lbo, sbo, mode)), rows, 32, size, mn_major)
    for row in range(rows):
        for k in range(depth):
            want = expect_address(start, lbo, sbo, width, mn_major, row, k, size)
            for part in range(size):
                assert found[row, k * size + part] == want + part, (row, k)


@pytest.mark.parametrize(("mode", "twin"), [(0, 0), (1, 2), (2, 4), (3, 6)])
def test_wgmma_codes_name_the_same_patterns(mode, twin):
    a = operand_addresses(decode_wgmma(wgmma(0x800, 0x100, 0x400, mode)), 64, 32, 1, False)
    b = operand_addresses(decode_tcgen05(tcgen05(0x800, 0x100, 0x400, twin)), 64, 32, 1, False)
    assert np.array_equal(a, b)


def test_next_k_steps_stay_inside_the_row():
    """K-major 128B: adding 2 to the descriptor moves by 32 bytes before the XOR, as every kernel relies on."""
    for step in range(4):
        found = operand_addresses(decode_tcgen05(tcgen05(0x4000 + 32 * step, 0, 1024, 2)), 16, 32, 1, False)
        for row in range(16):
            for byte in range(32):
                linear = row // 8 * 1024 + row % 8 * 128 + 32 * step + byte
                assert found[row, byte] == 0x4000 + (linear ^ (linear >> 7 & 7) << 4)


def test_32_byte_atoms():
    """128B swizzle of 32-byte atoms, MN-major: ((T,8,m),(4,k)), Swizzle<2,5,2>."""
    found = operand_addresses(decode_tcgen05(tcgen05(0x400, 0x4000, 0x200, 1)), 160, 32, 2, True)
    for row in (0, 7, 8, 15, 16, 63, 64, 159):
        for k in range(16):
            at = row * 2
            linear = 0x400 + at % 128 + at // 128 * 0x4000 + k % 4 * 128 + k // 4 * 0x200
            assert found[row, 2 * k] == linear ^ (linear >> 7 & 3) << 5


def test_base_offset_shifts_the_phase():
    found = operand_addresses(decode_tcgen05(tcgen05(0x480, 0, 1024, 2, base=1)), 8, 32, 1, False)
    for row in range(8):
        assert found[row, 0] == 0x480 + 128 * row + (row % 8) * 16 - ((0x480 + 128 * row) & 0x70)


def test_granules_are_the_16_byte_units():
    found = operand_granules(decode_tcgen05(tcgen05(0x800, 0, 256, 6)), 16, 32, 1, False)
    assert found.tolist() == list(range(0x80, 0xA0))


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (tcgen05(0x400, 0, 1024, 2, version=0), "0b001"),
        (tcgen05(0x400, 0, 1024, 3), "swizzle mode"),
        (tcgen05(0x480, 0, 1024, 2), "base offset must be 1"),
        (tcgen05(0x400, 0, 1024, 0, base=2), "base offset must be 0"),
        (tcgen05(0x400, 0, 1024, 2) | 1 << 52, "absolute address"),
        (tcgen05(0x400, 0, 1024, 2) | 1 << 55, "must be 0"),
    ],
)
def test_bad_tcgen05_descriptors(bits, text):
    with pytest.raises(Illegal, match=text):
        decode_tcgen05(bits)


def test_bad_wgmma_descriptor():
    with pytest.raises(Illegal, match="must be 0"):
        decode_wgmma(tcgen05(0x400, 0, 1024, 2))  # the version bits of tcgen05


@pytest.mark.parametrize(
    ("bits", "mn_major", "text"),
    [
        (tcgen05(0x400 + 112, 0, 1024, 2), False, "does not fit"),
        (tcgen05(0x400, 0, 1024, 1), False, "MN-major operands only"),
    ],
)
def test_rows_that_leave_the_pattern(bits, mn_major, text):
    with pytest.raises(Illegal, match=text):
        operand_addresses(decode_tcgen05(bits), 8, 32, 1, mn_major)
