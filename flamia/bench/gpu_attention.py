"""Attention on a GPU: FLAMIA's kernels, quantization included, beside PyTorch's own, in one run.

Note [Timing on a GPU]
~~~~~~~~~~~~~~~~~~~~~~
Every call of a contestant, ``forward`` and ``total`` (forward and backward), is captured in a CUDA graph that works
through several sets of inputs, together larger than twice the L2 cache, so that neither launch overhead nor a warm
cache is measured. The graphs are replayed in rounds, each once per round and in a new order, because a GPU at its power
limit lowers its clock within tens of milliseconds: who runs first runs faster, and a contestant alone does not have the
times that it has beside others. Rounds before `WARM_SECONDS` do not count. The number is the median of a graph's
replays between two CUDA events, divided by the sets. ``forward`` is a call where no gradient is wanted, and the
backward is the difference of the two: what a forward writes for a backward alone counts there. Inputs are standard
normal bfloat16 numbers, or those of a file: Note [Recorded workloads] of `flamia.bench.recorded`. A baseline gets its
tensors in a layout that it reads as it is, and key heads repeated beforehand where it cannot share them; dense kernels
take part where all documents have one length.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flamia.bench.recorded import Recorded

ROUNDS = 25
WARM_SECONDS = 0.5


@dataclass(frozen=True)
class Workload:
    """One call: lengths of the documents, heads and head dimension.

    :param source: of the values, for people; empty: they are standard normal.
    """

    name: str
    lengths: tuple[int, ...]
    q_heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    causal: bool = True
    source: str = ""

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def dense(self) -> bool:
        """Whether all documents have one length."""
        return len(set(self.lengths)) == 1

    @property
    def documents(self) -> str:
        """How many, and how long, for people."""
        count, mask = len(self.lengths), "" if self.causal else ", full"
        if self.dense:
            return f"{count} x {self.lengths[0]:,}{mask}"
        least, middle, most = min(self.lengths), statistics.median_low(self.lengths), max(self.lengths)
        return f"{count} of {least:,} to {most:,}, median {middle:,}{mask}"

    @property
    def flops(self) -> float:
        """Multiplications and additions of the forward's two products."""
        pairs = sum(n * (n + 1) / 2 if self.causal else n * n for n in self.lengths)
        return 4.0 * pairs * self.q_heads * self.head_dim

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        sizes = f"T={self.tokens}, {self.q_heads}/{self.kv_heads} heads, D={self.head_dim}, {mask}"
        return f"{self.name}: {sizes}" + (f", values of {self.source}" if self.source else "")


@dataclass
class Timing:
    """Microseconds by contestant; why others could not take part."""

    workload: Workload
    forward: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratio(self, which: str) -> float | None:
        """Time of the fastest baseline over that of ``flamia``, of ``forward`` or ``total``; more is better."""
        times = getattr(self, which)
        fastest = fastest_baseline(times)
        return None if fastest is None or "flamia" not in times else fastest / times["flamia"]


def fastest_baseline(times: Mapping[str, float]) -> float | None:
    """The least time of a contestant that is none of FLAMIA's; None without one."""
    return min((t for name, t in times.items() if not name.startswith("flamia")), default=None)


def log_normal_lengths(total: int, median: float, spread: float, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents as they come from code or the web, the last one cut so that they sum to ``total``."""
    import numpy as np

    rng, lengths, left = np.random.default_rng(seed), [], total
    while left:
        lengths.append(min(left, max(1, int(rng.lognormal(np.log(median), spread)))))
        left -= lengths[-1]
    return tuple(lengths)


def workloads() -> dict[str, Workload]:
    """Every workload by name."""
    found = [
        *(Workload(f"dense-{n // 1024}k", (n,) * max(1, 16384 // n)) for n in (4096, 8192, 16384, 32768)),
        Workload("dense-8k-gqa", (8192,) * 2, 32, 8),
        Workload("dense-8k-d64", (8192,) * 2, head_dim=64),
        Workload("dense-8k-full", (8192,), causal=False),
        Workload("packed-4k", (4096,) * 8),
        Workload("packed-code", log_normal_lengths(32768, 600, 1.2)),
        Workload("packed-web", log_normal_lengths(32768, 350, 1.0, 1), 32, 8),
        Workload("packed-long-short", (32768, *(200 + 13 * i % 600 for i in range(64)))),
        Workload("packed-300", (300,) * 109),
    ]
    return {w.name: w for w in found}


Call = Callable[[int], Any]
"""``call(i)`` works on the i-th set of inputs."""

Key = tuple[str, str]
"""``"forward"`` or ``"total"``, and the name of a contestant."""


def measure(
    workload: Workload,
    backward: bool = True,
    contestants: Sequence[str] | None = None,
    advance: Callable[[str], None] = lambda name: None,
    recorded: Recorded | None = None,
) -> Timing:
    """Time contestants on one workload.

    :param backward: measure ``total`` too.
    :param contestants: names of `CONTESTANTS`; default: all.
    :param advance: called with the name of each contestant before its calls are captured, and with ``"rounds"``.
    :param recorded: has the values of this workload; default: standard normal ones.
    """
    import torch

    torch.cuda.empty_cache()  # of the graphs of a workload before
    timing = Timing(workload)
    sets = _draw(workload) if recorded is None else _upload(recorded.sets(_count_sets(workload)))
    cu = torch.tensor([0, *accumulate(workload.lengths)], dtype=torch.int32, device="cuda")
    graphs: dict[Key, _Captured] = {}
    for name in CONTESTANTS if contestants is None else contestants:
        advance(name)
        try:
            forward, total = CONTESTANTS[name](workload, sets, cu)
            captured = {("forward", name): _capture(forward, len(sets))}
            if backward:
                captured["total", name] = _capture(total, len(sets))
            graphs |= captured
        except Exception as error:  # a contestant that cannot take part is named in the table
            timing.missing[name] = (str(error) or type(error).__name__).splitlines()[0][:120]
            torch.cuda.synchronize()
    advance("rounds")
    for (which, name), microseconds in _time_rounds(graphs).items():
        getattr(timing, which)[name] = microseconds / len(sets)
    return timing


@dataclass(frozen=True)
class _Captured:
    """A CUDA graph, the results in its memory, and what holds the inputs that it reads."""

    graph: Any
    results: Any
    call: Call


def _capture(call: Call, sets: int) -> _Captured:
    """``call`` on each of the sets, as one graph."""
    torch: Any = import_module("torch")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(i) for i in range(sets)]
    return _Captured(graph, results, call)


def _time_rounds(graphs: Mapping[Key, _Captured]) -> dict[Key, float]:
    """Median microseconds of a replay of each graph: Note [Timing on a GPU]."""
    torch: Any = import_module("torch")
    events = {key: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for key in graphs}
    times: dict[Key, list[float]] = {key: [] for key in graphs}
    order, shuffle, warm = list(graphs), random.Random(0).shuffle, time.perf_counter() + WARM_SECONDS
    counted = 0
    while graphs and counted < ROUNDS:
        shuffle(order)
        counts = time.perf_counter() >= warm
        for key in order:
            start, end = events[key]
            start.record()
            graphs[key].graph.replay()
            end.record()
        torch.cuda.synchronize()
        if counts:
            counted += 1
            for key, (start, end) in events.items():
                times[key].append(start.elapsed_time(end) * 1e3)
    return {key: float(statistics.median(found)) for key, found in times.items()}


def _count_sets(w: Workload) -> int:
    """At least two, and larger than twice the L2 cache together."""
    import torch

    size = 2 * w.tokens * w.head_dim * 2 * (w.q_heads + w.kv_heads)
    cache = int(torch.cuda.get_device_properties(0).L2_cache_size)
    return max(2, -(-2 * cache // size))


def _draw(w: Workload) -> list[tuple[Any, Any, Any, Any]]:
    """Sets of q, k, v and dout."""
    import torch

    def draw(n: int) -> Any:
        return torch.randn(w.tokens, n, w.head_dim, dtype=torch.bfloat16, device="cuda")

    heads = (w.q_heads, w.kv_heads, w.kv_heads, w.q_heads)
    return [tuple(draw(n) for n in heads) for _ in range(_count_sets(w))]


def _upload(sets: Iterable[tuple[Any, ...]], device: str = "cuda") -> list[tuple[Any, ...]]:
    """Sets of bfloat16 arrays as tensors of the same bits."""
    torch: Any = import_module("torch")
    return [tuple(torch.from_numpy(x.view("int16")).to(device).view(torch.bfloat16) for x in each) for each in sets]


# ---- contestants: forward, and forward with backward ---------------------------------------------------------


def _flamia(w: Workload, sets: Sequence[Any], cu: Any, recipe: str = "mxfp8") -> tuple[Call, Call]:
    from flamia.kernels import hopper, hopper_backward

    options: Any = {"recipe": recipe, "causal": w.causal, "max_seqlen": max(w.lengths)}

    def forward(i: int) -> Any:
        q, k, v, _ = sets[i]
        return hopper.attention_forward(q, k, v, cu, backward=False, saves=False, **options)

    def total(i: int) -> Any:
        q, k, v, dout = sets[i]
        f = hopper.attention_forward(q, k, v, cu, **options)
        return hopper_backward.attention_backward(dout, f.out, f.m, f.l, f.inputs, f.schedule, w.head_dim**-0.5)

    return forward, total


def _flamia_unscaled(w: Workload, sets: Sequence[Any], cu: Any) -> tuple[Call, Call]:
    return _flamia(w, sets, cu, "bf16")


def _differentiated(inputs: Sequence[tuple[Any, Any, Any, Any]], attend: Callable[..., Any]) -> tuple[Call, Call]:
    """A function of torch as a contestant; ``inputs`` in its layout."""
    import torch

    leaves = [tuple(x.requires_grad_() for x in (q, k, v)) for q, k, v, _ in inputs]

    def forward(i: int) -> Any:
        with torch.no_grad():
            return attend(*leaves[i])

    def total(i: int) -> Any:
        return torch.autograd.grad(attend(*leaves[i]), leaves[i], inputs[i][3])

    return forward, total


def _repeat_heads(x: Any, heads: int) -> Any:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sdpa(w: Workload, sets: Sequence[Any], backend: str) -> tuple[Call, Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if not w.dense:
        raise ValueError("takes documents of one length only")
    batch, length = len(w.lengths), w.lengths[0]

    def arrange(x: Any) -> Any:
        return x.view(batch, length, *x.shape[1:]).transpose(1, 2).detach()

    inputs = [tuple(arrange(x) for x in each) for each in sets]

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=w.causal, enable_gqa=w.q_heads != w.kv_heads)

    return _differentiated(inputs, attend)


def _cudnn(w: Workload, sets: Sequence[Any], cu: Any) -> tuple[Call, Call]:
    return _sdpa(w, sets, "CUDNN_ATTENTION")


def _flash(w: Workload, sets: Sequence[Any], cu: Any) -> tuple[Call, Call]:
    return _sdpa(w, sets, "FLASH_ATTENTION")


def _varlen(w: Workload, sets: Sequence[Any], cu: Any) -> tuple[Call, Call]:
    from torch.nn.attention.varlen import varlen_attn

    attention: Any = varlen_attn
    names = signature(attention).parameters
    # the way to ask for causal attention has changed between releases
    options: dict[str, Any] = {"window_size": (-1, 0 if w.causal else -1)}
    if "window_size" not in names:
        options = {"is_causal": w.causal}
    grouped = "enable_gqa" in names
    if grouped:
        options["enable_gqa"] = w.q_heads != w.kv_heads
    heads = w.kv_heads if grouped else w.q_heads
    longest = max(w.lengths)
    inputs = [(q.detach(), *(_repeat_heads(x, heads).detach() for x in (k, v)), d) for q, k, v, d in sets]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, cu, cu, longest, longest, **options)

    return _differentiated(inputs, attend)


def _flex(w: Workload, sets: Sequence[Any], cu: Any) -> tuple[Call, Call]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # or else the workloads before count towards the limit of recompilations
    owner = torch.repeat_interleave(torch.arange(len(w.lengths), device="cuda"), torch.diff(cu))

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        same = owner[query] == owner[key]
        return same & (query >= key) if w.causal else same

    mask = torch.compile(create_block_mask)(visible, None, None, w.tokens, w.tokens, device="cuda")
    call: Any = torch.compile(flex_attention, dynamic=False)
    inputs = [tuple(x.transpose(0, 1)[None].contiguous() for x in each) for each in sets]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return call(q, k, v, block_mask=mask, enable_gqa=w.q_heads != w.kv_heads)

    return _differentiated(inputs, attend)


CONTESTANTS: dict[str, Callable[[Workload, Sequence[Any], Any], tuple[Call, Call]]] = {
    "flamia": _flamia,
    "flamia bf16": _flamia_unscaled,
    "cuDNN": _cudnn,
    "FlashAttention-2": _flash,
    "varlen_attn": _varlen,
    "FlexAttention": _flex,
}
"""Name -> how to make its calls. FLAMIA includes schedule and quantization; its recipe BF16 quantizes nothing."""
