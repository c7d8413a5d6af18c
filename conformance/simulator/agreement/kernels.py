"""Every kernel of the comparison."""

from __future__ import annotations

from flamia.conformance.simulator.agreement import (
    arithmetic,
    bit_operations,
    collectives,
    conversions,
    programs,
    tensor_cores,
)
from flamia.conformance.simulator.agreement.case import Kernel

KERNELS: dict[str, Kernel] = {
    k.name: k
    for room in (
        arithmetic,
        conversions,
        bit_operations,
        collectives,
        programs,
        tensor_cores,
    )
    for k in room.KERNELS
}
"""Name -> kernel."""


def find_kernels(names: list[str] | tuple[str, ...] = ()) -> list[Kernel]:
    """Kernels by name or family; all of them for no names.

    :raises ValueError: for a name that is neither.
    """
    found: list[Kernel] = [] if names else list(KERNELS.values())
    for name in names:
        chosen = [k for k in KERNELS.values() if name in (k.name, k.family)]
        if not chosen:
            families = sorted({k.family for k in KERNELS.values()})
            raise ValueError(f"kernel must be one of {sorted(KERNELS)} or a family of {families}, got {name!r}")
        found += [k for k in chosen if k not in found]
    return found
