"""A report as one HTML page that needs no other file, no script and no network.

Its order is the reader's: the verdict, the levels, what failed and where, the figures, then every check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape

from flamia.conformance.cases import CASES
from flamia.conformance.report.figures import MOVED, NOT_COMPARED, UNMOVED, budget_chart, leak_map
from flamia.conformance.report.style import STYLE
from flamia.conformance.report.verdict import verdict
from flamia.conformance.results import LEVELS, STATUSES, CaseResult, Report, Status

SIGNS: dict[Status, str] = {"passed": "✓", "failed": "✗", "error": "!", "not_applicable": "–"}
WORDS: dict[Status, str] = {"passed": "passed", "failed": "failed", "error": "raised", "not_applicable": "n/a"}

MEANINGS = {
    0: "the chip computes as the machine model says",
    1: "payloads, scales, layout and schedule are the reference's, byte for byte",
    2: "out, LSE and the tiles of P are the reference's, bit for bit",
    3: "gradients and the tiles of P and dS are the reference's, bit for bit",
    4: "what must hold for any implementation, bit for bit",
    5: "the error against float64 is within twice the reference's own",
}
"""Level -> what passing it says."""


def to_html(report: Report) -> str:
    """The page as text."""
    title = f"{report.target}: {verdict(report)}"
    sections = [
        _head(report),
        _levels(report),
        _failures(report),
        _leak_maps(report),
        _budgets(report),
        _not_applicable(report),
        _all_checks(report),
    ]
    body = "\n".join(s for s in sections if s)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    word = verdict(report)
    facts = {
        "recipe and profile": f"{report.recipe}, {report.profile}",
        "size of the cases": report.size,
        "suite version": report.suite_version,
        "started": report.started,
        "took": f"{report.seconds:.1f} s",
        **report.environment,
    }
    rows = "".join(
        f'<tr><th scope="row">{escape(k)}</th><td class="mono">{escape(v)}</td></tr>' for k, v in facts.items()
    )
    counts = ", ".join(f"{report.count(s)} {s.replace('_', ' ') if s != 'error' else 'raised'}" for s in STATUSES)
    return (
        f'<h1>Conformance of <span class="mono">{escape(report.target)}</span> '
        f'<span class="verdict {word}">{word}</span></h1>\n'
        f'<p class="soft">{counts}</p>\n<table class="facts">{rows}</table>'
    )


def _levels(report: Report) -> str:
    cards = []
    for level, name in LEVELS.items():
        status = report.level_status(level)
        counts = ", ".join(f"{report.count(s, level)} {WORDS[s]}" for s in STATUSES if report.count(s, level))
        sign = "" if status is None else f'<span class="sign">{SIGNS[status]}</span> '
        cards.append(
            f'<div class="level {status or ""}"><b>{sign}{level} {escape(name)}</b>'
            f'<span class="count">{counts or "not asked for"}</span><br>'
            f'<span class="count">{MEANINGS[level]}</span></div>'
        )
    return f'<h2>Levels</h2>\n<div class="levels">{"".join(cards)}</div>'


def _failures(report: Report) -> str:
    found = list(report.failures())
    if not found:
        return ""
    parts = ["<h2>What failed, and where first</h2>"]
    for r in found:
        case = CASES.get(r.case)
        about = f'<p class="soft">{escape(case.summary)}</p>' if case is not None else ""
        if case is not None and case.classes:
            about += f'<p class="soft">covers: {escape(", ".join(case.classes))}</p>'
        parts.append(
            f'<div class="failure {r.status}"><h3><span class="sign {r.status}">{SIGNS[r.status]}</span> '
            f'level {r.level}, <span class="mono">{escape(r.name)}</span></h3>{about}'
            f"<pre>{escape(r.message)}</pre>{_numbers(r)}</div>"
        )
    return "\n".join(parts)


def _numbers(r: CaseResult) -> str:
    shown = {name: x for name, x in r.numbers.items() if not name.endswith("_over_budget") or x > 1}
    facts = [f"{name.replace('_', ' ')} {x:.4g}" for name, x in shown.items()]
    if r.coordinate is not None:
        facts.insert(0, f"coordinate {list(r.coordinate)}")
    if not facts:
        return ""
    text = ", ".join(facts)
    return f'<p class="soft">{escape(text)}</p>'


def _leak_maps(report: Report) -> str:
    drawn = [(r, svg) for r in report.results if (svg := leak_map(r))]
    if not drawn:
        return ""
    moved = [(r, svg) for r, svg in drawn if r.status != "passed"]
    parts = [
        "<h2>Leak maps</h2>",
        "<p>Each row is a document, each column a position in it. Only tokens after the positions compared were "
        "changed; where an output moved all the same, the future reached it. Lines mark blocks of 32 tokens and tiles "
        "of 128.</p>",
        _legend(),
    ]
    if not moved:
        calls = sum(r.numbers.get("positions", 0) for r, _ in drawn)
        parts.append(f"<p>Nothing moved: {calls:.0f} prefixes of documents kept every bit in {len(drawn)} cases.</p>")
    for r, svg in moved or drawn[:1]:
        nearest = r.numbers.get("smallest_distance")
        text = "" if not nearest else f", moved by a token {nearest:.0f} after it at the nearest"
        parts.append(f'<h3><span class="mono">{escape(r.case)}</span>{text}</h3>{svg}')
    return "\n".join(parts)


def _legend() -> str:
    def swatch(color: tuple[int, int, int], text: str) -> str:
        return f'<span><i class="swatch" style="background:rgb{color}"></i>{text}</span>'

    return (
        '<p class="legend soft">'
        + swatch(UNMOVED, "compared, no bit moved")
        + swatch(MOVED[0], "a few numbers of the row moved")
        + swatch(MOVED[1], "many moved")
        + swatch(NOT_COMPARED, "not compared, or no token")
        + "</p>"
    )


def _budgets(report: Report) -> str:
    chart = budget_chart(r for r in report.results if r.level == 5)
    if not chart:
        return ""
    return (
        "<h2>Errors against their budgets</h2>\n<p>The budget is twice the sum of the reference's own error and the "
        "rounding of the results' format. Each mark is the largest of the worst coordinate, the root mean square and "
        f"the bias of an output; right of 1 it fails.</p>\n{chart}"
    )


def _not_applicable(report: Report) -> str:
    reasons = Counter((r.level, r.message) for r in report.results if r.status == "not_applicable")
    if not reasons:
        return ""
    rows = "".join(
        f"<tr><td>{level} {escape(LEVELS[level])}</td><td>{count}</td><td>{escape(reason)}</td></tr>"
        for (level, reason), count in sorted(reasons.items())
    )
    return (
        "<h2>Not applicable</h2>\n<p>What the target could not be asked. It is no pass.</p>\n<table><thead><tr>"
        f'<th scope="col">level</th><th scope="col">checks</th><th scope="col">reason</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _all_checks(report: Report) -> str:
    levels = [level for level in LEVELS if report.level_status(level) is not None]
    by_case: dict[str, list[CaseResult]] = {}
    for r in report.results:
        by_case.setdefault(r.case, []).append(r)
    head = "".join(f'<th scope="col">{level} {escape(LEVELS[level])}</th>' for level in levels)
    rows = []
    for case, results in by_case.items():
        bad = any(r.status in ("failed", "error") for r in results)
        about = CASES[case].summary if case in CASES else ""
        cells = "".join(_cell([r for r in results if r.level == level]) for level in levels)
        rows.append(
            f'<tr class="{"bad" if bad else ""}"><th scope="row" class="mono" title="{escape(about)}">{escape(case)}'
            f"</th>{cells}</tr>"
        )
    return (
        "<h2>Every check</h2>\n<table><caption>✓ passed, ✗ failed, ! raised, – not applicable; empty: the case does "
        f'not belong to the level</caption><thead><tr><th scope="col">case</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(results: Iterable[CaseResult]) -> str:
    found = list(results)
    if len(found) == 1 and found[0].level != 4:
        return f'<td class="cell">{_mark(found[0])}</td>'
    marks = "".join(f"<span>{_mark(r)} {escape(r.check)}</span>" for r in found)
    return f'<td class="cell many">{marks}</td>' if marks else '<td class="cell"></td>'


def _mark(r: CaseResult) -> str:
    tip = escape(r.message.partition("\n")[0] or WORDS[r.status])
    return f'<span class="sign {r.status}" title="{tip}">{SIGNS[r.status]}</span>'
