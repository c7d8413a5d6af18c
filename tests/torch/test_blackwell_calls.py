"""Calls of the Blackwell forward with PyTorch tensors, on the simulator: layouts that users have, and what is refused.

A few layouts by default; all with ``FLAMIA_THOROUGH=1``.
"""

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flamia.conformance.comparison import compare_bits  # noqa: E402
from flamia.conformance.simulator.host import simulated_device  # noqa: E402
from flamia.conformance.targets.tensors import to_numpy  # noqa: E402
from flamia.kernels.blackwell import BlackwellForward, attention_forward  # noqa: E402
from flamia.kernels.quantize import Nvfp4  # noqa: E402
from flamia.kernels.targets import SM_100A, SM_103A  # noqa: E402
from flamia.reference.forward import attention_forward as reference_forward  # noqa: E402

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"


def normal(*shape: int, seed: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(total: int, q_heads: int, kv_heads: int, dim: int = 64, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    """q, k, v cut from one tensor."""
    x = normal(total, q_heads + 2 * kv_heads, dim, seed=total + q_heads, dtype=dtype)
    return x[:, :q_heads], x[:, q_heads : q_heads + kv_heads], x[:, q_heads + kv_heads :]


def padded(total: int, used: int) -> tuple[Any, Any, Any]:
    """The same with NaN behind the last document."""
    q, k, v = fused(total, 2, 1)
    for x in (q, k, v):
        x[used:] = float("nan")
    return q, k, v


def unaligned() -> tuple[Any, Any, Any]:
    """Rows that begin at no multiple of 16 bytes."""
    x = normal(140, 4, 65, seed=2)
    return x[:, :2, 1:], x[:, 2:3, :64], x[:, 3:, 1:]


def skipping() -> tuple[Any, Any, Any]:
    """Every other token, and some heads."""
    x = normal(280, 8, 64, seed=3)
    return x[::2, ::4], x[1::2, 1:2], x[::2, 2:3]


def transposed() -> tuple[Any, Any, Any]:
    """Heads outside of tokens."""
    x = normal(4, 140, 64, seed=4).transpose(0, 1)
    return x[:, :2], x[:, 2:3], x[:, 3:]


def expanded() -> tuple[Any, Any, Any]:
    """Strides of zero, over heads and over tokens."""
    return (
        normal(40, 1, 64, seed=5).expand(40, 4, 64),
        normal(1, 2, 64, seed=6).expand(40, 2, 64),
        normal(40, 1, 64, seed=7).expand(40, 2, 64),
    )


LAYOUTS: dict[str, tuple[tuple[Any, Any, Any], Any]] = {
    "unaligned rows, an empty document": (unaligned(), torch.tensor([0, 7, 7, 140], dtype=torch.int32)),
    "strides of zero": (expanded(), torch.tensor([0, 40])),
    "five query heads, a strided cu_seqlens": (fused(34, 5, 1), torch.tensor([0, 9, 1, 9, 34, 9])[::2]),
}
if THOROUGH:
    LAYOUTS |= {
        "skipped tokens, empty documents at both ends": (
            skipping(),
            torch.tensor([0, 0, 139, 140, 140], dtype=torch.int32),
        ),
        "heads outside of tokens": (transposed(), torch.tensor([0, 140])),
        "seven query heads of two": (fused(34, 14, 2), torch.tensor([0, 1, 34])),
        "two tiles of padding": (padded(300, 37), torch.tensor([0, 0, 5, 37, 37], dtype=torch.int32)),
        "padding alone": (padded(130, 0), torch.tensor([0, 0, 0])),
        "no document": (padded(40, 0), torch.tensor([0], dtype=torch.int32)),
        "no token": (fused(0, 2, 1), torch.tensor([0, 0])),
        "head_dim 128 in float32": (fused(50, 3, 1, 128, torch.float32), torch.tensor([0, 50])),
    }


def call(q: Any, k: Any, v: Any, cu: Any, recipe: str, **options: Any) -> BlackwellForward:
    if recipe == "nvfp4_fp8":
        options["nvfp4"] = Nvfp4(torch.ones(q.shape[1], 2), torch.ones(k.shape[1], 2))
    return attention_forward(q, k, v, cu, recipe=recipe, **options)


def mismatch(got: BlackwellForward, q: Any, k: Any, v: Any, cu: Any, recipe: str, causal: bool = True) -> str | None:
    """The first number that differs from the reference's."""
    arrays = [np.ascontiguousarray(to_numpy(x)) for x in (q, k, v)]
    expected = reference_forward(*arrays, cu.numpy(), recipe=recipe, causal=causal, profile="blackwell")
    for name in ("out", "m", "l", "lse"):
        found = compare_bits(name, to_numpy(getattr(got, name)), getattr(expected, name))
        if found is not None:
            return found.message
    return None


@pytest.mark.parametrize(("target", "recipe"), [(SM_100A, "mxfp8"), (SM_103A, "nvfp4_fp8")], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_bits_of_the_reference(layout: str, target: Any, recipe: str) -> None:
    tensors, cu = LAYOUTS[layout]
    for causal in (True, False) if THOROUGH else (True,):
        with simulated_device(target, seed=1, multiprocessors=3):
            got = call(*tensors, cu, recipe, causal=causal)
        wrong = mismatch(got, *tensors, cu, recipe, causal)
        assert wrong is None, wrong


def test_a_second_call_finds_nothing_of_the_first() -> None:
    """One device, one memory; the first call leaves NaN wherever it can."""
    q, k, v = fused(150, 1, 1)
    cu = torch.tensor([0, 130, 150])
    lost = torch.full_like(q, float("nan")), torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    with simulated_device(SM_100A, multiprocessors=3):
        call(*lost, cu, "mxfp8")
        results = [call(q, k, v, cu, "mxfp8") for _ in range(2)]
    for got in results:
        wrong = mismatch(got, q, k, v, cu, "mxfp8")
        assert wrong is None, wrong


Q, K, V = fused(8, 2, 1)
CU = torch.tensor([0, 8])
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative scale": ({"softmax_scale": -1e-300}, ValueError, "softmax_scale must be from 0 to"),
    "huge scale": ({"softmax_scale": 10**400}, ValueError, "softmax_scale must be from 0 to"),
    "a tensor as scale": ({"softmax_scale": torch.tensor(1.0)}, TypeError, "softmax_scale must be a number"),
    "causal is a word": ({"causal": "yes"}, TypeError, "causal must be a bool, got 'yes'"),
    "causal is a number": ({"causal": 2}, TypeError, "causal must be a bool, got 2"),
    "cu_seqlens is a list": ({"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    "k is None": ({"k": None}, TypeError, "k must be a torch tensor"),
    "v is None": ({"v": None}, TypeError, "v must be a torch tensor"),
    "k of two dimensions": ({"k": K[:, 0]}, ValueError, r"k must have shape \(T, H, D\) with H >= 1, got \(8, 64\)"),
    "k with other tokens": ({"k": K[:7]}, ValueError, "k must have 8 tokens and head_dim 64"),
    "head_dim 96": ({n: normal(8, 1, 96, seed=1) for n in "qkv"}, ValueError, r"q must have a head_dim of \(64, 128\)"),
    "an unknown exp2": ({"exp2": "fast"}, ValueError, r"exp2 must be one of \('exact', 'hardware'\), got 'fast'"),
    "no score_factor": ({"score_factor": float("nan")}, ValueError, "score_factor must be at least 0"),
    "no scales of heads": ({"recipe": "nvfp4_fp8"}, ValueError, "nvfp4 must be given for the recipe nvfp4_fp8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_by_name(what: str) -> None:
    changed, error, words = REFUSED[what]
    with simulated_device(SM_100A), pytest.raises(error, match=words):
        attention_forward(**({"q": Q, "k": K, "v": V, "cu_seqlens": CU} | changed))
