"""What the simulator and the comparison say about a planted fault."""

from __future__ import annotations

from flamia.conformance.simulator.machine.faults import Fault
from flamia.kernels.nvrtc import CompileError
from tests.blackwell.faults import WRONG, PlantedFault
from tests.blackwell.forward import run


def find(fault: PlantedFault) -> tuple[str, str]:
    """Kind and message of what is found, over the fault's seeds; two empty strings for nothing."""
    build = fault.planted()
    options = {"lengths": (160,), "heads": (1, 1), **dict(fault.options)}
    for seed in range(fault.seeds):
        try:
            _, wrong = run(build, seed=seed, strict=fault.strict, **options)
        except CompileError as error:
            return "CompileError", str(error)
        except Fault as found:
            return found.kind, str(found)
        if wrong is not None:
            return WRONG, wrong
    return "", ""
