"""Programs of several instructions, each a file of ``cuda/``: memory, barriers, bulk copies, clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.agreement.case import Draw, Kernel, Output
from flamia.conformance.simulator.agreement.operands import words

MEMORY, PIPELINES, CLUSTERS = "memory", "mbarrier and bulk copies", "clusters"


def _reals(rng: np.random.Generator) -> NDArray[Any]:
    return (rng.standard_normal(2048, np.float32) * np.exp2(rng.integers(-20, 20, 2048))).astype(np.float32)


def _program(
    name: str, family: str, draw: int | Draw, *shapes: tuple[int, ...], dtype: Any = np.uint32, **launch: Any
) -> Kernel:
    """A kernel that reads one array ``a`` (that many random words) and writes ``d``, ``e``, ... of these shapes."""
    outputs = tuple(Output(letter, shape, dtype) for letter, shape in zip("def", shapes, strict=False))
    return Kernel(name, family, "", {"a": words(draw) if isinstance(draw, int) else draw}, outputs, **launch)


KERNELS = (
    _program("vectors", MEMORY, 512, (1376,)),
    _program("matrix_fragments", MEMORY, 1024, (608,), threads=32),
    _program("async_copies", MEMORY, 2048, (26, 128)),
    Kernel(
        "atomics",
        MEMORY,
        "",
        {"a": words(256)},
        (Output("d", (528,), np.uint32), Output("w", (1046,), np.uint64)),
        threads=256,
    ),
    _program("named_barriers", "barriers", 256, (768,), threads=256),
    _program("mbarrier_states", PIPELINES, 64, (152,), threads=64),
    _program("generic_ring", PIPELINES, 1280, (10, 128), threads=256),
    _program("bulk_ring", PIPELINES, 24576, (2, 6144), (2,), threads=160, blocks=2, shared_bytes=24576),
    _program("bulk_reductions", PIPELINES, 1024 + 14 * 256, (14, 256)),
    _program("bulk_reduction_f32", PIPELINES, _reals, (1024,), dtype=np.float32),
    _program("copy_arrivals", PIPELINES, 1024, (2, 512)),
    _program("register_budget", PIPELINES, 1280, (256,), threads=384),
    _program("remote_memory", CLUSTERS, 512, (1024,), blocks=4, cluster=2),
    _program("remote_arrivals", CLUSTERS, 7 * 256, (2, 7, 128), blocks=2, cluster=2),
    _program("wgmma_overlap", "wgmma", 8 * 640, (32, 128), dtype=np.float32),
    _program("bulk_to_peer", CLUSTERS, 512, (2, 1024), blocks=2, cluster=2),
)
