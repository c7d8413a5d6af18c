"""``cp.async.bulk.commit_group`` and ``wait_group``: the bulk groups of every thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flamia.conformance.simulator.machine.outcomes import Blocked
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.ops.asynchronous import Mask
from flamia.conformance.simulator.ops.registry import Run, op

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp


@dataclass
class BulkOperation:
    """One copy out of shared memory.

    :param read: whether its source has been read; ``done``: whether its destination has been written.
    :param waited: whether a ``wait_group`` of the thread covered it; until then it counts as using its source.
    :param on_wait: called when one did.
    """

    read: bool = False
    done: bool = False
    waited: bool = False
    on_wait: Callable[[], None] | None = None


class BulkGroups:
    """The groups of a warp's threads, oldest first; the last entry of a lane collects what is not committed."""

    def __init__(self, warp: Warp) -> None:
        self._open: list[list[BulkOperation]] = [[] for _ in range(32)]
        self._groups: list[list[list[BulkOperation]]] = [[] for _ in range(32)]

    def add(self, lane: int, operation: BulkOperation) -> None:
        """A copy of this thread."""
        self._open[lane].append(operation)

    def commit(self, lane: int) -> None:
        """Everything so far becomes a group, an empty one if there is nothing."""
        groups = self._groups[lane]
        while groups and all(o.done and o.waited for o in groups[0]):
            groups.pop(0)
        groups.append(self._open[lane])
        self._open[lane] = []

    def is_complete(self, lane: int, most: int, reads_only: bool) -> bool:
        """Whether all groups but the ``most`` latest are complete, or have read their sources."""
        return all(o.done or (reads_only and o.read) for o in self._covered(lane, most))

    def wait(self, lane: int, most: int) -> None:
        """A wait for these returned."""
        for operation in self._covered(lane, most):
            if not operation.waited and operation.on_wait is not None:
                operation.on_wait()
            operation.waited = True

    def _covered(self, lane: int, most: int) -> list[BulkOperation]:
        groups = self._groups[lane]
        return [o for group in groups[: max(0, len(groups) - most)] for o in group]


@op("cp.async.bulk.commit_group", control=True)
def compile_commit(site: Site) -> Run:
    """``cp.async.bulk.commit_group``."""
    for name in ("async", "bulk", "commit_group"):
        site.flag(name)
    site.expect_operands(0)

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            warp.unit(BulkGroups).commit(lane)

    return run


@op("cp.async.bulk.wait_group", control=True)
def compile_wait(site: Site) -> Run:
    """``cp.async.bulk.wait_group{.read} N``."""
    for name in ("async", "bulk", "wait_group"):
        site.flag(name)
    reads_only = site.flag("read")
    most = site.integer(0)

    def run(warp: Warp, mask: Mask) -> Blocked | None:
        groups, lanes = warp.unit(BulkGroups), lanes_of(mask)

        def ready() -> bool:
            return all(groups.is_complete(lane, most, reads_only) for lane in lanes)

        def finish() -> None:
            for lane in lanes:
                groups.wait(lane, most)

        if not ready():
            return Blocked(f"bulk groups of threads, at most {most} left", ready, finish)
        finish()
        return None

    return run
