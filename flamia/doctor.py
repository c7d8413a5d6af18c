"""``flamia doctor``: what is installed, which GPU is there, which kernels are certified, what to do about the rest."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import typer

import flamia

OK, MISSING, BROKEN, NOTE = "ok", "missing", "broken", "note"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    :param subject: what was looked at.
    :param state: `OK`, `MISSING` (works without, but less), `BROKEN`, `NOTE` (nothing to do).
    :param text: what was found.
    :param fix: a command or a sentence that changes it; empty if nothing has to be done.
    """

    subject: str
    state: str
    text: str
    fix: str = ""


CERTIFY = {
    capability: f"flamia conform --target {target} --certify"
    for capability, target in (((9, 0), "hopper"), ((10, 0), "blackwell"), ((10, 3), "blackwell"))
}
"""What certifies the attention kernels of a chip, by compute capability."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it."""

    name: str
    capability: tuple[int, int]


def doctor() -> None:
    """Say what is installed, which GPU is there, which kernels are certified, and what to run for what is missing.

    Exits with 1 if something that is installed does not work.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    findings = examine()
    console = Console()
    marks = {OK: "[green]ok[/]", MISSING: "[yellow]--[/]", BROKEN: "[red]!![/]", NOTE: "  "}
    rows = []
    for f in findings:
        rows.append((marks[f.state], f.subject, escape(f.text)))
        rows += [("  ", "", f"[bold]{escape(f.fix)}[/]")] if f.fix else []
    if console.is_terminal:
        table = Table(box=None, show_header=False, pad_edge=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:  # a pipe has no width at which a path should break
        width = max(len(f.subject) for f in findings)
        for mark, subject, text in rows:
            console.print(f"{mark}  {subject:<{width}}  {text}", soft_wrap=True, highlight=False)
    raise typer.Exit(int(any(f.state == BROKEN for f in findings)))


def examine() -> list[Finding]:
    """Every finding. Nothing is installed, compiled or written."""
    out = list(_guard("FLAMIA", examine_flamia))
    out += _guard("PyTorch", examine_torch)
    out += _guard("transformers", examine_transformers)
    gpus: list[Gpu] | None = None
    try:
        gpus = read_gpus()
    except (OSError, RuntimeError) as error:
        out.append(Finding("GPU", BROKEN, f"the NVIDIA driver does not answer: {error}", "reinstall the driver"))
    else:
        out += _guard("GPU", lambda: examine_gpus(gpus))
    out += _guard("CuPy", lambda: examine_cupy(bool(gpus)))
    out += _guard("NVRTC", lambda: examine_compiler(bool(gpus)))
    out += _guard("kernels", examine_kernels)
    out += _guard("certificates", lambda: examine_certificates(gpus or []))
    return out


def _guard(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an exception in it becomes one."""
    try:
        yield from check()
    except Exception as error:  # whatever is wrong with a package, the report goes on
        yield Finding(subject, BROKEN, f"{type(error).__name__}: {error}", "reinstall it")


def examine_flamia() -> Iterator[Finding]:
    """The package itself, and whether the reference computes."""
    import numpy as np
    from ml_dtypes import bfloat16

    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("FLAMIA", OK, f"{flamia.__version__}, {machine}")
    ones, cu = np.ones((40, 1, 32), bfloat16), np.array([0, 1, 40])
    forward = flamia.reference.attention_forward(ones, ones, ones, cu)
    gradients = flamia.reference.attention_backward(ones, forward)
    # values of 1 average to 1, exactly; all scores are equal, and so stay if q and k move: no gradient but rounding
    right = bool((forward.out == 1).all() and (np.abs(np.stack([gradients.dq, gradients.dk])) < 1e-4).all())
    versions = f"NumPy {np.__version__}, ml_dtypes {metadata.version('ml_dtypes')}, {_cores()} cores"
    if right:
        yield Finding("reference", OK, f"computes; {versions}")
    else:
        yield Finding("reference", BROKEN, f"gives wrong numbers; {versions}", "pip install --force-reinstall numpy")


def examine_torch() -> Iterator[Finding]:
    """PyTorch, and whether `flamia.attention` runs on the CPU."""
    try:
        import torch
    except ModuleNotFoundError:
        yield Finding("PyTorch", MISSING, "not installed: no flamia.attention", "pip install 'flamia[torch]'")
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("PyTorch", OK, f"{torch.__version__}, {built}")
    ones = torch.ones(40, 1, 32, dtype=torch.bfloat16, requires_grad=True)
    out = flamia.attention(ones, ones, ones, torch.tensor([0, 1, 40]))
    (gradient,) = torch.autograd.grad(out, ones, torch.ones_like(out))
    if bool((out == 1).all() and gradient.isfinite().all()):
        yield Finding("flamia.attention", OK, "CPU tensors: computed by the reference")
    else:
        yield Finding("flamia.attention", BROKEN, "gives wrong numbers on the CPU", "pip install --upgrade torch")


def examine_transformers() -> Iterator[Finding]:
    """Hugging Face transformers; optional."""
    version = _version("transformers")
    if version is None:
        yield Finding("transformers", MISSING, "not installed (optional)", "pip install 'flamia[transformers]'")
    elif int(version.split(".")[0]) < 5:
        yield Finding("transformers", MISSING, f"{version} is too old", "pip install --upgrade 'transformers>=5'")
    else:
        yield Finding("transformers", OK, version)


def examine_gpus(gpus: list[Gpu] | None) -> Iterator[Finding]:
    """Which GPUs there are, and whether kernels and PyTorch can use them."""
    from flamia.kernels.targets import target_for

    if gpus is None:
        yield Finding("GPU", NOTE, "no NVIDIA driver: everything runs on the CPU")
        return
    if not gpus:
        yield Finding("GPU", NOTE, "an NVIDIA driver, but no GPU that this process may use")
    for gpu in gpus:
        try:
            target = target_for(gpu.capability)
        except ValueError as error:
            yield Finding(gpu.name, NOTE, str(error))
        else:
            yield Finding(
                gpu.name, OK, f"compute capability {'.'.join(map(str, gpu.capability))}, target {target.name}"
            )
    if gpus and _version("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            fix = (
                "install a PyTorch that is built for CUDA 13" if not torch.version.cuda else "update the NVIDIA driver"
            )
            yield Finding("PyTorch on the GPU", MISSING, "PyTorch does not see the GPU", fix)


def examine_cupy(gpu: bool) -> Iterator[Finding]:
    """CuPy, which launches kernels."""
    version = _version("cupy-cuda13x") or _version("cupy")
    if version is None:
        if gpu:
            yield Finding("CuPy", MISSING, "not installed: no kernel can be launched", "pip install 'flamia[cuda]'")
        else:
            yield Finding("CuPy", NOTE, "not installed: there is no GPU on which it could launch kernels")
        return
    import cupy

    yield Finding("CuPy", OK, version + ("" if cupy.is_available() else ", no GPU available to it"))


def examine_compiler(gpu: bool) -> Iterator[Finding]:
    """NVRTC, which compiles kernels, with or without a GPU."""
    from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc

    try:
        compiler = load_nvrtc()
    except NvrtcNotFoundError:
        state = MISSING if gpu else NOTE
        yield Finding("NVRTC", state, "not found: no kernel can be compiled", "pip install 'flamia[cuda]'")
    else:
        yield Finding("NVRTC", OK, f"{compiler.version[0]}.{compiler.version[1]} at {compiler.path}")


def examine_kernels() -> Iterator[Finding]:
    """Which kernels exist as source."""
    from flamia.kernels.registry import KERNELS

    names = ", ".join(k.name for k in KERNELS)
    yield Finding("kernels", NOTE, f"in this release: {names}; compile and inspect them with `flamia kernels`")


def examine_certificates(gpus: list[Gpu]) -> Iterator[Finding]:
    """What is certified, and what that means for CUDA tensors."""
    from flamia import dispatch
    from flamia.conformance.certificates import Certificate, list_certificates

    for path, found in list_certificates().items():
        if isinstance(found, Certificate):
            i = found.identity
            levels = ", ".join(map(str, found.levels))
            text = f"{i.kernel}, recipe {i.recipe}, on {i.chip}: levels {levels} ({found.date}, {path.name})"
            yield Finding("certificate", NOTE, text)
        else:
            yield Finding("certificate", BROKEN, found, f"remove {path}")
    if gpus and find_spec("torch") is not None:
        from torch import cuda

        from flamia.pytorch.call import register_kernels

        for index in range(cuda.device_count()):
            register_kernels(index)
    rows = dispatch.certified_kernels()
    for kernel, certificate in rows:
        i, dims = certificate.identity, " or ".join(map(str, kernel.head_dims))
        text = f"CUDA tensors: kernel {kernel.name}, certified on {i.chip} with {i.compiler} at {certificate.date[:10]}"
        text += f"; recipe {', '.join(kernel.recipes)}, head_dim {dims}, {', '.join(kernel.dtypes)}"
        yield Finding("flamia.attention", OK, text)
    for name, reason in dispatch.refusals().items():
        yield Finding(f"kernel {name}", MISSING, f"not certified here: {reason}")
    if rows:
        return
    each = "each chip, an H100 too, needs a certificate of its own"
    if not gpus:
        fix = " or ".join(dict.fromkeys(CERTIFY.values()))
        yield Finding("flamia.attention", NOTE, f"CUDA tensors: there is no GPU here; {each}", f"on the chip: {fix}")
        return
    fix = "pass backend='reference' to compute on the CPU, slowly"
    for command in {CERTIFY[gpu.capability]: None for gpu in gpus if gpu.capability in CERTIFY}:
        fix = f"{command}; or {fix}"
    text = f"CUDA tensors: refused, because no kernel for attention is certified here; {each}"
    yield Finding("flamia.attention", MISSING, text, fix)


def read_gpus() -> list[Gpu] | None:
    """The GPUs by the driver's own library; None without a driver.

    :raises RuntimeError: if there is a driver that does not answer.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None

    def call(name: str, *arguments: Any) -> int:
        return int(getattr(driver, name)(*arguments))

    code = call("cuInit", 0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE
        return []
    if code:
        raise RuntimeError(f"cuInit gives error {code}")
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    out = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, len(name), device)
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            numbers.append(value.value)
        out.append(Gpu(name.value.decode(), (numbers[0], numbers[1])))
    return out


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    from flamia.reference.parallel import worker_count

    return worker_count()
