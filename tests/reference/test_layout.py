"""Layout: addresses by hand and by a second, slow derivation; inverses; padding; what a document owns."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flamia.reference import layout

LENGTHS = st.lists(st.sampled_from([0, 1, 31, 32, 33, 127, 128, 129, 300]), max_size=5)
ROW_BYTES = [32, 64, 96, 128, 160, 192, 224, 256]


def boundaries(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def random_codes(shape: tuple[int, ...], seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, high, shape, dtype=np.uint8)


# ---- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "address", "expected"),
    [
        (128, 0x000, 0x000),
        (128, 0x080, 0x090),  # row 1: bit 7 flips bit 4
        (128, 0x100, 0x120),  # row 2: bit 8 flips bit 5
        (128, 0x200, 0x240),  # row 4: bit 9 flips bit 6
        (128, 0x3F5, 0x385),  # row 7, byte 117: the piece 7 goes to 0
        (128, 0x400, 0x400),  # row 8: the pattern starts again
        (64, 0x080, 0x090),  # rows 2 and 3
        (64, 0x1F0, 0x1C0),
        (64, 0x200, 0x200),
        (32, 0x080, 0x090),  # rows 4 to 7
        (32, 0x0FF, 0x0EF),
        (32, 0x100, 0x100),
    ],
)
def test_swizzle_by_hand(width, address, expected):
    assert layout.swizzle(address, width) == expected
    assert layout.swizzle(expected, width) == address


@pytest.mark.parametrize(
    ("row_bytes", "row", "byte", "expected"),
    [
        (128, 0, 5, 5),
        (128, 1, 0, 128 + 16),
        (128, 7, 127, 7 * 128 + 15),
        (128, 127, 0, 127 * 128 + 112),
        (64, 1, 20, 64 + 20),
        (64, 2, 0, 128 + 16),
        (64, 7, 0, 7 * 64 + 48),
        (32, 4, 0, 128 + 16),
        (
            192,
            1,
            128,
            128 * 128 + 64,
        ),  # the second panel is 64 bytes wide and follows 128 whole rows of the first
        (192, 3, 130, 128 * 128 + 3 * 64 + 16 + 2),
        (256, 1, 128, 128 * 128 + 128 + 16),
    ],
)
def test_payload_offset_by_hand(row_bytes, row, byte, expected):
    assert layout.payload_offset(row_bytes)[row, byte] == expected


def slow_payload_offset(row_bytes: int, row: int, byte: int) -> int:
    """The same address from binary digits: digits 7.. are added to digits 4.. without carry."""
    start = 0
    for width, digits in ((128, 3), (64, 2), (32, 1)):
        while start + width <= row_bytes:
            if byte < start + width:
                address = start * 128 + row * width + (byte - start)
                bits = [(address >> b) & 1 for b in range(18)]
                for d in range(digits):
                    bits[4 + d] = (bits[4 + d] + bits[7 + d]) % 2
                return sum(bit << b for b, bit in enumerate(bits))
            start += width
    raise AssertionError("outside the row")


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_payload_offset_equals_slow_derivation(row_bytes):
    offset = layout.payload_offset(row_bytes)
    slow = [[slow_payload_offset(row_bytes, r, c) for c in range(row_bytes)] for r in range(128)]
    np.testing.assert_array_equal(offset, slow)
    np.testing.assert_array_equal(np.sort(offset, axis=None), np.arange(128 * row_bytes))


@pytest.mark.parametrize("width", [32, 64, 128])
def test_both_majors_name_the_same_byte(width):
    token, byte = np.arange(128)[:, None], np.arange(4 * width)
    one = layout.k_major_offset(token, np.arange(width), width)
    by_panel = [128 * width * p + one for p in range(4)]
    np.testing.assert_array_equal(layout.mn_major_offset(byte, token, width), np.concatenate(by_panel, axis=1))


def test_steps_of_a_tensor_core_instruction_are_constant():
    """K-major, 32 bytes further along the row; MN-major, 32 tokens further: 32 W; before the exclusive-or."""
    plain = layout.swizzle(layout.payload_offset(128), 128)
    assert np.all(plain[:, 32:] - plain[:, :-32] == 32)
    assert np.all(plain[32:] - plain[:-32] == 4096)


@pytest.mark.parametrize("row_bytes", [0, -32, 16, 100])
def test_payload_offset_rejects(row_bytes):
    with pytest.raises(ValueError, match=f"row_bytes must be a positive multiple of 32, got {row_bytes}"):
        layout.payload_offset(row_bytes)


def test_scale_offset_by_hand_and_by_transposition():
    assert layout.scale_offset(0, 3) == 3
    assert layout.scale_offset(1, 0) == 16
    assert layout.scale_offset(32, 0) == 4
    assert layout.scale_offset(127, 3) == 511
    scales = random_codes((256, 8))
    blocked = scales.reshape(2, 4, 32, 2, 4).transpose(0, 3, 2, 1, 4).reshape(2, 2, 512)
    row, block = np.arange(256)[:, None], np.arange(8)
    mine = np.zeros_like(blocked)
    mine[row // 128, block // 4, layout.scale_offset(row % 128, block % 4)] = scales
    np.testing.assert_array_equal(mine, blocked)


# ---- tiles of a pack ---------------------------------------------------------------------------------------


@given(LENGTHS, st.integers(0, 200))
def test_tile_offsets_slots_and_bound(lengths, padding):
    cu = boundaries(lengths)
    first = layout.tile_offsets(cu)
    assert first.tolist() == [sum(-(-n // 128) for n in lengths[:i]) for i in range(len(lengths) + 1)]
    assert first[-1] <= layout.max_tiles(int(cu[-1]) + padding, len(lengths))
    tile, row = layout.token_slots(cu)
    slow = [(first[i] + p // 128, p % 128) for i, n in enumerate(lengths) for p in range(n)]
    assert list(zip(tile.tolist(), row.tolist(), strict=True)) == slow


def test_bound_is_attained():
    assert layout.tile_offsets([0, 1])[-1] == layout.max_tiles(1, 1) == 1
    assert layout.tile_offsets(boundaries([1] * 127))[-1] == layout.max_tiles(127, 127) == 127


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 3), st.sampled_from([32, 64, 96, 128, 192, 256]), st.integers(0, 40))
def test_payload_round_trip(lengths, heads, channels, padding):
    cu = boundaries(lengths)
    payload = random_codes((cu[-1] + padding, heads, channels))
    packed = layout.pack_payload(payload, cu)
    assert packed.shape == (heads, layout.tile_offsets(cu)[-1], 128 * channels)
    expected = payload.copy()
    expected[cu[-1] :] = 0
    np.testing.assert_array_equal(layout.unpack_payload(packed, cu, len(payload)), expected)
    assert np.count_nonzero(packed) == np.count_nonzero(expected)  # the rest of every tile is zero


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([64, 128, 192]), st.integers(0, 40))
def test_nvfp4_round_trip(lengths, channels, padding):
    cu = boundaries(lengths)
    codes = random_codes((cu[-1] + padding, 2, channels), high=16)
    packed = layout.pack_nvfp4(codes, cu)
    assert packed.shape == (2, layout.tile_offsets(cu)[-1], 64 * channels)
    codes[cu[-1] :] = 0
    np.testing.assert_array_equal(layout.unpack_nvfp4(packed, cu, len(codes)), codes)


def test_nvfp4_even_channel_is_the_low_nibble():
    codes = np.zeros((3, 1, 128), np.uint8)
    codes[2, 0, 0], codes[2, 0, 1] = 0x3, 0xA
    codes[2, 0, 35] = 0x7  # byte 17 of the row
    packed = layout.pack_nvfp4(codes, [0, 3])
    assert packed[0, 0, 2 * 64 + 16] == 0xA3  # row 2 of a 64-byte panel: piece 0 goes to piece 1
    assert packed[0, 0, 2 * 64 + 1] == 0x70


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from([32, 64, 128, 160, 256]), st.integers(0, 40))
def test_scales_round_trip(lengths, channels, padding):
    cu = boundaries(lengths)
    scale = random_codes((cu[-1] + padding, 3))
    packed = layout.pack_scales(scale, cu, channels)
    assert packed.shape == (3, layout.tile_offsets(cu)[-1], 512 * -(-channels // 128))
    scale[cu[-1] :] = 0
    np.testing.assert_array_equal(layout.unpack_scales(packed, cu, channels, len(scale)), scale)
    assert np.count_nonzero(packed) == np.count_nonzero(scale) * (channels // 32)

    for i, n in enumerate(lengths):
        block = (np.arange(n) // 32)[:, None]
        scale[cu[i] : cu[i + 1]] = random_codes((10, 3), seed=i)[block, np.arange(3)]
    packed = layout.pack_scales(scale, cu, channels, "tokens")
    assert packed.shape == (3, layout.tile_offsets(cu)[-1], 512 * -(-channels // 128))
    np.testing.assert_array_equal(layout.unpack_scales(packed, cu, channels, len(scale), "tokens"), scale)
    blocks = sum(-(-n // 32) for n in lengths)
    assert np.count_nonzero(packed) == blocks * 3 * channels


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([64, 128, 192]), st.integers(0, 40))
def test_nvfp4_scales_round_trip(lengths, channels, padding):
    cu = boundaries(lengths)
    scales = random_codes((cu[-1] + padding, 2, channels // 16))
    packed = layout.pack_nvfp4_scales(scales, cu)
    assert packed.shape == (2, layout.tile_offsets(cu)[-1], 512 * (channels // 64))
    scales[cu[-1] :] = 0
    np.testing.assert_array_equal(layout.unpack_nvfp4_scales(packed, cu, channels, len(scales)), scales)


def test_scale_tiles_equal_the_transposition_of_a_padded_document():
    """The channel use against the well-known reshape and transposition of the padded scales."""
    scale = random_codes((200, 1))
    padded = np.zeros((256, 4), np.uint8)
    padded[:200] = scale
    blocked = padded.reshape(2, 4, 32, 1, 4).transpose(0, 3, 2, 1, 4).reshape(2, 512)
    np.testing.assert_array_equal(layout.pack_scales(scale, [0, 200], 128)[0], blocked)


def test_scales_of_64_channels_leave_half_a_tile_zero():
    tile = layout.pack_scales(np.full((128, 1), 9, np.uint8), [0, 128], 64)[0, 0].reshape(32, 4, 4)
    assert np.all(tile[:, :, :2] == 9) and np.all(tile[:, :, 2:] == 0)  # two blocks of channels per token
    tile = layout.pack_scales(np.full((128, 1), 9, np.uint8), [0, 128], 64, "tokens")[0, 0].reshape(32, 4, 4)
    assert np.all(tile[:, :2] == 9) and np.all(tile[:, 2:] == 0)  # rows are channels


def test_token_contraction_places_blocks_along_the_columns():
    scale = np.repeat(np.array([3, 5, 7], np.uint8), [32, 32, 6])[:, None]
    tile = layout.pack_scales(scale, [0, 70], 128, "tokens")[0, 0]
    assert tile[:16].tolist() == [3, 5, 7, 0] * 4  # a line holds channels 0, 32, 64, 96


@settings(max_examples=25, deadline=None)
@given(LENGTHS.filter(len), st.data())
def test_a_document_owns_the_same_tiles_alone_and_in_a_pack(lengths, data):
    cu = boundaries(lengths)
    i = data.draw(st.integers(0, len(lengths) - 1))
    payload, scale = random_codes((cu[-1] + 3, 2, 64)), random_codes((cu[-1] + 3, 2))
    own, alone = slice(cu[i], cu[i + 1]), [0, lengths[i]]
    tiles = slice(*layout.tile_offsets(cu)[i : i + 2])
    np.testing.assert_array_equal(layout.pack_payload(payload, cu)[:, tiles], layout.pack_payload(payload[own], alone))
    np.testing.assert_array_equal(
        layout.pack_scales(scale, cu, 64)[:, tiles], layout.pack_scales(scale[own], alone, 64)
    )


def test_tiles_beyond_those_of_the_documents_are_ignored():
    payload = random_codes((5, 1, 32))
    allocated = np.full((1, layout.max_tiles(5, 3), 128 * 32), 77, np.uint8)
    allocated[:, :1] = layout.pack_payload(payload, [0, 0, 5, 5])
    np.testing.assert_array_equal(layout.unpack_payload(allocated, [0, 0, 5, 5], 5), payload)


def test_many_documents_are_fast():
    cu = np.arange(100_001)
    payload, scale = np.ones((100_000, 1, 32), np.uint8), np.ones((100_000, 1), np.uint8)
    start = time.perf_counter()
    assert layout.pack_scales(scale, cu, 32, "tokens").shape == (1, 100_000, 512)
    assert layout.unpack_scales(layout.pack_scales(scale, cu, 32), cu, 32, 100_000).all()
    assert layout.pack_payload(payload[:1000], cu[:1001]).shape == (1, 1000, 4096)
    assert layout.pack_payload(payload, np.zeros(100_001, np.int64)).shape == (1, 0, 4096)
    assert time.perf_counter() - start < 5  # a loop over documents takes longer


# ---- errors ------------------------------------------------------------------------------------------------

BYTES = np.zeros((4, 1, 64), np.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: layout.pack_payload(BYTES.astype(np.int8), [0, 4]),
            TypeError,
            "payload must be uint8, got int8",
        ),
        (
            lambda: layout.pack_payload(BYTES[0], [0, 4]),
            ValueError,
            r"payload must have 3 dimensions.*\(1, 64\)",
        ),
        (lambda: layout.pack_payload(BYTES[:, :, :48], [0, 4]), ValueError, "multiple of 32, got 48"),
        (lambda: layout.pack_payload(BYTES, [0, 5]), ValueError, r"cu_seqlens\[-1\].*got 5"),
        (lambda: layout.tile_offsets([0.0, 4.0]), TypeError, "cu_seqlens.*float64"),
        (lambda: layout.pack_nvfp4(BYTES[:, :, :32], [0, 4]), ValueError, "multiple of 64 channels"),
        (
            lambda: layout.pack_nvfp4(BYTES + np.uint8(16), [0, 4]),
            ValueError,
            "codes must be below 16, got 16",
        ),
        (lambda: layout.pack_scales(BYTES[:, :, 0], [0, 4], 48), ValueError, "head_dim .* 32, got 48"),
        (
            lambda: layout.pack_scales(BYTES[:, :, 0], [0, 4], 64, "rows"),
            ValueError,
            "contraction .* got 'rows'",
        ),
        (lambda: layout.unpack_payload(BYTES[:1], [0, 4], 4), ValueError, "row_bytes must be"),
        (
            lambda: layout.unpack_payload(np.zeros((1, 1, 4096), np.uint8), [0, 129], 129),
            ValueError,
            "packed must have at least 2 tiles of 4096 bytes",
        ),
        (
            lambda: layout.pack_scales(np.array([[3], [3], [4], [3]], np.uint8), [0, 4], 32, "tokens"),
            ValueError,
            "scale must hold one byte per block of 32 tokens, got 4 at token 2 of head 0 and 3 at the first",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
