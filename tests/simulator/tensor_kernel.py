"""A kernel around a few tcgen05 instructions: fill shared memory, execute them, read tensor memory back."""

import numpy as np

from tests.simulator.kernels import ONE, run, wait

BASE = 1024
"""Where ``smem`` begins: the first shared array, behind what the system keeps."""
BARRIERS = 64
"""Bytes of mbarriers and the address of the tensor memory, in front of the image: at ``smem``."""


def tensor_kernel(
    work,
    image,
    columns=128,
    *,
    words=None,
    before="",
    behind="",
    read=None,
    after_sync="tcgen05.fence::after_thread_sync;",
    ctas=1,
    allocated=512,
    waits=True,
    seed=0,
    **options,
):
    """Run ``work`` in one thread and return tensor memory.

    :param work: PTX; ``%r20`` is the address of tensor memory, ``%r21`` that of ``smem``.
    :param image: uint8: shared memory from address 0 on; the bytes from 2048 on are copied.
    :param columns: of tensor memory to return.
    :param words: uint32 ``(128, n)``: written by ``tcgen05.st`` to the columns from 256 on, before ``work``.
    :param before: PTX for all threads, before ``work``; ``behind``: for all threads, when one of them begins ``work``.
    :param waits: whether the copy into shared memory is waited for before ``work``; else behind it.
    :param read: PTX in place of the default reading of all lanes and ``columns``.
    :returns: uint32 ``(ctas, 128, columns)``, or of shape (128, columns) for one CTA.
    """
    group = ctas
    body = np.ascontiguousarray(image[2048:]).reshape(ctas, -1)
    size = body.shape[1]
    out = np.zeros((ctas, 128, columns), np.uint32)
    stored = np.zeros((128, 4), np.uint32) if words is None else np.ascontiguousarray(words)
    leader = "%p4" if ctas == 2 else "%p1"
    copies = "\n".join(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21+{1024 + at}], [%rd120+{at}], "
        f"{min(32768, size - at)}, [%r21];"
        for at in range(0, size, 32768)
    )
    stores = "\n".join(
        f"ld.global.u32 %r30, [%rd7+{4 * i}];\nadd.u32 %r31, %r24, {256 + i};\n"
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%r30};"
        for i in range(stored.shape[1])
    )
    reads = read or "\n".join(
        f"add.u32 %r31, %r24, {i};\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r30}}, [%r31];\n"
        f"tcgen05.wait::ld.sync.aligned;\nst.global.u32 [%rd8+{4 * i}], %r30;"
        for i in range(columns)
    )
    cluster_sync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" if ctas == 2 else ""
    commit = (
        "mov.u16 %h1, 3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%r25], %h1;"
        if ctas == 2
        else "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r25];"
    )
    text = f"""{ONE}
mov.u32 %r21, smem;
add.u32 %r25, %r21, 8;
mov.u32 %r26, %cluster_ctarank;
setp.eq.u32 %p5, %r26, 0;
and.pred %p4, %p1, %p5;
@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r25], 1;
@%p1 fence.mbarrier_init.release.cluster;
setp.lt.u32 %p6, %r1, 32;
@%p6 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r21+16], {allocated};
tcgen05.fence::before_thread_sync;
bar.sync 0;
{cluster_sync}
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r20, [%r21+16];
shl.b32 %r22, %r1, 16;
and.b32 %r23, %r22, {0x600000};
add.u32 %r24, %r20, %r23;
mul.wide.u32 %rd1, %r1, {4 * stored.shape[1]};
add.u64 %rd7, %rd102, %rd1;
mul.wide.u32 %rd1, %r26, {size};
add.u64 %rd120, %rd100, %rd1;
shl.b32 %r27, %r26, 7;
add.u32 %r27, %r27, %r1;
mul.wide.u32 %rd1, %r27, {4 * columns};
add.u64 %rd8, %rd101, %rd1;
{stores}
tcgen05.wait::st.sync.aligned;
{before}
tcgen05.fence::before_thread_sync;
@!%p1 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], {size};
{copies}
{wait("%r21", 0, "LOAD") if waits else ""}
LOADED:
bar.sync 0;
{cluster_sync}
tcgen05.fence::after_thread_sync;
{behind}
@!{leader} bra ISSUED;
{work}
{"" if waits else wait("%r21", 0, "LOAD")}
{commit}
ISSUED:
{wait("%r25", 0, "DONE")}
{after_sync}
{reads}
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
@%p6 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r20, {allocated};
{cluster_sync}
"""
    if ctas == 2:
        options["cluster"] = (2,)
    report = run(text, [body, out, stored], block=128, grid=ctas, shared=1024 + size, seed=seed, **options)
    tensor_kernel.report = report
    return out if ctas == 2 else out[0]


def tensor_image(size, ctas=1):
    """Shared memory from address 0 on; addresses below 2048 are not copied."""
    return np.zeros(2048 + size, np.uint8)
