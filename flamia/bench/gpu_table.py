"""What ``flamia bench attention`` prints and writes of its timings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flamia.bench.gpu_attention import CONTESTANTS, Timing, Workload


def record(timing: Timing) -> dict[str, Any]:
    """What the JSON file has of one workload: microseconds, and the fastest baseline's time over FLAMIA's."""
    ratios = {"forward_ratio": timing.ratio("forward"), "total_ratio": timing.ratio("total")}
    return {"title": str(timing.workload), **dataclasses.asdict(timing), **ratios}


def table(timing: Timing) -> Any:
    """One workload: microseconds, the forward's TFLOP/s, and each contestant's time over FLAMIA's."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=str(timing.workload), title_justify="left")
    for name in ("", "forward us", "backward us", "total us", "TFLOP/s", "forward / flamia", "total / flamia"):
        grid.add_column(name, justify="right" if name else "left")
    own_forward, own_total = timing.forward.get("flamia"), timing.total.get("flamia")
    for name in [*timing.forward, *timing.missing]:
        if name in timing.missing:
            grid.add_row(Text(name), Text(timing.missing[name], style="dim"))
            continue
        forward, total = timing.forward[name], timing.total.get(name)
        grid.add_row(
            Text(name),
            f"{forward:.0f}",
            "" if total is None else f"{total - forward:.0f}",
            "" if total is None else f"{total:.0f}",
            f"{timing.workload.flops / forward / 1e6:.0f}",
            "" if own_forward is None else f"{forward / own_forward:.2f}",
            "" if total is None or own_total is None else f"{total / own_total:.2f}",
        )
    return grid


def order(timings: Sequence[dict[str, Any]]) -> list[str]:
    """The contestants of some records, in the order of `CONTESTANTS`; then those that are not known here."""
    found = {name for t in timings for name in t["forward"]}
    return [*(name for name in CONTESTANTS if name in found), *sorted(found - set(CONTESTANTS))]


def markdown(timings: Sequence[dict[str, Any]]) -> str:
    """A table of records: microseconds of forward + backward, and the fastest baseline's times over FLAMIA's."""
    names = order(timings)
    rows = [
        ["workload", "documents", "heads", "D", *names, "forward", "total"],
        ["---", "---", "---", "---", *("---:" for _ in names), "---:", "---:"],
    ]
    for t in timings:
        w = Workload(**t["workload"])
        row = [w.name, w.documents, f"{w.q_heads}/{w.kv_heads}", str(w.head_dim)]
        for name in names:
            forward, total = t["forward"].get(name), t["total"].get(name)
            backward = "" if forward is None or total is None else f" + {total - forward:,.0f}"
            row.append("" if forward is None else f"{forward:,.0f}{backward}")
        row += ["" if t[key] is None else f"{t[key]:.2f}" for key in ("forward_ratio", "total_ratio")]
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
