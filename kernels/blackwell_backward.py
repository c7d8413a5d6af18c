"""Attention on Blackwell: the backward, from dout and a forward to dq, dk and dv.

The bits are those of `flamia.reference.attention_backward` under the profile ``blackwell``: a row pre-pass, a kernel
whose CTAs own keys (dk, dv), and one for dq. The latter multiplies the tiles of X that the former stored, for as many
heads at a time as a bound of memory allows; where that is not even one, its CTAs own queries and compute X again. Both
have the same bits. Nothing waits for the device, and no result depends on the number of CTAs or the order of work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flamia.kernels import structs
from flamia.kernels.blackwell import ELEMENTS, BlackwellForward
from flamia.kernels.launch import launch
from flamia.kernels.quantize import RowPass, row_pass
from flamia.kernels.registry import BLACKWELL_BACKWARD, BLACKWELL_DQ, Unit
from flamia.kernels.schedule import NUM_BACKWARD, NUM_FORWARD, TICKETS
from flamia.kernels.tensors import TILE, check_softmax_scale, pointer, softmax_constant

USUAL_CONSTANTS = {"c": (2.0**-60, 2.0**60), "softmax_scale": (2.0**-10, 2.0**10)}
"""Constants outside these ranges take the kernels' slow path: Note [Fast tiles] of ``backward_numbers.cuh``."""

X_BYTES = 128 * 128 + 16
"""A stored tile of X with its scales."""

STORED_BYTES = 4 << 30
"""Default bound of the memory for tiles of X."""

MAX_CTAS = 160
"""CTAs of a launch: a B200 has 148 multiprocessors, no chip of the family more than 160."""


@dataclass(frozen=True)
class BlackwellGradients:
    """Gradients in the dtype of dout: dq ``(T, Hq, D)``, dk and dv ``(T, Hkv, D)``; 0 in padding rows."""

    dq: Any
    dk: Any
    dv: Any


def attention_backward(
    dout: Any,
    forward: BlackwellForward,
    *,
    recipe: str = "mxfp8",
    softmax_scale: float | None = None,
    score_factor: float = 1.0,
    stored_bytes: int = STORED_BYTES,
    strict: bool = False,
    exp2: str = "exact",
) -> BlackwellGradients:
    """Gradients of attention.

    :param dout: ``(T, Hq, D)`` CUDA tensor, dtype of the forward's q.
    :param forward: the result of `flamia.kernels.blackwell.attention_forward`, with the backward's items.
    :param recipe: the forward's; ``softmax_scale``, ``score_factor`` and ``exp2`` likewise.
    :param stored_bytes: bound of the memory for tiles of X; 0: compute them twice.
    :param strict: wait where PTX promises no order.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    f, schedule = forward, forward.schedule
    if schedule.backward is None:
        raise ValueError("forward must have the backward's items: attention_forward(..., backward=True)")
    total, _, dim = f.out.shape
    kv_shape = (total, schedule.num_kv_heads, dim)
    dq = torch.empty(f.out.shape, dtype=f.out.dtype, device=f.out.device)
    dk, dv = (torch.empty(kv_shape, dtype=f.out.dtype, device=f.out.device) for _ in range(2))
    out = BlackwellGradients(dq, dk, dv)
    rows = row_pass(dout, f.out, f.l, f.m, schedule, gradients=(dq, dk, dv))
    scale = check_softmax_scale(softmax_scale, dim)
    fields = _fields(f, rows, scale, score_factor)
    variant: dict[str, Any] = {"recipe": recipe, "dim": dim, "exp2": exp2, "strict": int(strict), "hooks": 0}
    totals = _totals(f, dim)
    x = _stored_tiles(f, stored_bytes)
    fields |= {"totals": pointer(totals), "x": pointer(x.codes), "x_scales": pointer(x.scales), "pairs": x.pairs}
    ticket = pointer(schedule.status) + 4 * (TICKETS + 2)
    keys = {"first": _gradient(dv), "second": _gradient(dk), "items": pointer(schedule.backward), "ticket": ticket}
    queries = {"first": _gradient(dq), "items": pointer(schedule.forward), "ticket": ticket + 8}
    counts = {"num_items": NUM_BACKWARD}, {"num_items": NUM_FORWARD}
    for first in range(0, schedule.num_kv_heads, x.heads):
        heads = {"first_head": first, "last_head": min(first + x.heads, schedule.num_kv_heads)}
        unit = BLACKWELL_BACKWARD.unit(owner="keys", **variant)
        _launch(unit, "attention_backward", fields | keys | counts[0] | heads, schedule.backward)
        if x.codes is None:
            unit = BLACKWELL_BACKWARD.unit(owner="queries", **variant)
            _launch(unit, "attention_backward", fields | queries | counts[1] | heads, schedule.forward)
        else:
            _launch(BLACKWELL_DQ.unit(dim=dim), "attention_dq", fields | queries | counts[1] | heads, schedule.forward)
    return out


def _launch(unit: Unit, entry: str, fields: dict[str, Any], items: Any) -> None:
    ctas = max(1, min(items.shape[0], MAX_CTAS))
    launch(unit, entry, structs.fill(structs.BLACKWELL_BACKWARD, fields), items.device, at_most=ctas)


@dataclass(frozen=True)
class _StoredTiles:
    """Room for tiles of X; None: they are not stored.

    :param heads: KV heads of one launch.
    :param pairs: tiles of a query head.
    """

    codes: Any
    scales: Any
    heads: int
    pairs: int


def _stored_tiles(f: BlackwellForward, bound: int) -> _StoredTiles:
    """Room for as many heads as fit the bound; their tiles of a pack are counted as if it were one document."""
    import torch

    schedule, tiles = f.schedule, f.schedule.max_tiles
    pairs = tiles * (tiles + 1) // 2 if schedule.causal else tiles**2
    group = schedule.num_q_heads // schedule.num_kv_heads
    heads = min(schedule.num_kv_heads, bound // max(1, group * pairs * X_BYTES))
    if heads == 0:
        return _StoredTiles(None, None, schedule.num_kv_heads, pairs)
    count = heads * group * pairs
    codes, scales = (torch.empty(count * n, dtype=torch.uint8, device=f.out.device) for n in (X_BYTES - 16, 16))
    return _StoredTiles(codes, scales, heads, pairs)


def _totals(f: BlackwellForward, dim: int) -> Any:
    """Room for the sums of dK and dV over the heads of a group, for each CTA; None for groups of one."""
    import torch

    schedule = f.schedule
    if schedule.num_q_heads == schedule.num_kv_heads:
        return None
    ctas = min(schedule.backward.shape[0], MAX_CTAS)
    return torch.empty(ctas * 2 * dim * TILE, dtype=torch.float32, device=f.out.device)


def _gradient(x: Any) -> dict[str, int]:
    size = x.element_size()
    return {"data": pointer(x), "token_stride": x.stride(0) * size, "head_stride": x.stride(1) * size}


def _fields(f: BlackwellForward, rows: RowPass, softmax_scale: float, score_factor: float) -> dict[str, Any]:
    """Fields of `structs.BLACKWELL_BACKWARD` that both kernels share."""
    x, schedule = f.inputs, f.schedule
    q, k = (x.q, x.k) if x.q4 is None or x.k4 is None else (x.q4, x.k4)
    numbers = {"c": float(softmax_constant(softmax_scale)), "softmax_scale": float(softmax_scale)}
    usual = score_factor == 1 and all(low <= numbers[name] <= high for name, (low, high) in USUAL_CONSTANTS.items())
    return numbers | {
        "q": pointer(q.payload),
        "q_scales": pointer(q.scales),
        "q_tokens": pointer(x.q.payload),
        "q_exponents": pointer(x.q.exponents),
        "k": pointer(k.payload),
        "k_scales": pointer(k.scales),
        "k_tokens": pointer(x.k.payload),
        "k_exponents": pointer(x.k.exponents),
        "v": pointer(x.v.payload),
        "v_scales": pointer(x.v.scales),
        "v1": 0 if x.v1 is None else pointer(x.v1.payload),
        "v1_scales": 0 if x.v1 is None else pointer(x.v1.scales),
        "dout": pointer(rows.dout.payload),
        "dout_scales": pointer(rows.dout.scales),
        "dout_token_scales": pointer(rows.dout.token_scales),
        "delta": pointer(rows.delta),
        "top": pointer(rows.top),
        "tiles": pointer(schedule.tiles),
        "tile_offsets": pointer(schedule.tile_offsets),
        "status": pointer(schedule.status),
        "max_tiles": schedule.max_tiles,
        "largest_score": 2.0**20 / numbers["c"] if usual else 0.0,
        "score_factor": score_factor,
        "usual": usual,
        "group": schedule.num_q_heads // schedule.num_kv_heads,
        "causal": schedule.causal,
        "element": ELEMENTS[str(f.out.dtype)],
    }
