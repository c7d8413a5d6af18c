"""Accuracy budgets, computed for every case from the reference's own error.

Note [Budget]
~~~~~~~~~~~~~
``budget = 2 (e M + b)``, coordinate by coordinate:

* *M* is the magnitude of the sum that the coordinate is, the natural unit of its error: with ``A = |scale| |Q| |K|^T``,

  ===========  ================================================================================================
  out          ``M_o = sum_j P_ij (1 + A_ij) |V_j|``
  lse          ``1 + sum_j P_ij A_ij``
  dv           ``sum_i P_ij (1 + A_ij) |dO_i|``
  dq, dk       ``sum_j X_ij |K_j|``, ``sum_i X_ij |Q_i|``, with
               ``X_ij = |scale| P_ij (1 + A_ij) (|dO_i| . |V_j| + |dO_i| . M_o,i)``
  ===========  ================================================================================================

* *e* is the largest ``|reference - exact| / M`` in the tensor, where the reference runs the recipe that the target is
  held to;
* *b* is the rounding band: half a unit in the last place of the output's dtype at the exact value, ``2^-20 M`` for
  accumulation in FP32, and ``2^-120`` for implementations that flush subnormal numbers: 64 of them, say.

A worst coordinate alone would let every number be twice as wrong as the reference's worst. So the root mean square of
``error / M`` over each document and head must be within twice (the reference's + the band's), and so must the mean of
the signed error, which roundings to nearest keep near zero and biased ones do not: there four standard deviations of
the mean over the rows are added to the reference's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.calls import Inputs, Results
from flamia.reference.documents import iter_documents
from flamia.reference.oracle import attention_oracle

F64 = NDArray[np.float64]
ACCUMULATION_BAND = 2.0**-20
FLUSH_BAND = 2.0**-120
FACTOR = 2.0
QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Exact:
    """float64 results and magnitudes of Note [Budget] by output name, tokens first; LSE is ``(T, Hq, 1)``."""

    values: dict[str, F64]
    magnitudes: dict[str, F64]


@dataclass(frozen=True)
class Budget:
    """The budget of one output.

    :param allowed: ``2 (e M + b)``.
    :param unit: M; 1 where it is zero.
    :param band: b.
    :param reference: ``(reference - exact) / M``.
    """

    allowed: F64
    unit: F64
    band: F64
    reference: F64


def exact_results(inputs: Inputs) -> Exact:
    """The oracle and the magnitudes."""
    i = inputs
    oracle = attention_oracle(i.q, i.k, i.v, i.cu_seqlens, i.dout, causal=i.causal, softmax_scale=i.softmax_scale)
    assert oracle.dq is not None and oracle.dk is not None and oracle.dv is not None
    values = {"out": oracle.out, "lse": oracle.lse.T[..., None], "dq": oracle.dq, "dk": oracle.dk, "dv": oracle.dv}
    return Exact(values, magnitudes(inputs))


def magnitudes(inputs: Inputs) -> dict[str, F64]:
    """M of Note [Budget] by output; 0 in padding rows."""
    i = inputs
    (total, hq, dim), hkv = i.q.shape, i.k.shape[1]
    scale = dim**-0.5 if i.softmax_scale is None else float(i.softmax_scale)
    found = {
        "out": np.zeros((total, hq, dim)),
        "lse": np.zeros((total, hq, 1)),
        "dq": np.zeros((total, hq, dim)),
        "dk": np.zeros((total, hkv, dim)),
        "dv": np.zeros((total, hkv, dim)),
    }
    for document in iter_documents(i.cu_seqlens):
        for head in range(hq):
            kv = head // (hq // hkv)
            rows = slice(document.start, document.stop)
            k, v = (x[rows, kv].astype(np.float64) for x in (i.k, i.v))
            for start in range(document.start, document.stop, QUERIES_AT_ONCE):
                stop = min(start + QUERIES_AT_ONCE, document.stop)
                here, seen = slice(start, stop), (stop if i.causal else document.stop) - document.start
                q, dout = (x[here, head].astype(np.float64) for x in (i.q, i.dout))
                s = scale * (q @ k[:seen].T)
                if i.causal:
                    s[np.arange(seen)[None, :] > np.arange(start, stop)[:, None] - document.start] = -np.inf
                p = np.exp(s - s.max(axis=1, keepdims=True))
                p /= p.sum(axis=1, keepdims=True)
                a = scale * (np.abs(q) @ np.abs(k[:seen]).T)
                found["lse"][here, head, 0] = 1 + (p * a).sum(axis=1)
                p *= 1 + a
                size, values = np.abs(dout), np.abs(v[:seen])
                found["out"][here, head] = o = p @ values
                x = scale * p * (size @ values.T + (size * o).sum(axis=1, keepdims=True))
                found["dq"][here, head] = x @ np.abs(k[:seen])
                past = slice(document.start, document.start + seen)
                found["dk"][past, kv] += x.T @ np.abs(q)
                found["dv"][past, kv] += p.T @ size
    return found


def make_budgets(exact: Exact, reference: Results, dtype: Any) -> dict[str, Budget]:
    """The budget of every output that the reference returned.

    :param dtype: of the target's out and gradients.
    """
    budgets = {}
    for name, x in reference.outputs().items():
        value, unit = exact.values[name], exact.magnitudes[name]
        band = half_ulp(value, np.float32 if name == "lse" else dtype) + ACCUMULATION_BAND * unit + FLUSH_BAND
        unit = np.where(unit > 0, unit, 1.0)
        with np.errstate(invalid="ignore"):
            relative = np.where(np.isfinite(value), (x.astype(np.float64) - value) / unit, 0.0)
        e = float(np.abs(relative).max(initial=0))
        budgets[name] = Budget(FACTOR * (e * exact.magnitudes[name] + band), unit, band, relative)
    return budgets


def half_ulp(x: F64, dtype: Any) -> F64:
    """Half a unit in the last place of ``dtype`` at ``x``; 0 for values that are not finite."""
    bits, lowest = (8, -126) if np.dtype(dtype) == bfloat16 else (24, -126)
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    half: F64 = np.ldexp(1.0, np.maximum(exponent - 1, lowest) - bits)
    return np.where(np.isfinite(x), half, 0.0)
