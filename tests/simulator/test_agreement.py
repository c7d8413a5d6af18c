"""The simulator against what an H200 gave."""

import dataclasses

import numpy as np
import pytest

from flamia.conformance.simulator.agreement.case import UNWRITTEN, Output
from flamia.conformance.simulator.agreement.kernels import KERNELS, find_kernels
from flamia.conformance.simulator.agreement.record import Record
from flamia.conformance.simulator.agreement.results import Run, compare
from flamia.conformance.simulator.agreement.simulated import run_on_simulator

RECORD = Record.read()


@pytest.mark.parametrize("name", KERNELS)
def test_the_simulator_gives_the_bits_of_the_chip(name: str) -> None:
    kernel = KERNELS[name]
    # Which lane elect.sync elects is open; with schedule 0 it is the chip's.
    run = run_on_simulator([kernel], RECORD.seed, schedule=0 if name == "lanes" else 1)
    assert not run.errors
    assert run.digests[name] == RECORD.ptx[name], "another compiler: the record is of other PTX"
    verdict = RECORD.compare(kernel, run)
    assert verdict.values == sum(o.allocate().size for o in kernel.outputs)
    if kernel.exact:
        assert verdict.agrees, verdict.first


def test_there_are_enough_kernels_and_all_are_recorded() -> None:
    assert len(KERNELS) >= 40
    assert RECORD.rows.keys() == KERNELS.keys()
    assert "H200" in RECORD.place


def runs() -> tuple[Run, Run]:
    """Two runs of one kernel that differ in one bit of form 1, element 5."""
    kernel = KERNELS["f32_to_16_bit"]
    arrays = [np.zeros(o.shape, o.dtype) for o in kernel.outputs for _ in range(2)]
    arrays[1][1, 5] = 0x8000
    return tuple(Run(place, 0, outputs={kernel.name: {"d": x}}) for place, x in zip("ab", arrays, strict=True))  # type: ignore[return-value]


def test_a_difference_names_the_form_and_its_operand() -> None:
    kernel = KERNELS["f32_to_16_bit"]
    verdict = compare(kernel, *runs())
    assert (verdict.differing, verdict.values) == (1, kernel.outputs[0].allocate().size)
    assert verdict.first == ("f32_to_16_bit.d[1, 5]: a 0x0000, b 0x8000; cvt.rz.f16.f32 of a = 0x3f7fffff")


def test_a_record_names_the_part_that_differs() -> None:
    a, b = runs()
    kernel = KERNELS["f32_to_16_bit"]
    record = Record.of(a)
    assert record.compare(kernel, a).agrees
    found = record.compare(kernel, b)
    assert "1 of 9 parts differ, part 1, cvt.rz.f16.f32" in found.first
    assert "seed 0, the run of seed 3" in record.compare(kernel, dataclasses.replace(a, seed=3)).first
    assert "no record of it" in record.compare(KERNELS["prmt"], a).first


def test_a_run_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    a, _ = runs()
    a.errors["prmt"] = "broke"
    a.write(tmp_path / "deep" / "run.npz")
    again = Run.read(tmp_path / "deep" / "run.npz")
    assert again.errors == a.errors and again.place == "a"
    np.testing.assert_array_equal(again.outputs["f32_to_16_bit"]["d"], a.outputs["f32_to_16_bit"]["d"])


def test_outputs_start_as_a_pattern_that_shows_missing_stores() -> None:
    assert (Output("x", (3,), np.uint32).allocate().view(np.uint8) == UNWRITTEN).all()


def test_inputs_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    kernel = KERNELS["f32_add"]
    one, again, other = (kernel.draw(s)["b"].view(np.uint32) for s in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_unknown_kernels_are_named() -> None:
    with pytest.raises(ValueError, match="got 'f33'"):
        find_kernels(["f33"])
    assert {k.family for k in find_kernels(["wgmma"])} == {"wgmma"}
