"""Targets around a target, for faults that are not in the arithmetic but in how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import TENSORS, Array, Inputs, Results
from flamia.conformance.targets import CallableTarget, ReferenceTarget, Target


class Wrapped(Target):
    """A target that passes everything on; subclasses change one thing.

    Stages are not passed on: what is wrong here shows in the results.
    """

    stages = False

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        for name in ("name", "recipe", "profile", "bits", "promises", "lse", "backward", "device"):
            setattr(self, name, getattr(inner, name))

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call of the inner target."""
        return self.inner.run(inputs, backward=backward)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """The inner target's plan."""
        return self.inner.plan(cu_seqlens, heads, dim, causal)


class Replaying(ReferenceTarget):
    """The reference with what passes for a CUDA graph: replaying it is calling it again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.promises |= {"graph"}

    def replay(self, first: Inputs, second: Inputs) -> Results | None:
        """The results of a fresh call."""
        return self.run(second)


class ChangedInputs(Wrapped):
    """Computes with other inputs than it was given."""

    def __init__(self, inner: Target, change: Callable[[Inputs], Inputs]) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call, of other inputs."""
        return super().run(self.change(inputs), backward=backward)


class ChangedResults(Wrapped):
    """Returns other results than it computed."""

    def __init__(self, inner: Target, change: Callable[[Results], Results]) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call, with other results."""
        return self.change(super().run(inputs, backward=backward))


class MappedHeads(Wrapped):
    """Query heads read other KV heads than theirs, and their gradients are added there.

    :param choose: ``choose(query heads, Hq, Hkv) -> KV heads``.
    """

    def __init__(self, inner: Target, choose: Callable[[Array, int, int], Array]) -> None:
        super().__init__(inner)
        self.choose = choose

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call with a KV head per query head."""
        hq, hkv = inputs.head_counts
        heads = self.choose(np.arange(hq), hq, hkv)
        found = super().run(inputs.replace(k=inputs.k[:, heads], v=inputs.v[:, heads]), backward=backward)
        gathered: dict[str, Any] = {}
        for name in ("dk", "dv") if backward else ():
            x = getattr(found, name)
            total = np.zeros((len(x), hkv, x.shape[2]), np.float32)
            for query_head, head in enumerate(heads.tolist()):
                total[:, head] += x[:, query_head].astype(np.float32)
            gathered[name] = total.astype(x.dtype)
        return replace(found, **gathered)


class WholeChannelTiles(Wrapped):
    """Computes with the channels up to the last whole 64, and returns zeros in the others."""

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call with fewer channels."""
        dim = inputs.head_dim
        kept = max(dim // 64, 1) * 64
        if kept >= dim:
            return super().run(inputs, backward=backward)
        scale = dim**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale
        cut = {name: getattr(inputs, name)[..., :kept] for name in TENSORS}
        found = super().run(inputs.replace(**cut, softmax_scale=scale), backward=backward)
        missing = ((0, 0), (0, 0), (0, dim - kept))
        padded: dict[str, Any] = {
            name: np.pad(x, missing) for name in ("out", "dq", "dk", "dv") if (x := getattr(found, name)) is not None
        }
        return replace(found, **padded)


class WrappedOffsets(Wrapped):
    """Memory offsets in 32 bits."""

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """The plan as 32-bit arithmetic gives it."""
        found = super().plan(cu_seqlens, heads, dim, causal)
        return found and {
            name: x.astype(np.int32).astype(np.int64) if name.endswith("_offsets") else x for name, x in found.items()
        }


class Unsteady(Wrapped):
    """Every second call has the last bit of one number of out flipped, as a late barrier would do now and then."""

    calls = 0

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call, exact or not."""
        found = super().run(inputs, backward=backward)
        self.calls += 1
        if self.calls % 2 or not found.out.size:
            return found
        out = found.out.copy()
        bits = out.view({2: np.uint16, 4: np.uint32}[out.dtype.itemsize])
        bits[len(bits) // 2, 0, 0] ^= 1
        return replace(found, out=out)


class ChosenBySize(Wrapped):
    """Packs of more than 64 tokens go to another kernel, which multiplies Q and K in NVFP4."""

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call of one of two kernels."""
        if inputs.total <= 64:
            return super().run(inputs, backward=backward)
        return ReferenceTarget("nvfp4_fp8", self.profile).run(inputs, backward=backward)


class StaleGraph(Wrapped):
    """A replayed graph that returns what it computed at capture."""

    def replay(self, first: Inputs, second: Inputs) -> Results | None:
        """The results of the capture."""
        return self.run(first)


class Overwriting(Wrapped):
    """Scales q in place, in the caller's memory."""

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call, after which q is another."""
        found = super().run(inputs, backward=backward)
        if inputs.q.flags.writeable:
            inputs.q[...] = (inputs.q.astype(np.float32) * np.float32(1.4427)).astype(inputs.q.dtype)
        return found


def reuse_buffers(inner: Target) -> Target:
    """A callable of NumPy arrays that returns its own memory: the next call of the same shape overwrites it."""
    buffers: dict[Any, Array] = {}

    def attend(q: Array, k: Array, v: Array, cu: Array, *, causal: bool, softmax_scale: float) -> tuple[Array, Array]:
        found = inner.run(Inputs(q, k, v, q, cu.astype(np.int64), causal, softmax_scale))
        assert found.lse is not None
        for name, x in (("out", found.out), ("lse", found.lse)):
            buffers.setdefault((name, x.shape), np.empty_like(x))[...] = x
        return buffers["out", found.out.shape], buffers["lse", found.lse.shape]

    attend.tensors = "numpy"  # type: ignore[attr-defined]
    attend.promises = inner.promises  # type: ignore[attr-defined]
    return CallableTarget(attend, inner.name)


def take_for_contiguous(inputs: Inputs, names: tuple[str, ...] = TENSORS) -> Inputs:
    """What a kernel reads that takes views for contiguous memory: the first T x H x D elements behind each pointer.

    What lies beyond the view's last element reads as zeros.
    """
    changed = {}
    for name in names:
        x = getattr(inputs, name)
        if not x.flags.c_contiguous:
            flat = np.zeros(x.size, x.dtype)
            memory = _memory_behind(x)[: x.size]
            flat[: len(memory)] = memory
            changed[name] = flat.reshape(x.shape)
    return inputs.replace(**changed)


def _memory_behind(x: Array) -> Array:
    """The elements from the first of ``x`` to its last in memory, flat."""
    span = 1 + sum((n - 1) * s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True))
    return np.lib.stride_tricks.as_strided(x, (span,), (x.dtype.itemsize,))
