"""A few query rows against many keys, for studies of long contexts.

`attention_forward` takes as many queries as keys. Here the queries are not tokens of the document that holds the keys:
they are quantized as a document of their own, and every one sees every key. Bits are those of Note [Forward] with
``causal=False``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference import probabilities as pr
from flamia.reference.arguments import Arguments, check_forward, check_tensor
from flamia.reference.documents import TILE, Document
from flamia.reference.forward import RowState, operand_roles
from flamia.reference.operands import Operand, prepare
from flamia.reference.parallel import quiet, run_all
from flamia.reference.profiles import Profile, contract_channels
from flamia.reference.recipes import Recipe

KEYS_AT_ONCE = 64 * TILE
"""Keys that are held decoded at a time: whole tiles."""


def attention_rows(
    q: Any,
    k: Any,
    v: Any,
    *,
    recipe: Recipe | str = "mxfp8",
    softmax_scale: float | None = None,
    profile: Profile | str = "ideal",
) -> NDArray[Any]:
    """Full attention of ``R`` query rows to the ``T`` keys of one document.

    :param q: ``(R, Hq, D)`` float32 or ml_dtypes.bfloat16, ``R >= 0``.
    :param k: ``(T, Hkv, D)``, dtype of q, ``T >= 1``; Hkv divides Hq.
    :param v: as k.
    :param recipe: a `Recipe` or its name.
    :param softmax_scale: from 0 to half of the largest float32; default ``1 / sqrt(D)``.
    :param profile: a `Profile` or its name.
    :returns: out ``(R, Hq, D)``, dtype of q.
    :raises ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    a = check_forward(q[:0], k[:0], v[:0], [0], recipe, False, softmax_scale, profile)
    if not len(k):
        raise ValueError(f"k must have at least one token, got shape {k.shape}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k {k.shape}, got {v.shape}")
    rows, keys = (np.array([0, len(x)], np.int64) for x in (q, k))
    roles = operand_roles(a.recipe, causal=False, own_exponents=a.profile.own_exponents)
    operands = {
        role: prepare(x, tokens, roles[role][1], a.recipe)
        for role, x, tokens in (("q", q, rows), ("k", k, keys), ("v", v, keys))
    }
    out = np.zeros(q.shape, q.dtype)
    run_all(
        partial(_attend, a, operands, len(k), out, head, query_tile)
        for head in range(k.shape[1])
        for query_tile in range(Document(0, 0, len(q)).tiles)
    )
    return out


@quiet
def _attend(
    a: Arguments, operands: dict[str, Operand], length: int, out: NDArray[Any], head: int, query_tile: int
) -> None:
    """One query tile of the group of one KV head."""
    group = out.shape[1] // a.k.shape[1]
    kv_head, q_heads = slice(head, head + 1), slice(head * group, (head + 1) * group)
    start, stop = query_tile * TILE, min((query_tile + 1) * TILE, len(out))
    queries = operands["q"].document(Document(0, start, stop), q_heads)
    state = RowState(a, (1, group))
    for first in range(0, length, KEYS_AT_ONCE):
        part = Document(0, first, min(first + KEYS_AT_ONCE, length))
        k, v = (operands[role].document(part, kv_head) for role in ("k", "v"))
        for key_tile in range(part.tiles):
            hidden = pr.visible_mask(0, key_tile, part.length, causal=False)
            state.add(contract_channels(a.profile, k, queries, key_tile, 0), hidden, v, None, key_tile)
    result, _ = state.finish()
    out[start:stop, q_heads] = np.moveaxis(result[0, :, : stop - start], 0, 1).astype(out.dtype)
