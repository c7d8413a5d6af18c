"""Which kernels ``flamia simulate run`` knows: names, and their cases by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from flamia.conformance.simulator.case import Case


def _gemm_cases() -> dict[str, Case]:
    from flamia.conformance.simulator.examples.gemm import VARIANTS, gemm_case

    names = ("k_k", "k_mn", "mn_k", "mn_mn", "nvfp4")
    return {name: gemm_case(variant) for name, variant in zip(names, VARIANTS, strict=True)}


def _agreement_cases() -> dict[str, Case]:
    from flamia.conformance.simulator.agreement.as_case import as_case
    from flamia.conformance.simulator.agreement.kernels import KERNELS

    return {name: as_case(kernel) for name, kernel in KERNELS.items()}


SUBJECTS: dict[str, tuple[str, Callable[[], dict[str, Case]]]] = {
    "gemm": ("example: a block-scaled product on tcgen05, warp-specialised", _gemm_cases),
    "agreement": ("the kernels that also ran on an H200", _agreement_cases),
}
"""Kernel -> what it is, and its cases."""


def find_case(kernel: str, case: str | None = None) -> Case:
    """A case by names; without a case, the kernel's first. ``package.module:attribute`` is a `Case` of one's own.

    :raises ValueError: for names that are not known, with those that are.
    """
    if ":" in kernel:
        module, _, attribute = kernel.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"kernel {kernel} cannot be imported: {error}") from error
        if not isinstance(found, Case):
            raise ValueError(
                f"kernel {kernel} must be a flamia.conformance.simulator.case.Case, got {type(found).__name__}"
            )
        return found
    if kernel not in SUBJECTS:
        raise ValueError(f"kernel must be one of {sorted(SUBJECTS)} or package.module:attribute, got {kernel!r}")
    cases = SUBJECTS[kernel][1]()
    if case is None:
        return next(iter(cases.values()))
    if case not in cases:
        raise ValueError(f"case of {kernel} must be one of {list(cases)}, got {case!r}")
    return replace(cases[case], name=f"{kernel} {case}")
