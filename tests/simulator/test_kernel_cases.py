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
