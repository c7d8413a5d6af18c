"""The whole path of a call on Blackwell up to the launch, with the simulator in the GPU's place."""

import pytest

from flamia.conformance import resolve_target, run
from flamia.conformance.targets import PROMISES

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("target", "recipe", "case"),
    [("simulator:sm_100a", "mxfp8", "documents/padding"), ("simulator:sm_103a", "nvfp4_fp8", "extremes/nan_in_k")],
)
def test_a_case_passes_levels_1_2_and_5(target: str, recipe: str, case: str) -> None:
    report = run(target, levels=[1, 2, 5], cases=[case], recipe=recipe)
    assert [r.message for r in report.failures()] == []
    assert [report.level_status(level) for level in (1, 2)] == ["passed", "passed"]
    assert report.profile == "blackwell"
    assert report.environment["device"] == f"simulated {target.split(':')[1]}"


def test_gradients_and_the_promises_about_them_are_claimed() -> None:
    target = resolve_target("simulator:sm_100a")
    assert target.backward and target.promises == frozenset(PROMISES)
    report = run(target, levels=[3], cases=["extremes/nan_in_k"])
    assert [r.message for r in report.failures()] == []
    (result,) = report.results
    # delta; P, dS and their scales for four heads and the five tiles of three documents; dQ, dK and dV
    assert result.status == "passed" and result.numbers["stages"] == 1 + 4 * 4 * 5 + 3


def test_the_backwards_p_is_the_forwards() -> None:
    report = run("simulator:sm_103a", levels=[4], cases=["values/rising_logits"], promises=["consistency"])
    (result,) = (r for r in report.results if r.check == "consistency")
    assert result.status == "passed", result.message
    assert result.numbers["compared"] > 1000


def test_another_recipe_is_refused() -> None:
    report = run("simulator:sm_100a", levels=[2], cases=["documents/padding"], recipe="bf16")
    assert "recipe must be one of ('mxfp8', 'nvfp4_fp8')" in report.results[0].message


def test_malformed_arguments_are_refused() -> None:
    report = run("simulator:sm_100a", levels=[4], cases=["arguments/malformed"])
    (result,) = report.results
    assert result.status == "passed", result.message


def test_float16_rounds_the_same_rows() -> None:
    import torch

    from flamia.conformance.simulator.host import simulated_device
    from flamia.kernels.blackwell import attention_forward
    from flamia.kernels.targets import SM_100A

    generator = torch.Generator().manual_seed(0)
    with simulated_device(SM_100A):
        q, k, v = (torch.randn((40, 1, 64), generator=generator).half() for _ in range(3))
        cu = torch.tensor([0, 40])
        half = attention_forward(q, k, v, cu)
        full = attention_forward(q.float(), k.float(), v.float(), cu)
    assert half.out.dtype == torch.float16
    assert torch.equal(half.out, full.out.half())
    assert torch.equal(half.l, full.l) and torch.equal(half.lse, full.lse)
