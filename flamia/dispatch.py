"""Which kernel serves a call on a GPU: a table in which only certified kernels stand.

A kernel enters the table with `register`, which looks for a valid certificate: a record that this source, compiled by
this compiler, passed every level of the conformance suite on this chip (`flamia.conformance.certificates`). Nothing
else is ever launched: where no row of the table fits, `find` raises `NoCertifiedKernel`, whose one sentence says what
is missing and what to run. In this release `flamia.pytorch.hopper` registers the kernels for compute capability 9.0 and
`flamia.pytorch.blackwell` those for 10.0 and 10.3, at the first call with CUDA tensors.

This module imports neither PyTorch nor CuPy, so that ``flamia doctor`` can list the table without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flamia.conformance.certificates import Certificate, Identity, find_valid
from flamia.conformance.results import LEVELS


class NoCertifiedKernel(RuntimeError):
    """No certified kernel serves this call."""


@dataclass(frozen=True)
class Request:
    """What a call needs, all of it known without looking at the GPU's memory.

    :param recipe: name of a recipe of `flamia.reference.recipes.RECIPES`; of a derived recipe something else.
    :param dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    :param device: for the message, such as ``"NVIDIA H200"``.
    :param capability: compute capability, such as ``(9, 0)``.
    """

    recipe: str
    head_dim: int
    dtype: str
    causal: bool
    device: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class AttentionKernel:
    """One row of the table: forward and backward of attention for one chip, recipe and head dimension.

    All functions take CUDA tensors, launch on the current stream, never wait for the GPU, and return tensors whose
    shapes follow from the shapes of their arguments; so a call can be captured in a CUDA graph.

    :param name: unique; what ``flamia doctor`` prints.
    :param identity: what a certificate must name: source hash, chip and compiler as they are now.
    :param forward: ``(q, k, v, cu_seqlens, recipe, causal, softmax_scale, max_seqlen, saves) -> (out, lse, m, l,
        saved)``, where ``saved`` is a list of tensors, empty unless ``saves``.
    :param backward: ``(dout, out, m, l, cu_seqlens, saved, kv_heads, recipe, causal, softmax_scale, max_seqlen) ->
        (dq, dk, dv)``.
    :param empty_saved: ``(q, k, v, cu_seqlens, recipe, causal) -> saved``, uninitialised, for tracing.
    :param checks_documents: whether ``forward`` itself makes a device-side assertion of an illegal ``cu_seqlens`` or a
        document longer than ``max_seqlen``, and computes nothing from it; without it the operator checks first, in
        about ten launches.
    """

    name: str
    identity: Identity
    capability: tuple[int, int]
    recipes: tuple[str, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    empty_saved: Callable[..., Any]
    checks_documents: bool = False

    def serves(self, request: Request) -> bool:
        """Whether this kernel computes what is asked for, on that chip."""
        return (
            self.capability == request.capability
            and request.recipe in self.recipes
            and request.head_dim in self.head_dims
            and request.dtype in self.dtypes
        )


_table: dict[str, tuple[AttentionKernel, Certificate]] = {}
_refusals: dict[str, str] = {}


def register(kernel: AttentionKernel, folders: Iterable[Path] | None = None) -> Certificate:
    """Enter a kernel that has a valid certificate of every level; a kernel of the same name is replaced.

    :param folders: where certificates lie; default: the user's and the shipped ones.
    :returns: the certificate.
    :raises NoCertifiedKernel: without one; says why and what to run.
    :raises ValueError: for a name that selects the reference.
    """
    if kernel.name.startswith("reference"):
        raise ValueError(f"name must not start with 'reference', got {kernel.name!r}")
    try:
        certificate = find_valid(kernel.identity, LEVELS, folders)
    except LookupError as error:
        i = kernel.identity
        command = f"flamia conform --target {i.kernel} --recipe {i.recipe} --certify"
        raise NoCertifiedKernel(f"{error}; run `{command}`") from error
    _table[kernel.name] = kernel, certificate
    return certificate


def refuse(name: str, reason: str) -> None:
    """Keep why a kernel of this release is not in the table, for ``flamia doctor``."""
    _refusals[name] = reason


def refusals() -> dict[str, str]:
    """What `refuse` was told of kernels that are still not in the table, by name."""
    return {name: reason for name, reason in _refusals.items() if name not in _table}


def unregister(name: str) -> None:
    """Take a kernel out of the table."""
    del _table[name]


def certified_kernels() -> list[tuple[AttentionKernel, Certificate]]:
    """The whole table, in the order of registration."""
    return list(_table.values())


def get_kernel(name: str) -> AttentionKernel:
    """The kernel of that name.

    :raises NoCertifiedKernel: if it is not, or no longer, in the table.
    """
    if name not in _table:
        raise NoCertifiedKernel(f"kernel {name!r} is not certified in this process; run `flamia doctor`")
    return _table[name][0]


def find(request: Request) -> AttentionKernel:
    """The first kernel that serves the request.

    :raises NoCertifiedKernel: in one sentence, what is missing and what to run.
    """
    for kernel, _ in _table.values():
        if kernel.serves(request):
            return kernel
    major, minor = request.capability
    raise NoCertifiedKernel(
        f"no certified kernel for recipe {request.recipe!r}, head_dim {request.head_dim} and {request.dtype} on "
        f"{request.device} (sm_{major}{minor}); run `flamia doctor` to see which kernels exist and what certifies "
        "them, or pass backend='reference' to compute on the CPU"
    )
