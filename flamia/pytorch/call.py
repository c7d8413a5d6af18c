"""One call of attention: check, choose what computes it, call the operator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flamia import dispatch
from flamia.pytorch import operators as operators  # defines them
from flamia.pytorch.arguments import DTYPES, check_call
from flamia.pytorch.recipe_text import encode_recipe
from flamia.reference.arguments import MAX_HEAD_DIM
from flamia.reference.recipes import RECIPES, Recipe

_LOG = logging.getLogger(__name__)
_jit: Any = torch.jit

AUTOCAST_DEVICES = tuple(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))
"""Types of devices that have autocast: asked once, because torch.compile cannot trace the question in every release."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    *,
    max_seqlen: int | None,
    recipe: Recipe | str,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out and lse: see `flamia.attention`."""
    q, k, v = (autocast(x) for x in (q, k, v))
    check_call(q, k, v, cu_seqlens, max_seqlen, causal, softmax_scale, return_lse, backend)
    text = encode_recipe(recipe)
    implementation = choose_implementation(q, recipe, causal, backend)
    if softmax_scale is not None:
        softmax_scale = float(softmax_scale)
    batch = q.shape[:2] if q.ndim == 4 else None
    if batch is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu_seqlens = torch.arange(batch[0] + 1, device=q.device) * batch[1]
        max_seqlen = batch[1] if max_seqlen is None else max_seqlen
    traced = torch.compiler.is_exporting() or _jit.is_tracing()  # who knows what will be differentiated later
    saves = traced or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    out, lse, *_ = torch.ops.flamia.attention_forward(
        q, k, v, cu_seqlens, max_seqlen, text, causal, softmax_scale, implementation, saves
    )
    if batch is not None:
        out = out.unflatten(0, batch)
        lse = lse.unflatten(1, batch).transpose(0, 1)
    return out, lse


def autocast(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype where autocast is on: the rule of PyTorch's own attention."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        return x
    kind = x.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def choose_implementation(q: Tensor, recipe: Recipe | str, causal: bool, backend: str) -> str:
    """What `operators` takes as ``implementation``.

    :raises ValueError: for a device that nothing serves.
    :raises flamia.dispatch.NoCertifiedKernel: if no certified kernel serves the call.
    """
    meta = q.device.type == "meta"  # there is nothing to compute from
    if backend.startswith("reference") and not meta:
        return "reference:ideal" if backend == "reference" else backend
    if backend == "auto" and q.device.type == "cpu":
        return "reference:ideal"
    if q.device.type != "cuda":
        if backend == "cuda":
            raise ValueError(
                f"backend='cuda' needs q, k and v on a CUDA device, got {q.device}; move them there, or leave "
                "backend='auto' to compute on the CPU with the reference; `flamia doctor` says what this machine offers"
            )
        remedy = "" if meta else "; backend='reference' copies it to the CPU"
        raise ValueError(f"q must be on the CPU or a CUDA device, got {q.device}{remedy}")
    # Comparing gives torch.compile a constant where q.shape[-1] may be a symbol.
    head_dim = next(dim for dim in range(32, MAX_HEAD_DIM + 1, 32) if dim == q.shape[-1])
    return constant_find_kernel(_known_name(recipe), head_dim, q.dtype, causal, q.device.index)


def find_kernel(recipe: str, head_dim: int, dtype: torch.dtype, causal: bool, device: int | None) -> str:
    """Name of the certified kernel for one of this machine's GPUs.

    :raises flamia.dispatch.NoCertifiedKernel: if there is none.
    """
    register_kernels(device)
    request = dispatch.Request(
        recipe=recipe,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        causal=causal,
        device=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
    )
    return dispatch.find(request).name


ROWS = {(9, 0): "flamia.pytorch.hopper", (10, 0): "flamia.pytorch.blackwell", (10, 3): "flamia.pytorch.blackwell"}
"""Compute capability -> the module whose ``make_kernels(device)`` makes rows of `flamia.dispatch`."""

_registered: set[int] = set()


def register_kernels(device: int | None) -> None:
    """Enter the kernels of this release for a GPU into the table of `flamia.dispatch`, once, as far as certified."""
    index = torch.cuda.current_device() if device is None else device
    if index in _registered:
        return
    _registered.add(index)
    module = ROWS.get(torch.cuda.get_device_capability(index))
    if module is None:
        return
    name = module.rpartition(".")[2]
    try:
        rows = import_module(module).make_kernels(index)
    except (ImportError, RuntimeError) as error:  # a kernel that cannot be compiled here is no kernel
        _refuse(name, error)
        return
    known = [kernel.name for kernel, _ in dispatch.certified_kernels()]
    for row in rows:
        if row.name in known:
            continue
        try:
            dispatch.register(row)
        except dispatch.NoCertifiedKernel as error:  # the call that finds no kernel says what to run
            _refuse(row.name, error)


def _refuse(name: str, error: Exception) -> None:
    _LOG.info("no kernel %s: %s", name, error)
    dispatch.refuse(name, str(error))


_constant: Any = torch.compiler.assume_constant_result
constant_find_kernel: Callable[[str, int, torch.dtype, bool, int | None], str] = _constant(find_kernel)
"""`find_kernel`, which torch.compile calls while it traces: the chip and its kernels do not change."""


def _known_name(recipe: Recipe | str) -> str:
    """The name that kernels know; a derived recipe may bear the name of the one it was derived from."""
    if isinstance(recipe, str):
        return recipe
    return recipe.name if recipe == RECIPES.get(recipe.name) else f"{recipe.name} (derived)"
