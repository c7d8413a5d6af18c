"""How fast the quantization kernels move bytes, against a device-to-device copy of as many bytes in the same run.

Every time is the median of replays of a CUDA graph that runs the call on several input sets in turn, so that
neither launches nor the level-2 cache are measured. Inputs are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flamia.kernels.quantize import Nvfp4, quantize_qkv, quantize_tokens, quantize_values, row_pass
from flamia.kernels.schedule import build_schedule

SETS = 4
"""Input sets that a graph takes in turn."""


@dataclass(frozen=True)
class Measurement:
    """One kernel against the copy.

    :param moved: bytes read and written.
    :param milliseconds: of one call.
    :param copy_milliseconds: of a copy that reads and writes as many bytes together.
    """

    name: str
    moved: int
    milliseconds: float
    copy_milliseconds: float

    @property
    def fraction(self) -> float:
        """Bandwidth relative to the copy's."""
        return self.copy_milliseconds / self.milliseconds


def time_graph(calls: list[Callable[[], Any]], replays: int = 21) -> float:
    """Median milliseconds of one of the ``calls``, which are captured into one graph."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(replays + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    del kept
    return float(sorted(times[3:])[replays // 2]) / len(calls)


def measure(num_tokens: int, heads: int = 16, dim: int = 128, dtype: str = "bfloat16") -> list[Measurement]:
    """Measure each quantization call for one document of ``num_tokens``, on the current CUDA device."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    kind = getattr(torch, dtype)
    cu = torch.tensor([0, num_tokens], device=device)
    plan = build_schedule(cu, num_tokens, heads, heads, True)
    shape = (num_tokens, heads, dim)
    sets = [[torch.randn(shape, device=device, dtype=torch.float32).to(kind) for _ in range(3)] for _ in range(SETS)]
    row_sum = torch.rand((heads, num_tokens), device=device) + 1
    row_max = torch.zeros_like(row_sum)
    ones = torch.ones((heads, 2), device=device)

    given = num_tokens * heads * dim * sets[0][0].element_size()
    payload, scales, row = num_tokens * heads * dim, num_tokens * heads * 4 * -(-dim // 128), num_tokens * heads * 4
    token = payload + scales + row
    block = payload + 2 * scales
    values = given + block + payload + scales
    four = num_tokens * heads * (dim // 2 + dim // 16)

    def all_three(s: Any, four: Nvfp4 | None = None, fresh: bool = False) -> Any:
        schedule = build_schedule(cu, num_tokens, heads, heads, True) if fresh else plan
        return quantize_qkv(s[0], s[1], s[2], schedule, nvfp4=four)

    whole = 2 * (given + token) + values
    cases: list[tuple[str, int, Callable[[Any], Any]]] = [
        ("q: B=1", given + token, lambda s: quantize_tokens(s[0], plan, 1)),
        ("v: V32 and V1", values, lambda s: quantize_values(s[0], plan)),
        ("backward pre-pass", 2 * given + block + 4 * row, lambda s: row_pass(s[0], s[1], row_sum, row_max, plan)),
        ("q, k, v", whole, all_three),
        ("q, k, v and schedule", whole, partial(all_three, fresh=True)),
        ("q, k, v, NVFP4", whole + 2 * four, partial(all_three, four=Nvfp4(ones, ones))),
        ("q, k, v, NVFP4 + Hadamard", whole + 2 * four, partial(all_three, four=Nvfp4(ones, ones, hadamard=True))),
    ]
    out = []
    for name, moved, call in cases:
        source = [torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=device) for _ in range(2)]
        target = [torch.empty_like(x) for x in source]
        copy = time_graph([partial(b.copy_, a) for a, b in zip(source, target, strict=True)])
        del source, target
        kernel = time_graph([partial(call, s) for s in sets])
        out.append(Measurement(name, moved, kernel, copy))
    return out


def schedule_milliseconds(lengths: list[int], heads: int = 16) -> float:
    """Time of one schedule build, forward and backward."""
    import torch

    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return time_graph([lambda: build_schedule(cu, sum(lengths), heads, heads, True)] * SETS)


def cudnn_milliseconds(num_tokens: int, heads: int = 16, dim: int = 128) -> float:
    """Time of PyTorch's cuDNN attention forward, causal, bfloat16, one document."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, heads, num_tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return time_graph([call] * 2, replays=11)
