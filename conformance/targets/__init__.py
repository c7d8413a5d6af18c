"""Targets: whatever computes attention, behind one interface.

`base` holds the interface, `reference` and `callables` the two general kinds, `resolve` turns names into targets.
"""

from flamia.conformance.targets.base import PROMISES, Target, TargetUnavailableError
from flamia.conformance.targets.callables import CallableTarget
from flamia.conformance.targets.reference import ReferenceTarget
from flamia.conformance.targets.resolve import BUILT_IN, build_target, resolve_target

__all__ = [
    "BUILT_IN",
    "PROMISES",
    "CallableTarget",
    "ReferenceTarget",
    "Target",
    "TargetUnavailableError",
    "build_target",
    "resolve_target",
]
