"""The order of operations on a tensor core.

Note [Pipelined pairs]
~~~~~~~~~~~~~~~~~~~~~~
Operations of one tensor core are executed here in the order in which they were issued. PTX promises that for some pairs
only (9.7.16.6.2): ``mma`` after ``mma`` of the same accumulator, shape and cta_group; ``mma`` after ``cp``; and
``commit`` after either. A kernel that relies on another pair - an ``mma`` or ``cp`` that overwrites what an earlier
``mma`` reads, an ``mma`` that reads what another wrote - is executed, and the reliance is counted (strict: a fault).
A pair counts only if both touch the same tensor memory and no wait lies between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.tensormemory import Operation

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cluster, Cta
    from flamia.conformance.simulator.machine.warp import Warp


def is_promised(earlier: Operation, later: Operation) -> bool:
    """Whether PTX promises that they execute in order."""
    if later.kind != "mma":
        return False
    return earlier.kind == "cp" or (earlier.kind == "mma" and earlier.accumulator == later.accumulator)


def count_unpromised(warp: Warp, later: Operation, before: list[Operation]) -> None:
    """Count the pairs that PTX does not promise.

    :param before: operations whose tensor memory ``later`` uses, and that were not waited for.
    :raises Unpromised: in strict mode.
    """
    for text in sorted({_describe(e, later) for e in before if not is_promised(e, later)}):
        warp.machine.count_unpromised(text, warp)


def _describe(earlier: Operation, later: Operation) -> str:
    return f"{later.label} uses tensor memory of {earlier.label} without a wait between them"


class TensorCores:
    """What holds for all tensor cores of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.group = 0
        self.busy: dict[object, tuple[Cta, str]] = {}

    def use_group(self, group: int, what: str) -> None:
        """All tcgen05 instructions of a kernel name the same cta_group. :raises Illegal: otherwise."""
        if self.group not in (0, group):
            raise faults.Illegal(f"{what} has cta_group::{group}, earlier tcgen05 instructions cta_group::{self.group}")
        if group == 2 and self.cluster.size % 2:
            raise faults.Illegal(f"{what} has cta_group::2 in a cluster of {self.cluster.size} CTAs")
        self.group = group

    def ctas(self, warp: Warp, group: int) -> list[Cta]:
        """The CTAs that an operation issued by ``warp`` concerns, the one of even rank first."""
        if group == 1:
            return [warp.cta]
        first = warp.cta.rank & ~1
        return self.cluster.ctas[first : first + 2]

    @staticmethod
    def engine(ctas: list[Cta]) -> str:
        """Track of the timeline: the tensor core of a CTA, or of a pair."""
        return f"{ctas[0]} tensor core"

    def begin(self, ctas: list[Cta], what: str) -> list[object]:
        """An operation on these CTAs is under way. :returns: what `end` takes."""
        keys = [object() for _ in ctas]
        for key, cta in zip(keys, ctas, strict=True):
            self.busy[key] = (cta, what)
        return keys

    def end(self, keys: list[object]) -> None:
        """It is done."""
        for key in keys:
            del self.busy[key]

    def using(self, cta: Cta) -> list[str]:
        """Operations under way on a CTA."""
        return [what for owner, what in self.busy.values() if owner is cta]
