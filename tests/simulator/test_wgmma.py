"""``wgmma.mma_async`` through whole kernels: operand places, types, layouts, groups, and every fault.

Operands are small integers, so that the result is exact; shared memory is filled by the scalar formulas of `layouts`,
registers by the fragment figures of PTX 9.7.15.5.1.1.
"""

import ml_dtypes
import numpy as np
import pytest

from flamia.conformance.simulator.machine import asyncfaults as af
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.ptx.syntax import PtxError
from flamia.reference.tensorcore import WGMMA_BF16, WGMMA_E4M3, mma
from tests.simulator.kernels import ONE, run, wait
from tests.simulator.layouts import place, wgmma

A_AT, B_AT, SIZE = 2048, 2048 + 16384, 32768
MODES = {0: 16, 1: 128, 2: 64, 3: 32}
TYPES = {
    "bf16": (ml_dtypes.bfloat16, 2),
    "f16": (np.float16, 2),
    "e4m3": (ml_dtypes.float8_e4m3fn, 1),
    "e5m2": (ml_dtypes.float8_e5m2, 1),
}
FENCE, COMMIT, WAIT = (
    f"wgmma.{what};\n" for what in ("fence.sync.aligned", "commit_group.sync.aligned", "wait_group.sync.aligned 0")
)


def registers(first, count):
    return "{" + ", ".join(f"%f{first + i}" for i in range(count)) + "}"


def warpgroup(work, image, n, *, accumulators=None, fragments=None, block=128, seed=0, waits=True, **options):
    """Run ``work`` in a warpgroup; D in ``%f0`` and on, A in ``%r40`` to ``%r43``; returns D, ``(64, N)``.

    :param accumulators: initial D; ``fragments``: bytes of A, uint8 ``(64, 32)``.
    :param waits: whether the warps wait for shared memory before ``work``, else behind it.
    """
    body = np.ascontiguousarray(image[2048:])
    start = np.zeros((128, n // 2), np.float32)
    frag = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, t = divmod(thread, 32)
        for i in range(n // 2):
            row, column = 16 * warp + t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
            if accumulators is not None:
                start[thread, i] = accumulators[row, column]
        for i in range(4):
            row, byte = 16 * warp + t // 4 + 8 * (i % 2), 4 * (t % 4) + 16 * (i // 2)
            if fragments is not None:
                frag[thread, i] = int.from_bytes(bytes(fragments[row, byte : byte + 4]), "little")
    out = np.zeros((128, n // 2), np.float32)
    loads = "\n".join(f"ld.global.f32 %f{i}, [%rd11+{4 * i}];" for i in range(n // 2))
    stores = "\n".join(f"st.global.f32 [%rd13+{4 * i}], %f{i};" for i in range(n // 2))
    text = f"""{ONE}
mov.u32 %r21, smem;
@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
and.b32 %r22, %r1, 127;
mul.wide.u32 %rd10, %r22, {2 * n};
add.u64 %rd11, %rd101, %rd10;
add.u64 %rd13, %rd103, %rd10;
{loads}
mul.wide.u32 %rd10, %r22, 16;
add.u64 %rd12, %rd102, %rd10;
ld.global.v4.u32 {{%r40, %r41, %r42, %r43}}, [%rd12];
@!%p1 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], {body.size};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21+1024], [%rd100], {body.size}, [%r21];
LOADED:
{wait("%r21", 0, "LOAD") if waits else ""}
{work}
{"" if waits else wait("%r21", 0, "LOAD")}
{stores}
"""
    run(text, [body, start, frag, out], block=block, shared=1024 + body.size, seed=seed, target="sm_90a", **options)
    d = np.zeros((64, n), np.float32)
    for thread in range(128):
        warp, t = divmod(thread, 32)
        for i in range(n // 2):
            d[16 * warp + t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2] = out[thread, i]
    return d


def product(n, kinds, a, b, *, scale="%p2", tail="1, 1", d=0):
    k = 16 if kinds[0] in ("bf16", "f16") else 32
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kinds[0]}.{kinds[1]} {registers(d, n // 2)}, {a}, {b}, "
        f"{scale}, {tail};\n"
    )


def descriptors(a, b):
    return f"mov.b64 %rd2, {a};\nmov.b64 %rd3, {b};\nsetp.eq.u32 %p2, %r1, %r1;\n"


def layout(width, rows, size, mn_major):
    if width == 16:
        return (144, 8 * 16 * 3) if not mn_major else (16 * 8 * (rows * size // 16) + 16, 16 * 8)
    return (8 * width * (32 // size // 8), 8 * width) if mn_major else (0, 8 * width)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "trans"), [("bf16", (0, 0)), ("bf16", (1, 1)), ("f16", (0, 1)), ("e4m3", (0, 0))])
def test_both_operands_in_shared_memory(mode, kind, trans):
    rng = np.random.default_rng(mode)
    dtype, size = TYPES[kind]
    width, n = MODES[mode], 24
    a, b = (rng.integers(-4, 5, (rows, 32 // size)).astype(dtype) for rows in (64, n))
    image = np.zeros(2048 + SIZE, np.uint8)
    strides = [layout(width, rows, size, bool(t)) for rows, t in zip((64, n), trans, strict=True)]
    place(image, a.view(np.uint8), A_AT, *strides[0], width, bool(trans[0]), size)
    place(image, b.view(np.uint8), B_AT, *strides[1], width, bool(trans[1]), size)
    acc = rng.integers(-9, 10, (64, n)).astype(np.float32)
    tail = f"1, -1, {trans[0]}, {trans[1]}" if size == 2 else "1, -1"
    work = descriptors(wgmma(A_AT, *strides[0], mode), wgmma(B_AT, *strides[1], mode))
    work += FENCE + product(n, (kind, kind), "%rd2", "%rd3", tail=tail) + COMMIT + WAIT
    got = warpgroup(work, image, n, accumulators=acc)
    assert np.array_equal(got, acc - a.astype(np.float32) @ b.astype(np.float32).T)


def simple(kinds=("e4m3", "e4m3"), n=16, seed=0):
    """An image with A and B in 32B swizzles, their values, and the code that sets the descriptors."""
    rng = np.random.default_rng(seed)
    image = np.zeros(2048 + SIZE, np.uint8)
    values = []
    for kind, rows, at in ((kinds[0], 64, A_AT), (kinds[1], n, B_AT)):
        dtype, size = TYPES[kind]
        x = rng.integers(-4, 5, (rows, 32 // size)).astype(dtype)
        place(image, x.view(np.uint8), at, 0, 256, 32, False, size)
        values.append(x)
    return image, *values, descriptors(wgmma(A_AT, 0, 256, 3), wgmma(B_AT, 0, 256, 3))


@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"), ("bf16", "bf16")])
@pytest.mark.parametrize("seed", range(2))
def test_a_in_registers(kinds, seed):
    image, a, b, sets = simple(kinds, seed=seed)
    tail = "-1, 1, 0" if kinds[0] == "bf16" else "-1, 1"
    regs = "{%r40, %r41, %r42, %r43}"
    work = sets + FENCE + product(16, kinds, regs, "%rd3", scale="0", tail=tail) + COMMIT + WAIT
    got = warpgroup(work, image, 16, fragments=a.view(np.uint8), accumulators=np.full((64, 16), 7.0), seed=seed)
    assert np.array_equal(got, -(a.astype(np.float32) @ b.astype(np.float32).T))


@pytest.mark.parametrize(("kind", "step"), [("e4m3", WGMMA_E4M3), ("bf16", WGMMA_BF16)])
def test_accumulation_is_the_machine_profile(kind, step):
    """A chain of two products with a D of full precision: the bits of the reference, not of an exact sum."""
    rng = np.random.default_rng(9)
    dtype, size = TYPES[kind]
    image, *_, sets = simple((kind, kind))
    a, b = (rng.standard_normal((rows, 32 // size)).astype(dtype) for rows in (64, 16))
    place(image, a.view(np.uint8), A_AT, 0, 256, 32, False, size)
    place(image, b.view(np.uint8), B_AT, 0, 256, 32, False, size)
    acc = rng.standard_normal((64, 16)).astype(np.float32)
    tail = "1, 1, 0, 0" if size == 2 else "1, 1"
    one = product(16, (kind, kind), "%rd2", "%rd3", tail=tail)
    got = warpgroup(sets + FENCE + one + one + COMMIT + WAIT, image, 16, accumulators=acc)
    x, y = a.astype(np.float32), b.astype(np.float32)
    want = mma(x, y, mma(x, y, acc, step), step)
    assert np.array_equal(got, want)
    assert not np.array_equal(got, (acc + 2 * (x.astype(np.float64) @ y.T)).astype(np.float32))
    fast = warpgroup(sets + FENCE + one + one + COMMIT + WAIT, image, 16, accumulators=acc, fast_mma=True)
    assert np.abs(fast - want).max() < 2.0**-10 * np.abs(want).max()


@pytest.mark.parametrize("seed", range(4))
def test_two_warpgroups_and_groups_in_flight(seed):
    """Each warpgroup has its own products; wait_group 1 frees the registers of the older group only."""
    image, a, b, sets = simple()
    one = product(16, ("e4m3", "e4m3"), "%rd2", "%rd3", scale="0")
    two = product(16, ("e4m3", "e4m3"), "%rd2", "%rd3", scale="0", d=50)
    work = sets + FENCE + one + COMMIT + two + COMMIT + WAIT.replace("0", "1")
    work += "add.f32 %f0, %f0, 0f3F800000;\n" + WAIT + "add.f32 %f1, %f50, %f51;\n"
    got = warpgroup(work, image, 16, block=256, seed=seed)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    rows = np.array([0, 1, 5, 16, 63]) // 16 * 16 + np.array([0, 1, 5, 0, 7])
    assert np.array_equal(got[rows][:, 0::8], want[rows][:, 0::8] + [1, 0])
    assert np.array_equal(got[rows][:, 1], want[rows][:, 0] + want[rows][:, 1])


ONE_PRODUCT = product(16, ("e4m3", "e4m3"), "%rd2", "%rd3")
FROM_REGISTERS = product(16, ("e4m3", "e4m3"), "{%r40, %r41, %r42, %r43}", "%rd3")
FAULTS = {
    "no fence at all": (af.MissingWgmmaFence, ONE_PRODUCT + COMMIT + WAIT),
    "D written behind the fence": (
        af.MissingWgmmaFence,
        FENCE + "add.f32 %f3, %f3, %f3;\n" + ONE_PRODUCT + COMMIT + WAIT,
    ),
    "A written behind the fence": (
        af.MissingWgmmaFence,
        FENCE + "add.u32 %r41, %r41, 1;\n" + FROM_REGISTERS + COMMIT + WAIT,
    ),
    "D read before the wait": (af.RegisterInFlight, FENCE + ONE_PRODUCT + COMMIT + "add.f32 %f60, %f2, %f2;\n" + WAIT),
    "D read after a wait that leaves it": (
        af.RegisterInFlight,
        FENCE + ONE_PRODUCT + COMMIT + WAIT.replace("0", "1") + "add.f32 %f60, %f2, %f2;\n",
    ),
    "no commit": (af.RegisterInFlight, FENCE + ONE_PRODUCT + WAIT),
    "A written before the wait": (
        af.RegisterInFlight,
        FENCE + FROM_REGISTERS + COMMIT + "add.u32 %r40, %r1, 1;\n" + WAIT,
    ),
    "A read before the wait": (
        af.RegisterInFlight,
        FENCE + FROM_REGISTERS + COMMIT + "add.u32 %r50, %r40, 1;\n" + WAIT,
    ),
    "A copied over before the wait": (
        af.RegisterInFlight,
        FENCE + FROM_REGISTERS + COMMIT + "mov.b32 %r40, %r1;\n" + WAIT,
    ),
    "a copy of D read before the wait": (
        af.RegisterInFlight,
        FENCE + ONE_PRODUCT + COMMIT + "mov.f32 %f60, %f2;\nadd.f32 %f61, %f60, %f60;\n" + WAIT,
    ),
    "another D that overlaps": (
        af.RegisterInFlight,
        FENCE + ONE_PRODUCT + product(8, ("e4m3", "e4m3"), "%rd2", "%rd3", d=4) + COMMIT + WAIT,
    ),
    "half a warp": (faults.Divergent, "and.b32 %r23, %r1, 1;\nsetp.eq.u32 %p3, %r23, 0;\n@%p3 " + FENCE),
    "a descriptor of tcgen05": (af.BadDescriptor, f"or.b64 %rd2, %rd2, {1 << 46};\n" + FENCE + ONE_PRODUCT),
    "a descriptor out of range": (
        af.BadDescriptor,
        f"mov.b64 %rd2, {wgmma(0x3F000, 0, 256, 3)};\n" + FENCE + ONE_PRODUCT,
    ),
    "descriptors that differ between warps": (
        af.WarpgroupMismatch,
        "and.b32 %r23, %r1, 32;\ncvt.u64.u32 %rd4, %r23;\n"
        + ("add.u64 %rd2, %rd2, %rd4;\n" + FENCE + ONE_PRODUCT + COMMIT + WAIT),
    ),
    "descriptors that differ between lanes": (
        faults.NotUniform,
        "cvt.u64.u32 %rd4, %r1;\nadd.u64 %rd2, %rd2, %rd4;\n" + FENCE + ONE_PRODUCT,
    ),
    "one warp stays away": (
        faults.Deadlock,
        "setp.lt.u32 %p3, %r1, 32;\n" + FENCE + "@%p3 bra SKIP;\n" + ONE_PRODUCT + COMMIT + WAIT + "SKIP:\n",
    ),
    "operand that a generic store wrote": (
        faults.MissingProxyFence,
        "st.shared.u32 [%r21+1024], %r1;\nbar.sync 0;\n" + FENCE + ONE_PRODUCT,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_faults(name, seed):
    kind, body = FAULTS[name]
    image, *_, sets = simple()
    with pytest.raises(faults.Fault) as caught:
        warpgroup(sets + body, image, 16, seed=seed)
    assert type(caught.value) is kind, caught.value


@pytest.mark.parametrize("seed", range(6))
def test_copies_that_a_compiler_makes(seed):
    """D is set by mov behind the fence; A and D are copied while products are under way, and D's copy goes on as D."""
    image, a, b, sets = simple()
    zeros = "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(8))
    onward = "".join(f"mov.f32 %f{20 + i}, %f{i};\n" for i in range(8))
    back = "".join(f"mov.b32 %r{60 + i}, %f{20 + i};\n" for i in range(8))
    ends = "".join(f"mov.b32 %f{i}, %r{60 + i};\n" for i in range(8))
    second = product(16, ("e4m3", "e4m3"), "%rd2", "%rd3", d=20)
    work = (
        sets + FENCE + zeros + FROM_REGISTERS + "mov.b32 %r50, %r40;\n" + onward + second + back + COMMIT + WAIT + ends
    )
    got = warpgroup(work, image, 16, fragments=a.view(np.uint8), accumulators=np.full((64, 16), 7.0), seed=seed)
    assert np.array_equal(got, 2 * (a.astype(np.float32) @ b.astype(np.float32).T))


def test_no_wait_for_the_operands():
    """The products begin before the copy that brings their operands was waited for: found in every seed."""
    image, *_, sets = simple()
    for seed in range(5):
        with pytest.raises(faults.Fault) as caught:
            warpgroup(sets + FENCE + ONE_PRODUCT + COMMIT + WAIT, image, 16, seed=seed, waits=False)
        assert type(caught.value) is af.Unobserved, caught.value


@pytest.mark.parametrize(
    ("opcode", "text"),
    [
        ("m64n16k32.f16.e4m3.e4m3", "another type than .f32"),
        ("m64n12k32.f32.e4m3.e4m3", "N must be a multiple of 8"),
        ("m64n16k16.f32.e4m3.e4m3", "K 32"),
        ("m64n16k16.f32.bf16.f16", "does not exist"),
        ("m64n16k8.f32.tf32.tf32", "tf32"),
    ],
)
def test_forms_that_do_not_exist(opcode, text):
    image, *_, sets = simple()
    body = f"wgmma.mma_async.sync.aligned.{opcode} {registers(0, 8)}, %rd2, %rd3, 0, 1, 1;\n"
    with pytest.raises(PtxError, match=text):
        warpgroup(sets + FENCE + body, image, 16)


def test_sparse_products_are_refused_as_such():
    image, *_, sets = simple()
    body = f"wgmma.mma_async.sp.sync.aligned.m64n16k32.f32.bf16.bf16 {registers(0, 8)}, %rd2, %rd3, %r3, 0, 0, 1, 1;\n"
    with pytest.raises(PtxError, match=r"sparse products \(.sp\) are not simulated"):
        warpgroup(sets + FENCE + body, image, 16)
