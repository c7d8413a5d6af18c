"""Containment: a number that is not finite, or huge, reaches the rows that attend to it, and nothing else.

The case has such numbers, of 2^127 and more, in one head of one token of the middle document. The call is compared with
one in which the token is zero in that tensor. With the numbers in

* q: only out and LSE of that row and head may be lost;
* k or v: those of all query heads of the group that see the token;
* dO: no output; dQ of that row, dK and dV of the keys that it sees.

Every other row of out and LSE keeps its bits, and so do all results of other documents and KV heads. A NaN must show in
out of every row that attends to it (other numbers need not: a score of -inf is legal). Gradients of the same document
and KV head must be finite where the exact gradient does not depend on the number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import OUTPUTS, TENSORS, Inputs, Results
from flamia.conformance.cases import Case
from flamia.conformance.comparison import Difference, compare_bits, locate_token
from flamia.conformance.levels.check import Context, Outcome, first_failure

Mask = NDArray[np.bool_]

HUGE = 2.0**127
"""Numbers from here on are what a case is about."""


def check_containment(context: Context, case: Case) -> Outcome:
    """As the module says."""
    inputs = context.inputs(case)
    where = {name: np.argwhere(~(np.abs(getattr(inputs, name).astype(np.float32)) < HUGE)) for name in TENSORS}
    name = next(n for n in TENSORS if len(where[n]))
    token, head, channel = (int(i) for i in where[name][0])
    value = float(getattr(inputs, name)[token, head, channel])
    clean = inputs.copied()
    getattr(clean, name)[token, head] = 0
    backward = context.target.backward
    got, expected = context.target.run(inputs, backward=backward), context.target.run(clean, backward=backward)
    return first_failure(_differences(_Reach(inputs, name, token, head), got, expected, np.isnan(value)))


class _Reach:
    """Which rows of which output may depend on a token, as masks ``(T, heads)``."""

    def __init__(self, inputs: Inputs, name: str, token: int, head: int) -> None:
        self.inputs, self.name = inputs, name
        hq, hkv = inputs.head_counts
        group = hq // hkv
        document = int(np.searchsorted(inputs.cu_seqlens, token, side="right")) - 1
        start, stop = int(inputs.cu_seqlens[document]), int(inputs.cu_seqlens[document + 1])
        kv = head // group if name in ("q", "dout") else head
        position = np.arange(inputs.total)
        self.document = (position >= start) & (position < stop)
        self.query_heads = np.arange(hq) == head if name in ("q", "dout") else np.arange(hq) // group == kv
        self.kv_heads = np.arange(hkv) == kv
        after, before = (position >= token, position <= token) if inputs.causal else (self.document, self.document)
        own = position == token
        rows = own if name in ("q", "dout") else after & self.document
        # rows of out and LSE, of dQ, and keys of dK and dV that the lost rows see
        keys = (before if name in ("q", "dout") else self.document) & self.document
        nobody = np.zeros_like(own)
        self.rows = {
            "out": nobody if name == "dout" else rows,
            "lse": nobody if name in ("dout", "v") else rows,
            "dq": rows,
            "dk": keys,
            "dv": keys,
        }

    def lost(self, output: str) -> Mask:
        """Rows that may be lost."""
        heads = self.kv_heads if output in ("dk", "dv") else self.query_heads
        rows: Mask = self.rows[output][:, None] & heads
        return rows

    def shared(self, output: str) -> Mask:
        """Rows whose bits may move: the lost ones, and gradients of the same document and KV head."""
        if output in ("out", "lse"):
            return self.lost(output)
        hq, hkv = self.inputs.head_counts
        heads = self.kv_heads if output != "dq" else np.repeat(self.kv_heads, hq // hkv)
        rows: Mask = self.document[:, None] & heads
        return rows


def _differences(reach: _Reach, got: Results, expected: Results, nan: bool) -> Iterator[Difference | None]:
    a, b = got.outputs(), expected.outputs()
    cu = reach.inputs.cu_seqlens
    for name in OUTPUTS:
        if name not in a:
            continue
        may_move = reach.shared(name)[..., None]
        # v does not enter the scores, but a token's LSE is lost with its row in the contract
        if name == "lse" and reach.name == "v":
            may_move = (reach.rows["out"][:, None] & reach.query_heads)[..., None]
        kept = np.where(may_move, b[name], a[name])
        yield compare_bits(f"{name} beyond the token's reach ", kept, b[name], cu_seqlens=cu, token_axis=0)
        values = a[name].astype(np.float64)
        stray = ~np.isfinite(values) & ~reach.lost(name)[..., None] & np.isfinite(b[name].astype(np.float64))
        if name != "lse" and stray.any():
            yield _anomaly(name, "be finite", stray, values, cu)
        if name == "out" and nan:
            silent = reach.lost(name) & np.isfinite(values).all(axis=-1)
            if silent.any():
                yield _anomaly(name, "show the NaN", silent[..., None] & np.ones_like(values, bool), values, cu)


def _anomaly(name: str, rule: str, wrong: Mask, values: NDArray[np.float64], cu: NDArray[np.int64]) -> Difference:
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    text = f"{name}{list(at)} must {rule}, got {values[at]:.9g}, {locate_token(at[0], cu)}; {int(wrong.sum())} such"
    return Difference(text, at, int(wrong.sum()))
