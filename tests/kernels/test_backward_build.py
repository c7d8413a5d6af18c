"""The Hopper backward without a GPU: what the assembler made of it, and its bits on the simulator."""

import pytest

from flamia.kernels import disassembly, registry, targets
from flamia.kernels.build import build, read_report

WAYS = (("mxfp8", 0), ("mxfp8", 1), ("bf16", 0))
UNITS = [
    *(
        registry.HOPPER_BACKWARD_KEYS.unit(recipe=r, element="bf16", dim=d, widens=w)
        for d in (64, 128)
        for r, w in WAYS
    ),
    *(registry.HOPPER_BACKWARD_DQ.unit(recipe=r, element="bf16", dim=d) for d in (64, 128) for r in ("mxfp8", "bf16")),
]


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
def test_products_are_asynchronous_and_nothing_spills(nvrtc, unit):
    options = (*registry.OPTIONS, *unit.defines)
    compiled = nvrtc.compile(unit.kernel.source, unit.source(), unit.headers(), targets.SM_90A, options)
    assert "serialized" not in compiled.log, compiled.log
    (report,) = read_report(compiled)
    assert report.spill_bytes == report.stack_bytes == 0
    assert report.dynamic_shared_bytes <= 227 * 1024


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
def test_the_products_are_in_the_machine_code(nvrtc, cold_cache, unit):
    try:
        sass = disassembly.disassemble(build(unit, targets.SM_90A).cubin)
    except disassembly.DisassemblerNotFoundError as error:
        pytest.skip(str(error))
    (counts,) = disassembly.count_instructions(sass).values()
    found = disassembly.group_opcodes(counts)
    scaled_products = unit.kernel is registry.HOPPER_BACKWARD_KEYS and unit.values[0] == "mxfp8"
    assert found["HGMMA"] > 0 and (found["QGMMA"] > 0) == scaled_products
    assert "LDL" not in found and "STL" not in found


@pytest.mark.parametrize("name", ["half_tile", "one_tile", "two_tiles", "full_tile", "high_tops", "lost_tokens"])
def test_bits_on_the_simulator(nvrtc, cold_cache, monkeypatch, to_numpy, name):
    pytest.importorskip("torch")
    from flamia.conformance.simulator.host import simulated_device
    from flamia.kernels import hopper_backward

    from .test_device_backward import CASES, differences

    (case,) = (c for c in CASES if c.name == name)
    monkeypatch.setattr(hopper_backward, "count_multiprocessors", lambda device: 2)
    with simulated_device(targets.SM_90A) as (device, _):
        found = differences(case, device, to_numpy)
    assert not found, "\n".join(found)
