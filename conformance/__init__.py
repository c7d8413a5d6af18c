"""The conformance suite: does an implementation of attention leak, drift or break?

`run` puts any callable ``f(q, k, v, cu_seqlens, *, causal, softmax_scale) -> out`` through six levels and returns a
`Report`; ``flamia conform`` does the same from the command line. An implementation that promises the bits of
``flamia.reference`` is compared with it byte for byte; any other is held to the promises and to an accuracy budget.
"""

from flamia.conformance.calls import Inputs, Results
from flamia.conformance.cases import CASES, Case
from flamia.conformance.results import LEVELS, SUITE_VERSION, CaseResult, Report
from flamia.conformance.runner import run
from flamia.conformance.targets import Target, TargetUnavailableError, resolve_target

__all__ = [
    "CASES",
    "LEVELS",
    "SUITE_VERSION",
    "Case",
    "CaseResult",
    "Inputs",
    "Report",
    "Results",
    "Target",
    "TargetUnavailableError",
    "resolve_target",
    "run",
]
