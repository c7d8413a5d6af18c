"""The Blackwell backward gives the reference's bits on the simulator."""

from __future__ import annotations

import pytest

from flamia.conformance.simulator.attention_backward import Build
from flamia.kernels.targets import SM_100A, SM_103A
from tests.blackwell.backward import check


@pytest.mark.parametrize(
    ("recipe", "dim", "target", "lengths", "heads", "causal"),
    [
        ("mxfp8", 128, SM_100A, (0, 160, 33), (3, 1), True),
        ("nvfp4_fp8", 64, SM_103A, (129, 1), (1, 1), True),
        ("mxfp8", 64, SM_103A, (130,), (1, 1), False),
    ],
    ids=["mxfp8 d128 gqa", "nvfp4 d64 sm_103a", "mxfp8 d64 full"],
)
def test_gradients_and_tiles_have_the_bits_of_the_reference(recipe, dim, target, lengths, heads, causal):  # type: ignore[no-untyped-def]
    outcome = check(Build(recipe, dim, target), lengths, heads, causal)
    assert all(not report.approximate for report in outcome.reports.values())


def test_a_strict_build_relies_on_nothing_that_ptx_does_not_promise() -> None:
    outcome = check(Build(dim=64, strict=1, hooks=0), (140,), (1, 1), strict=True)
    assert all(not report.unpromised for report in outcome.reports.values())
