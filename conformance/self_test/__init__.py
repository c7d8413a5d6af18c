"""The suite against itself: faults planted in a copy of the reference, every one of which it must find."""

from flamia.conformance.self_test.fault import Fault, Kill
from flamia.conformance.self_test.faults import FAULTS
from flamia.conformance.self_test.runner import SelfTest, Verdict, run_self_test, try_fault

__all__ = ["FAULTS", "Fault", "Kill", "SelfTest", "Verdict", "run_self_test", "try_fault"]
