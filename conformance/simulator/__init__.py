"""A machine that executes PTX on the CPU, bit for bit, and finds what the assembler does not look for.

`simulate` runs an entry of a PTX module on NumPy arrays. Asynchronous operations complete after seeded random delays
and warps run in a seeded random order, so that a missing wait shows; every rule that a kernel breaks is a `Fault`, with
the lines of PTX and CUDA C++, the warp, the lanes and the address.
"""

from flamia.conformance.simulator.machine.devicememory import DeviceMemory, Uninitialised
from flamia.conformance.simulator.machine.faults import Fault
from flamia.conformance.simulator.machine.launch import Report, simulate
from flamia.conformance.simulator.ptx import PtxError, parse

__all__ = ["DeviceMemory", "Fault", "PtxError", "Report", "Uninitialised", "parse", "simulate"]
