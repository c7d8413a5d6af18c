"""``tcgen05.ld``, ``st`` and ``cp`` through whole kernels, in every shape."""

import numpy as np
import pytest

from tests.simulator.kernels import ONE, run
from tests.simulator.layouts import place, tcgen05
from tests.simulator.tensor_kernel import tensor_image, tensor_kernel

ALLOC = f"""{ONE}
mov.u32 %r21, smem;
setp.lt.u32 %p6, %r1, 32;
@%p6 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 512;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r20, [%r21];
shl.b32 %r22, %r1, 16;
and.b32 %r23, %r22, {0x600000};
add.u32 %r24, %r20, %r23;
"""
FREE = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
@%p6 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;
"""
SHAPES = [("32x32b", 4), ("16x64b", 4), ("16x128b", 2), ("16x256b", 1), ("16x32bx2", 4)]


def cell(shape, t, r):
    """Lane and column of register r of thread t; the second half of 16x32bx2 begins 8 columns further on."""
    return {
        "32x32b": (t, r),
        "16x64b": (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
        "16x128b": (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
        "16x256b": (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
        "16x32bx2": (t % 16, r + 8 * (t // 16)),
    }[shape]


@pytest.mark.parametrize(
    ("shape", "number", "upper"), [(s, n, up) for s, n in SHAPES for up in (0, 16) if s != "32x32b" or up == 0]
)
def test_store_then_load(shape, number, upper):
    """All 32 columns are written by 32x32b; a load of the shape finds the cells of its table."""
    out = np.zeros((128, 4), np.uint32)
    fill = ", ".join(f"%r{40 + i}" for i in range(32))
    split = ", 8" if shape == "16x32bx2" else ""
    text = ALLOC + "\n".join(f"mad.lo.u32 %r{40 + i}, %r1, 1000, {i};" for i in range(32))
    text += f"""
tcgen05.st.sync.aligned.32x32b.x32.b32 [%r24], {{{fill}}};
tcgen05.wait::st.sync.aligned;
mul.wide.u32 %rd1, %r1, 16;
add.u64 %rd2, %rd100, %rd1;
add.u32 %r25, %r24, {upper << 16};
tcgen05.ld.sync.aligned.{shape}.x{number}.b32 {{%r30, %r31, %r32, %r33}}, [%r25+4]{split};
tcgen05.wait::ld.sync.aligned;
st.global.v4.u32 [%rd2], {{%r30, %r31, %r32, %r33}};
{FREE}"""
    run(text, [out], block=128, shared=16)
    for warp in range(4):
        for t in range(32):
            for r in range(4):
                lane, column = cell(shape, t, r)
                assert out[32 * warp + t, r] == 1000 * (32 * warp + upper + lane) + column + 4


@pytest.mark.parametrize(("shape", "number"), SHAPES)
def test_store_in_every_shape(shape, number):
    """A store of the shape fills the cells of its table; 32x32b reads them back."""
    out = np.zeros((128, 16), np.uint32)
    zero = ", ".join(["%r3"] * 16)
    split = "8, " if shape == "16x32bx2" else ""
    values = "\n".join(f"mad.lo.u32 %r{30 + i}, %r1, 100, {7 + i};" for i in range(4))
    loaded = ", ".join(f"%r{40 + i}" for i in range(16))
    stores = "\n".join(f"st.global.u32 [%rd2+{4 * i}], %r{40 + i};" for i in range(16))
    text = (
        ALLOC
        + f"""mov.u32 %r3, 0;
tcgen05.st.sync.aligned.32x32b.x16.b32 [%r24], {{{zero}}};
tcgen05.wait::st.sync.aligned;
{values}
tcgen05.st.sync.aligned.{shape}.x{number}.b32 [%r24], {split}{{%r30, %r31, %r32, %r33}};
tcgen05.wait::st.sync.aligned;
mul.wide.u32 %rd1, %r1, 64;
add.u64 %rd2, %rd100, %rd1;
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{loaded}}}, [%r24];
tcgen05.wait::ld.sync.aligned;
{stores}
{FREE}"""
    )
    run(text, [out], block=128, shared=16)
    want = np.zeros((128, 16), np.uint32)
    for thread in range(128):
        for r in range(4):
            lane, column = cell(shape, thread % 32, r)
            want[thread // 32 * 32 + lane, column] = 100 * thread + 7 + r
    assert np.array_equal(out, want)


def test_pack_and_unpack():
    """unpack::16b spreads the halves of a register over two columns; pack::16b puts them together again."""
    out = np.zeros((128, 4), np.uint32)
    text = (
        ALLOC
        + f"""mad.lo.u32 %r30, %r1, 65537, 131075;
add.u32 %r31, %r30, 1966085;
tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r24], {{%r30, %r31}};
tcgen05.wait::st.sync.aligned;
mul.wide.u32 %rd1, %r1, 16;
add.u64 %rd2, %rd100, %rd1;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r32, %r33}}, [%r24+1];
tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {{%r34, %r35}}, [%r24];
tcgen05.wait::ld.sync.aligned;
st.global.v4.u32 [%rd2], {{%r32, %r33, %r34, %r35}};
{FREE}"""
    )
    run(text, [out], block=128, shared=16)
    thread = np.arange(128)
    first = thread * 65537 + 131075
    second = first + 1966085
    assert np.array_equal(out, np.stack([first >> 16, second & 0xFFFF, first, second], axis=1))


@pytest.mark.parametrize(("operation", "want"), [("max", 5.0), ("min", -7.0), ("max.abs", 7.0), ("max.NaN", np.nan)])
def test_load_with_reduction(operation, want):
    """sm_103a: the values and their extremum over the registers of each thread; a NaN counts only with .NaN."""
    out = np.zeros((128, 8), np.float32)
    values = np.array([5.0, -7.0, np.nan, 0.5], np.float32)
    sets = "\n".join(f"mov.b32 %r{30 + i}, {int(v)};" for i, v in enumerate(values.view(np.uint32)))
    text = (
        ALLOC
        + f"""{sets}
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r24], {{%r30, %r31, %r32, %r33}};
tcgen05.wait::st.sync.aligned;
mul.wide.u32 %rd1, %r1, 32;
add.u64 %rd2, %rd100, %rd1;
tcgen05.ld.red.sync.aligned.32x32b.x4.{operation}.f32 {{%r34, %r35, %r36, %r37}}, %r38, [%r24];
tcgen05.wait::ld.sync.aligned;
st.global.v4.u32 [%rd2], {{%r34, %r35, %r36, %r37}};
st.global.u32 [%rd2+16], %r38;
{FREE}"""
    )
    run(text, [out], block=128, shared=16, target="sm_103a")
    assert np.array_equal(out[:, :4], np.tile(values, (128, 1)), equal_nan=True)
    assert np.array_equal(out[:, 4], np.full(128, want, np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("form", "rows", "row_bytes", "lanes"),
    [
        ("128x256b", 128, 32, lambda row: [row]),
        ("128x128b", 128, 16, lambda row: [row]),
        ("64x128b.warpx2::02_13", 64, 16, lambda row: [row, row + 64]),
        ("64x128b.warpx2::01_23", 64, 16, lambda row: [row % 32 + 64 * (row // 32), row % 32 + 64 * (row // 32) + 32]),
        ("32x128b.warpx4", 32, 16, lambda row: [row, row + 32, row + 64, row + 96]),
    ],
)
def test_copies(form, rows, row_bytes, lanes):
    """The K-major matrix of the descriptor, a row per lane, in as many columns as a row has words."""
    rng = np.random.default_rng(0)
    image = tensor_image(8192)
    raw = rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    place(image, raw, 2048, 128, 256, 16, False, 1)
    work = f"mov.b64 %rd4, {tcgen05(2048, 128, 256, 0)};\nadd.u32 %r3, %r20, 4;\n"
    work += f"tcgen05.cp.cta_group::1.{form} [%r3], %rd4;"
    width = row_bytes // 4
    reads = "\n".join(
        f"add.u32 %r31, %r24, {4 + i};\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r30}}, [%r31];\n"
        f"tcgen05.wait::ld.sync.aligned;\nst.global.u32 [%rd8+{4 * i}], %r30;"
        for i in range(width)
    )
    out = tensor_kernel(work, image, width, read=reads)
    words = raw.view(np.uint32)
    for row in range(rows):
        for lane in lanes(row):
            assert np.array_equal(out[lane], words[row])


def test_two_warps_share_the_columns_and_blocks_of_each_other():
    """An allocation waits until another warp frees its columns; the second one then gets the same place."""
    out = np.zeros(4, np.uint32)
    text = f"""{ONE}
mov.u32 %r21, smem;
shr.u32 %r2, %r1, 5;
mul.lo.u32 %r4, %r2, 4;
add.u32 %r21, %r21, %r4;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 512;
ld.shared.u32 %r20, [%r21];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;
mul.wide.u32 %rd1, %r2, 4;
add.u64 %rd2, %rd100, %rd1;
add.u32 %r20, %r20, 1;
st.global.u32 [%rd2], %r20;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
"""
    run(text.replace("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", ""), [out], block=128, shared=16)
    assert out.tolist() == [1, 1, 1, 1]
