"""Level 1 of the conformance suite on a GPU: every case, byte for byte."""

import pytest

from flamia.conformance import resolve_target, run

pytest.importorskip("torch", reason="PyTorch is not installed")
from flamia.conformance.targets import cuda


def failures(report):
    return {r.name: r.message for r in report.failures()}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"])
@pytest.mark.parametrize("size", ["quick", "full"])
def test_every_case_of_level_1(gpu, size, recipe):
    report = run("cuda", levels=[1], size=size, recipe=recipe)
    assert failures(report) == {}
    assert report.count("passed") == len(report.results) > 70
    assert sum(r.numbers["stages"] for r in report.results) > 8 * len(report.results)
    assert report.environment["compute capability"] and report.environment["compiler"].startswith("NVRTC")


def test_other_levels_are_not_applicable(gpu):
    report = run("cuda", cases=["documents/padding"], levels=[1, 2, 3, 4, 5])
    assert [report.level_status(level) for level in (1, 2, 3, 4, 5)] == ["passed"] + ["not_applicable"] * 4


@pytest.mark.parametrize(
    ("field", "stage"), [("payload", "v.payload_tiles"), ("scales", "v.scale_tiles"), ("token_scales", "v.scale_tiles")]
)
def test_one_wrong_byte_is_found(gpu, monkeypatch, field, stage):
    def spoil(*arguments, **options):
        got = quantize(*arguments, **options)
        getattr(got.v, field)[0, 0, 5] += 1
        return got

    quantize = cuda.quantize_qkv
    monkeypatch.setattr(cuda, "quantize_qkv", spoil)
    (message,) = failures(run("cuda", levels=[1], cases=["documents/padding"])).values()
    assert stage in message


def test_recipes_of_other_operands_are_refused(gpu):
    report = run(resolve_target("cuda", recipe="cudnn_mxfp8"), levels=[1], cases=["documents/padding"])
    assert "recipe.scores must be one of ['TOKEN', 'NVFP4'] for the kernels" in next(iter(failures(report).values()))
