"""Probes against the model itself: they pass on it, and tell a chip that differs from it."""

from dataclasses import replace

import pytest

from flamia.conformance import run
from flamia.conformance.probes import machines_of, probes_of
from flamia.conformance.probes.conversions import corners
from flamia.reference import tensorcore
from flamia.reference.formats import E4M3

MACHINES = [m for capability in ((9, 0), (10, 0)) for m in machines_of(capability)]


def chip(machine, **changes):
    """A machine whose chip behaves like its model, but for some changes."""
    step = replace(machine.step, **changes)

    def multiply(x, device):
        return tensorcore.mma(x.a, x.b, x.c, step, scale_a=x.scale_a, scale_b=x.scale_b)

    return replace(machine, multiply=multiply)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_directed_probes_measure_the_model(machine) -> None:
    probes = dict(probes_of(chip(machine)))
    found = {name: probe("cpu") for name, probe in probes.items() if name != "random"}
    assert {o.status for o in found.values()} == {"passed"}
    assert found["alignment"].numbers["fraction_bits"] == machine.step.fraction_bits


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
@pytest.mark.parametrize("by", [-1, 1])
def test_another_alignment_is_measured(machine, by: int) -> None:
    outcome = dict(probes_of(chip(machine, fraction_bits=machine.step.fraction_bits + by)))["alignment"]("cpu")
    assert outcome.status == "failed"
    assert outcome.numbers["fraction_bits"] == machine.step.fraction_bits + by


def test_a_longer_accumulator_is_measured() -> None:
    machine = next(m for m in MACHINES if m.name == "wgmma_e4m3")
    outcome = dict(probes_of(chip(machine, accumulator_bits=15)))["accumulator"]("cpu")
    # F = 13 already drops the bit that a longer accumulator would keep
    assert outcome.status == "passed"
    shorter = dict(probes_of(chip(machine, accumulator_bits=12)))["accumulator"]("cpu")
    assert shorter.status == "failed" and shorter.numbers["accumulator_fraction_bits"] == 11


def test_the_conversion_corners_hold_ties_and_saturation() -> None:
    values = set(corners(E4M3).tolist())
    assert {448.0, 464.0, 2.0**-10, 2.0**-9, 17.0, 0.0} <= values


def test_on_a_cpu_there_are_no_probes() -> None:
    (result,) = run("reference", levels=[0]).results
    assert result.status == "not_applicable" and "CUDA" in result.message
