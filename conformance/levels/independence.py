"""Promises that compare two calls of the target bit for bit, such as pack, prefix, suffix and determinism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import OUTPUTS, TENSORS, Array, Inputs, Results
from flamia.conformance.cases import Case
from flamia.conformance.comparison import Difference, compare_bits
from flamia.conformance.levels.check import Context, Outcome, first_failure, not_applicable
from flamia.conformance.levels.leak import change_after

ALONE_AT_MOST = {"quick": 6, "full": 40, "stress": 100}
"""Documents of a pack that are also called alone, by size class."""

REPETITIONS = {"quick": 3, "full": 20, "stress": 100}
"""Calls that must agree, by size class."""


def check_pack(context: Context, case: Case) -> Outcome:
    """Documents alone, and the pack in reverse order, against the pack."""
    inputs, packed = context.inputs(case), context.results(case)
    documents = [i for i, n in enumerate(inputs.lengths) if n]
    alone = documents[:: -(-len(documents) // ALONE_AT_MOST[context.size]) or 1]

    def differences() -> Iterator[Difference | None]:
        for document in alone:
            picked = take_documents(inputs, [document])
            yield from _compare_rows(_call(context, picked), packed, rows_of(inputs, [document]), "alone", inputs)
        order = documents[::-1]
        if len(order) > 1:
            picked = take_documents(inputs, order)
            yield from _compare_rows(_call(context, picked), packed, rows_of(inputs, order), "reversed", inputs)

    return _until_failure(differences(), {"documents": float(len(documents))})


def check_prefix(context: Context, case: Case) -> Outcome:
    """Each document cut after half and after 31 of its tokens against the whole with dO = 0 after the cut."""
    inputs = context.inputs(case)
    lengths = np.array(inputs.lengths)
    if not inputs.causal:
        return not_applicable("without the causal mask a prefix depends on what follows")

    def differences() -> Iterator[Difference | None]:
        for kept in (-(-lengths // 2), np.minimum(lengths, 31)):
            rows = np.concatenate(
                [np.arange(s, s + n) for s, n in zip(inputs.cu_seqlens[:-1], kept, strict=True)] or [np.arange(0)]
            ).astype(np.int64)
            whole = zero_gradient_outside(inputs, rows)
            cu = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
            prefix = inputs.replace(**{name: getattr(inputs, name)[rows] for name in TENSORS}, cu_seqlens=cu)
            yield from _compare_rows(_call(context, prefix), _call(context, whole), rows, "prefix", inputs)

    return _until_failure(differences())


def check_suffix(context: Context, case: Case) -> Outcome:
    """dO = 0 after the cuts: gradients up to the cuts under other values after them."""
    if not context.target.backward:
        return not_applicable("the target has no backward")
    inputs = context.inputs(case)
    lengths = np.array(inputs.lengths)
    cuts = np.where(lengths > 1, np.arange(len(lengths)) % np.maximum(lengths - 1, 1), -1)
    rows = np.concatenate(
        [np.arange(s, s + c + 1) for s, c in zip(inputs.cu_seqlens[:-1], cuts, strict=True)] or [np.arange(0)]
    ).astype(np.int64)
    base = zero_gradient_outside(inputs, rows)
    before = _cut_rows(_call(context, base), rows)

    def differences() -> Iterator[Difference | None]:
        for factor in (2.0**10, -(2.0**-10)):
            after = _call(context, change_after(base, cuts, "qkv", factor))
            yield from _compare_rows(before, after, rows, f"suffix times {factor}", inputs, ("dq", "dk", "dv"))

    return _until_failure(differences())


def check_heads(context: Context, case: Case) -> Outcome:
    """KV heads reversed, with their groups."""
    inputs, expected = context.inputs(case), context.results(case).outputs()
    hq, hkv = inputs.head_counts
    kv = np.arange(hkv)[::-1]
    group = np.arange(hq).reshape(hkv, -1)[::-1].reshape(-1)
    order = {"q": group, "dout": group, "k": kv, "v": kv, "out": group, "lse": group, "dq": group, "dk": kv, "dv": kv}
    turned = inputs.replace(**{name: getattr(inputs, name)[:, order[name]] for name in TENSORS})
    got = _call(context, turned).outputs()
    return first_failure(
        compare_bits(f"{name} of reversed heads ", x, expected[name][:, order[name]]) for name, x in got.items()
    )


def check_strides(context: Context, case: Case) -> Outcome:
    """The views of the case against their contiguous copies."""
    inputs, got = context.inputs(case), context.results(case).outputs()
    expected = _call(context, inputs.copied()).outputs()
    return first_failure(compare_bits(f"{name} of a view ", x, expected[name]) for name, x in got.items())


def check_determinism(context: Context, case: Case) -> Outcome:
    """The same call again."""
    inputs, first = context.inputs(case), context.results(case).outputs()
    repetitions = REPETITIONS[context.size]

    def differences() -> Iterator[Difference | None]:
        for i in range(1, repetitions):
            again = _call(context, inputs).outputs()
            for name, x in again.items():
                yield compare_bits(
                    f"{name} of call {i + 1} ", x, first[name], cu_seqlens=inputs.cu_seqlens, token_axis=0
                )

    return _until_failure(differences(), {"calls": float(repetitions)})


def check_graph(context: Context, case: Case) -> Outcome:
    """A CUDA graph captured on other tensors and replayed on these."""
    inputs = context.inputs(case)
    other = inputs.replace(**{name: getattr(inputs, name)[::-1].copy() for name in ("q", "k", "v")})
    try:
        replayed = context.target.replay(other, inputs)
    except RuntimeError as error:
        return not_applicable(f"the target cannot be captured in a CUDA graph: {error}".splitlines()[0])
    if replayed is None:
        return not_applicable("the target does not run on a CUDA device, or cannot be captured")
    expected = context.target.run(inputs).outputs()
    return first_failure(
        compare_bits(f"{name} of the replayed graph ", x, expected[name], cu_seqlens=inputs.cu_seqlens, token_axis=0)
        for name, x in replayed.outputs().items()
    )


# ---- pieces of packs ---------------------------------------------------------------------------------------


def take_documents(inputs: Inputs, order: Iterable[int]) -> Inputs:
    """A pack of some of the documents, in the given order, without padding."""
    chosen = list(order)
    rows = rows_of(inputs, chosen)
    cu = np.concatenate([[0], np.cumsum([inputs.lengths[i] for i in chosen])]).astype(np.int64)
    return inputs.replace(**{name: getattr(inputs, name)[rows] for name in TENSORS}, cu_seqlens=cu)


def rows_of(inputs: Inputs, documents: Iterable[int]) -> NDArray[np.int64]:
    """The packed rows of some documents, one after the other."""
    cu = inputs.cu_seqlens
    return np.concatenate([np.arange(cu[i], cu[i + 1]) for i in documents])


def zero_gradient_outside(inputs: Inputs, rows: NDArray[np.int64]) -> Inputs:
    """dO = 0 but in ``rows``."""
    dout = np.zeros(inputs.dout.shape, inputs.dout.dtype)
    dout[rows] = inputs.dout[rows]
    return inputs.replace(dout=dout)


def _call(context: Context, inputs: Inputs) -> Results:
    return context.target.run(inputs, backward=context.target.backward)


def _cut_rows(results: Results, rows: NDArray[np.int64]) -> Results:
    picked: dict[str, Array | None] = {name: None for name in OUTPUTS}
    for name, x in results.outputs().items():
        picked[name] = x[rows, :, 0].T if name == "lse" else x[rows]
    assert picked["out"] is not None
    return Results(picked["out"], picked["lse"], picked["dq"], picked["dk"], picked["dv"])


def _compare_rows(
    part: Results,
    whole: Results,
    rows: NDArray[np.int64],
    label: str,
    inputs: Inputs,
    names: tuple[str, ...] = OUTPUTS,
) -> Iterator[Difference | None]:
    """``part`` against the given rows of ``whole``; coordinates count the rows of ``part``."""
    a, b = part.outputs(), whole.outputs()
    for name in names:
        if name in a:
            found = compare_bits(f"{name} ({label}) ", a[name], b[name][rows])
            if found is not None and found.coordinate is not None:
                token = int(rows[found.coordinate[0]])
                where = (token, *found.coordinate[1:])
                found = Difference(f"{found.message}; packed row {token}", where, found.count, found.numbers)
            yield found


def _until_failure(found: Iterator[Difference | None], numbers: dict[str, float] | None = None) -> Outcome:
    """Stop calling the target at the first difference."""
    for difference in found:
        if difference is not None:
            return first_failure([difference], numbers)
    return Outcome(numbers=numbers or {})
