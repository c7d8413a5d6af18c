"""Forward and backward of the reference beside PyTorch: exact attention, and the same recipe fake-quantized."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference import attention_backward, attention_forward

SLOWER_THAN_SDPA = 10.0
"""Goal: at most so many times the time of exact attention in PyTorch."""
FASTER_THAN_FAKE_QUANT = 3.0
"""Goal: at least so many times as fast as fake quantization in PyTorch."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one causal document."""

    tokens: int = 4096
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128

    def __str__(self) -> str:
        return f"T={self.tokens}, Hq={self.q_heads}, Hkv={self.kv_heads}, D={self.head_dim}, causal"


@dataclass
class AttentionTimes:
    """Seconds of forward plus backward, the best of all repeats.

    :param compiled: whether the reference ran `flamia.reference.compiled.loops`.
    :param seconds: by contestant: ``reference``, ``math_sdpa``, ``fake_quant``; those that could run.
    :param cpu_seconds: of all threads together; these tell a busy machine from a slow program.
    :param missing: why others could not.
    :param difference: of fake quantization from the reference: relative Frobenius norm by output.
    """

    shape: Shape
    threads: int
    compiled: bool
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    difference: dict[str, float] = field(default_factory=dict)

    @property
    def over_sdpa(self) -> float | None:
        """Time of the reference over that of exact attention in PyTorch."""
        return self._ratio("reference", "math_sdpa")

    @property
    def under_fake_quant(self) -> float | None:
        """Time of fake quantization over that of the reference."""
        return self._ratio("fake_quant", "reference")

    def _ratio(self, a: str, b: str) -> float | None:
        return self.seconds[a] / self.seconds[b] if a in self.seconds and b in self.seconds else None


def make_inputs(shape: Shape, seed: int = 0) -> list[NDArray[Any]]:
    """q, k, v, dout of standard normal bfloat16 numbers."""
    rng = np.random.default_rng(seed)
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    return [rng.standard_normal((shape.tokens, h, shape.head_dim), np.float32).astype(bfloat16) for h in heads]


def run_reference(inputs: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """out, dq, dk, dv of MXFP8 in the ideal profile."""
    q, k, v, dout = inputs
    forward = attention_forward(q, k, v, [0, len(q)])
    g = attention_backward(dout, forward)
    return [forward.out, g.dq, g.dk, g.dv]


def measure_attention(shape: Shape, repeats: int = 2, advance: Callable[[], None] = lambda: None) -> AttentionTimes:
    """Time all contestants in turn, `repeats` times.

    :param advance: called after each run; there are ``3 * repeats``.
    """
    from flamia.reference.compiled import loops
    from flamia.reference.parallel import worker_count

    result = AttentionTimes(shape, worker_count(), loops() is not None)
    inputs = make_inputs(shape)
    contestants: dict[str, Callable[[], Any]] = {"reference": lambda: run_reference(inputs)}
    try:
        torch = import_module("torch")
    except ImportError as error:
        why = f"PyTorch cannot be imported ({error}); pip install torch"
        result.missing = {"math_sdpa": why, "fake_quant": why}
    else:
        torch.set_num_threads(result.threads)
        contestants["math_sdpa"] = _math_sdpa(torch, inputs)
        if shape.tokens % 128:
            result.missing["fake_quant"] = f"it takes multiples of 128 tokens, not {shape.tokens}"
        else:
            contestants["fake_quant"] = _fake_quant(torch, inputs)
    outputs = {}
    for _ in range(repeats):
        for name in ("reference", "math_sdpa", "fake_quant"):
            if name in contestants:
                start, cpu = time.perf_counter(), time.process_time()
                outputs[name] = contestants[name]()
                for into, spent in (
                    (result.seconds, time.perf_counter() - start),
                    (result.cpu_seconds, time.process_time() - cpu),
                ):
                    into[name] = min(spent, into.get(name, spent))
            advance()
    if "fake_quant" in outputs:
        for name, a, b in zip(("out", "dq", "dk", "dv"), outputs["fake_quant"], outputs["reference"], strict=True):
            x, y = a.float().numpy().astype(np.float64), b.astype(np.float64)
            result.difference[name] = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    return result


def _tensors(torch: Any, inputs: list[NDArray[Any]]) -> list[Any]:
    return [torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) for x in inputs]


def _math_sdpa(torch: Any, inputs: list[NDArray[Any]]) -> Callable[[], Any]:
    """``scaled_dot_product_attention`` in float32, its plain ("math") kernel, and autograd."""
    group = inputs[0].shape[1] // inputs[1].shape[1]
    q, k, v, dout = (x.float().transpose(0, 1)[None].contiguous() for x in _tensors(torch, inputs))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention = import_module("torch.nn.attention")

    def run() -> Any:
        keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return torch.autograd.grad(out, leaves, dout)

    return run


def _fake_quant(torch: Any, inputs: list[NDArray[Any]]) -> Callable[[], Any]:
    fake_quant = import_module("flamia.bench.fake_quant")
    q, k, v, dout = _tensors(torch, inputs)

    def run() -> Any:
        with torch.no_grad():
            return fake_quant.attention(q, k, v, dout)

    return run
