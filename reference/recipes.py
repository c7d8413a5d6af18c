"""Recipes: which operand of attention is held in which format, under which scale.

Note [Recipes]
~~~~~~~~~~~~~~
Attention makes seven products. Two kinds of contraction occur, and an operand may need another copy for each kind:

* over **channels**: ``S = Q K^T`` and ``dP = dO V^T``;
* over **tokens**: ``O = P V``, ``dV = P^T dO``, ``dQ = dS K`` and ``dK = dS^T Q``.

A `Recipe` names the `Scaling` of each operand for each kind. In the contract's recipes (`MXFP8`, `NVFP4_FP8`) the scale
of a token block covers all channels, so one payload serves both kinds. The study-only recipes reproduce what others do,
so that their leaks and errors can be measured by the same code; derive another with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flamia.reference.scaling import Rule


class Scaling(Enum):
    """How the elements of a ``(T, H, D)`` tensor share scales. All but `NONE` and `NVFP4` hold E4M3 elements."""

    NONE = "bfloat16; one byte per token says 1.0, or NaN if the token is not finite"
    TOKEN = "one E8M0 per token: token block, B=1"
    TOKEN_BLOCK = "one E8M0 per 32 tokens of a document: token block, B=32"
    NVFP4 = "E2M1 elements, one UE4M3 per 16 channels of a token"
    CHANNELS_1X32 = "one E8M0 per 32 channels of a token"
    TOKENS_1X32 = "one E8M0 per channel and 32 tokens of a document"
    TILE_32X32 = "one E8M0 per 32 tokens x 32 channels"
    TENSOR = "one float32 per tensor"


@dataclass(frozen=True)
class Recipe:
    """Formats and scale rules of one way to compute attention. See Note [Recipes].

    :param name: what users type; lower case.
    :param summary: one line for tables.
    :param scores: Q and K in ``S = Q K^T``.
    :param gradient_qk: Q and K as the token-contraction operands of dK and dQ. With `Scaling.TOKEN` their exponents are
        folded into dS and undone on the output rows.
    :param values: V in ``O = P V`` (V32 of the contract).
    :param diagonal_values: V in the diagonal tile of causal attention (V1); None: as ``values``.
    :param gradient_values: V in ``dP = dO V^T``; None: the same payload as the forward, tile by tile.
    :param dout_channels: dO in ``dP``.
    :param dout_tokens: dO in ``dV``; None: the same payload as ``dout_channels``.
    :param p_scale: ``"tile"``: integer maximum of the row's 128-key tile (forward) and of the 32x32 tile (backward);
        ``"constant"``: ``2**p_exponent`` relative to the row's running maximum.
    :param p_exponent: with a constant scale, the forward holds ``P * 2**p_exponent``.
    :param p_backward_exponent: with a constant scale, the backward holds ``P / l * 2**p_backward_exponent``.
    :param row_sum: ``"quantized"``: l sums the P that multiplies V; ``"exact"``: l sums P before it is rounded.
    :param normalize: ``"dout"``: the backward quantizes dO / l and keeps P unnormalised; ``"p"``: dO as it is and P /
        l.
    :param delta: ``"quantized"``: delta from the quantized dO; ``"unquantized"``: from dO as given.
    :param ds_probability: P inside dS: ``"quantized"`` or ``"exact"``.
    :param ds_scale: ``"tile"``: one E8M0 per 32x32 tile of dS for both products; ``"1x32"``: two copies, blocks of 32
        along keys for dQ and along queries for dK.
    :param scale_rule: ``"rceil"`` (contract) or ``"floor"`` (OCP, for study).
    :param hadamard: rotate the channels of Q and K before NVFP4 quantization (exact in QK^T).
    :param head_scale: NVFP4's second-level scale: one constant for every head.
    :raises ValueError: for a combination that has no meaning; the message names the field.
    """

    name: str
    summary: str
    scores: Scaling
    gradient_qk: Scaling
    values: Scaling
    dout_channels: Scaling
    diagonal_values: Scaling | None = None
    gradient_values: Scaling | None = None
    dout_tokens: Scaling | None = None
    p_scale: str = "tile"
    p_exponent: int = 8
    p_backward_exponent: int = 8
    row_sum: str = "quantized"
    normalize: str = "dout"
    delta: str = "quantized"
    ds_probability: str = "quantized"
    ds_scale: str = "tile"
    scale_rule: Rule = "rceil"
    hadamard: bool = False
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        for field in ("name", "summary"):
            if not isinstance(getattr(self, field), str) or not self.name:
                raise TypeError(f"Recipe.{field} must be text, and name not empty, got {getattr(self, field)!r}")
        for field in _ROLES:
            value = getattr(self, field)
            if not isinstance(value, Scaling) and not (value is None and field in _OPTIONAL_ROLES):
                either = " or None" if field in _OPTIONAL_ROLES else ""
                raise TypeError(f"Recipe.{field} must be a Scaling{either}, got {value!r}")
        choices = {
            "p_scale": ("tile", "constant"),
            "row_sum": ("quantized", "exact"),
            "normalize": ("dout", "p"),
            "delta": ("quantized", "unquantized"),
            "ds_probability": ("quantized", "exact"),
            "ds_scale": ("tile", "1x32"),
            "scale_rule": ("rceil", "floor"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"Recipe.{field} must be one of {allowed}, got {getattr(self, field)!r}")
        h = self.head_scale
        if isinstance(h, bool) or not isinstance(h, (int, float)) or not 2.0**-126 <= h <= 2.0**126:
            raise ValueError(f"Recipe.head_scale must be one number from 2^-126 to 2^126 for all heads, got {h!r}")
        for field in ("p_exponent", "p_backward_exponent"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 8:
                raise ValueError(f"Recipe.{field} must be an integer from 0 to 8, got {value!r}")
        if not isinstance(self.hadamard, bool):
            raise TypeError(f"Recipe.hadamard must be a bool, got {self.hadamard!r}")
        if self.hadamard and self.scores is not Scaling.NVFP4:
            raise ValueError(f"Recipe.hadamard must be False unless scores is NVFP4, got scores {self.scores}")
        for field in (*_TOKEN_ROLES, "gradient_values", "dout_channels"):
            if getattr(self, field) is Scaling.NVFP4:
                raise ValueError(f"Recipe.{field} cannot be NVFP4: E2M1 is for the scores alone")
        if self.diagonal_values not in (None, Scaling.TOKEN, Scaling.TOKEN_BLOCK, Scaling.NONE):
            raise ValueError(
                "Recipe.diagonal_values must be None, TOKEN, TOKEN_BLOCK or NONE, because its exponents are folded "
                f"into P; got {self.diagonal_values}"
            )
        if self.p_scale == "tile":
            for field, needed in (("normalize", "dout"), ("ds_probability", "quantized")):
                if getattr(self, field) != needed:
                    raise ValueError(f"Recipe.{field} must be {needed!r} unless p_scale is 'constant'")

    @property
    def study_only(self) -> str:
        """Why only the ``ideal`` profile can run the recipe: the field that no tensor core takes; empty if all can."""
        unscaled = self.values is Scaling.NONE
        token, block = (Scaling.NONE, Scaling.NONE) if unscaled else (Scaling.TOKEN, Scaling.TOKEN_BLOCK)
        either = (None, token, block)
        possible = {
            "scores": (token, block, Scaling.NVFP4),
            "gradient_qk": (token,),
            "values": (block,),
            "diagonal_values": either,
            "gradient_values": either,
            "dout_channels": (block,),
            "dout_tokens": (None, block),
            "p_scale": ("tile",),
            "row_sum": ("quantized",),
            "ds_scale": ("tile",),
        }
        return next((field for field, taken in possible.items() if getattr(self, field) not in taken), "")


_OPTIONAL_ROLES = ("diagonal_values", "gradient_values", "dout_tokens")
_ROLES = ("scores", "gradient_qk", "values", "dout_channels", *_OPTIONAL_ROLES)
_TOKEN_ROLES = ("gradient_qk", "values", "diagonal_values", "dout_tokens")


MXFP8 = Recipe(
    name="mxfp8",
    summary="the contract: one leak-free E4M3 copy per operand, V1 in the diagonal tile",
    scores=Scaling.TOKEN,
    gradient_qk=Scaling.TOKEN,
    values=Scaling.TOKEN_BLOCK,
    diagonal_values=Scaling.TOKEN,
    dout_channels=Scaling.TOKEN_BLOCK,
)

NVFP4_FP8 = Recipe(
    name="nvfp4_fp8",
    summary="the contract with Q and K in NVFP4 for the scores, E4M3 elsewhere",
    scores=Scaling.NVFP4,
    gradient_qk=Scaling.TOKEN,
    values=Scaling.TOKEN_BLOCK,
    diagonal_values=Scaling.TOKEN,
    dout_channels=Scaling.TOKEN_BLOCK,
)

BF16 = Recipe(
    name="bf16",
    summary="the same code path with bfloat16 operands; scales only mark tokens that are not finite",
    scores=Scaling.NONE,
    gradient_qk=Scaling.NONE,
    values=Scaling.NONE,
    diagonal_values=Scaling.NONE,
    dout_channels=Scaling.NONE,
)

CUDNN_MXFP8 = Recipe(
    name="cudnn_mxfp8",
    summary="1x32 along each contraction as in cuDNN's reference: two copies, another P in each pass, leaks through V",
    scores=Scaling.CHANNELS_1X32,
    gradient_qk=Scaling.TOKENS_1X32,
    values=Scaling.TOKENS_1X32,
    gradient_values=Scaling.CHANNELS_1X32,
    dout_channels=Scaling.CHANNELS_1X32,
    dout_tokens=Scaling.TOKENS_1X32,
    p_scale="constant",
    p_exponent=4,
    p_backward_exponent=8,
    row_sum="exact",
    normalize="p",
    delta="unquantized",
    ds_probability="exact",
    ds_scale="1x32",
)

TILE_32X32 = Recipe(
    name="tile_32x32",
    summary="every operand in 32x32 tiles: one copy, but Q, K and V leak",
    scores=Scaling.TILE_32X32,
    gradient_qk=Scaling.TILE_32X32,
    values=Scaling.TILE_32X32,
    dout_channels=Scaling.TILE_32X32,
)

TENSOR_FP8 = Recipe(
    name="tensor_fp8",
    summary="one scale per tensor from its own maximum (current scaling), constant P scale: everything leaks",
    scores=Scaling.TENSOR,
    gradient_qk=Scaling.TENSOR,
    values=Scaling.TENSOR,
    dout_channels=Scaling.TENSOR,
    p_scale="constant",
    row_sum="exact",
    normalize="p",
    delta="unquantized",
)

RECIPES = {r.name: r for r in (MXFP8, NVFP4_FP8, BF16, CUDNN_MXFP8, TILE_32X32, TENSOR_FP8)}
"""Every named recipe, by name."""


def get_recipe(recipe: Recipe | str) -> Recipe:
    """Return ``recipe`` itself, or the named one.

    :raises ValueError: for a name that is not in `RECIPES`.
    :raises TypeError: for anything that is neither a `Recipe` nor a string.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a Recipe or a name, got {recipe!r}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {sorted(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]
