"""Profiles: how a machine multiplies tiles.

Note [Profiles]
~~~~~~~~~~~~~~~
The contract fixes every number that is rounded to a format; it leaves to the machine how a product of two tiles is
accumulated. A `Profile` says so:

* ``ideal``: products and sums in float64 with BLAS. The products of two E4M3 tiles are exact there.
* ``blackwell``: chains of tcgen05 steps; the scale factors are operands of the step.
* ``hopper``: chains of wgmma steps. Channel contractions multiply the E4M3 codes (13-bit accumulator) and apply the
  two token scales afterwards in FP32; token contractions multiply the decoded values in bfloat16, which holds them
  exactly, and P and dS as Note [Own exponents] says.

A contraction over channels gives FP32; a contraction over tokens continues an accumulator, in ascending order of the
contracted token. The accumulator of the ideal profile is float64.

Note [Own exponents]
~~~~~~~~~~~~~~~~~~~~
A machine whose token contractions take bfloat16 operands needs no common scale for what is computed on the fly. There,
P and dS keep an exponent each, bfloat16's, and are rounded to the significand of their format alone: to F = 3 fraction
bits for E4M3, F = 7 for bfloat16. So

* P is `probabilities.own_exponents`: its fraction is rounded once, from the exact product in the exponential, and the
  exponent is ``r - top``, with the row's running maximum M, this tile included, as ``top`` in the forward and the final
  m in the backward. Exponent field 0 gives the subnormal number of the same fraction, a field below gives 0. P of the
  backward is that of the forward, times an exact power of two, where both fields are above 0.
* nothing is folded, and V has one copy: V1 in every tile, of full attention too. V1, dO', q and k multiply with their
  decoded values in bfloat16. All of these are finite, because the zeros of hidden entries of P and dS multiply them:
  a lost token counts as zeros, and 2^128, which is the code 256 under scale byte 247 (E4M3 rounds elements from
  (1 - 2^-5) 2^128 on to it), saturates at bfloat16's largest number, (255/128) 2^127, of the same sign. A query that
  sees a lost token of V gets NaN. Channel contractions keep codes and scales.
* ``dS = fl(P * fl(dP - delta))`` is rounded to F bits, ties away from zero for F = 3 (bits + 2^19, cut off) and to even
  for F = 7, and is the operand itself, NaN where the product is not finite; ``softmax_scale`` multiplies the FP32 rows
  of dQ and dK of each query head.

The numbers are those of block-scaled E4M3 wherever that is normal, but for ties of dS; where it would be subnormal or
underflow they are more accurate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference import tensorcore
from flamia.reference.documents import BLOCK, TILE
from flamia.reference.formats import decode_e8m0
from flamia.reference.operands import DocumentOperand
from flamia.reference.recipes import Scaling

ONE_BYTE = np.uint8(127)
"""The E8M0 byte of 1.0."""


@dataclass(frozen=True)
class Profile:
    """How one machine contracts tiles; see Note [Profiles].

    :param name: what users type.
    :param e4m3_step: channel contraction of E4M3 codes; None: float64.
    :param nvfp4_step: channel contraction of NVFP4 operands; None: the decoded values through ``bf16_step``.
    :param token_step: token contraction of scaled E4M3 operands; None: the decoded values through ``bf16_step``.
    :param bf16_step: contraction of unscaled operands.
    :param head_dims: head dimensions that the machine's tiles take; None: any multiple of 32 up to 256.
    :param own_exponents: P and dS have no common scales: Note [Own exponents].
    """

    name: str
    e4m3_step: tensorcore.MmaStep | None = None
    nvfp4_step: tensorcore.MmaStep | None = None
    token_step: tensorcore.MmaStep | None = None
    bf16_step: tensorcore.MmaStep | None = None
    head_dims: tuple[int, ...] | None = None
    own_exponents: bool = False

    @property
    def exact(self) -> bool:
        """True for the float64 profile."""
        return self.bf16_step is None

    @property
    def accumulator(self) -> type[np.float32] | type[np.float64]:
        """dtype of token-contraction accumulators."""
        return np.float64 if self.exact else np.float32


IDEAL = Profile("ideal")

BLACKWELL = Profile(
    "blackwell",
    e4m3_step=tensorcore.MXF8F6F4,
    nvfp4_step=tensorcore.MXF4NVF4,
    token_step=tensorcore.MXF8F6F4,
    bf16_step=tensorcore.TCGEN05_F16,
    head_dims=(64, 128),
)

HOPPER = Profile(
    "hopper",
    e4m3_step=tensorcore.WGMMA_E4M3,
    bf16_step=tensorcore.WGMMA_BF16,
    head_dims=(64, 128),
    own_exponents=True,
)

PROFILES = {p.name: p for p in (IDEAL, BLACKWELL, HOPPER)}
"""Every profile, by name."""


def get_profile(profile: Profile | str) -> Profile:
    """Return ``profile`` itself, or the named one.

    :raises ValueError: for an unknown name. :raises TypeError: for another type.
    """
    if isinstance(profile, Profile):
        return profile
    if not isinstance(profile, str):
        raise TypeError(f"profile must be a Profile or a name, got {profile!r}")
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {sorted(PROFILES)}, got {profile!r}")
    return PROFILES[profile]


def contract_channels(
    profile: Profile, keys: DocumentOperand, queries: DocumentOperand, key_tile: int, query_tile: int
) -> NDArray[np.float32]:
    """FP32 ``(C, G, 128 keys, 128 queries)``: every dot product over channels of two token tiles.

    ``keys`` has ``C`` heads, ``queries`` ``C * G``: the group of KV head ``c`` is ``c * G .. c * G + G - 1``. The
    constant head scales of NVFP4 multiply the result, in FP32.
    """
    group = queries.codes.shape[0] // keys.codes.shape[0]

    def key_rows(x: NDArray[Any]) -> NDArray[Any]:
        return x[:, None, _tile(key_tile)]

    def query_rows(x: NDArray[Any]) -> NDArray[Any]:
        return x[:, _tile(query_tile)].reshape(-1, group, TILE, *x.shape[2:])

    out: NDArray[np.float32]
    if profile.exact:
        out = np.matmul(key_rows(keys.values), query_rows(queries.values).swapaxes(-1, -2)).astype(np.float32)
    else:
        assert keys.scale is not None and queries.scale is not None
        a, b = key_rows(keys.codes), query_rows(queries.codes)
        scale_a, scale_b = key_rows(keys.scale), query_rows(queries.scale)
        if keys.scaling is Scaling.NVFP4:
            if profile.nvfp4_step is not None:
                out = tensorcore.mma(a, b, None, profile.nvfp4_step, scale_a=scale_a, scale_b=scale_b)
            else:
                assert profile.bf16_step is not None
                a, b = (x.astype(np.float32) for x in (key_rows(keys.values), query_rows(queries.values)))
                out = tensorcore.mma(a, b, None, profile.bf16_step)
        else:
            step = profile.bf16_step if keys.scaling is Scaling.NONE else profile.e4m3_step
            assert step is not None
            out = _contract_token_scaled(step, a, b, scale_a, scale_b)
    if keys.factor != 1 or queries.factor != 1:
        out *= keys.factor * queries.factor
    return out


def _contract_token_scaled(
    step: tensorcore.MmaStep,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    scale_a: NDArray[np.uint8],
    scale_b: NDArray[np.uint8],
) -> NDArray[np.float32]:
    """``A B^T`` of element values with one E8M0 byte per row of each."""
    if step.scale_block:
        blocks = (a.shape[-1] // step.scale_block,)
        wide_a = np.broadcast_to(scale_a[..., None], scale_a.shape + blocks)
        wide_b = np.broadcast_to(scale_b[..., None], scale_b.shape + blocks)
        return tensorcore.mma(a, b, None, step, scale_a=wide_a, scale_b=wide_b)
    out = tensorcore.mma(a, b, None, step)
    # The two token scales in FP32, keys first: exact but for overflow and subnormals.
    out *= decode_e8m0(scale_a)[..., :, None]
    out *= decode_e8m0(scale_b)[..., None, :]
    return out


@dataclass(frozen=True)
class Computed:
    """An operand that is computed on the fly, P or dS, for one tile: ``A`` of ``A B`` over 128 tokens.

    :param codes: float32 element values ``(..., M, 128)``.
    :param scale: E8M0 bytes ``(..., M, 4)``, one per row and 32 tokens; None without scales.
    :param wide: float64 of the codes times their scales, for the ideal profile; computed if None.
    :param e4m3: the elements are E4M3, else bfloat16.
    """

    codes: NDArray[np.float32]
    scale: NDArray[np.uint8] | None
    wide: NDArray[np.float64] | None = None
    e4m3: bool = True

    def decoded(self) -> NDArray[np.float64]:
        """``wide``, from codes and scale if it was not given."""
        if self.wide is not None:
            return self.wide
        wide: NDArray[np.float64] = self.codes.astype(np.float64)
        if self.scale is not None:
            blocks = wide.reshape(*wide.shape[:-1], self.scale.shape[-1], BLOCK)  # splits an axis: a view
            blocks *= decode_e8m0(self.scale)[..., None]
        return wide


@dataclass(frozen=True)
class Stored:
    """A stored operand of a token contraction for one tile: ``B`` of ``A B``.

    :param codes: float32 element values ``(..., 128, N)``.
    :param scale: E8M0 bytes ``(..., 4)``, one per 32 tokens; None: scale 1.
    :param wide: float64 of the codes times their scales.
    """

    codes: NDArray[np.float32]
    scale: NDArray[np.uint8] | None
    wide: NDArray[np.float64]


def stored_tile(
    operand: DocumentOperand, rows: slice, group: int, *, folded: bool = False, found: bool = False
) -> Stored:
    """Tokens ``rows`` of an operand whose heads come in groups: arrays ``(C, group, 128, D)``.

    If its token scales are ``folded`` into the other operand (Note [Folded exponents]), only the payload is taken;
    ``found``: the decoded values, finite and with zeros for lost tokens (Note [Own exponents]).
    """

    def cut(x: NDArray[Any]) -> NDArray[Any]:
        return x[:, rows].reshape(-1, group, TILE, *x.shape[2:])

    if folded:
        return Stored(cut(operand.codes), None, cut(operand.wide_codes))
    if found:
        return Stored(cut(operand.codes), None, cut(operand.found_values))
    scale = None
    if operand.scaling is Scaling.TOKEN_BLOCK and operand.scale is not None:
        scale = cut(operand.scale)[..., ::BLOCK]
    return Stored(cut(operand.codes), scale, cut(operand.values))


def contract_tokens(profile: Profile, accumulator: NDArray[Any], a: Computed, b: Stored) -> None:
    """``accumulator (..., M, N) += A B`` over one tile of 128 tokens, in the steps of the profile."""
    if profile.exact:
        accumulator += np.matmul(a.decoded(), b.wide)
        return
    columns = b.codes.swapaxes(-1, -2)
    if a.e4m3 and a.scale is not None and profile.token_step is not None:
        b_scale = b.scale
        if b_scale is None:
            b_scale = np.full((1,) * (columns.ndim - 2) + a.scale.shape[-1:], ONE_BYTE)
        per_column = np.broadcast_to(b_scale[..., None, :], columns.shape[:-1] + b_scale.shape[-1:])
        accumulator[...] = tensorcore.mma(
            a.codes, columns, accumulator, profile.token_step, scale_a=a.scale, scale_b=per_column
        )
        return
    assert profile.bf16_step is not None
    left, right = (_as_bf16(x) for x in (a.decoded(), b.wide))
    accumulator[...] = tensorcore.mma(left, right.swapaxes(-1, -2), accumulator, profile.bf16_step)


def sum_tokens(profile: Profile, accumulator: NDArray[Any], a: Computed) -> None:
    """``accumulator (..., M, 1) += A 1``: the row sum as one more product, with an operand of ones."""
    if profile.exact:
        # wide has at most 17 significant bits per element below a common power of two: the sum is exact
        accumulator += a.decoded().sum(axis=-1, keepdims=True)
        return
    ones = np.ones((*(1,) * (a.codes.ndim - 2), TILE, 1))
    contract_tokens(profile, accumulator, a, Stored(ones.astype(np.float32), None, ones))


def _as_bf16(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """E4M3 values times powers of two in bfloat16, exact but for its subnormals."""
    return x.astype(np.float32).astype(bfloat16).astype(np.float32)


def _tile(index: int) -> slice:
    return slice(index * TILE, (index + 1) * TILE)
