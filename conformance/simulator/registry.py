"""Which kernels ``flamia simulate run`` knows: names, and their cases by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from flamia.conformance.simulator.case import Case, Simulated


def _gemm_cases() -> Mapping[str, Simulated]:
    from flamia.conformance.simulator.examples.gemm import VARIANTS, gemm_case

    names = ("k_k", "k_mn", "mn_k", "mn_mn", "nvfp4")
    return {name: gemm_case(variant) for name, variant in zip(names, VARIANTS, strict=True)}


def _agreement_cases() -> Mapping[str, Simulated]:
    from flamia.conformance.simulator.agreement.as_case import as_case
    from flamia.conformance.simulator.agreement.kernels import KERNELS

    return {name: as_case(kernel) for name, kernel in KERNELS.items()}


_PACK = "a small pack: 130, 1, 0 and 33 tokens, bfloat16"


def _host_cases(name: str, summary: str = _PACK) -> Callable[[], Mapping[str, Simulated]]:
    """Those of a function of `kernel_cases`."""

    def cases() -> Mapping[str, Simulated]:
        from flamia.conformance.simulator import kernel_cases

        return kernel_cases.kernel_cases(getattr(kernel_cases, name), summary)

    return cases


def _forward_cases() -> Mapping[str, Simulated]:
    from flamia.conformance.simulator.attention import forward_cases

    return forward_cases()


SUBJECTS: dict[str, tuple[str, Callable[[], Mapping[str, Simulated]]]] = {
    "gemm": ("example: a block-scaled product on tcgen05, warp-specialised", _gemm_cases),
    "schedule": ("the schedule kernel, through its host code; needs PyTorch", _host_cases("schedule")),
    "quantize": ("the quantization kernel, through its host code; needs PyTorch", _host_cases("quantize")),
    "row_pass": ("the backward's row pre-pass, through its host code; needs PyTorch", _host_cases("row_pass")),
    "decode": ("quantized tiles back to tokens, through its host code; needs PyTorch", _host_cases("decode")),
    "epilogue": ("gradients from FP32 tiles, through its host code; needs PyTorch", _host_cases("epilogue")),
    "formats": (
        "number conversions, through their host code; needs PyTorch",
        _host_cases("conversions", "random float32 bits"),
    ),
    "blackwell_forward": ("attention forward on Blackwell", _forward_cases),
    "agreement": ("the kernels that also ran on an H200", _agreement_cases),
}
"""Kernel -> what it is, and its cases."""


def find_case(kernel: str, case: str | None = None) -> Simulated:
    """A case by names; without a case, the kernel's first. ``package.module:attribute`` is a `Case` of one's own.

    :raises ValueError: for names that are not known, with those that are.
    """
    if ":" in kernel:
        if case is not None:
            raise ValueError(f"case must not be given with {kernel}, which is one case, got {case!r}")
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
        case = next(iter(cases))
    if case not in cases:
        raise ValueError(f"case of {kernel} must be one of {list(cases)}, got {case!r}")
    named: Any = replace(cases[case], name=f"{kernel} {case}")  # type: ignore[type-var]
    chosen: Simulated = named
    return chosen
