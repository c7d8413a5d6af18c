"""Bulk copies: every direction, groups, reductions, and the faults of each."""

import ml_dtypes
import numpy as np
import pytest

from flamia.conformance.simulator.machine import asyncfaults as af
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.ops.bulk import reduce_values
from tests.simulator.kernels import ONE, run, wait

INIT = f"""{ONE}
mov.u32 %r2, smem;
add.u32 %r3, %r2, 64;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {};\n"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
COMMIT = "cp.async.bulk.commit_group;\n"
WAIT = "cp.async.bulk.wait_group 0;\n"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_in_and_out(seed, space):
    """Two copies in on one phase, one copy out by a group."""
    source, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    load = LOAD.replace("shared::cluster", space)
    run(
        INIT
        + f"""@!%p1 bra END;
{EXPECT.format(256)}
{load} [%r3+16], [%rd100], 16, [%r2];
{load}.L2::cache_hint [%r3+32], [%rd100+16], 240, [%r2], 5;
{wait("%r2", 0, "W")}
{STORE} [%rd101], [%r3+16], 256;
{COMMIT}{WAIT}
END:""",
        [source, out],
        shared=512,
        seed=seed,
    )
    assert np.array_equal(out, source)


@pytest.mark.parametrize("seed", range(3))
def test_generic_writes_go_out_behind_a_proxy_fence(seed):
    out = np.zeros(32, np.uint32)
    run(
        INIT
        + f"""mad.lo.u32 %r4, %r1, 4, %r3;
st.shared.u32 [%r4], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra END;
{STORE} [%rd100], [%r3], 128;
{COMMIT}cp.async.bulk.wait_group.read 0;
END:""",
        [out],
        shared=256,
        seed=seed,
    )
    assert np.array_equal(out, np.arange(32))


def test_wait_group_leaves_the_latest():
    """wait_group 1 with two groups waits for the first; the copy of the second may come later."""
    out = np.zeros(8, np.uint32)
    run(
        INIT
        + f"""@!%p1 bra END;
mov.u32 %r5, 7;
st.shared.v4.u32 [%r3], {{%r5, %r5, %r5, %r5}};
fence.proxy.async;
{STORE} [%rd100], [%r3], 16;
{COMMIT}{STORE} [%rd100+16], [%r3], 16;
{COMMIT}cp.async.bulk.wait_group 1;
ld.global.u32 %r6, [%rd100];
add.u32 %r6, %r6, 1;
{WAIT}st.global.u32 [%rd100+16], %r6;
END:""",
        [out],
        shared=256,
    )
    assert out.tolist() == [7] * 4 + [8, 7, 7, 7]


REDUCTIONS = [
    ("add", "f32", np.float32),
    ("add", "u32", np.uint32),
    ("add", "u64", np.uint64),
    ("add.noftz", "bf16", ml_dtypes.bfloat16),
    ("add.noftz", "f16", np.float16),
    ("min", "s32", np.int32),
    ("max", "u32", np.uint32),
    ("inc", "u32", np.uint32),
    ("dec", "u32", np.uint32),
    ("and", "b32", np.uint32),
    ("xor", "b64", np.uint64),
]


@pytest.mark.parametrize(("operation", "kind", "dtype"), REDUCTIONS, ids=lambda x: str(x))
def test_reductions_into_global_memory(operation, kind, dtype):
    rng = np.random.default_rng(0)
    count = 32 // np.dtype(dtype).itemsize
    old, new = (rng.integers(0, 50, count).astype(dtype) for _ in range(2))
    if "f" in kind:
        old, new = ((x.astype(np.float32) * 0.37).astype(dtype) for x in (old, new))
    out = old.copy()
    form = "add.noftz" if "noftz" in operation else operation
    run(
        INIT
        + f"""@!%p1 bra END;
{EXPECT.format(32)}
{LOAD} [%r3], [%rd100], 32, [%r2];
{wait("%r2", 0, "W")}
cp.reduce.async.bulk.global.shared::cta.bulk_group.{form}.{kind} [%rd101], [%r3], 32;
{COMMIT}{WAIT}
END:""",
        [new.view(np.uint8), out.view(np.uint8)],
        shared=256,
    )
    want = []
    for a, b in zip(old.tolist(), new.tolist(), strict=True):
        x, y = dtype(a), dtype(b)
        want.append(
            {
                "add": lambda x=x, y=y: x + y,
                "add.noftz": lambda x=x, y=y: x + y,
                "min": lambda x=x, y=y: min(x, y),
                "max": lambda x=x, y=y: max(x, y),
                "inc": lambda a=a, b=b: 0 if a >= b else a + 1,
                "dec": lambda a=a, b=b: b if a == 0 or a > b else a - 1,
                "and": lambda a=a, b=b: a & b,
                "xor": lambda a=a, b=b: a ^ b,
            }[operation]()
        )
    assert np.array_equal(out, np.array(want, dtype))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_extremes_of_halves_order_the_zeros(dtype):
    zeros, other = np.array([0.0, -0.0, 0.0, -0.0], dtype), np.array([-0.0, 0.0, 0.0, -0.0], dtype)
    assert reduce_values("min", zeros, other).view(np.uint16).tolist() == [0x8000, 0x8000, 0, 0x8000]
    assert reduce_values("max", zeros, other).view(np.uint16).tolist() == [0, 0, 0, 0x8000]


@pytest.mark.parametrize("seed", range(4))
def test_many_ctas_add_into_one_place(seed):
    out = np.zeros(32, np.float32)
    run(
        INIT
        + f"""mad.lo.u32 %r4, %r1, 4, %r3;
mov.f32 %f1, 0f3FC00000;
st.shared.f32 [%r4], %f1;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra END;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd100], [%r3], 128;
{COMMIT}{WAIT}
END:""",
        [out],
        grid=5,
        shared=256,
        seed=seed,
    )
    assert (out == 7.5).all()


CLUSTER = f"""{ONE}
mov.u32 %r2, smem;
add.u32 %r3, %r2, 64;
mov.u32 %r5, %cluster_ctarank;
setp.eq.u32 %p2, %r5, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("seed", range(3))
def test_multicast(seed):
    """CTA 0 loads into both CTAs; each waits on its own mbarrier."""
    source, out = np.arange(16, dtype=np.uint32), np.zeros((2, 16), np.uint32)
    run(
        CLUSTER
        + f"""@!%p1 bra END;
{EXPECT.format(64)}
mov.u16 %h1, 3;
@%p2 {LOAD}.multicast::cluster [%r3], [%rd100], 64, [%r2], %h1;
{wait("%r2", 0, "W")}
mad.lo.u32 %r6, %r5, 64, 0;
cvt.u64.u32 %rd1, %r6;
add.u64 %rd2, %rd101, %rd1;
{STORE} [%rd2], [%r3], 64;
{COMMIT}{WAIT}
END:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;""",
        [source, out],
        grid=2,
        cluster=(2,),
        shared=256,
        seed=seed,
    )
    assert np.array_equal(out, np.stack([source, source]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduce", [False, True])
def test_between_the_ctas_of_a_cluster(seed, reduce):
    """CTA 1 sends to CTA 0, on the mbarrier of CTA 0; reducing, it adds to what is there."""
    out = np.zeros(4, np.uint32)
    form = "cp.{}async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{}".format(
        "reduce." if reduce else "", ".add.u32" if reduce else ""
    )
    run(
        CLUSTER.replace("@%p1 fence", "mov.u32 %r7, 5; st.shared.v4.u32 [%r3], {%r7, %r7, %r7, %r7};\n@%p1 fence")
        + f"""@!%p1 bra END;
@%p2 bra HERE;
mov.u32 %r7, 8;
st.shared.v4.u32 [%r3+16], {{%r7, %r7, %r7, %r7}};
fence.proxy.async.shared::cta;
mapa.shared::cluster.u32 %r8, %r2, 0;
{form} [%r8+64], [%r3+16], 16, [%r8];
bra END;
HERE:
{EXPECT.format(16)}
{wait("%r2", 0, "W")}
ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r3];
st.global.v4.u32 [%rd100], {{%r10, %r11, %r12, %r13}};
END:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;""",
        [out],
        grid=2,
        cluster=(2,),
        shared=256,
        seed=seed,
    )
    assert out.tolist() == [13 if reduce else 8] * 4


ALONE = INIT + "@!%p1 bra END;\n"
END = "\nEND:"
W = wait("%r2", 0, "W")
FAULTS = {
    "address not aligned": (faults.Misaligned, EXPECT.format(16) + f"{LOAD} [%r3+8], [%rd100], 16, [%r2];{W}"),
    "size not aligned": (faults.Misaligned, EXPECT.format(24) + f"{LOAD} [%r3], [%rd100], 24, [%r2];{W}"),
    "past the source": (faults.OutOfBounds, EXPECT.format(512) + f"{LOAD} [%r3], [%rd100], 512, [%r2];{W}"),
    "past shared memory": (faults.OutOfBounds, EXPECT.format(128) + f"{LOAD} [%r3+448], [%rd100], 128, [%r2];{W}"),
    "too few bytes expected": (
        af.ExpectTxMismatch,
        EXPECT.format(16)
        + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{LOAD} [%r3+16], [%rd100], 16, [%r2];\n{W}\n"
        + EXPECT.format(16).replace("%r2", "%r2")
        + wait("%r2", 1, "V"),
    ),
    "too many bytes expected": (
        af.ExpectTxMismatch,
        EXPECT.format(32) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{W}",
    ),
    "source that nothing wrote": (
        faults.UnwrittenRead,
        f"{STORE} [%rd100], [%r3], 16;\n{COMMIT}{WAIT}",
    ),
    "no proxy fence": (
        faults.MissingProxyFence,
        f"st.shared.v4.u32 [%r3], {{%r1, %r1, %r1, %r1}};\n{STORE} [%rd100], [%r3], 16;\n{COMMIT}{WAIT}",
    ),
    "mbarrier not made visible": (
        faults.MissingProxyFence,
        "mbarrier.init.shared::cta.b64 [%r2+8], 1;\nmbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2+8], 16;\n"
        f"{LOAD} [%r3], [%rd100], 16, [%r2+8];\n",
    ),
    "no wait before a copy of the copy": (
        af.Unobserved,
        EXPECT.format(16) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{STORE} [%rd100], [%r3], 16;\n",
    ),
    "no wait before the next fill": (
        af.Unobserved,
        EXPECT.format(32) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{LOAD} [%r3], [%rd100], 16, [%r2];\n",
    ),
    "no wait for the load": (af.UnterminatedCopy, EXPECT.format(16) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n"),
    "a wait that leaves the store": (
        af.UnterminatedCopy,
        EXPECT.format(16)
        + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{W}\n{STORE} [%rd100], [%r3], 16;\n{COMMIT}"
        + WAIT.replace("0", "1"),
    ),
    "no wait for the store": (
        af.UnterminatedCopy,
        EXPECT.format(16) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{W}\n{STORE} [%rd100], [%r3], 16;\n{COMMIT}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(4))
def test_faults(name, seed):
    kind, body = FAULTS[name]
    with pytest.raises(faults.Fault) as caught:
        run(ALONE + body + END, [np.zeros(64, np.uint32)], shared=512, seed=seed)
    assert type(caught.value) is kind, caught.value


IN_TIME = {
    "a generic read of a copy under way": (
        faults.InFlightRead,
        EXPECT.format(16) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\nld.shared.u32 %r9, [%r3];\n{W}",
    ),
    "a generic write over a copy under way": (
        faults.InFlightWrite,
        EXPECT.format(16) + f"{LOAD} [%r3], [%rd100], 16, [%r2];\nst.shared.u32 [%r3], %r1;\n{W}",
    ),
    "a generic write over a source": (
        faults.OperandOverwritten,
        EXPECT.format(16)
        + f"{LOAD} [%r3], [%rd100], 16, [%r2];\n{W}\n{STORE} [%rd100], [%r3], 16;\n{COMMIT}st.shared.u32 [%r3], %r1;\n"
        + WAIT,
    ),
}


@pytest.mark.parametrize("name", IN_TIME)
def test_faults_of_generic_accesses(name):
    """These are seen while the copy is under way: in most seeds."""
    kind, body = IN_TIME[name]
    seen = 0
    for seed in range(10):
        try:
            run(ALONE + body + END, [np.zeros(64, np.uint32)], shared=512, seed=seed)
        except faults.Fault as fault:
            assert type(fault) is kind, fault
            seen += 1
    assert seen >= 5
