"""Figures of a report as inline SVG: leak maps, and errors against their budgets.

They are drawn here rather than by a plotting library, so that marks carry tooltips, colours follow the page, and a
report is written in milliseconds.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import OUTPUTS
from flamia.conformance.results import CaseResult
from flamia.reference.documents import BLOCK, TILE

NOT_COMPARED = (0xEE, 0xEE, 0xEE)
UNMOVED = (0xA8, 0xD5, 0xBA)
MOVED = ((0xFD, 0xB8, 0x63), (0x9E, 0x0B, 0x2A))
"""Colours of a leak map; moved rows go from the first to the second as more of their numbers moved."""

MAP_WIDTH = 760
MAP_MARGIN = (64, 26)
TICKS_AT_MOST = 16

BUDGET_COLORS = {"out": "#1b6ca8", "lse": "#7a7a7a", "dq": "#d1495b", "dk": "#edae49", "dv": "#2a9d8f"}
LOWEST_RATIO, HIGHEST_RATIO = 1e-2, 1e2
BUDGET_WIDTH, ROW_HEIGHT, NAME_WIDTH = 760, 17, 240


def leak_map(result: CaseResult) -> str:
    """Document x position: where an output moved when only later tokens were changed. Empty without a map.

    :param result: of a leak check; its ``leak_map`` has a row per document and a column per position.
    """
    found = result.arrays.get("leak_map")
    if found is None or not found.size:
        return ""
    documents, positions = found.shape
    cell = min(14.0, max(1.0, MAP_WIDTH / positions))
    height = min(14.0, max(2.0, 320 / documents))
    width, depth = positions * cell, documents * height
    left, top = MAP_MARGIN
    parts = [
        f'<image x="{left}" y="{top}" width="{width:.1f}" height="{depth:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{_png(_map_pixels(found))}"/>'
    ]
    for position in range(BLOCK, positions, BLOCK):
        x = left + position * cell
        strong = "strong" if position % TILE == 0 else "weak"
        parts.append(f'<line class="{strong}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + depth:.1f}"/>')
    for position in range(0, positions, _tick_step(positions, BLOCK)):
        parts.append(_text(left + position * cell, top - 6, str(position), "start"))
    for document in range(0, documents, _tick_step(documents, 1)):
        parts.append(_text(left - 6, top + (document + 0.5) * height + 4, str(document), "end"))
    parts.append(_text(left - 6, top - 6, "document", "end"))
    parts.append(_text(left, top + depth + 16, "position in the document", "start"))
    label = escape(f"leak map of {result.case}")
    size = f"{left + MAP_WIDTH + 8} {top + depth + 22:.0f}"
    return f'<svg class="figure" role="img" aria-label="{label}" viewBox="0 0 {size}">{"".join(parts)}</svg>'


def _map_pixels(counts: NDArray[Any]) -> NDArray[np.uint8]:
    """RGB of a leak map."""
    pixels = np.empty((*counts.shape, 3), np.uint8)
    pixels[...] = UNMOVED
    with np.errstate(invalid="ignore"):
        moved = counts > 0
        share = np.log1p(np.where(moved, counts, 0)) / np.log1p(max(1.0, float(np.nanmax(counts, initial=1.0))))
    shade = np.array(MOVED[0]) + share[..., None] * (np.array(MOVED[1]) - np.array(MOVED[0]))
    pixels[moved] = shade[moved].astype(np.uint8)
    pixels[np.isnan(counts)] = NOT_COMPARED
    return pixels


def _png(pixels: NDArray[np.uint8]) -> str:
    """An RGB image as a data URI."""
    height, width = pixels.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 3)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode("ascii")


def _tick_step(count: int, unit: int) -> int:
    """A multiple of ``unit``, doubled until at most `TICKS_AT_MOST` ticks are left."""
    step = unit
    while count / step > TICKS_AT_MOST:
        step *= 2
    return step


def worst_ratio(result: CaseResult, output: str) -> float | None:
    """The largest error over budget that a level-5 check measured for an output, by any of its measures."""
    found = [x for name, x in result.numbers.items() if name.startswith(f"{output}_") and name.endswith("_over_budget")]
    return max(found, default=None)


def budget_chart(results: Iterable[CaseResult]) -> str:
    """One line per case: the largest error over budget of each output, on a logarithmic axis. Empty without numbers."""
    rows = [r for r in results if any(worst_ratio(r, output) is not None for output in OUTPUTS)]
    if not rows:
        return ""
    top, plot = 34, BUDGET_WIDTH - NAME_WIDTH - 20
    bottom = top + ROW_HEIGHT * len(rows)

    def place(ratio: float) -> float:
        clipped = min(max(ratio, LOWEST_RATIO), HIGHEST_RATIO)
        span = math.log10(HIGHEST_RATIO / LOWEST_RATIO)
        return NAME_WIDTH + plot * math.log10(clipped / LOWEST_RATIO) / span

    parts = [
        f'<rect class="over" x="{place(1):.1f}" y="{top}" width="{place(HIGHEST_RATIO) - place(1):.1f}" '
        f'height="{bottom - top}"/>'
    ]
    for power in range(-2, 3):
        x = place(10.0**power)
        kind = "strong" if power == 0 else "weak"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        sign = {-2: "≤ ", 2: "≥ "}.get(power, "")
        parts.append(_text(x, top - 6, f"{sign}{10.0**power:g}", "middle"))
    for i, r in enumerate(rows):
        y = top + ROW_HEIGHT * (i + 0.5)
        name = "fail" if r.status in ("failed", "error") else "name"
        parts.append(_text(NAME_WIDTH - 10, y + 4, r.case, "end", name))
        for lane, output in enumerate(OUTPUTS):
            ratio = worst_ratio(r, output)
            if ratio is not None:
                tip = escape(f"{r.case}, {output}: {ratio:.3g} of the budget")
                at = f'cx="{place(ratio):.1f}" cy="{y + 2.6 * (lane - 2):.1f}"'
                parts.append(f'<circle {at} r="3" fill="{BUDGET_COLORS[output]}"><title>{tip}</title></circle>')
    for i, output in enumerate(OUTPUTS):
        x = NAME_WIDTH + 60 * i
        parts.append(f'<circle cx="{x}" cy="9" r="3.6" fill="{BUDGET_COLORS[output]}"/>')
        parts.append(_text(x + 9, 13, output, "start"))
    parts.append(_text(NAME_WIDTH - 10, 13, "error over budget", "end"))
    label = "largest error over budget by case and output"
    box = f"0 0 {BUDGET_WIDTH} {bottom + 6}"
    return f'<svg class="figure" role="img" aria-label="{label}" viewBox="{box}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "name") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
