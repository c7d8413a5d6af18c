"""A machine that executes PTX on the CPU, bit for bit, and finds what the assembler does not look for.

`simulate` runs an entry of a PTX module on NumPy arrays. Asynchronous operations complete after seeded random delays
and warps run in a seeded random order, so that a missing wait shows; every rule that a kernel breaks is a `Fault`, with
the lines of PTX and CUDA C++, the warp, the lanes and the address.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.devicememory import DeviceMemory, Uninitialised
    from flamia.conformance.simulator.machine.faults import Fault
    from flamia.conformance.simulator.machine.launch import Report, simulate
    from flamia.conformance.simulator.ptx import PtxError, parse

__all__ = ["DeviceMemory", "Fault", "PtxError", "Report", "Uninitialised", "parse", "simulate"]

_HOMES = {
    "DeviceMemory": "machine.devicememory",
    "Uninitialised": "machine.devicememory",
    "Fault": "machine.faults",
    "Report": "machine.launch",
    "simulate": "machine.launch",
    "PtxError": "ptx",
    "parse": "ptx",
}
"""Name -> its module, which is imported when the name is first used: the command line asks for none of them."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
