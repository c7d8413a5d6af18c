"""The picture of ``flamia bench attention``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(timings: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Forward and backward of every contestant, as multiples of the fastest baseline's total.

    :param timings: the ``timings`` of the JSON file.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for t in timings for name in (t["total"] or t["forward"])))
    figure = Figure(figsize=(1.5 + 1.3 * len(timings), 4.4), layout="constrained")
    axes, width = figure.subplots(), 0.8 / max(1, len(names))
    for column, name in enumerate(names):
        color = f"C{column}"
        for at, timing in enumerate(timings):
            which = "total" if timing["total"] else "forward"
            unit = min((t for n, t in timing[which].items() if not n.startswith("flamia")), default=None)
            if unit is None or name not in timing[which]:
                continue
            forward, whole = timing["forward"][name] / unit, timing[which][name] / unit
            place = at - 0.4 + (column + 0.5) * width
            axes.bar(place, forward, width, color=color)
            axes.bar(place, whole - forward, width, bottom=forward, color=color, alpha=0.5)
        axes.bar(0, 0, color=color, label=name)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(timings)), [t["workload"]["name"] for t in timings], rotation=20)
    axes.set_ylabel("time / fastest baseline")
    axes.set_title(f"{device}: forward (dark) and backward (light), quantization included; less is better")
    figure.legend(loc="outside lower center", ncols=max(1, len(names)), fontsize="small")
    figure.savefig(path, dpi=150)
