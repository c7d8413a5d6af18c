"""The quantization kernels on the simulator, by name."""

from dataclasses import replace

import pytest

from flamia.conformance.simulator.kernel_cases import HostCase
from flamia.conformance.simulator.registry import find_case
from flamia.conformance.simulator.tools import sweep

pytest.importorskip("torch")


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_quantization_gives_the_bytes_of_the_reference(target: str) -> None:
    case = find_case("quantize", target)
    report, data = case.simulate(seed=1)
    assert (report.target, report.entry) == (target, "quantize")
    assert len(data.expected) == 8 and data.mismatch() is None


def test_the_schedule_is_right_and_a_wrong_expectation_is_named() -> None:
    case = find_case("schedule")
    assert isinstance(case, HostCase)
    assert sweep(case, range(2)).right

    def off_by_one(device: object, seed: int) -> dict[str, tuple]:  # type: ignore[type-arg]
        return {name: (got, expected + 1) for name, (got, expected) in case.run(device, seed).items()}

    assert sweep(replace(case, run=off_by_one), [0]).mismatches[0].startswith("tile_offsets[0] (byte 0): got 0")


@pytest.mark.parametrize(
    ("kernel", "entry", "names"),
    [
        ("row_pass", "row_pass", ["dO payload", "delta", "top"]),
        ("decode", "decode_tokens", ["blocks of 1", "blocks of 32"]),
        ("epilogue", "reduce_heads", ["out"]),
        ("formats", "convert", ["e4m3", "e4m3_software", "e2m1", "e2m1_software"]),
    ],
)
def test_other_kernels_give_what_the_reference_says(kernel: str, entry: str, names: list[str]) -> None:
    for seed, target in enumerate(("sm_90a", "sm_100a")):
        report, data = find_case(kernel, target).simulate(seed=seed)
        assert data.mismatch() is None and list(data.expected) == names
        assert report.target == target and report.entry == entry
        assert all(expected.any() for _, expected in data.expected.values())
