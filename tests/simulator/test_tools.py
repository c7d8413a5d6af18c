"""Timelines, counts, the cycle model and sweeps."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flamia.conformance.simulator.case import Case, Data
from flamia.conformance.simulator.machine.launch import Report
from flamia.conformance.simulator.machine.trace import Span
from flamia.conformance.simulator.registry import SUBJECTS, find_case
from flamia.conformance.simulator.tools import count_by_role, draw_timeline, estimate_cycles, format_timeline, sweep
from flamia.conformance.simulator.tools.roles import role_of
from flamia.kernels.targets import SM_90A

ROLES = {"load": (1,), "work": (0, 2)}


def report(spans: list[Span] | None = None, target: str = "sm_100a") -> Report:
    executed = {
        "CTA 0 warp 0": Counter({"fma.rn.f32": 8, "ex2.approx.ftz.f32": 4, "ld.shared.v4.f32": 2}),
        "CTA 0 warp 1": Counter({"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": 3}),
        "CTA 0 warp 2": Counter({"fma.rn.f32x2": 8, "tcgen05.ld.sync.aligned.32x32b.x32.b32": 1}),
        "CTA 0 warp 4": Counter({"tcgen05.mma.cta_group::1.kind::f16": 5}),
    }
    return Report("k", target, 0, executed, Counter(), {}, 100, spans or [])


def test_roles_are_found_by_warp() -> None:
    assert role_of("CTA (1, 0, 0) warp 2", ROLES) == "CTA (1, 0, 0) work"
    assert role_of("CTA 3 warp 7", ROLES) == "CTA 3 warp 7"
    assert role_of("CTA 3 warp 1 tensor memory", ROLES) == "CTA 3 load tensor memory"
    assert role_of("CTA 3 copy engine", ROLES) == "CTA 3 copy engine"


def test_counts_add_up_per_role() -> None:
    counts = count_by_role(report(), ROLES)
    assert counts["CTA 0 work"] == Counter({"fma": 16, "ex2": 4, "ld": 2, "tcgen05.ld": 1})
    assert counts["CTA 0 load"] == Counter({"cp.async.bulk": 3})
    assert list(count_by_role(report(), ROLES, full=True)["CTA 0 warp 4"]) == ["tcgen05.mma.cta_group::1.kind::f16"]


def test_the_cycle_model_adds_up_each_unit() -> None:
    rows = estimate_cycles(report(), ROLES)
    work = rows["CTA 0 work"]
    assert work["FP32"] == 8 * 0.25 + 8 * 0.5
    assert work["MUFU"] == 4 * 2  # 16 lanes per clock
    assert estimate_cycles(report(target="sm_103a"), ROLES)["CTA 0 work"]["MUFU"] == 4
    assert work["shared memory"] == 2 * 32 * 16 / 128
    assert work["tensor memory"] == 32 * 4 * 32 / 512
    assert work["issue"] == 14  # warps 0 and 2 have schedulers of their own
    assert rows["CTA 0 warp 4"]["tensor core"] == 5 * 64
    assert estimate_cycles(report(), ROLES, mma_n=256)["CTA 0 warp 4"]["tensor core"] == 5 * 128
    with pytest.raises(ValueError, match="got sm_90a"):
        estimate_cycles(report(target="sm_90a"), ROLES)


SPANS = [
    Span("CTA 0 warp 0", "run", "", 0, 50),
    Span("CTA 0 warp 2", "wait", "mbarrier", 0, 80),
    Span("CTA 0 warp 1", "run", "", 0, 10),
    Span("CTA 0 warp 1", "wait", "mbarrier", 10, 100),
    Span("CTA 0 copy engine", "async", "cp.async.bulk (PTX line 3)", 10, 60),
    Span("CTA 0 copy engine", "async", "cp.async.bulk (PTX line 4)", 20, 60),
]


def test_the_text_timeline_shows_who_runs_waits_and_works() -> None:
    lines = format_timeline(report(SPANS), ROLES, width=10).splitlines()
    assert lines[1:] == [
        "CTA 0 load        █·········",
        "CTA 0 work        █████···  ",
        "CTA 0 copy engine  ▒▒▒▒▒    ",
    ]
    with pytest.raises(ValueError, match="trace=True"):
        format_timeline(report(), ROLES)


def test_the_picture_has_a_lane_per_role_and_engine(tmp_path: Path) -> None:
    figure = draw_timeline(report(SPANS), ROLES, tmp_path / "t.png", title="t")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["CTA 0 load", "CTA 0 work", "CTA 0 copy engine"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert {t.get_text() for t in figure.legends[0].get_texts()} == {"runs", "waits", "cp.async.bulk"}


SOURCE = """
extern "C" __global__ void __launch_bounds__(64) kernel(const unsigned* a, unsigned* b) {
  __shared__ unsigned s[64];
  s[threadIdx.x] = a[threadIdx.x];
  BARRIER
  b[threadIdx.x] = s[63 - threadIdx.x] + 1;
}
"""


def reversal(barrier: str = "__syncthreads();", plus: int = 1) -> Case:
    def draw(seed: int) -> Data:
        a = np.random.default_rng(seed).integers(0, 1 << 31, 64, np.uint32)
        b = np.zeros(64, np.uint32)
        return Data([a, b], {"b": (b, a[::-1] + np.uint32(plus))})

    return Case("reversal", "", SOURCE.replace("BARRIER", barrier), "kernel", SM_90A, draw, 64)


def test_a_sweep_tells_right_from_wrong_bytes_and_faults() -> None:
    assert sweep(reversal(), range(5)).passed == [0, 1, 2, 3, 4]
    wrong = sweep(reversal(plus=2), range(3))
    assert not wrong.right and wrong.found() == Counter({"wrong bytes": 3})
    assert wrong.mismatches[0].startswith("b[0] (byte 0): got ")
    broken = sweep(reversal("__syncwarp();"), range(8))
    assert set(broken.found()) == {"UnwrittenRead"}, "half of the array is written by the other warp"
    assert len(sweep(reversal(plus=2), range(3), stop=True).mismatches) == 1


def test_cases_are_found_by_name() -> None:
    assert find_case("gemm", "mn_mn").name == "gemm mn_mn"
    assert find_case("agreement", "prmt").target is SM_90A
    assert find_case("tests.simulator.test_tools:OWN") is OWN
    for kernel, case, text in (
        ("gem", None, "kernel must be one of"),
        ("gemm", "x", "case of gemm must be one of"),
        ("tests.simulator.test_tools:ROLES", None, "must be a flamia.conformance.simulator.case.Case, got dict"),
        ("no_such_module:x", None, "cannot be imported"),
    ):
        with pytest.raises(ValueError, match=text):
            find_case(kernel, case)
    assert set(SUBJECTS) >= {"gemm", "agreement"}


OWN = replace(reversal(), name="own")
WRONG = reversal(plus=2)
