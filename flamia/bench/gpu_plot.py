"""The picture of ``flamia bench attention``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flamia.bench.gpu_attention import Workload, fastest_baseline
from flamia.bench.gpu_table import order

PER_ROW = 6
"""Workloads beside one another."""


def draw(timings: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Forward and backward of every contestant, as multiples of the fastest baseline's total.

    :param timings: the ``timings`` of the JSON file.
    """
    from matplotlib.figure import Figure

    names, columns = order(timings), min(PER_ROW, max(1, len(timings)))
    rows = [timings[i : i + PER_ROW] for i in range(0, len(timings), PER_ROW)] or [[]]
    figure = Figure(figsize=(2 + 1.6 * max(3, columns), 1 + 2.7 * len(rows)), layout="constrained")
    for axes, row in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows, strict=True):
        _draw_row(axes, row, names)
        axes.set_xlim(-0.6, columns - 0.4)
    for column, name in enumerate(names):
        axes.bar(0, 0, color=f"C{column}", label=name)
    figure.suptitle(
        f"{device}, quantization included: forward (dark) and backward (light), less is better", fontsize="medium"
    )
    figure.supylabel("time / that of the fastest baseline", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(2 + columns, 6))
    figure.savefig(path, dpi=120)


def _draw_row(axes: Any, timings: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    width, labels = 0.8 / max(1, len(names)), []
    for at, timing in enumerate(timings):
        which = "total" if timing["total"] else "forward"
        unit = fastest_baseline(timing[which])
        w = Workload(**timing["workload"])
        lines = [w.name, *w.documents.split(", "), f"{w.q_heads}/{w.kv_heads} heads, D = {w.head_dim}"]
        labels.append("\n".join(lines))
        for column, name in enumerate(names):
            if unit is None or name not in timing[which]:
                continue
            forward, whole = timing["forward"][name] / unit, timing[which][name] / unit
            place = at - 0.4 + (column + 0.5) * width
            axes.bar(place, forward, width, color=f"C{column}")
            axes.bar(place, whole - forward, width, bottom=forward, color=f"C{column}", alpha=0.5)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(timings)), labels, fontsize="small")
