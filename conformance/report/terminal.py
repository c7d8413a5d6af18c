"""A run in the terminal: a table that fills while the checks run, and the findings at the end.

Where the output is no terminal (a pipe, a CI log) nothing moves: one line per failure as it happens, then the table.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flamia.conformance.report.verdict import verdict
from flamia.conformance.results import LEVELS, STATUSES, CaseResult, Report, Status

SIGNS: dict[Status, tuple[str, str]] = {
    "passed": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "error": ("!", "bold magenta"),
    "not_applicable": ("–", "dim"),
}
"""Status -> sign and style."""

LINES_PER_FAILURE = 6
RECENT_FAILURES = 5


class LiveTable:
    """``with LiveTable(console, title) as table: run(..., progress=table)``."""

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.counts: dict[int, Counter[Status]] = {}
        self.seconds: Counter[int] = Counter()
        self.failures: list[CaseResult] = []
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self.task = self.bar.add_task("planning", total=None)
        self.live = Live(self._render(), console=console, transient=True, auto_refresh=False)
        self.drawn = 0.0

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self.live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def __call__(self, result: CaseResult, done: int, total: int) -> None:
        """Take in one result; the ``progress`` of `runner.run`."""
        self.counts.setdefault(result.level, Counter())[result.status] += 1
        self.seconds[result.level] += result.seconds  # type: ignore[assignment]
        if result.status in ("failed", "error"):
            self.failures.append(result)
            if not self.console.is_terminal:
                self.console.print(describe_failure(result), highlight=False)
        self.bar.update(self.task, completed=done, total=total, description=result.name)
        if self.console.is_terminal and (time.monotonic() - self.drawn > 0.1 or done == total):
            self.drawn = time.monotonic()
            self.live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [level_table(self.counts, self.seconds, self.title), self.bar]
        parts += [describe_failure(r, lines=1) for r in self.failures[-RECENT_FAILURES:]]
        return Group(*parts)


def level_table(counts: dict[int, Counter[Status]], seconds: Counter[int], title: str) -> Table:
    """One row per level, one column per status."""
    table = Table(title=title, title_justify="left")
    table.add_column("level")
    for status in STATUSES:
        sign, style = SIGNS[status]
        table.add_column(f"{sign} {status.replace('_', ' ')}", justify="right", style=style)
    table.add_column("seconds", justify="right")
    for level, name in LEVELS.items():
        found = counts.get(level)
        cells = [""] * len(STATUSES) if found is None else [str(found[s]) if found[s] else "·" for s in STATUSES]
        table.add_row(f"{level} {name}", *cells, f"{seconds[level]:.1f}" if found else "")
    return table


def describe_failure(r: CaseResult, lines: int = LINES_PER_FAILURE) -> Text:
    """Level, case and check of a failure, and what its message says first."""
    sign, style = SIGNS[r.status]
    shown = r.message.splitlines()
    text = Text(f"{sign} level {r.level} {r.name}", style)
    for line in shown[:lines]:
        text.append(f"\n  {line}" if lines > 1 else f"  {line}", "default")
    if lines > 1 and len(shown) > lines:
        text.append(f"\n  and {len(shown) - lines} more lines", "dim")
    return text


def print_report(console: Console, report: Report, *, failures: bool = True) -> None:
    """The table of levels, the failures, and the verdict.

    :param failures: False where they have been printed while the checks ran.
    """
    counts: dict[int, Counter[Status]] = {}
    seconds: Counter[int] = Counter()
    for r in report.results:
        counts.setdefault(r.level, Counter())[r.status] += 1
        seconds[r.level] += r.seconds  # type: ignore[assignment]
    title = f"{report.target} · recipe {report.recipe} · profile {report.profile} · {report.size}"
    console.print(level_table(counts, seconds, escape(title)))
    for reason, number in _reasons(report).most_common():
        checks = "1 check" if number == 1 else f"{number} checks"
        console.print(f"[dim]– not applicable, {checks}: {escape(reason)}[/dim]", highlight=False)
    if failures:
        for r in report.failures():
            console.print(describe_failure(r), highlight=False)
    word = verdict(report)
    style = {"passed": "bold green", "failed": "bold red"}.get(word, "bold yellow")
    console.print(
        f"[{style}]{word}[/{style}]: {report.count('passed')} passed, {report.count('failed')} failed, "
        f"{report.count('error')} raised, {report.count('not_applicable')} not applicable, in {report.seconds:.1f} s",
        highlight=False,
    )


def _reasons(report: Report) -> Counter[str]:
    return Counter(r.message for r in report.results if r.status == "not_applicable")
