"""Registers that the warps of a CTA hold, and what ``setmaxnreg`` moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from flamia.conformance.simulator.machine.types import LANES, REGISTERS


class RegisterPool:
    """Registers of a CTA, by warp: per thread, as ``setmaxnreg`` counts them.

    Note [Register pool]
    ~~~~~~~~~~~~~~~~~~~~
    A launch gives every thread of a CTA one number of registers, and that is all that the CTA ever has.
    ``setmaxnreg.dec`` puts registers of a warp into the CTA's pool; ``setmaxnreg.inc`` takes them from there, and waits
    until there are enough (PTX ISA, "setmaxnreg"). Nothing says that a warp which ends leaves its registers to the
    pool, so it keeps them here: a kernel that needs them may wait forever, as one whose warpgroups asked for more than
    its launch had was seen to do on an H200, where two warps of its producers had ended.

    The number at entry is that of ``.maxnreg``. Without it, ptxas gives a kernel that uses ``setmaxnreg`` the most with
    which ``.minnctapersm`` CTAs of ``.maxntid`` threads fit on a multiprocessor, see `registers_at_entry`. With neither
    it does not know the number, and ignores every ``setmaxnreg`` of the kernel (its message C7508).
    """

    def __init__(self, cta: Any) -> None:
        entry = registers_at_entry(cta.program.function.directives)
        self.known = entry is not None
        self.per_thread: list[int] = [entry or 0] * len(cta.warps)
        self.total = LANES * sum(self.per_thread)

    @property
    def free(self) -> int:
        """Registers in the pool."""
        return self.total - LANES * sum(self.per_thread)


def registers_at_entry(directives: Mapping[str, tuple[int, ...]]) -> int | None:
    """Registers per thread of a kernel with ``setmaxnreg``; None where ptxas does not know them: Note [Register pool].

    The bounds' number is what the ptxas of CUDA 13.0 was seen to choose for 128 to 1024 threads and 1 to 5 CTAs: warps
    in fours, as a multiprocessor has four parts; multiples of 8, as registers are allotted; and at most 255 are named.
    """
    found = []
    if limit := directives.get("maxnreg"):
        found.append(-(-limit[0] // 8) * 8)
    threads = prod(directives.get("maxntid") or directives.get("reqntid") or (0,))
    if threads and (ctas := directives.get("minnctapersm")):
        warps = -(-threads // LANES) * ctas[0]
        found.append(min(255, REGISTERS // (LANES * (-(-warps // 4) * 4))) // 8 * 8)
    return min(found) if found else None
