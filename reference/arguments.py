"""Argument checks of the reference: bad input is an error that names the argument, what it was and what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference.documents import validate_cu_seqlens
from flamia.reference.profiles import Profile, get_profile
from flamia.reference.recipes import Recipe, get_recipe

DTYPES = (np.dtype(np.float32), np.dtype(bfloat16))
MAX_HEAD_DIM = 256
MAX_SOFTMAX_SCALE = float(np.finfo(np.float32).max) / 2
"""So that its product with log2 e is a finite FP32 number."""


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of one attention call."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    cu_seqlens: NDArray[np.int64]
    recipe: Recipe
    profile: Profile
    causal: bool
    softmax_scale: float

    @property
    def softmax_constant(self) -> np.float32:
        """c of Note [Probabilities]."""
        return softmax_constant(self.softmax_scale)


def softmax_constant(softmax_scale: float) -> np.float32:
    """``c = fl(softmax_scale * log2 e)``: the product in float64, rounded once."""
    return np.float32(softmax_scale * math.log2(math.e))


def check_tensor(name: str, x: Any) -> NDArray[Any]:
    """``x`` if it is a ``(T, H, D)`` array of a supported dtype."""
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a NumPy array (T, H, D), got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32 or ml_dtypes.bfloat16, got {x.dtype}")
    if x.ndim != 3:
        raise ValueError(f"{name} must have shape (T, H, D), got {x.shape}")
    return x


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Shapes, dtypes and head counts of q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the {q.shape[0]} tokens of q, got shape {x.shape}")
        if x.shape[1] == 0:
            raise ValueError(f"{name} must have at least one head, got shape {x.shape}")
    dim = q.shape[2]
    for name, x in (("k", k), ("v", v)):
        if x.shape[2] != dim:
            raise ValueError(f"{name} must have the head_dim of q ({dim}), got {x.shape[2]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v must have the {k.shape[1]} heads of k, got {v.shape[1]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")


def check_causal(causal: Any) -> bool:
    """``causal`` as a Python bool."""
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    return bool(causal)


def check_observer(observer: Any) -> None:
    """An observer is None or can be called."""
    if observer is not None and not callable(observer):
        raise TypeError(f"observer must be a function or None, got {observer!r}")


def check_softmax_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale as a Python float, ``1 / sqrt(head_dim)`` by default."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"softmax_scale must be a number, got {softmax_scale!r}")
    if isinstance(softmax_scale, np.generic):
        softmax_scale = softmax_scale.item()  # or a float16 would be compared as one
    if not 0 <= softmax_scale <= MAX_SOFTMAX_SCALE:  # before the conversion: a Python int may exceed float64
        raise ValueError(f"softmax_scale must be from 0 to {MAX_SOFTMAX_SCALE:.4g}, got {softmax_scale}")
    return float(softmax_scale)


def check_forward(
    q: Any, k: Any, v: Any, cu_seqlens: Any, recipe: Any, causal: Any, softmax_scale: Any, profile: Any
) -> Arguments:
    """Check everything before anything is computed."""
    check_qkv(q, k, v)
    cu = validate_cu_seqlens(cu_seqlens, q.shape[0])
    causal = check_causal(causal)
    chosen, machine = get_recipe(recipe), get_profile(profile)
    dim = q.shape[2]
    if machine.head_dims is not None and dim not in machine.head_dims:
        raise ValueError(f"q must have a head_dim in {machine.head_dims} for profile {machine.name!r}, got {dim}")
    if dim == 0 or dim % 32 or dim > MAX_HEAD_DIM:
        raise ValueError(f"q must have a head_dim that is a multiple of 32 up to {MAX_HEAD_DIM}, got {dim}")
    if not machine.exact and (field := chosen.study_only):
        raise ValueError(
            f"recipe {chosen.name!r} is study-only, because of its {field}: "
            f"profile must be 'ideal', got {machine.name!r}"
        )
    return Arguments(q, k, v, cu, chosen, machine, causal, check_softmax_scale(softmax_scale, dim))
