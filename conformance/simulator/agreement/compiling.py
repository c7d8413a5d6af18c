"""The kernels as PTX and machine code."""

from __future__ import annotations

import hashlib
import re

from flamia.conformance.simulator.agreement.case import Kernel, headers
from flamia.kernels.nvrtc import Compiled, load_nvrtc
from flamia.kernels.targets import SM_90A

OPTIONS = ("--std=c++17", "--fmad=false", "--generate-line-info")


def compile_kernel(kernel: Kernel) -> tuple[Compiled, str]:
    """PTX and machine code for sm_90a, and the compiler's name.

    :raises flamia.kernels.nvrtc.CompileError: with its log.
    """
    nvrtc = load_nvrtc()
    compiled = nvrtc.compile(f"{kernel.name}.cu", kernel.text, headers(), SM_90A, OPTIONS)
    return compiled, f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}"


def digest_ptx(ptx: bytes) -> str:
    """SHA-256 of PTX, but for the paths of its sources."""
    return hashlib.sha256(re.sub(rb"(?m)^\s*\.file\s.*$", b"", ptx)).hexdigest()
