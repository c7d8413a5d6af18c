"""Timelines: one lane per warp role and per asynchronous engine, as text and as a picture.

The unit of time is a segment, a stretch of instructions without a stop, whatever it would cost on a chip: what a
timeline shows is who waits for whom, and what overlaps, not how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flamia.conformance.simulator.machine.launch import Report
from flamia.conformance.simulator.machine.trace import Span
from flamia.conformance.simulator.tools.roles import Roles, natural, role_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUN, WAIT, BUSY = "█", "·", "▒"
COLORS = {"run": "#2f6f9f", "wait": "#d9dee3"}
ENGINE_COLORS = ("#d98032", "#5a9f5a", "#b04f6f", "#8a6fb0", "#c0a030", "#4fa3a3")
LEVELS = 4
"""Operations under way at once that are drawn side by side in a lane."""


def lanes_of(report: Report, roles: Roles) -> dict[str, list[Span]]:
    """Lane -> its spans: roles first, then engines, each in natural order."""
    lanes: dict[str, list[Span]] = {}
    for span in report.spans:
        lanes.setdefault(role_of(span.track, roles), []).append(span)
    engines = {lane for lane, spans in lanes.items() if all(s.kind == "async" for s in spans)}
    order = list(roles)

    def key(lane: str) -> tuple[Any, ...]:
        role = next((i for i, name in enumerate(order) if lane.endswith(f" {name}")), len(order))
        cta = lane.removesuffix(f" {order[role]}") if role < len(order) else lane
        return lane in engines, natural(cta) if role < len(order) else (), role, natural(lane)

    return {lane: lanes[lane] for lane in sorted(lanes, key=key)}


def format_timeline(report: Report, roles: Roles, width: int = 100) -> str:
    """A line per lane: █ some warp of the role runs, · all that are there wait, ▒ an engine is at work.

    :raises ValueError: for a report without spans.
    """
    lanes, end = _checked(report, roles)
    label = max(map(len, lanes))
    lines = [f"{'':{label}} 0{'segments':^{width - 2 - len(str(end))}}{end}"]
    for name, spans in lanes.items():
        cells = [" "] * width
        for kind, mark in (("wait", WAIT), ("async", BUSY), ("run", RUN)):
            for span in (s for s in spans if s.kind == kind):
                first = int(span.start / end * width)
                last = max(first + 1, -int(-span.end / end * width // 1))
                cells[first : min(last, width)] = [mark] * (min(last, width) - first)
        lines.append(f"{name:{label}} {''.join(cells)}")
    return "\n".join(lines)


def draw_timeline(report: Report, roles: Roles, path: Path | None = None, *, title: str = "") -> Figure:
    """The same as a picture, with the names of asynchronous operations; written to ``path`` if it is given."""
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.patches import Patch

    lanes, end = _checked(report, roles)
    figure = NewFigure(figsize=(10, 1.1 + 0.34 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    operations = sorted({operation_of(s) for spans in lanes.values() for s in spans if s.kind == "async"})
    colors = {name: ENGINE_COLORS[i % len(ENGINE_COLORS)] for i, name in enumerate(operations)}
    for row, spans in enumerate(lanes.values()):
        for kind, height in (("wait", 0.26), ("run", 0.62)):
            bars = [(a, max(b - a, end / 400)) for a, b in _merged(s for s in spans if s.kind == kind)]
            axes.broken_barh(bars, (row - height / 2, height), facecolors=COLORS[kind], linewidth=0)
        stacked = _stacked([s for s in spans if s.kind == "async"])
        for level, span in stacked:
            height = 0.72 / (1 + max(n for n, _ in stacked))
            place = (row - 0.36 + level * height, height * 0.9)
            axes.broken_barh([(span.start, max(span.end - span.start, end / 400))], place,
                             facecolors=colors[operation_of(span)], linewidth=0)  # fmt: skip
    axes.set(yticks=range(len(lanes)), yticklabels=list(lanes), xlim=(0, end), xlabel="segments run")
    axes.set_title(title, loc="left", fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    names = {"runs": COLORS["run"], "waits": COLORS["wait"], **colors}
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(handles=handles, fontsize=7, ncols=len(handles), frameon=False, loc="outside lower center")
    if path is not None:
        figure.savefig(path, dpi=140)
    return figure


def operation_of(span: Span) -> str:
    """What an asynchronous span does, without its place: ``cp.async.bulk``."""
    return span.name.partition(" (")[0] or "asynchronous"


def _stacked(spans: list[Span]) -> list[tuple[int, Span]]:
    """Each span on the lowest level, of at most `LEVELS`, that is free when it begins."""
    free: list[int] = []
    out = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        level = next((i for i, end in enumerate(free) if end <= span.start), len(free))
        if level == len(free) < LEVELS:
            free.append(0)
        level = min(level, LEVELS - 1)
        free[level] = span.end
        out.append((level, span))
    return out


def _checked(report: Report, roles: Roles) -> tuple[dict[str, list[Span]], int]:
    if not report.spans:
        raise ValueError("report has no spans: simulate with trace=True")
    return lanes_of(report, roles), max(1, max(s.end for s in report.spans))


def _merged(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Intervals that touch, as one."""
    out: list[tuple[int, int]] = []
    for start, end in sorted((s.start, s.end) for s in spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out
