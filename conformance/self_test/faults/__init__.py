"""The planted faults, by what they are in."""

from flamia.conformance.self_test.fault import Fault, index_faults
from flamia.conformance.self_test.faults import backward, calls, forward, layouts, machine, numbers

FAULTS: dict[str, Fault] = index_faults(
    fault for module in (numbers, layouts, forward, backward, machine, calls) for fault in module.FAULTS
)
"""Every fault by name."""
