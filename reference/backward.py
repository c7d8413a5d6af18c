"""The backward pass: the gradient of the function that the forward computed.

Note [Backward]
~~~~~~~~~~~~~~~
Row pre-pass, per query head and row i: ``dO' = fl(dO * fl(1 / l))`` quantized to E4M3 in token blocks of 32, and
``delta_i = sum_d dO'q_id * out_id`` with the *quantized* dO' (FP32, a binary tree over the channels; float64 in the
ideal profile). A row is

* *inactive* if its dO, or the quantized dO', is all zero: it contributes nothing to any gradient (P and dS are zero by
  selection). So a suffix with dO = 0 cannot move the scale of a tile that it shares with the prefix;
* *lost* if it is not inactive and its dO' (in bfloat16, if that is its operand) or l is not finite: its payload is zero
  and the block's scale comes from the other rows; P and dS of the row are NaN where it sees a key, so exactly dQ_i and
  dK_j, dV_j of the keys it sees become NaN.

Per 128x128 tile, with the S bits of the forward, ``[keys, queries]``:

1. ``E`` = max over the visible entries of active rows of ``ceil(x_ij) - m_i``, one integer per 32x32 tile, 0 if none of
   them is finite; ``P = E4M3(p 2^(r + 8 - m_i - E))``, scale ``2^(E - 8)`` (below 2^-127 the tile contributes zero).
2. ``dV_j += P^T dO'q``.
3. ``dP = MMA(V, dO'q)``, V32 or V1 as in the forward; ``dS = fl(softmax_scale * fl(P * fl(dP - delta)))``.
4. ``X = fl(fl(dS * 2^eQ_i) * 2^eK_j)`` (Note [Folded exponents]), one RCEIL scale per 32x32 tile; an entry that is not
   finite is a NaN element. ``dQ_i += X K``, ``dK_j += X^T Q`` on the payloads; at the end
   ``dQ_i *= 2^-eQ_i``, ``dK_j *= 2^-eK_j``.

dQ accumulates over key tiles, dK and dV over query tiles, ascending. The query heads of a group are summed in FP32 in
ascending order (float64 in the ideal profile). Gradients are rounded once, to the dtype of q.

Under a profile with Note [Own exponents] of `flamia.reference.profiles` that note replaces E, the scales of P and X,
the folded exponents and V32, and ``softmax_scale`` is applied to the rows of dQ and dK.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference import probabilities as pr
from flamia.reference.arguments import DTYPES, check_observer, check_tensor, softmax_constant
from flamia.reference.documents import BLOCK, TILE, Document, iter_documents
from flamia.reference.formats import E4M3, decode_e8m0, round_to
from flamia.reference.forward import Forward, Observer, head_chunks
from flamia.reference.operands import F32, DocumentOperand, Operand, exp2_of, prepare
from flamia.reference.parallel import quiet, run_all
from flamia.reference.profiles import Computed, contract_channels, contract_tokens, stored_tile
from flamia.reference.recipes import Scaling
from flamia.reference.scaling import Quantized, Rule, dequantize_tokens, exponent_of, scale_rule, tile_amax

Array = NDArray[np.float32]
PER_TILE = TILE // BLOCK


@dataclass(frozen=True)
class Gradients:
    """Gradients in the dtype of q or float32: dq ``(T, Hq, D)``, dk and dv ``(T, Hkv, D)``; 0 in padding rows."""

    dq: NDArray[Any]
    dk: NDArray[Any]
    dv: NDArray[Any]


@dataclass(frozen=True)
class RowPass:
    """Result of `row_pass`.

    :param dout: dO' by role: ``dout`` (dP) and ``dout_tokens`` (dV).
    :param delta: float32 ``(Hq, T)``.
    :param top: float32 ``(Hq, T)``: m, +inf in inactive rows, NaN in lost rows.
    """

    dout: dict[str, Operand]
    delta: Array
    top: Array


def row_pass(dout: NDArray[Any], f: Forward) -> RowPass:
    """The row pre-pass of Note [Backward].

    :param dout: ``(T, Hq, D)``, dtype of the forward's q.
    """
    r = f.recipe
    given = dout.astype(F32)
    given[f.cu_seqlens[-1] :] = 0
    zero = ~given.any(axis=-1)
    with np.errstate(all="ignore"):
        rows = given * (F32(1) / f.l.T)[..., None] if r.normalize == "dout" else given
        if r.dout_channels is Scaling.NONE:
            rows = rows.astype(bfloat16).astype(F32)  # which may overflow
        bad = ~np.isfinite(rows).all(axis=-1) | np.isnan(f.l.T)
        rows = np.where((bad | zero)[..., None], F32(0), rows)
        quantized = prepare(rows, f.cu_seqlens, r.dout_channels, r)
        other = r.dout_tokens
        tokens = quantized if other is None else prepare(rows, f.cu_seqlens, other, r)
        values = decode_operand(quantized) if r.delta == "quantized" else rows
        delta = dot_channels(values, f.out.astype(F32), f.profile.exact)
    inactive = zero | (~bad & ~values.any(axis=-1))
    top = np.where(inactive, F32(np.inf), np.where(bad, F32(np.nan), f.m.T))
    delta = np.where(inactive, F32(0), delta)
    return RowPass(
        {"dout": quantized, "dout_tokens": tokens}, np.ascontiguousarray(delta.T), np.ascontiguousarray(top.T)
    )


def decode_operand(operand: Operand) -> Array:
    """Packed float32 values of a token-block, unscaled or decoded operand."""
    if operand.payload.dtype != np.uint8:
        return operand.payload.astype(F32)
    assert operand.scale is not None
    return dequantize_tokens(Quantized(operand.payload, operand.scale))


def dot_channels(a: Array, b: Array, exact: bool) -> Array:
    """``sum(a * b)`` over the last axis, as FP32: in float64, or FP32 products in a binary tree of adjacent pairs.

    The tree is padded to a power of two.
    """
    if exact:
        wide: Array = np.multiply(a, b, dtype=np.float64).sum(axis=-1).astype(F32)
        return wide
    x = a * b
    width = 1 << (x.shape[-1] - 1).bit_length()
    if width != x.shape[-1]:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], width - x.shape[-1]), F32)], axis=-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def attention_backward(
    dout: Any, forward: Forward, *, dtype: Any = None, observer: Observer | None = None
) -> Gradients:
    """Gradients of attention as Note [Backward] says.

    :param dout: ``(T, Hq, D)``, shape and dtype of ``forward.out``.
    :param forward: the result of `attention_forward`, unaltered: its arrays are not checked again.
    :param dtype: dtype of the gradients; default: that of q. float32 leaves them unrounded.
    :param observer: receives the tiles of the stages ``"p"`` (float32 element values ``[heads, keys, queries]``),
        ``"p_scale"`` (E8M0 bytes ``[heads, 4, 4]``), ``"ds"``, ``"ds_scale"`` (likewise) and ``"ds_exact"`` (dS before
        quantization).
    :raises ValueError, TypeError: naming the argument.
    """
    if not isinstance(forward, Forward):
        raise TypeError(f"forward must be the result of attention_forward, got {type(forward).__name__}")
    check_tensor("dout", dout)
    if dout.shape != forward.out.shape:
        raise ValueError(f"dout must have the shape of out {forward.out.shape}, got {dout.shape}")
    if dout.dtype != forward.out.dtype:
        raise TypeError(f"dout must have the dtype of out ({forward.out.dtype}), got {dout.dtype}")
    try:
        kind = np.dtype(forward.out.dtype if dtype is None else dtype)
    except TypeError:
        kind = None
    if kind not in DTYPES:
        raise TypeError(f"dtype must be float32 or ml_dtypes.bfloat16, got {dtype!r}")
    check_observer(observer)
    rows = row_pass(dout, forward)
    hq, hkv = forward.head_counts
    total, _, dim = dout.shape
    grads = Gradients(
        np.zeros((total, hq, dim), kind), np.zeros((total, hkv, dim), kind), np.zeros((total, hkv, dim), kind)
    )
    run_all(
        partial(_backward_document, forward, rows, document, heads, observer, grads)
        for document in iter_documents(forward.cu_seqlens)
        for heads in head_chunks(hq, hkv)
    )
    return grads


@quiet
def _backward_document(
    f: Forward,
    rows: RowPass,
    document: Document,
    heads: tuple[slice, slice],
    observer: Observer | None,
    grads: Gradients,
) -> None:
    _DocumentBackward(f, rows, document, heads, observer).run(grads)


class _DocumentBackward:
    """The backward of one document and some heads."""

    def __init__(
        self, f: Forward, rows: RowPass, document: Document, heads: tuple[slice, slice], observer: Observer | None
    ) -> None:
        kv_heads, q_heads = heads

        def cut(operand: Operand, heads: slice) -> DocumentOperand:
            return operand.document(document, heads)

        self.f, self.document, self.kv_heads, self.q_heads, self.observer = f, document, kv_heads, q_heads, observer
        self.kv = kv_heads.stop - kv_heads.start
        self.group = (q_heads.stop - q_heads.start) // self.kv
        o = f.operands
        self.q, self.k = cut(o["q"], q_heads), cut(o["k"], kv_heads)
        same = f.recipe.scores is f.recipe.gradient_qk
        self.q_tokens = self.q if same else cut(o["q_tokens"], q_heads)
        self.k_tokens = self.k if same else cut(o["k_tokens"], kv_heads)
        self.v = cut(o["v_gradient"] if "v_gradient" in o else o["v"], kv_heads)
        self.v1 = cut(o["v1"], kv_heads) if "v1" in o and "v_gradient" not in o else None
        self.dout = cut(rows.dout["dout"], q_heads)
        same = rows.dout["dout"] is rows.dout["dout_tokens"]
        self.dout_tokens = self.dout if same else cut(rows.dout["dout_tokens"], q_heads)
        tokens = slice(document.start, document.stop)
        self.delta = self._padded(rows.delta[q_heads, tokens], 0)
        self.top = self._padded(rows.top[q_heads, tokens], np.inf)
        self.inverse_l = self._padded(F32(1) / f.l[q_heads, tokens], 0)
        self.own = f.profile.own_exponents
        folded = f.recipe.gradient_qk in (Scaling.TOKEN, Scaling.NONE) and not self.own
        zeros = np.zeros(1, F32)
        self.e_q = self._grouped(self.q_tokens.exponents) if folded else zeros
        self.e_k = self.k_tokens.exponents[:, None] if folded else zeros
        self.factor_q, self.factor_k = exp2_of(self.e_q), exp2_of(self.e_k)
        self.folded = folded
        self.constant = softmax_constant(f.softmax_scale)

    def _padded(self, x: Array, fill: float) -> Array:
        out = np.full((x.shape[0], self.document.tiles * TILE), fill, F32)
        out[:, : x.shape[1]] = x
        return self._grouped(out)

    def _grouped(self, x: NDArray[Any]) -> NDArray[Any]:
        return x.reshape(self.kv, self.group, *x.shape[1:])

    def run(self, grads: Gradients) -> None:
        """Walk key tiles, and for each the query tiles that see it; write this document's gradients."""
        f, tiles = self.f, self.document.tiles
        dim, kind = f.out.shape[-1], f.profile.accumulator
        heads = (self.kv, self.group)
        dq = np.zeros((*heads, tiles * TILE, dim), kind)
        dk, dv = np.zeros_like(dq), np.zeros_like(dq)
        for key_tile in range(tiles):
            keys = _tile(key_tile)
            for query_tile in range(key_tile if f.causal else 0, tiles):
                queries = _tile(query_tile)
                p, ds, ds_turned = self.tile(key_tile, query_tile)
                how = {"folded": self.folded, "found": self.own}
                dout = stored_tile(self.dout_tokens, queries, self.group, found=self.own)
                contract_tokens(f.profile, dv[:, :, keys], p, dout)
                contract_tokens(f.profile, dk[:, :, keys], ds, stored_tile(self.q_tokens, queries, self.group, **how))
                contract_tokens(f.profile, dq[:, :, queries], ds_turned, stored_tile(self.k_tokens, keys, 1, **how))
        if self.folded:
            dq = self._unfold(dq, self.e_q)
            dk = self._unfold(dk, np.broadcast_to(self.e_k, (*heads, tiles * TILE)))
        if self.own:
            dq *= F32(f.softmax_scale)
            dk *= F32(f.softmax_scale)
        length, tokens = self.document.length, slice(self.document.start, self.document.stop)
        grads.dq[tokens, self.q_heads] = _packed(dq.reshape(-1, *dq.shape[2:]), length, grads.dq.dtype)
        for total, part in ((grads.dk, dk), (grads.dv, dv)):
            summed = part[:, 0]
            for g in range(1, self.group):
                summed = summed + part[:, g]
            total[tokens, self.kv_heads] = _packed(summed, length, total.dtype)

    def tile(self, key_tile: int, query_tile: int) -> tuple[Computed, Computed, Computed]:
        """P, and X as operand of dK and of dQ, for one 128x128 tile: steps 1, 3 and 4."""
        f, r = self.f, self.f.recipe
        queries, keys = _tile(query_tile), _tile(key_tile)
        hidden = pr.visible_mask(query_tile, key_tile, self.document.length, f.causal)
        top = self.top[..., queries]
        idle = np.isposinf(top)
        if idle.any():
            closed = idle[..., None, :]
            hidden = np.broadcast_to(closed if hidden is None else hidden | closed, (*idle.shape[:-1], TILE, TILE))

        scores = contract_channels(f.profile, self.k, self.q, key_tile, query_tile)
        if self.own:
            p, value = self._own_probabilities(scores, hidden, top)
        elif r.p_scale == "tile":
            p, value = self._tile_probabilities(scores, hidden, top)
        else:
            p, value = self._constant_probabilities(scores, hidden, top, queries)

        v = self.v1 if self.v1 is not None and f.causal and key_tile == query_tile else self.v
        ds = contract_channels(f.profile, v, self.dout, key_tile, query_tile)
        ds -= self.delta[..., None, queries]
        ds *= value
        if self.own:
            return self._own_gradients(ds, hidden, p, query_tile, key_tile)
        ds *= F32(f.softmax_scale)
        _select(ds, hidden)
        self._observe("p", query_tile, key_tile, p.codes)
        self._observe("p_scale", query_tile, key_tile, None if p.scale is None else p.scale[..., ::BLOCK, :])
        self._observe("ds_exact", query_tile, key_tile, ds)
        if self.folded:
            ds *= self.factor_q[..., None, queries]
            ds *= self.factor_k[..., keys, None]
            _select(ds, hidden)
        if r.gradient_qk is Scaling.NONE:
            rounded = ds.astype(bfloat16).astype(F32)
            return p, Computed(rounded, None), Computed(rounded.swapaxes(-1, -2), None)
        if r.ds_scale == "1x32":
            along_keys = _quantized_blocks(ds, -2, r.scale_rule)
            return (
                p,
                Computed(_quantized_blocks(ds, -1, r.scale_rule), None),
                Computed(along_keys.swapaxes(-1, -2), None),
            )
        codes, scale = quantize_square_tiles(ds, r.scale_rule)
        self._observe("ds", query_tile, key_tile, codes)
        self._observe("ds_scale", query_tile, key_tile, scale)
        x_tile = _square(codes, scale, f.profile.exact)
        turned = None if x_tile.wide is None else x_tile.wide.swapaxes(-1, -2)
        return p, x_tile, Computed(codes.swapaxes(-1, -2), _per_row(scale.swapaxes(-1, -2)), turned)

    def _tile_probabilities(
        self, scores: Array, hidden: NDArray[np.bool_] | None, top: Array
    ) -> tuple[Computed, Array]:
        """P with one scale per 32x32 tile, and the numbers it stands for: step 1. Overwrites ``scores``."""
        pr.raise_overflowed(scores)
        if hidden is not None:
            np.copyto(scores, F32(-np.inf), where=hidden)
        columns = np.fmax.reduce(scores.reshape(*scores.shape[:-2], PER_TILE, BLOCK, TILE), axis=-2)
        if hidden is not None:
            np.copyto(scores, F32(0), where=hidden)  # any number: P is zero there by selection, below
        relative = pr.ceiling(columns, self.constant) - top[..., None, :]
        largest = np.fmax.reduce(relative.reshape(*relative.shape[:-1], PER_TILE, BLOCK), axis=-1)
        largest = np.where(np.isfinite(largest), largest, F32(0))
        above = np.repeat(largest, BLOCK, axis=-1) + top[..., None, :]
        r, p = pr.exponential(scores, self.constant)
        blocks = r.reshape(*r.shape[:-2], PER_TILE, BLOCK, TILE)
        e4m3 = self.f.recipe.values is not Scaling.NONE
        codes = pr.quantize(p.reshape(blocks.shape), blocks, above[..., None, :], F32(8), e4m3).reshape(p.shape)
        scale, dead = pr.scale_bytes(largest - F32(8))
        if dead.any():
            codes = pr.drop(codes, np.repeat(np.repeat(dead, BLOCK, -1), BLOCK, -2))
        _select(codes, hidden)
        value = _by_square(codes, decode_e8m0(scale))
        wide = value.astype(np.float64) if self.f.profile.exact else None
        return Computed(codes, _per_row(scale), wide, e4m3), value

    def _own_probabilities(self, scores: Array, hidden: NDArray[np.bool_] | None, top: Array) -> tuple[Computed, Array]:
        """P with an exponent each, Note [Own exponents]. Overwrites ``scores``."""
        pr.raise_overflowed(scores)
        if hidden is not None:
            np.copyto(scores, F32(0), where=hidden)  # any number: P is zero there by selection, below
        e4m3 = self.f.recipe.values is not Scaling.NONE
        p = pr.own_probabilities(scores, self.constant, top[..., None, :], hidden, e4m3)
        return Computed(p, None, e4m3=e4m3), p

    def _own_gradients(
        self, ds: Array, hidden: NDArray[np.bool_] | None, p: Computed, query_tile: int, key_tile: int
    ) -> tuple[Computed, Computed, Computed]:
        """P and dS with an exponent each; overwrites ``ds``. P is observed in units of 2^-8, as a scale says."""
        _select(ds, hidden)
        scale = np.full((*ds.shape[:-2], PER_TILE, PER_TILE), 127 - 8, np.uint8)
        self._observe("p", query_tile, key_tile, p.codes * F32(2.0**8))
        self._observe("p_scale", query_tile, key_tile, scale)
        self._observe("ds_exact", query_tile, key_tile, ds)
        rounded = pr.round_own(ds, pr.fraction_bits(p.e4m3))
        self._observe("ds", query_tile, key_tile, rounded)
        return p, Computed(rounded, None, e4m3=p.e4m3), Computed(rounded.swapaxes(-1, -2), None, e4m3=p.e4m3)

    def _constant_probabilities(
        self, scores: Array, hidden: NDArray[np.bool_] | None, top: Array, queries: slice
    ) -> tuple[Computed, Array]:
        """P, or P / l, held as ``E4M3(P * 2^p_backward_exponent)`` (study only), and the numbers inside dS."""
        recipe = self.f.recipe
        scores *= self.constant
        scores -= top[..., None, :]
        r, p = pr.exponential_of_rounded(scores)
        exact = pr.shift(p, r)
        if recipe.normalize == "p":
            exact *= self.inverse_l[..., None, queries]
        _select(exact, hidden)
        factor = F32(2.0**recipe.p_backward_exponent)
        if recipe.values is Scaling.NONE:
            rounded = exact.astype(bfloat16).astype(F32)
        else:
            rounded = round_to(exact * factor, E4M3) / factor
        return Computed(rounded, None), exact if recipe.ds_probability == "exact" else rounded

    def _unfold(self, x: NDArray[Any], exponent: Array) -> NDArray[Any]:
        undone: NDArray[Any] = x * exp2_of(-exponent, x.dtype)[..., None]
        return undone

    def _observe(self, stage: str, query_tile: int, key_tile: int, x: NDArray[Any] | None) -> None:
        if self.observer is not None and x is not None:
            flat = x.reshape(-1, *x.shape[2:]).copy()
            self.observer(stage, self.document, self.q_heads, query_tile, key_tile, flat)


def quantize_square_tiles(x: Array, rule: Rule = "rceil") -> tuple[Array, NDArray[np.uint8]]:
    """E4M3 element values and one scale byte per 32x32 tile of ``x (..., 128, 128)``; overwrites ``x``.

    The maximum is taken over finite entries; an entry that is not finite becomes a NaN element.
    """
    scale = scale_rule(rule)(tile_amax(x))
    if not np.isfinite(x).all():
        x = np.where(np.isfinite(x), x, F32(np.nan))
    x = _by_square(x, exp2_of(-exponent_of(scale)))
    return round_to(x, E4M3, out=x), scale


def _by_square(x: Array, factor: Array) -> Array:
    """Multiply each 32x32 tile of ``x (..., 128, 128)`` by its factor ``(..., 4, 4)``."""
    wide = np.repeat(factor, BLOCK, axis=-1)[..., None, :]
    out: Array = x.reshape(*x.shape[:-2], PER_TILE, BLOCK, TILE) * wide
    return out.reshape(x.shape)


def _quantized_blocks(x: Array, axis: int, rule: Rule) -> Array:
    """Decoded E4M3 values of ``x (..., 128, 128)`` with one scale per 32 entries along ``axis`` (study only)."""
    y = np.moveaxis(x, axis, -1)
    blocks = y.reshape(*y.shape[:-1], -1, BLOCK)
    size = np.abs(np.where(np.isfinite(blocks), blocks, F32(0))).max(axis=-1, keepdims=True)
    e = exponent_of(scale_rule(rule)(size))
    rounded = round_to(blocks * exp2_of(-e), E4M3) * exp2_of(e)
    return np.moveaxis(rounded.reshape(y.shape), -1, axis)


def _square(codes: Array, scale: NDArray[np.uint8], wide: bool) -> Computed:
    """An operand with one scale byte ``(..., 4, 4)`` per 32x32 tile."""
    decoded = _by_square(codes, decode_e8m0(scale)).astype(np.float64) if wide else None
    return Computed(codes, _per_row(scale), decoded)


def _per_row(scale: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Square-tile bytes ``(..., 4 rows, 4 columns)`` as bytes per row ``(..., 128, 4)``."""
    return np.repeat(scale, BLOCK, axis=-2)


def _select(x: Array, hidden: NDArray[np.bool_] | None) -> None:
    """Zero, by selection, where a query does not see a key or contributes nothing."""
    if hidden is not None:
        np.copyto(x, F32(0), where=hidden)


def _packed(x: NDArray[Any], length: int, dtype: Any) -> NDArray[Any]:
    return np.moveaxis(x[:, :length], 0, 1).astype(F32).astype(dtype)


def _tile(index: int) -> slice:
    return slice(index * TILE, (index + 1) * TILE)
