"""Layouts of tensor memory, register fragments and copies, against scalar formulas."""

import numpy as np
import pytest

from flamia.conformance.simulator.tensor import fragments, movement, tmem_layout
from flamia.conformance.simulator.tensor.descriptors import decode_tcgen05
from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.instruction import decode_instruction

F16 = 1 << 4 | 1 << 7 | 1 << 10


def f16(m, n, group):
    return decode_instruction(F16 | n // 8 << 17 | m // 16 << 24, "f16", group, None)


def numbered():
    return (np.arange(128)[:, None] * 1000 + np.arange(512)).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize(("m", "group"), [(128, 1), (64, 1), (256, 2), (128, 2)])
def test_accumulator(m, group):
    n = 32
    instruction = f16(m, n, group)
    found = tmem_layout.read_accumulator(numbered(), 100, instruction)
    assert found.shape == (m // group, n)
    for row in range(m // group):
        for column in range(n):
            if (m, group) == (64, 1):
                lane, at = row // 16 * 32 + row % 16, column
            elif (m, group) == (128, 2):
                lane, at = row + 64 * (column // (n // 2)), column % (n // 2)
            else:
                lane, at = row, column
            assert found[row, column] == lane * 1000 + 100 + at
    words = np.zeros((128, 512), np.uint32)
    tmem_layout.write_accumulator(words, 100, instruction, found)
    assert np.array_equal(tmem_layout.read_accumulator(words, 100, instruction), found)
    assert np.count_nonzero(words) == (words[:, 100 : 100 + n] != 0).sum() == m // group * n


def test_disabled_lanes_keep_their_value():
    words = np.zeros((128, 512), np.uint32)
    enabled = np.arange(128) % 3 > 0
    tmem_layout.write_accumulator(words, 0, f16(128, 16, 1), np.ones((128, 16), np.float32), enabled)
    assert np.array_equal(words[:, :16].any(axis=1), enabled)


def test_scales_of_a_row():
    rng = np.random.default_rng(0)
    table = rng.integers(0, 256, (128, 4), dtype=np.uint8)  # row, byte
    words = np.zeros((128, 512), np.uint32)
    for row in range(128):
        for quadrant in range(4):
            words[row % 32 + 32 * quadrant, 40 + row // 32] = int.from_bytes(bytes(table[row]), "little")
    for first, count in ((0, 1), (3, 1), (2, 2), (0, 4)):
        found = tmem_layout.read_scales(words, 40, 128, first, count, "A")
        assert np.array_equal(found, table[:, first : first + count])
    assert np.array_equal(tmem_layout.read_scales(words, 40, 24, 1, 1, "B"), table[:24, 1:2])
    words[32 * 2 + 5, 41] ^= 0x100
    assert tmem_layout.read_scales(words, 40, 128, 0, 1, "A").shape == (128, 1)  # another byte: not looked at
    with pytest.raises(Illegal, match="row 37 has") as caught:
        tmem_layout.read_scales(words, 40, 128, 1, 1, "A")
    assert caught.value.kind == "scale-replication" and caught.value.address == (69 << 16 | 41)


def test_scales_of_b_in_the_two_by_two_layout():
    words = np.zeros((128, 512), np.uint32)
    for n in range(128):
        half, within = divmod(n, 64)
        for quadrant in (2 * half, 2 * half + 1):
            words[within % 32 + 32 * quadrant, within // 32] = n
    found = tmem_layout.read_scales(words, 0, 128, 0, 1, "B", split=True)
    assert found[:, 0].tolist() == list(range(128))


def test_a_in_tensor_memory():
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    found = tmem_layout.read_operand(words, 64, f16(128, 16, 1))
    for row in (0, 17, 127):
        for byte in range(32):
            assert found[row, byte] == words[row, 64 + byte // 4] >> (8 * (byte % 4)) & 0xFF
    with pytest.raises(Illegal, match="lanes 0-63 and 64-127"):
        tmem_layout.read_operand(words, 64, f16(128, 16, 2))
    words[64:] = words[:64]
    assert np.array_equal(tmem_layout.read_operand(words, 64, f16(128, 16, 2)), found[:64])


def expect_cell(shape, t, r, split):
    """Lane and column of thread t, register r: the figures of PTX 9.7.16.2.3.1."""
    if shape == "32x32b":
        return t, r
    if shape == "16x64b":  # a row of 8 bytes is held by threads 4q..4q+3 in an even/odd pattern
        return t // 4 + 8 * (t & 1), ((t >> 1) & 1) + 2 * r
    if shape == "16x128b":
        return t // 4 + (8 if r & 1 else 0), t % 4 + 4 * (r >> 1)
    if shape == "16x256b":
        return t // 4 + (8 if r & 2 else 0), 2 * (t % 4) + (r & 1) + 8 * (r >> 2)
    return (t, r) if t < 16 else (t - 16, r + split)


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
@pytest.mark.parametrize("num", [1, 2, 8, 32])
@pytest.mark.parametrize("packed", [False, True])
def test_fragments(shape, num, packed):
    split = 64 if shape == "16x32bx2" else 0
    where = movement.fragment(shape, num, packed, split)
    words = np.random.default_rng(2).integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    first = 0 if packed else 8
    found = movement.gather(words, 32, first, where, packed)
    for r in range(found.shape[0]):
        for t in range(32):
            lane, column = expect_cell(shape, t, r, split)
            if packed:
                low, high = words[32 + lane, 2 * column], words[32 + lane, 2 * column + 1]
                assert found[r, t] == low & 0xFFFF | (int(high) & 0xFFFF) << 16
            else:
                assert found[r, t] == words[32 + lane, 8 + column]
    back = words.copy()
    movement.scatter(back, 32, first, where, packed, found)
    assert np.array_equal(movement.gather(back, 32, first, where, packed), found)
    assert packed or np.array_equal(back, words)


def test_every_word_of_a_shape_is_held_once():
    for shape, most, per in (("16x64b", 128, 2), ("16x128b", 64, 4), ("16x256b", 32, 8)):
        where = movement.fragment(shape, most)
        cells = set(zip(where.lanes.ravel().tolist(), where.columns.ravel().tolist(), strict=True))
        assert len(cells) == where.lanes.size == 16 * most * per


def test_reach():
    movement.check_reach(32, 0, movement.fragment("32x32b", 32), 1)
    movement.check_reach(48, 0, movement.fragment("16x64b", 1), 1)
    with pytest.raises(Illegal, match="reaches lanes 64 to 95"):
        movement.check_reach(32, 0, movement.fragment("32x32b", 32), 2)
    with pytest.raises(Illegal, match="end past column 511"):
        movement.check_reach(0, 496, movement.fragment("32x32b", 32), 0)
    with pytest.raises(Illegal, match=r"\.x64 is not among"):
        movement.fragment("16x256b", 64)


@pytest.mark.parametrize(
    ("shape", "multicast", "lanes"),
    [
        ("128x256b", None, {row: [row] for row in range(128)}),
        ("128x128b", None, {row: [row] for row in range(128)}),
        ("64x128b", "warpx2::02_13", {row: [row, row + 64] for row in range(64)}),
        (
            "64x128b",
            "warpx2::01_23",
            {row: [row % 32 + 64 * (row // 32) + 32 * w for w in (0, 1)] for row in range(64)},
        ),
        ("32x128b", "warpx4", {row: [row + 32 * w for w in range(4)] for row in range(32)}),
    ],
)
def test_copy_shapes(shape, multicast, lanes):
    found = movement.COPY_SHAPES[shape, multicast]
    at: dict[int, list[int]] = {}
    for row, lane in movement.copy_lanes(found):
        for i in range(32):
            at.setdefault(row + i, []).append(lane + i)
    assert {row: sorted(where) for row, where in at.items()} == lanes


def test_scale_block_source():
    """32x128b of a 512-byte scale block: SBO 128, no swizzle: line r is bytes 16 r to 16 r + 15."""
    descriptor = decode_tcgen05(0x800 >> 4 | (128 >> 4) << 32 | 1 << 46)
    found = movement.copy_addresses(descriptor, movement.COPY_SHAPES["32x128b", "warpx4"])
    assert np.array_equal(found.ravel(), 0x800 + np.arange(512))


def test_addresses():
    assert tmem_layout.split_address(127 << 16 | 511) == (127, 511)
    with pytest.raises(Illegal, match="outside 128 lanes"):
        tmem_layout.split_address(512)
    with pytest.raises(Illegal, match="must name lane 0"):
        tmem_layout.check_columns(1 << 16, 4, "D")
    with pytest.raises(Illegal, match="ends past"):
        tmem_layout.check_columns(510, 4, "D")


def test_wgmma_fragments():
    """D and A of m64nNk16 and m64nNk32, as PTX 9.7.15.5.1.1 draws them: rows groupID and groupID + 8 of each warp."""
    n = 24
    registers = np.arange(4 * 12 * 32, dtype=np.float32).reshape(4, 12, 32)
    d = fragments.gather_accumulator(registers, n)
    for warp in range(4):
        for lane in range(32):
            group, thread = lane >> 2, lane & 3
            for i in range(12):
                row = 16 * warp + group + (8 if i & 2 else 0)
                column = 8 * (i >> 2) + 2 * thread + (i & 1)
                assert d[row, column] == registers[warp, i, lane]
    assert np.array_equal(fragments.scatter_accumulator(d), registers)

    words = np.arange(4 * 4 * 32, dtype=np.uint32).reshape(4, 4, 32) * 7919
    a = fragments.operand_bytes(words)
    for warp in range(4):
        for lane in range(32):
            group, thread = lane >> 2, lane & 3
            for i in range(4):
                row = 16 * warp + group + 8 * (i & 1)
                for e in range(4):  # 8-bit elements: columns 4 thread + e, + 16 in registers 2 and 3
                    column = 4 * thread + e + 16 * (i >> 1)
                    assert a[row, column] == words[warp, i, lane] >> (8 * e) & 0xFF
