"""Attention of other packages as targets, in bfloat16 on CUDA: flash-attn, TransformerEngine, cuDNN's Python frontend.

Each is imported only when it is asked for, and is called as its documentation says: flash-attn and TransformerEngine
with packed documents, cuDNN with one graph per document.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from flamia.conformance.targets.base import Target, TargetUnavailableError
from flamia.conformance.targets.callables import CallableTarget
from flamia.conformance.targets.torch_attention import CLAIMS, require_cuda


def make_target(option: str, device: str) -> Target:
    """The target of one package.

    :raises TargetUnavailableError: if the package or a CUDA device is missing.
    """
    module, package, make = VENDORS[option]
    if find_spec(module.partition(".")[0]) is None:
        raise TargetUnavailableError(f"{option} is not installed: pip install {package}")
    require_cuda(option, device)
    try:
        subject = make(import_module(module))
    except ImportError as error:  # installed, but without its compiled part
        raise TargetUnavailableError(f"{option} cannot be imported: {error}") from error
    return CallableTarget(subject, option, device)


class _FlashAttention:
    """flash_attn_varlen_func: autograd through the package's own function."""

    tensors = "torch"
    promises = CLAIMS
    dtypes = ("bfloat16",)
    graphs = False
    packages = ("flash-attn",)

    def __init__(self, module: Any) -> None:
        self.call = module.flash_attn_varlen_func

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> torch.Tensor:
        longest = longest_document(cu_seqlens)
        if not longest:
            return clear_padding(q, cu_seqlens)
        out: torch.Tensor = self.call(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=softmax_scale, causal=causal
        )
        return clear_padding(out, cu_seqlens)


class _TransformerEngine:
    """DotProductAttention in the packed ``thd`` layout."""

    tensors = "torch"
    promises = CLAIMS
    dtypes = ("bfloat16",)
    graphs = False
    packages = ("transformer-engine",)

    def __init__(self, module: Any) -> None:
        self.make = module.DotProductAttention

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> torch.Tensor:
        longest = longest_document(cu_seqlens)
        if not longest:
            return clear_padding(q, cu_seqlens)
        attention = self.make(
            q.shape[1],
            q.shape[2],
            num_gqa_groups=k.shape[1],
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal" if causal else "padding",
            softmax_scale=softmax_scale,
        )
        out: torch.Tensor = attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return clear_padding(out.reshape(q.shape), cu_seqlens)


class _Cudnn:
    """cuDNN's scaled dot-product attention, one forward and one backward graph per document."""

    tensors = "torch"
    promises = CLAIMS
    dtypes = ("bfloat16",)
    graphs = False
    packages = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

    def __init__(self, module: Any) -> None:
        self.cudnn = module
        self.handle = module.create_handle()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """out, LSE (cuDNN's ``stats``) and what the backward needs."""
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        documents = []
        for rows in document_rows(cu_seqlens):
            tensors = {name: x[rows].transpose(0, 1)[None] for name, x in (("q", q), ("k", k), ("v", v))}
            o = torch.empty_like(tensors["q"])
            stats = torch.empty((*o.shape[:3], 1), dtype=torch.float32, device=q.device)
            graph = self._graph()
            handles = {name: graph.tensor_like(x) for name, x in tensors.items()}
            o_handle, stats_handle = graph.sdpa(
                name="sdpa", **handles, generate_stats=True, attn_scale=softmax_scale, use_causal_mask=causal
            )
            o_handle.set_output(True).set_dim(o.size()).set_stride(o.stride())
            stats_handle.set_output(True).set_dim(stats.size()).set_stride(stats.stride())
            stats_handle.set_data_type(self.cudnn.data_type.FLOAT)
            given = {handles[name]: x for name, x in tensors.items()}
            self._execute(graph, {**given, o_handle: o, stats_handle: stats})
            out[rows], lse[:, rows] = o[0].transpose(0, 1), stats[0, ..., 0]
            documents.append((rows, {**tensors, "o": o, "stats": stats}))
        return out, lse, (documents, (q, k, v), causal, softmax_scale)

    def backward(self, dout: torch.Tensor, saved: Any) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv."""
        documents, inputs, causal, scale = saved
        gradients = tuple(torch.zeros_like(x) for x in inputs)
        for rows, tensors in documents:
            given = {**tensors, "dO": dout[rows].transpose(0, 1)[None].contiguous()}
            graph = self._graph()
            handles = {name: graph.tensor_like(x) for name, x in given.items()}
            outputs = graph.sdpa_backward(name="sdpa_backward", **handles, attn_scale=scale, use_causal_mask=causal)
            found = [torch.empty_like(given[name]) for name in ("q", "k", "v")]
            for handle, x in zip(outputs, found, strict=True):
                handle.set_output(True).set_dim(x.size()).set_stride(x.stride())
            pack = {handles[name]: x for name, x in given.items()} | dict(zip(outputs, found, strict=True))
            self._execute(graph, pack)
            for total, x in zip(gradients, found, strict=True):
                total[rows] = x[0].transpose(0, 1)
        return gradients

    def _graph(self) -> Any:
        kinds = self.cudnn.data_type
        return self.cudnn.pygraph(
            io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
        )

    def _execute(self, graph: Any, pack: dict[Any, torch.Tensor]) -> None:
        modes = self.cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        device = next(iter(pack.values())).device
        workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
        graph.execute(pack, workspace, handle=self.handle)


VENDORS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "flash-attn": ("flash_attn", "flash-attn", _FlashAttention),
    "transformer-engine": ("transformer_engine.pytorch", "transformer-engine[pytorch]", _TransformerEngine),
    "cudnn": ("cudnn", "nvidia-cudnn-frontend", _Cudnn),
}
"""Name -> module, how it is installed, and what calls it."""


def longest_document(cu_seqlens: torch.Tensor) -> int:
    """Tokens of the longest document."""
    return int(torch.diff(cu_seqlens).max()) if len(cu_seqlens) > 1 else 0


def document_rows(cu_seqlens: torch.Tensor) -> list[slice]:
    """The packed rows of every document that has any."""
    return [slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist()) if stop > start]


def clear_padding(out: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zeros past the last document, by selection: functions of packed documents leave these rows as they were."""
    inside = torch.arange(out.shape[0], device=out.device) < cu_seqlens[-1]
    return torch.where(inside[:, None, None], out, out.new_zeros(()))
