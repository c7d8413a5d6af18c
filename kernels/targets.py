"""Targets: the GPUs that the kernels are compiled for, each exactly.

A target with the suffix ``a`` may use the instructions of its architecture alone (``wgmma``, ``tcgen05``); its
machine code runs on that compute capability and no other, so nothing is left for a driver to translate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One compilation target.

    :param name: as NVRTC's ``--gpu-architecture`` takes it.
    :param compute_capability: of the GPUs that run its machine code.
    :param chips: products, for tables.
    """

    name: str
    compute_capability: tuple[int, int]
    chips: str


SM_90A = Target("sm_90a", (9, 0), "H100, H200")
SM_100A = Target("sm_100a", (10, 0), "B200")
SM_103A = Target("sm_103a", (10, 3), "B300")

TARGETS = (SM_90A, SM_100A, SM_103A)
"""Every target, in order of compute capability."""


def get_target(target: Target | str) -> Target:
    """``target`` itself, or the one of that name.

    :raises ValueError: for a name that is not in `TARGETS`.
    """
    if isinstance(target, Target):
        return target
    for known in TARGETS:
        if known.name == target:
            return known
    raise ValueError(f"target must be one of {[t.name for t in TARGETS]}, got {target!r}")


def target_for(compute_capability: tuple[int, int]) -> Target:
    """The target whose machine code a GPU of this compute capability runs.

    :raises ValueError: in one sentence that names what is supported.
    """
    for known in TARGETS:
        if known.compute_capability == tuple(compute_capability):
            return known
    major, minor = compute_capability
    supported = ", ".join(f"{'.'.join(map(str, t.compute_capability))} ({t.chips})" for t in TARGETS)
    raise ValueError(
        f"compute_capability {major}.{minor} has no FLAMIA kernels; supported GPUs have one of {supported}"
    )
