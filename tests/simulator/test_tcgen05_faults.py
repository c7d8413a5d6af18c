"""Every fault of tensor memory and of tcgen05, provoked by leaving out or changing one thing in a right kernel."""

import ml_dtypes
import numpy as np
import pytest

from flamia.conformance.simulator.machine import asyncfaults as af
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.ptx.syntax import PtxError
from tests.simulator.kernels import ONE, run, wait
from tests.simulator.layouts import place, scale_block, tcgen05
from tests.simulator.tensor_kernel import tensor_image, tensor_kernel

A_AT, B_AT, SF_AT = 2048, 2048 + 8192, 2048 + 16384
DESCRIPTORS = {"a": tcgen05(A_AT, 0, 256, 6), "b": tcgen05(B_AT, 0, 256, 6), "sf": tcgen05(SF_AT, 0, 128, 0)}
IDESC = 1 << 23 | 16 << 17 | 8 << 24
WORK = """mov.b64 %rd2, {a};
mov.b64 %rd3, {b};
mov.b64 %rd4, {sf};
mov.b32 %r2, {idesc};
setp.ne.u32 %p2, %r20, %r20;
setp.eq.u32 %p3, %r20, %r20;
add.u32 %r4, %r20, 300;
add.u32 %r5, %r20, 304;
add.u32 %r6, %r20, 256;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4], %rd4;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r5], %rd4;
tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%r20], %rd2, %rd3, %r2, [%r4], [%r5], %p2;
"""


def image():
    out = tensor_image(16384 + 512)
    one = np.ones((128, 32), ml_dtypes.float8_e4m3fn).view(np.uint8)
    place(out, one, A_AT, 0, 256, 32, False, 1)
    place(out, one, B_AT, 0, 256, 32, False, 1)
    out[SF_AT : SF_AT + 512] = scale_block(np.full((128, 4), 127, np.uint8))
    return out


def product(work=WORK, *, more="", idesc=IDESC, image=image, **options):
    names = {**DESCRIPTORS, **{k: options.pop(k) for k in ("a", "b", "sf") if k in options}}
    return tensor_kernel(work.format(**names, idesc=idesc) + more, image(), 8, **options)


def test_the_kernel_itself_is_right():
    assert (product().view(np.float32) == 32).all() and not tensor_kernel.report.unpromised


MMA = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%r20], "
OPERANDS = {
    "A not aligned to its swizzle": (af.BadDescriptor, "tcgen05.mma", {"a": tcgen05(A_AT + 128, 0, 256, 6)}),
    "A leaves the pattern": (af.BadDescriptor, "tcgen05.mma", {"a": tcgen05(A_AT + 16, 0, 256, 6)}),
    "B out of range": (af.BadDescriptor, "tcgen05.mma", {"b": tcgen05(230400, 0, 256, 6)}),
    "wrong version bits": (af.BadDescriptor, "tcgen05.mma", {"a": tcgen05(A_AT, 0, 256, 6, version=0)}),
    "scale block out of range": (af.BadDescriptor, "tcgen05.cp", {"sf": tcgen05(SF_AT, 0, 16368, 0)}),
    "M = 64": (af.IllegalShape, "tcgen05.mma", {"idesc": 1 << 23 | 16 << 17 | 4 << 24}),
    "N = 0": (af.IllegalShape, "tcgen05.mma", {"idesc": 1 << 23 | 8 << 24}),
    "UE4M3 scales": (af.BadDescriptor, "tcgen05.mma", {"idesc": IDESC ^ 1 << 23}),
    "sparse": (af.NotSimulated, "tcgen05.mma", {"idesc": IDESC | 4}),
    "D past column 511": (
        af.TmemRange,
        "tcgen05.mma",
        {"work": WORK.replace(MMA, "add.u32 %r7, %r20, 400;\n" + MMA.replace("%r20", "%r7"))},
    ),
    "D at another lane": (
        af.TmemRange,
        "tcgen05.mma",
        {"work": WORK.replace(MMA, "add.u32 %r7, %r20, 2097152;\n" + MMA.replace("%r20", "%r7"))},
    ),
    "D never written": (
        af.TmemUnwritten,
        "tcgen05.mma",
        {"work": WORK.replace("[%r4], [%r5], %p2", "[%r4], [%r5], %p3")},
    ),
    "scales never written": (
        af.TmemUnwritten,
        "tcgen05.mma",
        {"work": WORK.replace("tcgen05.cp.cta_group::1.32x128b.warpx4 [%r5], %rd4;", "")},
    ),
    "scales in one quadrant only": (
        af.ScaleNotReplicated,
        "tcgen05.mma",
        {
            "work": WORK.replace("tcgen05.cp.cta_group::1.32x128b.warpx4 [%r5], %rd4;", "mov.u32 %r5, %r6;"),
            "words": np.arange(512, dtype=np.uint32).reshape(128, 4),
        },
    ),
    "SF id of a 4X kind": (
        af.IllegalScaleId,
        "tcgen05.mma",
        {
            "work": WORK.replace("mxf8f6f4.block_scale.block32", "mxf4nvf4.block_scale.scale_vec::4X"),
            "idesc": 1 << 7 | 1 << 10 | 16 << 17 | 8 << 24 | 1 << 29,
        },
    ),
    "MN-major NVFP4": (
        af.IllegalMajorness,
        "tcgen05.mma",
        {
            "work": WORK.replace("mxf8f6f4.block_scale.block32", "mxf4nvf4.block_scale.scale_vec::4X"),
            "idesc": 1 << 7 | 1 << 10 | 16 << 17 | 8 << 24 | 1 << 16,
        },
    ),
    "two cta_groups": (
        faults.Illegal,
        "tcgen05.cp",
        {"work": WORK.replace("cp.cta_group::1", "cp.cta_group::2", 1)},
    ),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands(name):
    kind, opcode, options = OPERANDS[name]
    with pytest.raises(faults.Fault) as caught:
        product(**options)
    assert type(caught.value) is kind, caught.value
    assert caught.value.instruction.opcode.startswith(opcode)
    assert "warp 0" in caught.value.warp and "at PTX line" in str(caught.value)


def test_outside_the_allocation():
    with pytest.raises(af.TmemNotAllocated, match="column 256 of tensor memory outside every allocation"):
        product(allocated=256)


LD1 = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r24];\n"
KEEP = "tcgen05.wait::ld.sync.aligned;\nst.global.u32 [%rd8], %r30;\n"
ST1 = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r24], {%r30};\n"
ORDER = {
    "no fence::after behind the wait for a commit": (
        af.MissingTensorFence,
        "after_thread_sync is missing",
        {"after_sync": ""},
    ),
    "no wait::ld before the register is used": (
        af.RegisterInFlight,
        "%r30 is used while tcgen05.ld",
        {"read": LD1 + "st.global.u32 [%rd8], %r30;"},
    ),
    "a register in flight is written": (
        af.RegisterInFlight,
        "%r30 is used",
        {"read": LD1 + "mov.u32 %r30, 0;"},
    ),
    "a second load into the same register": (af.RegisterInFlight, "writes register", {"read": LD1 + LD1}),
    "a store from a register in flight": (
        af.RegisterInFlight,
        "is used while",
        {"read": LD1 + ST1.replace("%r24", "%r31").replace("tcgen05", "add.u32 %r31, %r24, 9;\ntcgen05", 1)},
    ),
    "no wait::st before a load": (
        af.MissingTensorWait,
        "wait::st is missing",
        {"read": "mov.u32 %r30, 1;\n" + ST1 + LD1.replace("%r30", "%r29")},
    ),
    "no wait::ld before a store": (
        af.MissingTensorWait,
        "wait::ld is missing",
        {"read": LD1 + ST1.replace("%r30", "%r1")},
    ),
    "a load of words that nobody wrote": (
        af.TmemUnwritten,
        "never written",
        {"read": LD1.replace("[%r24]", "[%r24+200]") + KEEP},
    ),
    "the quadrant of another warp": (
        af.TmemRange,
        "reaches lanes",
        {"read": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r20];\n" + KEEP},
    ),
    "an address that differs between lanes": (
        faults.NotUniform,
        "one value is needed",
        {"read": "add.u32 %r24, %r24, %r1;\n" + LD1 + KEEP},
    ),
    "half a warp": (
        faults.Divergent,
        "needs all lanes",
        {"read": "and.b32 %r28, %r1, 16;\nsetp.eq.u32 %p3, %r28, 0;\n@%p3 " + LD1 + KEEP},
    ),
}


@pytest.mark.parametrize("name", ORDER)
@pytest.mark.parametrize("seed", range(3))
def test_order_of_one_warp(name, seed):
    """Found in every seed: by what the warp knows, not by when the operation was done."""
    kind, text, options = ORDER[name]
    with pytest.raises(faults.Fault, match=text) as caught:
        product(seed=seed, **options)
    assert type(caught.value) is kind, caught.value


def test_a_load_may_be_waited_for_while_a_store_is_under_way():
    """wait::ld covers the load though an earlier store is not waited for: what was read may be overwritten."""
    st9 = ST1.replace("[%r24]", "[%r24+9]").replace("%r30", "%r1")
    product(
        read=st9
        + LD1
        + "tcgen05.wait::ld.sync.aligned;\n"
        + ST1.replace("%r30", "%r1")
        + "tcgen05.wait::st.sync.aligned;"
    )


SHARED = {
    "an operand that a generic store wrote": (
        faults.MissingProxyFence,
        {"work": "st.shared.u32 [%r21+1024], %r1;\n" + WORK},
    ),
    "an operand that was not waited for": (af.Unobserved, {"waits": False}),
    "a copy over an operand of a running mma": (
        faults.OperandOverwritten,
        {
            "more": "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 16;\n"
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21+1024], [%rd120], 16, [%r21];\n"
        },
    ),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("seed", range(4))
def test_shared_memory(name, seed):
    kind, options = SHARED[name]
    with pytest.raises(faults.Fault) as caught:
        product(seed=seed, **options)
    assert type(caught.value) is kind, caught.value


def hand_over(*, wait_st=True, before=True, arrive=True, after=True, seed=0):
    """Warps 0 to 3 store A and the scales; thread 0 waits for an mbarrier, multiplies, and all read D back."""
    image_ = image()
    words = np.full((128, 4), 0x7F7F7F7F, np.uint32)
    steps = [
        "mov.b32 %r40, 0x38383838;",
        "add.u32 %r41, %r24, 280;",
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r41], {%r40, %r40, %r40, %r40, %r40, %r40, %r40, %r40};",
        "tcgen05.wait::st.sync.aligned;" if wait_st else "",
        "tcgen05.fence::before_thread_sync;" if before else "",
        "mbarrier.arrive.shared::cta.b64 _, [%r21+24];" if arrive else "",
    ]
    work = WORK.replace("%rd2, %rd3", "[%r41], %rd3").format(**DESCRIPTORS, idesc=IDESC)
    waits = (wait("%r21+24", 0, "HAND") if arrive else "") + (
        "\ntcgen05.fence::after_thread_sync;\n" if after else "\n"
    )
    prologue = "@%p1 mbarrier.init.shared::cta.b64 [%r21+24], 128;\nbar.sync 0;\n"
    return tensor_kernel(
        "add.u32 %r41, %r20, 280;\n" + waits + work,
        image_,
        8,
        words=words,
        before=prologue,
        behind="\n".join(steps),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(3))
def test_hand_over_between_warps(seed):
    assert (hand_over(seed=seed).view(np.float32) == 32).all()


@pytest.mark.parametrize(
    ("left_out", "kinds", "text"),
    [
        ("wait_st", (af.MissingTensorWait,), "wait::st is missing"),
        ("before", (af.MissingTensorFence,), "before_thread_sync is missing"),
        ("after", (af.MissingTensorFence,), "after_thread_sync is missing"),
        # The product may come before the stores, too.
        ("arrive", (af.TensorRace, af.TmemUnwritten), "nothing orders|never written"),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_hand_over_with_a_step_left_out(left_out, kinds, text, seed):
    options = {left_out: False, **({"after": True} if left_out != "after" else {})}
    with pytest.raises(faults.Fault, match=text) as caught:
        hand_over(seed=seed, **options)
    assert type(caught.value) in kinds, caught.value
    assert caught.value.instruction.opcode.startswith("tcgen05.mma")


def test_commit_is_needed():
    """D is read after an arrival that no commit makes."""
    with pytest.raises(af.TmemInFlight, match=r"no wait for a tcgen05\.commit"):
        product(more="mbarrier.arrive.shared::cta.b64 _, [%r25];\nbra ISSUED;\n")


def test_several_threads_issue():
    with pytest.raises(faults.Divergent, match="is issued by 32 threads"):
        body = WORK.format(**DESCRIPTORS, idesc=IDESC)
        tensor_kernel("", image(), 8, before=body)


UNPROMISED = {
    "scales are copied over those of a running mma": (
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4], %rd4;\n",
        r"tcgen05\.cp .* of tcgen05\.mma",
    ),
    "another accumulator overwrites the scales": (
        "add.u32 %r7, %r20, 250;\n" + MMA.replace("%r20", "%r7") + "%rd2, %rd3, %r2, [%r4], [%r5], %p2;\n",
        r"tcgen05\.mma .* of tcgen05\.mma",
    ),
}


@pytest.mark.parametrize("name", UNPROMISED)
def test_orderings_that_ptx_does_not_promise(name):
    more, text = UNPROMISED[name]
    work = WORK + (more if "cp" in more else "")
    if "another" in name:
        # D of the second product covers columns 250 to 377, where the first one's scales are; its own lie elsewhere.
        copies = "".join(
            f"add.u32 {r}, %r20, {at};\ntcgen05.cp.cta_group::1.32x128b.warpx4 [{r}], %rd4;\n"
            for r, at in (("%r8", 400), ("%r9", 404))
        )
        work = WORK.replace("tcgen05.mma", copies + "tcgen05.mma") + more.replace("[%r4], [%r5]", "[%r8], [%r9]")
    product(work)
    (what,) = tensor_kernel.report.unpromised
    with pytest.raises(faults.Unpromised, match=text):
        product(work, strict=True)
    assert "without a wait between them" in what


def test_what_is_promised_is_not_counted():
    """cp -> mma, and mma -> mma of the same accumulator and shape."""
    product(more=MMA + "%rd2, %rd3, %r2, [%r4], [%r5], %p3;\n", strict=True)


def test_another_shape_is_another_accumulator():
    with pytest.raises(faults.Unpromised):
        narrow = f"mov.b32 %r2, {1 << 23 | 8 << 17 | 8 << 24};\n"
        product(more=narrow + MMA + "%rd2, %rd3, %r2, [%r4], [%r5], %p3;\n", strict=True)


ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], {};\n"
DEALLOC = "ld.shared.u32 %r20, [%r21];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, {};\n"
ALLOCATIONS = {
    "leak": (af.TmemLeak, ALLOC.format(64)),
    "no power of two": (af.TmemAllocation, ALLOC.format(96)),
    "16 columns": (af.TmemAllocation, ALLOC.format(16)),
    "another number is freed": (af.TmemAllocation, ALLOC.format(64) + DEALLOC.format(32)),
    "freed twice": (af.TmemAllocation, ALLOC.format(64) + DEALLOC.format(64) + DEALLOC.format(64)),
    "after relinquish": (
        af.TmemAllocation,
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" + ALLOC.format(64),
    ),
    "no room, ever": (faults.Deadlock, ALLOC.format(512) + ALLOC.format(32)),
    "use after free": (
        af.TmemNotAllocated,
        ALLOC.format(64) + DEALLOC.format(64) + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};\n",
    ),
    "freed while it is used": (
        af.TmemNotAllocated,
        ALLOC.format(64)
        + "ld.shared.u32 %r20, [%r21];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};\n"
        + DEALLOC.format(64),
    ),
    "contents of an earlier allocation": (
        af.TmemUnwritten,
        ALLOC.format(64)
        + "ld.shared.u32 %r20, [%r21];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};\n"
        + "tcgen05.wait::st.sync.aligned;\n"
        + DEALLOC.format(64)
        + ALLOC.format(64)
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r20];\n",
    ),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocations(name):
    kind, body = ALLOCATIONS[name]
    with pytest.raises(faults.Fault) as caught:
        run(f"{ONE}\nmov.u32 %r21, smem;\n" + body, [np.zeros(4, np.uint32)], shared=16)
    assert type(caught.value) is kind, caught.value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("mxf8f6f4.block_scale.block32", "mxf8f6f4.block_scale.block16"), "scale vector"),
        (("mxf8f6f4.block_scale.block32", "mxf8f6f4"), "have .block_scale"),
        (("tcgen05.mma.", "tcgen05.mma.ws."), "'.ws'"),
        (("32x128b.warpx4 [%r4]", "4x256b [%r4]"), "4x256b"),
        (("[%r5], %p2", "[%r5], %p2, 1"), "7"),
    ],
)
def test_forms_that_do_not_exist(change, text):
    with pytest.raises((PtxError, faults.Fault), match=text):
        product(WORK.replace(*change))
