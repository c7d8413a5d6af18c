"""Generic accesses to shared memory that asynchronous operations use: found by what warps know, whatever the timing."""

from dataclasses import replace

import numpy as np
import pytest

from flamia.conformance.simulator.examples.gemm import gemm_case
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.asyncfaults import Unobserved
from tests.simulator.kernels import ONE, run, wait
from tests.simulator.tensor_kernel import tensor_image, tensor_kernel

SEEDS = range(3)
LATE = 21_000
"""Turns of a loop after which every asynchronous operation is done."""


def spin(turns):
    """Pass the time, with ``%r9`` and ``%p8``."""
    return f"mov.u32 %r9, 0;\nSPIN: add.u32 %r9, %r9, 1;\nsetp.lt.u32 %p8, %r9, {turns};\n@%p8 bra SPIN;\n"


def load_and_read(second_warp, seed):
    """Warp 0 waits for a bulk copy that both warps read; warp 1 does ``second_warp``. :returns: what they read."""
    x, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    run(
        f"""{ONE}
mov.u32 %r3, smem;
add.u32 %r4, %r3, 128;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd100], 256, [%r3];
setp.ge.u32 %p4, %r1, 32;
@%p4 bra SECOND;
{wait("%r3", 0, "WAIT")}
bar.arrive 1, 64;
bra READ;
SECOND:
{second_warp}
READ:
mad.lo.u32 %r5, %r1, 4, %r4;
ld.shared.u32 %r6, [%r5];
mul.wide.u32 %rd1, %r1, 4;
add.u64 %rd2, %rd101, %rd1;
st.global.u32 [%rd2], %r6;""",
        [x, out],
        block=64,
        shared=1024,
        seed=seed,
    )
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_without_a_wait_is_found_when_the_copy_is_long_done(seed):
    with pytest.raises((Unobserved, faults.InFlightRead)) as found:
        load_and_read(spin(LATE), seed)
    if found.type is Unobserved:
        assert "a generic load uses bytes of a bulk copy, and phase 0 of mbarrier 0x400, which" in str(found.value)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", ["the mbarrier", "a barrier with a warp that waited"])
def test_a_read_behind_a_wait_is_right(way, seed):
    ways = {"the mbarrier": wait("%r3", 0, "OTHER"), "a barrier with a warp that waited": "bar.sync 1, 64;"}
    assert np.array_equal(load_and_read(ways[way], seed), np.arange(64))


def send_and_store(between, seed):
    """Thread 0 sends out 256 bytes; behind ``between``, thread 32 stores over the first four."""
    out = np.zeros(64, np.uint32)
    run(
        f"""{ONE}
mov.u32 %r3, smem;
mad.lo.u32 %r4, %r1, 4, %r3;
st.shared.u32 [%r4], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra SENT;
cp.async.bulk.global.shared::cta.bulk_group [%rd100], [%r3], 256;
cp.async.bulk.commit_group;
SENT:
{between}
setp.eq.u32 %p3, %r1, 32;
@%p3 st.shared.u32 [%r3], 77;
@%p1 cp.async.bulk.wait_group 0;""",
        [out],
        block=64,
        shared=256,
        seed=seed,
    )
    return out


READ = "@%p1 cp.async.bulk.wait_group.read 0;\n"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("before", ["bar.sync 0;\n", READ, "bar.sync 0;\n" + READ])
def test_a_store_over_what_a_bulk_copy_sends_is_found(before, seed):
    """Nobody waited; or the storing warp does not know of it, as no barrier lies behind the wait."""
    with pytest.raises(faults.OperandOverwritten):
        send_and_store(before + spin(LATE), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_behind_the_wait_of_a_bulk_copy_is_right(seed):
    assert np.array_equal(send_and_store(READ + "bar.sync 0;\n", seed), np.arange(64))


def product_and_store(behind, seed):
    """A tcgen05.mma of bfloat16 zeros, 128 x 16 x 16; then ``behind`` in the issuing thread."""
    description = 1 << 4 | 1 << 7 | 1 << 10 | 16 >> 3 << 17 | 128 >> 4 << 24

    def operand(address):
        return address >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46

    return tensor_kernel(
        f"""mov.b64 %rd1, {operand(2048)};
mov.b64 %rd2, {operand(2048 + 8192)};
mov.b32 %r3, {description};
setp.ne.u32 %p2, %r3, %r3;
tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd1, %rd2, %r3, %p2;
{behind}""",
        tensor_image(16384),
        columns=16,
        seed=seed,
    )


STORE = "st.shared.u32 [%r21+1024], 5;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_over_an_operand_of_a_long_done_product_is_found(seed):
    with pytest.raises(faults.OperandOverwritten):
        product_and_store(spin(LATE) + STORE, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_behind_the_commit_of_a_product_is_right(seed):
    barrier = "@%p1 mbarrier.init.shared::cta.b64 [%r21+24], 1;\nfence.proxy.async.shared::cta;\n"
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r28];\n"
    behind = barrier + "add.u32 %r28, %r21, 24;\n" + commit + wait("%r28", 0, "MINE") + "\n" + STORE
    assert not product_and_store(behind, seed).any()


def test_a_product_that_came_too_early_is_named():
    """The GEMM's multiplying warp waits for the first phase always; the loading warp finds its own copy forestalled."""
    case = gemm_case()
    source = case.source.replace("wait(full + 8 * s, phase);", "wait(full + 8 * s, 0);")
    assert source != case.source
    with pytest.raises(faults.OperandOverwritten, match=r"CTA 0 warp 5 issued it: .* or it came too early"):
        replace(case, source=source).simulate(seed=0)
