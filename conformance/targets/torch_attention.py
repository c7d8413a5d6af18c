"""PyTorch's own attention functions as targets, in the dtype of the inputs.

``scaled_dot_product_attention`` knows no packed documents; it is called once per document, as its users do. What it
then promises is less than the contract: masked values are multiplied by zero, so that a NaN reaches the rows before it;
LSE is not returned; and a document cut short may be reduced in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from flamia.conformance.targets.base import Target, TargetUnavailableError
from flamia.conformance.targets.callables import CallableTarget
from flamia.conformance.targets.tensors import find_cuda

CLAIMS = frozenset({"leak", "pack", "suffix", "edges", "heads", "shift", "determinism", "strides"})
"""What the documentation of these functions lets a caller expect. ``--promises`` asks for more."""

BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}


def make_target(option: str, device: str) -> Target:
    """The target for a backend of scaled_dot_product_attention, ``"flex"`` or ``"varlen"``."""
    if option in ("cudnn", "varlen"):
        require_cuda("torch-varlen" if option == "varlen" else f"torch-sdpa-{option}", device)
    subjects: dict[str, Callable[[], Any]] = {"flex": lambda: _Flex(device), "varlen": _Varlen}
    subject = subjects.get(option, lambda: _Sdpa(option))()
    return CallableTarget(subject, subject.name, device)


def require_cuda(name: str, device: str) -> None:
    """Raise `TargetUnavailableError` unless ``device`` is a CUDA device that PyTorch finds."""
    if not device.startswith("cuda"):
        raise TargetUnavailableError(f"{name} runs on CUDA only: device must be 'cuda' or 'cuda:N', got {device!r}")
    find_cuda(name, device)


class _TorchAttention:
    """Autograd around a packed function; an output without history has zero gradients."""

    tensors = "torch"
    recipe = "bf16"
    promises = CLAIMS
    name = "torch"
    differentiable = True
    graphs = False  # documents are cut, or the longest is found, on the host
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        """out ``(T, Hq, D)``."""
        raise NotImplementedError

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, None, Any]:
        """out, no LSE, and the leaves of the graph."""
        q, k, v = (x.detach().requires_grad_(self.differentiable) for x in (q, k, v))
        out = self.attend(q, k, v, cu_seqlens, causal, softmax_scale)
        return out, None, (out, (q, k, v))

    def backward(self, dout: torch.Tensor, saved: Any) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv."""
        out, leaves = saved
        if not out.requires_grad:
            return tuple(torch.zeros_like(x) for x in leaves)
        gradients: tuple[torch.Tensor, ...] = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
        return gradients


class _Sdpa(_TorchAttention):
    """scaled_dot_product_attention once per document."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        if backend in ("flash", "cudnn"):
            self.dtypes = ("bfloat16",)
        self.name = f"torch-sdpa-{backend}" if backend else "torch-sdpa"

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        bounds = cu.tolist()
        pieces = []
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            a, b, c = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
            group = q.shape[1] // k.shape[1]
            if self.backend == "efficient" and group > 1:  # it has no grouped heads of its own
                b, c, group = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1), 1
            with self._context():
                out = scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale, enable_gqa=group > 1)
            pieces.append(out[0].transpose(0, 1))
        return torch.cat([*pieces, q.new_zeros((q.shape[0] - bounds[-1], *q.shape[1:]))])

    def _context(self) -> AbstractContextManager[Any]:
        if not self.backend:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context: AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, BACKENDS[self.backend]))
        return context


class _Flex(_TorchAttention):
    """flex_attention over the whole pack with a mask of documents; compiled on CUDA, eager on the CPU."""

    name = "torch-flex"

    def __init__(self, device: str) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        on_cuda = device.startswith("cuda")
        if on_cuda:
            # one compilation for every combination of heads, head_dim, dtype and mask
            torch._dynamo.config.recompile_limit = 64
        self.differentiable = on_cuda
        self.create_block_mask = create_block_mask
        self.call: Any = torch.compile(flex_attention, dynamic=True) if on_cuda else flex_attention

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        total = int(cu[-1])
        padding = q.new_zeros((q.shape[0] - total, *q.shape[1:]))
        if not total:
            return padding
        owner = torch.repeat_interleave(torch.arange(len(cu) - 1, device=q.device), torch.diff(cu))

        def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
            same = owner[query] == owner[key]
            return same & (query >= key) if causal else same

        mask = self.create_block_mask(visible, None, None, total, total, device=str(q.device))
        a, b, c = (x[:total].transpose(0, 1)[None] for x in (q, k, v))
        out = self.call(a, b, c, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return torch.cat([out[0].transpose(0, 1), padding])


class _Varlen(_TorchAttention):
    """torch.nn.attention.varlen.varlen_attn, whose documents are packed as ours are."""

    name = "torch-varlen"
    dtypes = ("bfloat16",)

    def __init__(self) -> None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise TargetUnavailableError(f"torch.nn.attention.varlen is not in PyTorch {torch.__version__}") from error
        self.call: Any = varlen_attn

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        longest = int(torch.diff(cu).max()) if len(cu) > 1 else 0
        if not longest:
            return torch.zeros_like(q)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        # the way to ask for causal attention has changed between releases
        windowed = "window_size" in signature(self.call).parameters
        mask: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)} if windowed else {"is_causal": causal}
        out: torch.Tensor = self.call(q, keys, values, cu, cu, longest, longest, scale=scale, **mask)
        # rows past the last document are not written
        inside = torch.arange(q.shape[0], device=q.device) < cu[-1]
        return torch.where(inside[:, None, None], out, out.new_zeros(()))
