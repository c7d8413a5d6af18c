"""What the forward keeps for the backward: quantized payloads and their scales, not q, k and v.

Note [Saved tensors]
~~~~~~~~~~~~~~~~~~~~
The operator saves the output, m and l (float32, one each per token and query head), and for every operand that the
backward reads a payload and, if the scaling has them, its scale bytes:

==================  ===========================  =============================
scaling             payload                      scales
==================  ===========================  =============================
``TOKEN``           uint8 ``(T, H, D)``          uint8 ``(T, H)``
``TOKEN_BLOCK``     uint8 ``(T, H, D)``          uint8 ``(T, H)``, the block's byte at each of its tokens
``NVFP4``           uint8 ``(T, H, D / 2)``      uint8 ``(T, H, D / 16)``
``NONE``            bfloat16 ``(T, H, D)``       uint8 ``(T, H)``
study-only          float32 ``(T, H, D)``        none: the decoded values
==================  ===========================  =============================

Shapes depend on T alone, not on where documents begin. Two products that read the same copy share it. An even channel
of an NVFP4 payload is the low nibble of its byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flamia.pytorch.exchange import to_numpy, to_torch
from flamia.reference import nvfp4
from flamia.reference.forward import operand_roles
from flamia.reference.operands import F32, ONE, Operand, prepare
from flamia.reference.profiles import get_profile
from flamia.reference.recipes import Recipe, Scaling


@dataclass(frozen=True)
class SavedOperand:
    """One quantized copy: the tensor it is of (``"q"``, ``"k"``, ``"v"``), and the roles that it plays."""

    tensor: str
    scaling: Scaling
    roles: tuple[str, ...]


@cache
def saved_operands(recipe: Recipe, causal: bool, profile: str) -> tuple[SavedOperand, ...]:
    """The copies that the backward reads, in the order in which they are saved."""
    roles = operand_roles(recipe, causal, get_profile(profile).own_exponents)
    if "v_gradient" in roles:  # then dP reads that one, and no other copy of V
        roles.pop("v")
        roles.pop("v1", None)
    players: dict[tuple[str, Scaling], list[str]] = {}
    for role, key in roles.items():
        players.setdefault(key, []).append(role)
    return tuple(SavedOperand(tensor, scaling, tuple(names)) for (tensor, scaling), names in players.items())


def save_operands(
    operands: dict[str, Operand], recipe: Recipe, causal: bool, profile: str, device: torch.device
) -> list[Tensor]:
    """The operands of a forward of the reference as tensors; see Note [Saved tensors]."""
    out = []
    for saved in saved_operands(recipe, causal, profile):
        operand = operands[saved.roles[0]]
        packed = _pack_nibbles(operand.payload) if saved.scaling is Scaling.NVFP4 else operand.payload
        out.append(to_torch(packed, device=device))
        if operand.scale is not None:
            out.append(to_torch(operand.scale, device=device))
    return out


def load_operands(tensors: list[Tensor], recipe: Recipe, causal: bool, profile: str) -> dict[str, Operand]:
    """The inverse of `save_operands`, but for roles that the backward does not read."""
    remaining = iter(tensors)
    out = {}
    for saved in saved_operands(recipe, causal, profile):
        payload = to_numpy(next(remaining))
        scale = None if sample(saved.scaling, recipe).scale is None else to_numpy(next(remaining))
        factor = ONE
        if saved.scaling is Scaling.NVFP4:
            payload = _unpack_nibbles(payload)
            factor = F32(nvfp4.head_scales(recipe.head_scale, 1)[1][0])
        operand = Operand(saved.scaling, payload, scale, factor)
        out.update(dict.fromkeys(saved.roles, operand))
    return out


def empty_operands(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, causal: bool, profile: str) -> list[Tensor]:
    """Uninitialised tensors of the shapes and dtypes of `save_operands`."""
    tensors = {"q": q, "k": k, "v": v}
    out = []
    for saved in saved_operands(recipe, causal, profile):
        total, heads, dim = tensors[saved.tensor].shape
        one = sample(saved.scaling, recipe)
        width = dim // 2 if saved.scaling is Scaling.NVFP4 else dim
        out.append(q.new_empty((total, heads, width), dtype=to_torch(one.payload).dtype))
        if one.scale is not None:
            blocks = (dim // nvfp4.BLOCK,) if one.scale.ndim == 3 else ()
            out.append(q.new_empty((total, heads, *blocks), dtype=torch.uint8))
    return out


@cache
def sample(scaling: Scaling, recipe: Recipe) -> Operand:
    """One token under a scaling, from which dtypes and the presence of scales are read."""
    return prepare(np.zeros((1, 1, nvfp4.BLOCK * 2), F32), np.array([0, 1]), scaling, recipe)


def _pack_nibbles(codes: NDArray[Any]) -> NDArray[np.uint8]:
    pairs: NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return pairs


def _unpack_nibbles(pairs: NDArray[Any]) -> NDArray[np.uint8]:
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)
