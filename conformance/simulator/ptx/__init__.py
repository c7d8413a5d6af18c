"""The front end: PTX text to a `Module`."""

from flamia.conformance.simulator.ptx.parser import parse
from flamia.conformance.simulator.ptx.syntax import Function, Instruction, Module, PtxError

__all__ = ["Function", "Instruction", "Module", "PtxError", "parse"]
