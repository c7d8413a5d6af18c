"""The forward pass: out, LSE, and what the backward needs.

Note [Forward]
~~~~~~~~~~~~~~
For query row i of a document, key tiles of 128 tokens in ascending order:

1. ``S = MMA(Q, K)`` with the token scales; ``x = c S``, hidden keys removed by selection before any maximum.
2. ``m_t = ceil(max of the visible x in tile t)``, an integer. ``P = E4M3(p 2^(r + 8 - m_t))`` (Note [Probabilities]).
3. The reference exponent ``M`` is the running maximum of ``m_t``. When it grows, O and l are multiplied by the exact
   power ``2^(M_old - M_new)``, or by 0 below 2^-126. The tile's scale factor is ``2^(m_t - 8 - M)``; below 2^-127 the
   tile contributes 0, but a NaN in it stays NaN.
4. ``O += P V`` and ``l += P 1``, both of the quantized P. In the diagonal tile of causal attention V1 takes the place
   of V32: the product is ``P' V1`` with P' and ``2^(E_ib)`` of `probabilities.fold_values`, while l still sums P
   itself. The route depends on position only.
5. ``out = fl(O / l)`` rounded to the input dtype; ``LSE = ln 2 (M + log2 l)``. Saved: ``m = max_t m_t`` and l
   in units of 2^m.

Under a profile with Note [Own exponents] of `flamia.reference.profiles` that note replaces P, its scale and V32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference import probabilities as pr
from flamia.reference.arguments import Arguments, check_forward, check_observer
from flamia.reference.documents import BLOCK, TILE, Document, iter_documents
from flamia.reference.formats import decode_e8m0
from flamia.reference.operands import F32, DocumentOperand, Operand, exp2_of, prepare
from flamia.reference.parallel import quiet, run_all, worker_count
from flamia.reference.profiles import Computed, Profile, contract_channels, contract_tokens, stored_tile, sum_tokens
from flamia.reference.recipes import Recipe, Scaling
from flamia.reference.scaling import exponent_of

Observer = Callable[[str, Document, slice, int, int, NDArray[Any]], None]
"""``observer(stage, document, query_heads, query_tile, key_tile, array)``: called with a copy of every tile of a stage.

The backward calls it from several threads.
"""

HEADS_AT_ONCE = 4
"""Query heads that the engine handles together, so that a tile's arrays stay in a core's cache."""


@dataclass(frozen=True)
class Forward:
    """Result of `attention_forward`, and all that `attention_backward` needs.

    :param out: ``(T, Hq, D)``, dtype of q; 0 in padding rows.
    :param lse: float32 ``(Hq, T)``, natural logarithm; -inf in padding rows.
    :param m: float32 ``(Hq, T)``, the integer m of Note [Forward]; -inf in padding rows.
    :param l: float32 ``(Hq, T)``, the row sum in units of ``2**m``; 0 in padding rows.
    :param operands: quantized q, k, v by role (see `quantize_inputs`).
    """

    out: NDArray[Any]
    lse: NDArray[np.float32]
    m: NDArray[np.float32]
    l: NDArray[np.float32]  # noqa: E741
    operands: dict[str, Operand]
    cu_seqlens: NDArray[np.int64]
    recipe: Recipe
    profile: Profile
    causal: bool
    softmax_scale: float
    head_counts: tuple[int, int] = field(default=(0, 0))


def operand_roles(recipe: Recipe, causal: bool, own_exponents: bool = False) -> dict[str, tuple[str, Scaling]]:
    """Which copy of which tensor each product reads: role -> (``"q"``, ``"k"`` or ``"v"``, scaling).

    ``q``, ``k``: scores; ``q_tokens``, ``k_tokens``: dK and dQ; ``v``: O; ``v1``: the diagonal tile; ``v_gradient``:
    dP. With ``own_exponents``, of a profile, ``v`` is V1, and there is no ``v1``.
    """
    roles = {
        "q": ("q", recipe.scores),
        "k": ("k", recipe.scores),
        "q_tokens": ("q", recipe.gradient_qk),
        "k_tokens": ("k", recipe.gradient_qk),
        "v": ("v", recipe.values),
    }
    if own_exponents and recipe.diagonal_values is not None:
        roles["v"] = ("v", recipe.diagonal_values)
    elif recipe.diagonal_values is not None and causal:
        roles["v1"] = ("v", recipe.diagonal_values)
    if recipe.gradient_values is not None:
        roles["v_gradient"] = ("v", recipe.gradient_values)
    return roles


def quantize_inputs(a: Arguments) -> dict[str, Operand]:
    """The operands of both passes by role (see `operand_roles`); equal roles share one copy."""
    tensors = {"q": a.q, "k": a.k, "v": a.v}
    done: dict[tuple[str, Scaling], Operand] = {}
    out = {}
    for role, key in operand_roles(a.recipe, a.causal, a.profile.own_exponents).items():
        if key not in done:
            name, scaling = key
            done[key] = prepare(tensors[name], a.cu_seqlens, scaling, a.recipe)
        out[role] = done[key]
    return out


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    *,
    recipe: Recipe | str = "mxfp8",
    causal: bool = True,
    softmax_scale: float | None = None,
    profile: Profile | str = "ideal",
    observer: Observer | None = None,
) -> Forward:
    """Attention of packed documents as Note [Forward] says.

    :param q: ``(T, Hq, D)`` float32 or ml_dtypes.bfloat16.
    :param k: ``(T, Hkv, D)``, dtype of q; Hkv divides Hq.
    :param v: as k.
    :param cu_seqlens: integers ``(n + 1,)``, see Note [Documents].
    :param recipe: a `Recipe` or its name.
    :param causal: a query sees the keys of its document up to itself; False: all keys of its document.
    :param softmax_scale: from 0 to half of the largest float32; default ``1 / sqrt(D)``.
    :param profile: a `Profile` or its name.
    :param observer: receives the tiles of the stages ``"p"`` (float32 element values, ``[heads, keys, queries]``),
        ``"p_top"`` (the integers m_t, ``[heads, queries]``).
    :raises ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    a = check_forward(q, k, v, cu_seqlens, recipe, causal, softmax_scale, profile)
    check_observer(observer)
    operands = quantize_inputs(a)
    total, hq, dim = a.q.shape
    out = np.zeros((total, hq, dim), a.q.dtype)
    lse = np.full((hq, total), -np.inf, F32)
    m = np.full((hq, total), -np.inf, F32)
    l = np.zeros((hq, total), F32)  # noqa: E741
    outputs = (out, lse, m, l)
    stripes = 1 if observer is not None else worker_count()
    run_all(
        partial(_forward_document, a, operands, document, heads, outputs, observer, (stripe, stripes))
        for document in iter_documents(a.cu_seqlens)
        for heads in head_chunks(hq, a.k.shape[1])
        for stripe in range(min(stripes, document.tiles))
    )
    return Forward(
        out, lse, m, l, operands, a.cu_seqlens, a.recipe, a.profile, a.causal, a.softmax_scale, (hq, a.k.shape[1])
    )


def head_chunks(num_q_heads: int, num_kv_heads: int) -> Iterator[tuple[slice, slice]]:
    """Slices of KV heads and of their query heads, about `HEADS_AT_ONCE` query heads each."""
    group = num_q_heads // num_kv_heads
    step = max(1, HEADS_AT_ONCE // group)
    for first in range(0, num_kv_heads, step):
        last = min(first + step, num_kv_heads)
        yield slice(first, last), slice(first * group, last * group)


@quiet
def _forward_document(
    a: Arguments,
    operands: dict[str, Operand],
    document: Document,
    heads: tuple[slice, slice],
    outputs: tuple[NDArray[Any], ...],
    observer: Observer | None,
    stripe: tuple[int, int],
) -> None:
    """Every ``stripe[1]``-th query tile of one document and some heads, from tile ``stripe[0]`` on."""
    kv_heads, q_heads = heads
    cut = {role: operands[role].document(document, q_heads if role == "q" else kv_heads) for role in ("q", "k", "v")}
    v1 = operands["v1"].document(document, kv_heads) if "v1" in operands else None
    kv = kv_heads.stop - kv_heads.start
    group = (q_heads.stop - q_heads.start) // kv
    out, lse, m, l = outputs  # noqa: E741
    for query_tile in range(stripe[0], document.tiles, stripe[1]):
        rows = min(TILE, document.length - query_tile * TILE)
        state = RowState(a, (kv, group))
        for key_tile in range(query_tile + 1 if a.causal else document.tiles):
            hidden = pr.visible_mask(query_tile, key_tile, document.length, a.causal)
            scores = contract_channels(a.profile, cut["k"], cut["q"], key_tile, query_tile)
            diagonal = v1 if a.causal and key_tile == query_tile else None
            codes, top = state.add(scores, hidden, cut["v"], diagonal, key_tile)
            if observer is not None:
                observer("p", document, q_heads, query_tile, key_tile, codes.reshape(-1, TILE, TILE).copy())
                observer("p_top", document, q_heads, query_tile, key_tile, top.reshape(-1, TILE).copy())
        tokens = slice(document.start + query_tile * TILE, document.start + query_tile * TILE + rows)
        result, sums = state.finish()
        out[tokens, q_heads] = np.moveaxis(result.reshape(-1, TILE, result.shape[-1])[:, :rows], 0, 1).astype(out.dtype)
        m[q_heads, tokens] = state.top.reshape(-1, TILE)[:, :rows]
        l[q_heads, tokens] = sums.reshape(-1, TILE)[:, :rows]
        natural = np.log(2.0) * (state.top.astype(np.float64) + np.log2(sums.astype(np.float64)))
        lse[q_heads, tokens] = natural.reshape(-1, TILE)[:, :rows].astype(F32)


class RowState:
    """O, l and M of 128 query rows while the key tiles pass: steps 2 to 5 of Note [Forward]."""

    def __init__(self, a: Arguments, heads: tuple[int, int]) -> None:
        self.profile, self.recipe, self.constant = a.profile, a.recipe, a.softmax_constant
        self.top = np.full((*heads, TILE), -np.inf, F32)
        self.o = np.zeros((*heads, TILE, a.q.shape[-1]), a.profile.accumulator)
        self.l = np.zeros((*heads, TILE, 1), a.profile.accumulator)

    def add(
        self,
        scores: NDArray[np.float32],
        hidden: NDArray[np.bool_] | None,
        v: DocumentOperand,
        v1: DocumentOperand | None,
        key_tile: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Take in one key tile; overwrites its scores. Returns P and the integer exponent it is held against."""
        recipe = self.recipe
        pr.raise_overflowed(scores)
        if hidden is not None:
            np.copyto(scores, F32(-np.inf), where=hidden)
        largest = np.fmax.reduce(scores, axis=-2)
        if hidden is not None:
            np.copyto(scores, F32(0), where=hidden)  # any number: P is zero there by selection, below
        if self.profile.own_exponents:
            return self._add_own(scores, hidden, largest, v, key_tile)
        bits = F32(recipe.p_exponent)
        if recipe.p_scale == "tile":
            tile_top = pr.ceiling(largest, self.constant)
            new_top = np.fmax(self.top, tile_top)
            self._rescale(new_top, exp2_of)
            r, p = pr.exponential(scores, self.constant)
            above = tile_top
        else:
            new_top = np.fmax(self.top, largest * self.constant)
            self._rescale(new_top, np.exp2)
            scores *= self.constant
            scores -= new_top[..., None, :]
            r, p = pr.exponential_of_rounded(scores)
            above = np.zeros_like(new_top)
            tile_top = new_top
        exact = recipe.row_sum == "exact"
        if exact:
            unrounded = pr.shift(p.copy(), r - above[..., None, :])
            if hidden is not None:
                np.copyto(unrounded, F32(0), where=hidden)
            factor = exp2_of(above - new_top, np.float64) if recipe.p_scale == "tile" else 1.0
            self.l += (unrounded.sum(axis=-2, dtype=np.float64) * factor)[..., None].astype(self.l.dtype)
        e4m3 = recipe.values is not Scaling.NONE
        codes = pr.quantize(p, r, above[..., None, :], bits, e4m3)
        if hidden is not None:
            np.copyto(codes, F32(0), where=hidden)

        exponent = (tile_top - new_top) - bits
        scale, dead = pr.scale_bytes(exponent)
        if dead.any():
            codes = pr.drop(codes, dead[..., None, :])
        per_block = np.broadcast_to(scale[..., None], (*scale.shape, TILE // BLOCK))
        wide = np.multiply(codes, decode_e8m0(scale).astype(np.float64)[..., None, :]) if self.profile.exact else None
        a = Computed(codes.swapaxes(-1, -2), per_block, None if wide is None else wide.swapaxes(-1, -2), e4m3)
        rows = slice(key_tile * TILE, (key_tile + 1) * TILE)
        if not exact:
            sum_tokens(self.profile, self.l, a)
        if v1 is None:
            contract_tokens(self.profile, self.o, a, stored_tile(v, rows, 1))
        else:
            assert hidden is not None and v1.scale is not None
            e = exponent_of(v1.scale[:, rows])
            folded, largest = pr.fold_values(codes, e[:, None], hidden, e4m3)
            scale, dead = pr.scale_bytes(exponent[..., None, :] + largest)
            if dead.any():
                folded = pr.drop(folded, np.repeat(dead, BLOCK, axis=-2))
            a = Computed(folded.swapaxes(-1, -2), scale.swapaxes(-1, -2), e4m3=e4m3)
            contract_tokens(self.profile, self.o, a, stored_tile(v1, rows, 1, folded=True))
        return codes, tile_top

    def _add_own(
        self,
        scores: NDArray[np.float32],
        hidden: NDArray[np.bool_] | None,
        largest: NDArray[np.float32],
        v: DocumentOperand,
        key_tile: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The same where P has exponents of its own: Note [Own exponents]. P is returned in units of ``2^(M - 8)``."""
        new_top = np.fmax(self.top, pr.ceiling(largest, self.constant))
        self._rescale(new_top, exp2_of)
        e4m3 = self.recipe.values is not Scaling.NONE
        p = pr.own_probabilities(scores, self.constant, new_top[..., None, :], hidden, e4m3)
        a = Computed(p.swapaxes(-1, -2), None, e4m3=e4m3)
        sum_tokens(self.profile, self.l, a)
        rows = slice(key_tile * TILE, (key_tile + 1) * TILE)
        contract_tokens(self.profile, self.o, a, stored_tile(v, rows, 1, found=True))
        assert v.scale is not None
        lost = v.scale[:, None, rows, None] == 255
        if lost.any():
            seen = (lost & (True if hidden is None else ~hidden)).any(axis=-2)
            np.copyto(self.o, np.nan, where=seen[..., None])
        return p * F32(2.0**8), new_top

    def _rescale(self, new_top: NDArray[np.float32], power: Callable[[Any], Any]) -> None:
        if (new_top > self.top).any():
            step = np.where(self.top == -np.inf, F32(0), self.top - new_top)
            factor = np.where(step < F32(-126), F32(0), power(step))[..., None].astype(self.o.dtype)
            self.o = self.o * factor
            self.l = self.l * factor
        self.top = new_top

    def finish(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Unrounded FP32 output rows and the FP32 row sums."""
        sums = self.l[..., 0].astype(F32)
        return self.o.astype(F32) / sums[..., None], sums
