"""A kernel of the comparison as a `Case`, for timelines and counts; nothing is expected of its outputs."""

from __future__ import annotations

from flamia.conformance.simulator.agreement.case import Kernel, headers
from flamia.conformance.simulator.case import Case, Data
from flamia.kernels.targets import SM_90A


def as_case(kernel: Kernel) -> Case:
    """The kernel with inputs of the seed."""
    return Case(
        name=kernel.name,
        summary=kernel.family,
        source=kernel.text,
        entry="kernel",
        target=SM_90A,
        draw=lambda seed: Data([*kernel.draw(seed).values(), *kernel.allocate().values()]),
        block=kernel.threads,
        grid=kernel.blocks,
        cluster=(kernel.cluster, 1, 1),
        shared_bytes=kernel.shared_bytes,
        headers=tuple(headers().items()),
    )
