"""Validation: illegal calls must raise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flamia.conformance.calls import Inputs
from flamia.conformance.cases import Case
from flamia.conformance.levels.check import Context, Outcome


def check_validation(context: Context, case: Case) -> Outcome:
    """Each illegal call must raise an ordinary exception."""
    accepted: list[str] = []
    count = 0
    for label, inputs in illegal_calls(context.inputs(case)):
        count += 1
        try:
            context.target.run(inputs)
        except Exception as error:
            if context.target.is_alive():
                continue
            text = f"{label} was accepted and ended the device's context: {error}".splitlines()[0]
            return Outcome("failed", text, None, {"calls": float(count), "accepted": float(len(accepted) + 1)})
        accepted.append(label)
    numbers = {"calls": float(count), "accepted": float(len(accepted))}
    if accepted:
        return Outcome("failed", "accepted: " + "; ".join(accepted), None, numbers)
    return Outcome(numbers=numbers)


def illegal_calls(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """What is wrong, and the call."""
    total = inputs.total
    for cu in ([1, 20, total], [0, 30, 20, total], [0, 20, total + 1], [0, -5, total], []):
        yield f"cu_seqlens {cu}", inputs.replace(cu_seqlens=np.array(cu, np.int64))
    yield "cu_seqlens of two dimensions", inputs.replace(cu_seqlens=inputs.cu_seqlens[None])
    for scale in (-0.125, float("nan"), float("inf")):
        yield f"softmax_scale {scale}", inputs.replace(softmax_scale=scale)
    yield (
        "3 query heads for 2 KV heads",
        inputs.replace(q=np.repeat(inputs.q, 2, 1)[:, :3], k=np.repeat(inputs.k, 2, 1), v=np.repeat(inputs.v, 2, 1)),
    )
    yield "k with fewer tokens than q", inputs.replace(k=inputs.k[:-1])
    yield "k with another head_dim than q", inputs.replace(k=inputs.k[..., :32])
    yield "v with other heads than k", inputs.replace(v=np.repeat(inputs.v, 2, 1))
    yield "k with another dtype than q", inputs.replace(k=inputs.k.astype(np.float32))
