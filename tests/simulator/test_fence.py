"""Fences: which forms exist, and on which paths a proxy fence orders a generic store before an asynchronous read."""

import numpy as np
import pytest

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.ptx.syntax import PtxError
from tests.simulator.kernels import ONE, run

FORMS = [
    *(f"membar.{level}" for level in ("cta", "gl", "sys")),
    *(f"fence.{scope}" for scope in ("cta", "cluster", "gpu", "sys")),
    *(f"fence.{sem}.{scope}" for sem in ("sc", "acq_rel", "acquire", "release") for scope in ("cta", "cluster", "gpu")),
    "fence.acquire.sync_restrict::shared::cluster.cluster",
    "fence.release.sync_restrict::shared::cta.cluster",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.async",
    "fence.proxy.async.global",
    "fence.proxy.async.shared::cta",
    "fence.proxy.async.shared::cluster",
    "fence.proxy.alias",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
    "fence.proxy.tensormap::generic.release.gpu",
]


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    run(f"{form};", [np.zeros(1, np.uint32)])


@pytest.mark.parametrize("form", ["fence.acq_rel", "membar.gpu", "fence.mbarrier_init.acquire.cluster", "fence.sc"])
def test_forms_that_do_not_exist(form):
    with pytest.raises(PtxError, match=r"'(fence|membar)"):
        run(f"{form};", [np.zeros(1, np.uint32)])


FENCE = "fence.proxy.async.shared::cta;\n"
STORE = "mad.lo.u32 %r4, %r1, 4, %r3;\nst.shared.u32 [%r4], %r1;\n"
BARRIER = "bar.sync 0;\n"


def send(*, writer, sync, reader, seed=0):
    """Warp 1 stores; a thread of warp 0 sends it all out. Each of the three pieces is PTX."""
    out = np.zeros(64, np.uint32)
    run(
        f"""{ONE}
mov.u32 %r3, smem;
setp.lt.u32 %p3, %r1, 32;
{writer}
{sync}
{reader}
@!%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd100], [%r3], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:""",
        [out],
        block=64,
        shared=256,
        seed=seed,
        zero_shared=True,
    )
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("writer", "reader"), [(STORE + FENCE, ""), (STORE, FENCE)], ids=["the writer fences", "the reader fences"]
)
def test_a_fence_on_the_path(writer, reader, seed):
    """PTX asks for a proxy fence somewhere between the store and the asynchronous read, on the path of barriers."""
    assert np.array_equal(send(writer=writer, sync=BARRIER, reader=reader, seed=seed), np.arange(64))


UNORDERED = {
    "none": (STORE, BARRIER, ""),
    "before the store": (FENCE + STORE, BARRIER, ""),
    "of another kind": (STORE, BARRIER, "@%p3 fence.acq_rel.cta;\n"),
    "by the reader, before the barrier": (STORE, "@%p3 " + FENCE + BARRIER, ""),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fence", UNORDERED)
def test_no_fence_on_the_path(fence, seed):
    writer, sync, reader = UNORDERED[fence]
    with pytest.raises(faults.MissingProxyFence, match="generic store wrote"):
        send(writer=writer, sync=sync, reader=reader, seed=seed)
