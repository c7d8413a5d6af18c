"""Cases: named, seeded, documented generators of inputs.

`CASES` holds every case by name. A case is a function ``(rng) -> Inputs`` under the `case` decorator; its docstring
says what it is and names the trigger of each bug class that it covers.
"""

# importing these modules fills the registry
from flamia.conformance.cases import arguments, documents, extremes, gaps, heads, leaks, strides, values  # noqa: F401
from flamia.conformance.cases.registry import (
    BUG_CLASSES,
    CASES,
    SIZES,
    Case,
    PlanRequest,
    Variant,
    case,
    find_larger_sizes,
    select_cases,
)

__all__ = [
    "BUG_CLASSES",
    "CASES",
    "SIZES",
    "Case",
    "PlanRequest",
    "Variant",
    "case",
    "find_larger_sizes",
    "select_cases",
]
