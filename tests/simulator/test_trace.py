"""The trace of a run: waits last until what they wait for has happened, and delays keep to their limit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from flamia.conformance.simulator.machine.launch import Report
from tests.simulator.kernels import ONE, run, wait

COPY = f"""{ONE} mov.u32 %r2, smem; @!%p1 bra END;
mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+128], [%rd100], 128, [%r2];
{wait("%r2", 0, "W")}
ld.shared.u32 %r9, [%r2+128]; st.global.u32 [%rd100], %r9;
END:"""


def copied(seed: int, **options: int) -> Report:
    data: NDArray[np.uint32] = np.arange(32, dtype=np.uint32)
    return run(COPY, [data], shared=256, seed=seed, trace=True, **options)


@pytest.mark.parametrize("seed", range(8))
def test_a_wait_lasts_from_the_run_before_it_to_the_copy_that_ends_it(seed: int) -> None:
    spans = copied(seed).spans
    (copy,) = (s for s in spans if s.kind == "async")
    runs = [s for s in spans if s.kind == "run"]
    waits = [s for s in spans if s.kind == "wait"]
    assert len(waits) <= 1
    for w in waits:
        assert w.end >= copy.end
        assert w.start in {r.end for r in runs}
        assert not [r for r in runs if r.start < w.end and w.start < r.end]


def test_delays_keep_to_their_limit() -> None:
    def longest(**options: int) -> int:
        return max(s.end - s.start for seed in range(30) for s in copied(seed, **options).spans if s.kind == "async")

    assert longest(longest_delay=50) <= 50
    assert longest() > 5_000


@pytest.mark.parametrize("seed", range(12))
def test_lanes_wait_for_their_copies_in_two_branches(seed: int) -> None:
    """Both sides are let go at their meeting."""
    out: NDArray[np.uint32] = np.zeros(64, np.uint32)
    run(
        f"""{ONE} mov.u32 %r10, smem; shl.b32 %r2, %r1, 3; add.u32 %r3, %r10, %r2; mov.b64 %rd3, 5;
st.shared.b64 [%r3], %rd3; fence.proxy.async.shared::cta; bar.sync 0; setp.gt.u32 %p3, %r1, 1; @%p3 bra END;
@%p1 bra A;
cp.async.bulk.global.shared::cta.bulk_group [%rd100], [%r10], 128;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; bra END;
A: add.u64 %rd4, %rd100, 128; add.u32 %r4, %r10, 128;
cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%r4], 128;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: bar.sync 0;""",
        [out],
        shared=256,
        seed=seed,
    )
    assert out.tolist() == [5, 0] * 32
