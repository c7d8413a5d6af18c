"""The oracle: exact attention in float64, forward and backward, for measuring error.

No quantization, no profile: ``S = scale Q K^T``, softmax over visible keys, ``O = P V``, and the analytic gradients.
Rows are taken 128 at a time, so nothing of size T x T is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference.arguments import check_causal, check_qkv, check_softmax_scale, check_tensor
from flamia.reference.documents import TILE, iter_documents, validate_cu_seqlens

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Oracle:
    """float64 out, dq ``(T, Hq, D)``, dk, dv ``(T, Hkv, D)``, lse ``(Hq, T)``; gradients are None without dout."""

    out: Array
    lse: Array
    dq: Array | None
    dk: Array | None
    dv: Array | None


def attention_oracle(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    dout: Any = None,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> Oracle:
    """Exact attention of packed documents.

    :param q, k, v, cu_seqlens: as for `attention_forward`, any head_dim.
    :param dout: ``(T, Hq, D)`` or None.
    """
    check_qkv(q, k, v)
    cu, causal = validate_cu_seqlens(cu_seqlens, q.shape[0]), check_causal(causal)
    scale = check_softmax_scale(softmax_scale, q.shape[2])
    if dout is not None and check_tensor("dout", dout).shape != q.shape:
        raise ValueError(f"dout must have the shape of q {q.shape}, got {dout.shape}")
    (total, hq, dim), hkv = q.shape, k.shape[1]
    out, lse = np.zeros((total, hq, dim)), np.full((hq, total), -np.inf)
    dq, dk, dv = np.zeros_like(out), np.zeros((total, hkv, dim)), np.zeros((total, hkv, dim))
    for document in iter_documents(cu):
        for head in range(hq):
            kv = head // (hq // hkv)
            keys = k[document.start : document.stop, kv].astype(np.float64)
            values = v[document.start : document.stop, kv].astype(np.float64)
            for start in range(document.start, document.stop, TILE):
                stop = min(start + TILE, document.stop)
                seen = (stop if causal else document.stop) - document.start
                k_seen, v_seen = keys[:seen], values[:seen]
                queries = q[start:stop, head].astype(np.float64)
                s = scale * (queries @ k_seen.T)
                if causal:
                    position = np.arange(start, stop) - document.start
                    s[np.arange(seen)[None, :] > position[:, None]] = -np.inf
                top = s.max(axis=1, keepdims=True)
                p = np.exp(s - top)
                sums = p.sum(axis=1, keepdims=True)
                p /= sums
                out[start:stop, head] = p @ v_seen
                lse[head, start:stop] = (top + np.log(sums))[:, 0]
                if dout is not None:
                    do = dout[start:stop, head].astype(np.float64)
                    dp = do @ v_seen.T
                    ds = scale * p * (dp - (do * out[start:stop, head]).sum(axis=1, keepdims=True))
                    dq[start:stop, head] = ds @ k_seen
                    dk[document.start : document.start + seen, kv] += ds.T @ queries
                    dv[document.start : document.start + seen, kv] += p.T @ do
    if dout is None:
        return Oracle(out, lse, None, None, None)
    return Oracle(out, lse, dq, dk, dv)
