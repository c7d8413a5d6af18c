"""What happened when: spans on tracks, for the timeline. Time is counted in segments run by all warps together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    :param track: a warp, or an engine of a CTA: ``CTA 0 warp 3``, ``CTA 0 tensor core``.
    :param kind: ``run``, ``wait`` or ``async``.
    """

    track: str
    kind: str
    name: str
    start: int
    end: int


class Trace:
    """Spans, if they are wanted."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.spans: list[Span] = []
        self.time = 0
        self._open: dict[tuple[str, str], int] = {}
        self._entered: list[tuple[str, str]] = []

    def enter(self, warp: Warp, reason: str) -> None:
        """A warp begins to wait."""
        if self.enabled:
            self._open[str(warp), reason] = self.time
            self._entered.append((str(warp), reason))

    def leave(self, warp: Warp, reason: str) -> None:
        """A warp ends a wait."""
        if self.enabled:
            start = self._open.pop((str(warp), reason), self.time)
            self.spans.append(Span(str(warp), "wait", reason, start, self.time))

    def ran(self, warp: Warp, start: int, end: int) -> None:
        """A warp ran; waits that it entered meanwhile begin where the run ends."""
        if self.enabled:
            for key in self._entered:
                if key in self._open:
                    self._open[key] = end
            self._entered.clear()
            self.spans.append(Span(str(warp), "run", "", start, end))

    def asynchronous(self, engine: str, label: str, start: int, end: int) -> None:
        """An asynchronous operation, from its issue to its completion."""
        if self.enabled:
            self.spans.append(Span(engine, "async", label, start, end))
