"""The MXFP8 recipe as fake quantization in PyTorch: whole ``T x T`` matrices, one head at a time.

This is what one would write first to try the numerics of Notes [Forward] and [Backward] in PyTorch: the formulas,
with every operand quantized and decoded to float32. It uses PyTorch's own E4M3 cast and does nothing that the recipe
does not ask for. Doing every step in place instead takes about 0.7 times the time. Causal, one document, T a multiple
of 128.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flamia.reference.exp2 import C1, C2

TILE, BLOCK = 128, 32
E4M3_MAX = 448.0


def attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq ``(T, Hq, D)``, dk, dv ``(T, Hkv, D)`` in the dtype of q.

    :param q, dout: float32 or bfloat16 ``(T, Hq, D)``.
    :param k, v: ``(T, Hkv, D)``.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    hidden = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu_(1)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for kv_head in range(k.shape[1]):
        keys, values = Keys(k[:, kv_head]), Values(v[:, kv_head])
        dk_sum, dv_sum = torch.zeros(k.shape[0], k.shape[2]), torch.zeros(v.shape[0], v.shape[2])
        for head in range(kv_head * group, (kv_head + 1) * group):
            one = Head(q[:, head], keys, values, hidden, scale)
            out[:, head] = one.out
            dq_head, dk_head, dv_head = one.backward(dout[:, head])
            dq[:, head] = dq_head
            dk_sum += dk_head
            dv_sum += dv_head
        dk[:, kv_head], dv[:, kv_head] = dk_sum, dv_sum
    return out, dq, dk, dv


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value as float32, saturating."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def rceil(amax: Tensor) -> Tensor:
    """Exponent of RCEIL: the smallest e with amax <= 448 * 2^e, at least -127; 0 for a block of zeros."""
    mantissa, exponent = torch.frexp(amax * (1 / E4M3_MAX))
    return torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-127).float()


def quantize_tokens(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """E4M3 values and exponents ``(T,)`` of ``x (T, D)`` under one scale per ``block`` tokens."""
    x = x.float()
    amax = x.abs().amax(dim=1).view(-1, block).amax(dim=1)
    e = rceil(amax).repeat_interleave(block)
    return to_e4m3(x * torch.exp2(-e)[:, None]), e


def by_tile(x: Tensor, edge: int) -> Tensor:
    """``(T, T)`` as ``(T / edge, edge, T / edge, edge)``."""
    n = x.shape[0] // edge
    return x.view(n, edge, n, edge)


def diagonal_tiles(x: Tensor) -> Tensor:
    """The ``(T / 128, 128, 128)`` tiles on the diagonal of ``(T, T)``."""
    return by_tile(x, TILE).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


class Keys:
    """K of one KV head, quantized once."""

    def __init__(self, k: Tensor) -> None:
        self.code, self.e = quantize_tokens(k, 1)
        self.value = self.code * torch.exp2(self.e)[:, None]


class Values:
    """V of one KV head: V32, and V1 for the diagonal tiles."""

    def __init__(self, v: Tensor) -> None:
        code, e = quantize_tokens(v, BLOCK)
        self.v32 = code * torch.exp2(e)[:, None]
        self.code1, self.e1 = quantize_tokens(v, 1)
        self.v1 = self.code1 * torch.exp2(self.e1)[:, None]


class Head:
    """One query head: the forward when made, the backward when asked."""

    def __init__(self, q: Tensor, keys: Keys, values: Values, hidden: Tensor, scale: float) -> None:
        self.keys, self.values, self.scale = keys, values, scale
        total = q.shape[0]
        tiles = total // TILE
        self.q_code, self.q_e = quantize_tokens(q, 1)
        self.q_value = self.q_code * torch.exp2(self.q_e)[:, None]
        c = torch.tensor(scale * math.log2(math.e), dtype=torch.float32)
        self.x = (c * (self.q_value @ keys.value.T)).masked_fill(hidden, -math.inf)

        tile_top = self.x.view(total, tiles, TILE).amax(dim=2).ceil_()  # -inf in tiles that the row does not see
        self.m = tile_top.amax(dim=1)
        code = self.exponential(torch.where(tile_top.isinf(), 0, tile_top).repeat_interleave(TILE, dim=1))
        factor = torch.exp2(tile_top - 8 - self.m[:, None])
        p = (code.view(total, tiles, TILE) * factor[..., None]).view(total, total)
        self.inverse_l = 1 / p.sum(dim=1)[:, None]

        # the diagonal tile: V1's exponents are folded into P
        own, factor = diagonal_tiles(code), factor.view(tiles, TILE, tiles).diagonal(dim1=0, dim2=2).T
        e = values.e1.view(tiles, 1, TILE).expand(tiles, TILE, TILE)
        seen = e.masked_fill(hidden[:TILE, :TILE], -math.inf).view(tiles, TILE, -1, BLOCK)
        top = seen.amax(dim=3, keepdim=True)
        top = torch.where(top.isinf(), 0, top)
        blocks = to_e4m3(own.reshape(seen.shape) * torch.exp2((e.reshape(seen.shape) - top).clamp_(max=0)))
        folded = (blocks * torch.exp2(top)).view(tiles, TILE, TILE) * factor[..., None]
        o = torch.bmm(folded, values.code1.view(tiles, TILE, -1)).view(total, -1)
        diagonal_tiles(p).zero_()
        o += p @ values.v32
        self.out = (o * self.inverse_l).to(q.dtype)

    def exponential(self, top: Tensor) -> Tensor:
        """E4M3 of ``2^(x + 8 - top)`` by the recipe's polynomial; 0 where hidden."""
        r = self.x.floor()
        f = (self.x - r).nan_to_num(0.0)
        p = (C2 * f + C1) * f + 1
        return to_e4m3(p * torch.exp2(r + 8 - top))

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 dq, dk, dv ``(T, D)`` of this head."""
        total = dout.shape[0]
        code, e = quantize_tokens(dout.float() * self.inverse_l, BLOCK)
        dout_q = code * torch.exp2(e)[:, None]
        delta = (dout_q * self.out.float()).sum(dim=1)

        above = (self.x.ceil() - self.m[:, None]).view(total // BLOCK, BLOCK, total // BLOCK, BLOCK)
        tile = above.amax(dim=(1, 3))
        tile = torch.where(tile.isinf(), 0, tile)
        spread = tile.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
        p = self.exponential(spread + self.m[:, None]) * torch.exp2(spread - 8)
        dv = p.T @ dout_q

        ds = dout_q @ self.values.v32.T
        blocks = dout_q.view(-1, TILE, dout_q.shape[1])
        diagonal_tiles(ds).copy_(torch.bmm(blocks, self.values.v1.view(blocks.shape).transpose(1, 2)))
        ds = self.scale * p * (ds - delta[:, None])
        ds = ds * torch.exp2(self.q_e)[:, None] * torch.exp2(self.keys.e)[None, :]
        square = by_tile(ds, BLOCK)
        e = rceil(square.abs().amax(dim=(1, 3)))[:, None, :, None]
        ds = (to_e4m3(square * torch.exp2(-e)) * torch.exp2(e)).view(total, total)
        dq = (ds @ self.keys.code) * torch.exp2(-self.q_e)[:, None]
        dk = (ds.T @ self.q_code) * torch.exp2(-self.keys.e)[:, None]
        return dq, dk, dv
