"""``tcgen05.mma`` through whole kernels: every kind, majorness, swizzle, operand place and cta_group.

Operands are small integers and scales powers of two, so that the result is exact whatever the order of the sum. They
are written into shared memory by the scalar formulas of `layouts`.
"""

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.layouts import WIDTHS, place, scale_block, tcgen05
from tests.simulator.tensor_kernel import tensor_image, tensor_kernel

A_AT, B_AT, SFA_AT, SFB_AT, SIZE = 2048, 2048 + 40960, 2048 + 81920, 2048 + 82944, 83968
FP8 = {"e4m3": (0, ml_dtypes.float8_e4m3fn), "e5m2": (1, ml_dtypes.float8_e5m2)}


def stride(width, rows, size, mn_major):
    """Offsets that keep the pieces of a matrix apart: (leading, stride)."""
    if width == 16:
        return (8 * 16 + 16, 8 * 16 * 5) if not mn_major else (16 * 8 * (rows * size // 16) + 32, 16 * 8)
    if not mn_major:
        return 0, 8 * width
    return 8 * width * (32 // size // 8), 8 * width


def shared_operand(image, values, raw, at, mode, mn_major, size):
    """Place a matrix; its descriptor."""
    width = WIDTHS[mode]
    lbo, sbo = stride(width, raw.shape[0], size, mn_major)
    place(image, raw, at, lbo, sbo, width, mn_major, size)
    return tcgen05(at, lbo, sbo, mode)


def mma(kind, d, a, b, idesc, enable, tables=""):
    """PTX of one product. :param a: descriptor, or text of an address in brackets."""
    head = f"mov.b64 %rd3, {b};\nmov.b32 %r2, {idesc};\nsetp.{'eq' if enable else 'ne'}.u32 %p2, %r20, %r20;\n"
    if isinstance(a, int):
        head += f"mov.b64 %rd2, {a};\n"
        a = "%rd2"
    return head + f"tcgen05.mma.{kind} [{d}], {a}, %rd3, %r2, {tables}%p2;\n"


@pytest.mark.parametrize("mode", WIDTHS)
@pytest.mark.parametrize("a_mn", [0, 1])
@pytest.mark.parametrize("b_mn", [0, 1])
def test_fp8_in_every_layout(mode, a_mn, b_mn):
    rng = np.random.default_rng(mode * 4 + a_mn * 2 + b_mn)
    image = tensor_image(SIZE)
    a = rng.integers(-4, 5, (128, 32)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.integers(-4, 5, (48, 32)).astype(ml_dtypes.float8_e5m2)
    da = shared_operand(image, a, a.view(np.uint8), A_AT, mode, bool(a_mn), 1)
    db = shared_operand(image, b, b.view(np.uint8), B_AT, mode, bool(b_mn), 1)
    idesc = 1 << 4 | 0 << 7 | 1 << 10 | a_mn << 15 | b_mn << 16 | 48 // 8 << 17 | 128 // 16 << 24
    out = tensor_kernel(mma("cta_group::1.kind::f8f6f4", "%r20", da, db, idesc, False), image, 48)
    assert np.array_equal(out.view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("mode", WIDTHS)
@pytest.mark.parametrize(("a_mn", "b_mn"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_16_bit_in_every_layout(mode, a_mn, b_mn, dtype):
    rng = np.random.default_rng(mode)
    image = tensor_image(SIZE)
    a, b = rng.integers(-9, 10, (64, 16)).astype(dtype), rng.integers(-9, 10, (40, 16)).astype(dtype)
    da = shared_operand(image, a, a.view(np.uint8), A_AT, mode, bool(a_mn), 2)
    db = shared_operand(image, b, b.view(np.uint8), B_AT, mode, bool(b_mn), 2)
    code = int(dtype is ml_dtypes.bfloat16)
    idesc = 1 << 4 | code << 7 | code << 10 | a_mn << 15 | b_mn << 16 | 40 // 8 << 17 | 64 // 16 << 24
    every = "\n".join(  # layout F: only the first 16 lanes of each quadrant hold rows
        f"add.u32 %r31, %r24, {2 * i};\ntcgen05.ld.sync.aligned.16x64b.x1.b32 {{%r30}}, [%r31];\n"
        f"tcgen05.wait::ld.sync.aligned;\nst.global.u32 [%rd8+{4 * i}], %r30;"
        for i in range(20)
    )
    out = tensor_kernel(mma("cta_group::1.kind::f16", "%r20", da, db, idesc, False), image, 20, read=every)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    got = out.view(np.float32)
    for warp in range(4):
        for t in range(32):
            row, column = 16 * warp + t // 4 + 8 * (t % 2), t // 2 % 2
            assert np.array_equal(got[32 * warp + t], want[row, column::2])


def scales(rng, rows):
    """A table of E8M0 bytes near 1 and its values, ``(rows, 4)``."""
    table = rng.integers(124, 131, (rows, 4)).astype(np.uint8)
    return table, 2.0 ** (table.astype(np.float64) - 127)


def padded_table(table):
    full = np.zeros((128, 4), np.uint8)
    full[: len(table)] = table
    return full


COPY_SCALES = "\n".join(
    f"mov.b64 %rd4, {tcgen05(at, 0, 128, 0)};\nadd.u32 %r3, %r20, {column};\n"
    "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3], %rd4;"
    for at, column in ((SFA_AT, 300), (SFB_AT, 304))
)
TABLES = "[%r4], [%r5], "
SET_TABLES = "add.u32 %r4, %r20, 300;\nadd.u32 %r5, %r20, 304;\n"


@pytest.mark.parametrize("b_mn", [0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_mxfp8_gemm_of_128_cubed(b_mn, seed):
    """Four K steps under the scale ids 0 to 3, one 128B-swizzled tile each, scales by tcgen05.cp."""
    rng = np.random.default_rng(seed)
    image = tensor_image(SIZE)
    a, b = (rng.integers(-4, 5, (128, 128)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    place(image, a.view(np.uint8), A_AT, 0, 1024, 128, False, 1)
    place(image, b.view(np.uint8), B_AT, 0, 1024, 128, bool(b_mn), 1)
    (ta, fa), (tb, fb) = scales(rng, 128), scales(rng, 128)
    image[SFA_AT : SFA_AT + 512], image[SFB_AT : SFB_AT + 512] = scale_block(ta), scale_block(tb)
    work = COPY_SCALES + "\n" + SET_TABLES
    for k in range(4):
        da = tcgen05(A_AT + 32 * k, 0, 1024, 2)
        db = tcgen05(B_AT + (4096 * k if b_mn else 32 * k), 0, 1024, 2)
        idesc = 1 << 23 | 128 >> 3 << 17 | 128 >> 4 << 24 | b_mn << 16 | k << 4 | k << 29
        work += mma("cta_group::1.kind::mxf8f6f4.block_scale.block32", "%r20", da, db, idesc, k > 0, TABLES)
    out = tensor_kernel(work, image, 128, seed=seed)
    x = a.astype(np.float64) * np.repeat(fa, 32, axis=1)
    y = b.astype(np.float64) * np.repeat(fb, 32, axis=1)
    assert np.array_equal(out.view(np.float32), (x @ y.T).astype(np.float32))
    assert not tensor_kernel.report.unpromised


def test_a_from_tensor_memory():
    """TS: the words that a thread stores for its row are the A of that row; fast and accurate evaluation agree here."""
    rng = np.random.default_rng(5)
    image = tensor_image(SIZE)
    a, b = (rng.integers(-4, 5, (128, 32)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    place(image, b.view(np.uint8), B_AT, 0, 256, 32, False, 1)
    (ta, fa), (tb, fb) = scales(rng, 128), scales(rng, 128)
    image[SFA_AT : SFA_AT + 512], image[SFB_AT : SFB_AT + 512] = scale_block(ta), scale_block(tb)
    idesc = 1 << 23 | 128 >> 3 << 17 | 128 >> 4 << 24 | 2 << 4 | 1 << 29
    work = COPY_SCALES + "\n" + SET_TABLES + "add.u32 %r6, %r20, 256;\n"
    db = tcgen05(B_AT, 0, 256, 6)
    work += mma("cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X", "%r20", "[%r6]", db, idesc, False, TABLES)
    want = (a.astype(np.float64) * fa[:, 1:2]) @ (b.astype(np.float64) * fb[:, 2:3]).T
    words = np.ascontiguousarray(a.view(np.uint8)).view(np.uint32)
    for fast in (False, True):
        out = tensor_kernel(work, image, 128, words=words, fast_mma=fast)
        assert np.array_equal(out.view(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("use", ["fill", "use", "lastuse", "discard"])
def test_collector_buffers_are_hints(use):
    image = tensor_image(SIZE)
    ones = np.ones((128, 32), ml_dtypes.float8_e4m3fn)
    da = shared_operand(image, ones, ones.view(np.uint8), A_AT, 6, False, 1)
    db = shared_operand(image, ones[:16], ones[:16].view(np.uint8), B_AT, 6, False, 1)
    work = mma(f"cta_group::1.kind::f8f6f4.collector::a::{use}", "%r20", da, db, 1 << 4 | 2 << 17 | 8 << 24, False)
    assert (tensor_kernel(work, image, 16).view(np.float32) == 32).all()


def test_a_of_16_bits_from_tensor_memory():
    rng = np.random.default_rng(6)
    image = tensor_image(SIZE)
    a, b = rng.integers(-9, 10, (128, 16)).astype(ml_dtypes.bfloat16), rng.integers(-9, 10, (32, 16))
    b = b.astype(ml_dtypes.bfloat16)
    db = shared_operand(image, b, b.view(np.uint8), B_AT, 4, False, 2)
    work = "add.u32 %r6, %r20, 256;\n"
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 4 << 17 | 8 << 24 | 1 << 14  # B negated
    work += mma("cta_group::1.kind::f16", "%r20", "[%r6]", db, idesc, False)
    words = np.ascontiguousarray(a.view(np.uint8)).view(np.uint32)
    out = tensor_kernel(work, image, 32, words=words)
    assert np.array_equal(out.view(np.float32), -(a.astype(np.float32) @ b.astype(np.float32).T))


@pytest.mark.parametrize(
    ("kind", "vector", "e8m0", "ids"),
    [
        ("mxf4nvf4", "scale_vec::4X", 0, (0, 0)),
        ("mxf4nvf4", "block16", 1, (0, 0)),
        ("mxf4", "block32", 1, (2, 0)),
        ("mxf4nvf4", "scale_vec::2X", 1, (0, 2)),
    ],
)
def test_fp4(kind, vector, e8m0, ids):
    """Packed E2M1, 64 per 32 bytes; scales of 16 (UE4M3 or UE8M0) or 32 elements (UE8M0)."""
    rng = np.random.default_rng(7)
    image = tensor_image(SIZE)
    codes = [rng.integers(0, 16, (128, 64), dtype=np.uint8) for _ in range(2)]
    values = [c.view(ml_dtypes.float4_e2m1fn).astype(np.float64) for c in codes]
    packed = [c[:, 0::2] | c[:, 1::2] << 4 for c in codes]
    place(image, packed[0], A_AT, 0, 256, 32, False, 1)
    place(image, packed[1], B_AT, 0, 1024, 128, False, 1)
    exponents = rng.integers(-2, 3, (2, 128, 4))
    bytes_ = (exponents + 127 if e8m0 else exponents + 7 << 3).astype(np.uint8)
    image[SFA_AT : SFA_AT + 512], image[SFB_AT : SFB_AT + 512] = scale_block(bytes_[0]), scale_block(bytes_[1])
    idesc = 1 << 7 | 1 << 10 | e8m0 << 23 | 16 << 17 | 8 << 24 | ids[0] << 29 | ids[1] << 4
    work = COPY_SCALES + "\n" + SET_TABLES
    da, db = tcgen05(A_AT, 0, 256, 6), tcgen05(B_AT, 0, 1024, 2)
    work += mma(f"cta_group::1.kind::{kind}.block_scale.{vector}", "%r20", da, db, idesc, False, TABLES)
    out = tensor_kernel(work, image, 128)
    count = 4 if vector in ("scale_vec::4X", "block16") else 2
    scaled = [
        v * np.repeat(2.0 ** exponents[i, :, ids[i] : ids[i] + count], 64 // count, axis=1)
        for i, v in enumerate(values)
    ]
    assert np.array_equal(out.view(np.float32), (scaled[0] @ scaled[1].T).astype(np.float32))


def test_lane_mask_and_scaled_input():
    """Lanes of a set mask bit keep their value; D enters times 2^-3."""
    image = tensor_image(SIZE)
    a, b = np.ones((128, 16), ml_dtypes.bfloat16), np.ones((16, 16), ml_dtypes.bfloat16)
    da = shared_operand(image, a, a.view(np.uint8), A_AT, 6, False, 2)
    db = shared_operand(image, b, b.view(np.uint8), B_AT, 6, False, 2)
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24
    work = mma("cta_group::1.kind::f16", "%r20", da, db, idesc, False)
    work += "setp.eq.u32 %p2, %r20, %r20;\nmov.b32 %r7, 0;\nmov.b32 %r8, 5;\n"
    work += "tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd2, %rd3, %r2, {%r7, %r8, %r7, %r7}, %p2, 3;\n"
    out = tensor_kernel(work, image, 16).view(np.float32)
    want = np.full((128, 16), 16 + 2.0)
    want[[32, 34]] = 16
    assert np.array_equal(out, want)


@pytest.mark.parametrize("m", [256, 128])
@pytest.mark.parametrize("seed", range(2))
def test_pair_of_ctas(m, seed):
    """cta_group::2: each CTA holds half of A's rows and half of B's; M = 128 puts D in the 2 x 2 layout."""
    rng = np.random.default_rng(8)
    n = 64
    a = rng.integers(-4, 5, (m, 32)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.integers(-4, 5, (n, 32)).astype(ml_dtypes.float8_e4m3fn)
    images = []
    for rank in range(2):
        image = tensor_image(SIZE)
        half = a[rank * m // 2 : (rank + 1) * m // 2], b[rank * n // 2 : (rank + 1) * n // 2]
        place(image, half[0].view(np.uint8), A_AT, 0, 256, 32, False, 1)
        place(image, half[1].view(np.uint8), B_AT, 0, 256, 32, False, 1)
        images.append(image[2048:])
    idesc = 1 << 4 | n // 8 << 17 | m // 16 << 24
    work = mma("cta_group::2.kind::f8f6f4", "%r20", tcgen05(A_AT, 0, 256, 6), tcgen05(B_AT, 0, 256, 6), idesc, False)
    both = np.concatenate([np.zeros(2048, np.uint8), *images])
    out = tensor_kernel(work, both, n if m == 256 else n // 2, ctas=2, seed=seed).view(np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    if m == 256:
        assert np.array_equal(out.reshape(256, n), want)
    else:
        for rank in range(2):
            rows = want[64 * rank : 64 * rank + 64]
            assert np.array_equal(out[rank, :64], rows[:, : n // 2])
            assert np.array_equal(out[rank, 64:], rows[:, n // 2 :])


@pytest.mark.parametrize("m", [256, 128])
def test_scaled_pair_of_ctas(m):
    """Each CTA holds the scales of its own rows of A and of all of B; with M = 128 those of B split over quadrants.

    One instruction of the leader copies in both CTAs, from the same address of each.
    """
    rng = np.random.default_rng(11)
    n = 128
    a, b = (rng.integers(-4, 5, (rows, 32)).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n))
    (ta, fa), (tb, fb) = scales(rng, m), scales(rng, n)
    images = []
    for rank in range(2):
        image = tensor_image(SIZE)
        mine = slice(rank * m // 2, (rank + 1) * m // 2)
        place(image, a[mine].view(np.uint8), A_AT, 0, 256, 32, False, 1)
        place(image, b[rank * n // 2 : (rank + 1) * n // 2].view(np.uint8), B_AT, 0, 256, 32, False, 1)
        image[SFA_AT : SFA_AT + 512] = scale_block(padded_table(ta[mine]))
        if m == 256:
            image[SFB_AT : SFB_AT + 512] = scale_block(tb)
        else:  # 64 lines of 16 bytes: lines 0-31 for quadrants 0 and 1, with columns below N/2
            for half in range(2):
                for column in range(64):
                    line = 32 * half + column % 32
                    image[SFB_AT + 16 * line + 4 * (column // 32) :][:4] = tb[64 * half + column]
        images.append(image[2048:])
    shape_b = "32x128b.warpx4" if m == 256 else "64x128b.warpx2::01_23"
    work = "".join(
        f"mov.b64 %rd4, {tcgen05(at, 0, 128, 0)};\nadd.u32 %r3, %r20, {column};\n"
        f"tcgen05.cp.cta_group::2.{shape} [%r3], %rd4;\n"
        for at, column, shape in ((SFA_AT, 300, "32x128b.warpx4"), (SFB_AT, 304, shape_b))
    )
    idesc = 1 << 23 | n // 8 << 17 | m // 16 << 24 | 3 << 29 | 1 << 4
    da, db = tcgen05(A_AT, 0, 256, 6), tcgen05(B_AT, 0, 256, 6)
    work += SET_TABLES + mma("cta_group::2.kind::mxf8f6f4.block_scale.block32", "%r20", da, db, idesc, False, TABLES)
    out = tensor_kernel(
        work, np.concatenate([np.zeros(2048, np.uint8), *images]), n if m == 256 else n // 2, ctas=2
    ).view(np.float32)
    want = ((a.astype(np.float64) * fa[:, 3:4]) @ (b.astype(np.float64) * fb[:, 1:2]).T).astype(np.float32)
    for rank in range(2):
        rows = want[rank * m // 2 : (rank + 1) * m // 2]
        expected = rows if m == 256 else np.concatenate([rows[:, : n // 2], rows[:, n // 2 :]])
        assert np.array_equal(out[rank], expected)
