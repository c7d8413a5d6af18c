"""Faults around the arithmetic: heads, strides, memory, repeated calls and arguments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flamia.conformance.calls import Array, Results
from flamia.conformance.self_test.copies import Edit
from flamia.conformance.self_test.fault import Fault, accuracy, bits, promise
from flamia.conformance.self_test.wrappers import (
    ChangedInputs,
    ChangedResults,
    ChosenBySize,
    MappedHeads,
    Overwriting,
    StaleGraph,
    Unsteady,
    WholeChannelTiles,
    WrappedOffsets,
    reuse_buffers,
    take_for_contiguous,
)
from flamia.conformance.targets import Target


def _contiguous_dout(inner: Target) -> Target:
    return ChangedInputs(inner, lambda inputs: take_for_contiguous(inputs, ("dout",)))


def _contiguous_qkv(inner: Target) -> Target:
    return ChangedInputs(inner, lambda inputs: take_for_contiguous(inputs, ("q", "k", "v")))


def _transposed_lse(inner: Target) -> Target:
    def transpose(found: Results) -> Results:
        return found if found.lse is None else replace(found, lse=np.ascontiguousarray(found.lse.T))

    return ChangedResults(inner, transpose)


def _float32(inner: Target) -> Target:
    return ChangedResults(inner, lambda found: replace(found, out=found.out.astype(np.float32)))


def _modulo_heads(inner: Target) -> Target:
    return MappedHeads(inner, lambda head, hq, hkv: head % hkv)


def _power_of_two_groups(inner: Target) -> Target:
    def choose(head: Array, hq: int, hkv: int) -> Array:
        shift = (hq // hkv).bit_length() - 1
        found: Array = np.minimum(head >> shift, hkv - 1)
        return found

    return MappedHeads(inner, choose)


FAULTS = (
    Fault(
        "kv-heads-by-modulo",
        "Query head h reads KV head h mod Hkv instead of h // group.",
        kills=(promise("heads/group_of_8", "heads"), bits(2, "heads/group_of_8"), accuracy("heads/group_of_3")),
        wrap=_modulo_heads,
        bug_class="gqa-mapping",
    ),
    Fault(
        "groups-of-a-power-of-two",
        "The KV head is found by a shift, which is right for groups of 1, 2, 4, 8 and wrong for others.",
        kills=(promise("heads/group_of_3", "heads"), bits(2, "heads/group_of_3"), accuracy("heads/group_of_3")),
        wrap=_power_of_two_groups,
        bug_class="gqa-mapping",
    ),
    Fault(
        "lse-transposed",
        "LSE is (tokens, heads).",
        kills=(bits(2, "values/lse"), promise("values/lse", "edges")),
        wrap=_transposed_lse,
        bug_class="lse-base",
    ),
    Fault(
        "out-in-float32",
        "out has another dtype than q.",
        kills=(bits(2, "values/gaussian"),),
        wrap=_float32,
    ),
    Fault(
        "offsets-in-32-bits",
        "Byte offsets of tiles are 32-bit products, which wrap past 2^31.",
        kills=(bits(1, "offsets/past_2_31"),),
        wrap=WrappedOffsets,
        bug_class="offsets",
    ),
    Fault(
        "dout-taken-for-contiguous",
        "dO is read as if it were contiguous.",
        kills=(promise("strides/expanded_over_tokens", "strides"), bits(3, "strides/expanded_over_tokens")),
        wrap=_contiguous_dout,
        bug_class="expanded-dout",
    ),
    Fault(
        "qkv-taken-for-contiguous",
        "q, k and v are read as if they were contiguous.",
        kills=(promise("strides/sliced_qkv", "strides"), promise("strides/transposed_heads", "strides")),
        wrap=_contiguous_qkv,
    ),
    Fault(
        "channels-in-whole-tiles",
        "Channels past the last 64 are ignored: head dimensions that are no multiple of it run, and are wrong.",
        kills=(accuracy("heads/dim_80"),),
        wrap=WholeChannelTiles,
        bug_class="head-dim",
    ),
    Fault(
        "unsteady-result",
        "One number differs in its last bit in every second call, as when a barrier comes too late.",
        kills=(promise("values/gaussian", "determinism"),),
        wrap=Unsteady,
        bug_class="nondeterminism",
    ),
    Fault(
        "kernel-chosen-by-pack-size",
        "Large packs go to another kernel: a document's bits depend on what it is packed with.",
        kills=(promise("documents/block_edges", "pack"),),
        wrap=ChosenBySize,
        bug_class="joined-documents",
    ),
    Fault(
        "graph-replays-the-capture",
        "A replayed CUDA graph returns what was computed at capture.",
        kills=(promise("arguments/graph", "graph"),),
        wrap=StaleGraph,
        bug_class="graph-replay",
    ),
    Fault(
        "inputs-overwritten",
        "q is scaled in place, in the caller's memory.",
        kills=(promise("values/gaussian", "determinism"), bits(2, "values/gaussian")),
        wrap=Overwriting,
    ),
    Fault(
        "leak-behind-a-reused-buffer",
        "V leaks through its scales, and results are returned in memory that the next call overwrites: comparing two "
        "calls compares the second with itself.",
        kills=(promise("leak/every_residue", "leak"),),
        edits=(Edit("forward", "diagonal_values is not None and causal", "diagonal_values is None and causal"),),
        wrap=reuse_buffers,
        bug_class="future-leak",
    ),
    Fault(
        "falling-cu-seqlens-accepted",
        "cu_seqlens that decrease are accepted.",
        kills=(promise("arguments/malformed", "validation"),),
        edits=(Edit("documents", "if falls.size:", "if falls.size > cu.size:"),),
        bug_class="malformed-cu-seqlens",
    ),
    Fault(
        "cu-seqlens-past-the-end-accepted",
        "cu_seqlens that end past the tensors are cut off there, without a word.",
        kills=(promise("arguments/malformed", "validation"),),
        edits=(Edit("documents", "if cu[-1] > total:", "cu = np.minimum(cu, total)\nif cu[-1] > total:"),),
        bug_class="malformed-cu-seqlens",
    ),
    Fault(
        "negative-softmax-scale-accepted",
        "A negative softmax_scale is accepted.",
        kills=(promise("arguments/malformed", "validation"),),
        edits=(Edit("arguments", "if not 0 <= softmax_scale <=", "if not -1e30 <= softmax_scale <="),),
    ),
)
