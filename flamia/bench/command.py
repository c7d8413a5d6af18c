"""``flamia bench``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flamia.bench.gpu_command import attention as attention_command

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command("attention")(attention_command)

ROWS = {
    "attention": "forward and backward beside PyTorch",
    "memory": "peak memory of 16,384 tokens",
    "quantization": "quantizing bfloat16 to E4M3 on one core",
    "bit-accurate": "the blackwell profile on 512 tokens",
}


@app.callback()
def _group() -> None:
    """Benchmarks, side by side in one run."""


@app.command()
def reference(
    row: Annotated[
        list[str] | None,
        typer.Option(help=f"What to measure; repeat for several. Default: all of {', '.join(ROWS)}."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="T of the attention row; its goals are set for 4096.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the attention row, of which the best counts.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
) -> None:
    """Time the NumPy reference beside PyTorch, and its other goals. About two minutes on two cores."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flamia.bench import attention, bit_accurate, memory, quantization

    rows = list(dict.fromkeys(row)) if row else list(ROWS)
    for name in rows:
        if name not in ROWS:
            raise typer.BadParameter(f"row must be one of {list(ROWS)}, got {name!r}")
    if json_file is not None:
        try:
            json_file.touch()
        except OSError as error:
            raise typer.BadParameter(f"json cannot be written: {error}") from error
    console = Console()
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:

        def measure(name: str, run: Callable[[Callable[[], None]], Any], steps: int = 1) -> None:
            if name not in rows:
                return
            task = bars.add_task(ROWS[name], total=steps)
            results[name] = run(lambda: bars.advance(task))
            bars.update(task, completed=steps)

        shape = attention.Shape(tokens)
        measure("attention", lambda step: attention.measure_attention(shape, repeats, step), 3 * repeats)
        try:
            measure("memory", lambda step: memory.measure_memory())
        except RuntimeError as error:
            console.print(f"No peak memory: {error}")
        measure("quantization", lambda step: quantization.measure_quantization())
        measure("bit-accurate", lambda step: bit_accurate.measure_bit_accurate())
    console.print()
    console.print(table(results))
    if json_file is not None:
        plain: dict[str, Any] = {name: dataclasses.asdict(result) for name, result in results.items()}
        plain["rows"] = [dict(zip(("what", "measured", "goal", "met"), line, strict=True)) for line in lines(results)]
        json_file.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        console.print(f"Written to {json_file}.")


def table(results: dict[str, Any]) -> Any:
    """All measurements beside their goals."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Reference, mxfp8, forward + backward", title_justify="left"
    )
    for name, justify in (("what", "left"), ("measured", "right"), ("goal", "right"), ("met", "left")):
        grid.add_column(name, justify=justify)  # type: ignore[arg-type]
    for what, measured, goal, met in lines(results):
        verdict = Text("") if met is None else Text("yes", "green") if met else Text("no", "red")
        grid.add_row(Text(what), Text(measured), Text(goal), verdict)
    return grid


def lines(results: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """``(what, measured, goal, whether it is met)``; the goal is empty where a number stands for itself."""
    from flamia.bench.attention import FASTER_THAN_FAKE_QUANT, SLOWER_THAN_SDPA
    from flamia.bench.bit_accurate import GOAL_SECONDS
    from flamia.bench.memory import GOAL_BYTES

    found: list[tuple[str, str, str, bool | None]] = []
    if "attention" in results:
        r = results["attention"]
        found.append((f"ideal: {r.shape}, {r.threads} threads", "", "", None))
        loops = "compiled loops" if r.compiled else "NumPy alone; faster with 'flamia[fast]'"
        labels = {
            "reference": f"reference ({loops})",
            "math_sdpa": "torch float32, math SDPA",
            "fake_quant": "torch fake-quant",
        }
        for name, label in labels.items():
            text = r.missing.get(name, "")
            if name in r.seconds:
                text = f"{r.seconds[name]:.2f} s (CPU {r.cpu_seconds[name]:.2f})"
            found.append((f"  {label}", text, "", None))
        if r.over_sdpa is not None:
            goal = f"at most {SLOWER_THAN_SDPA:.0f}x"
            found.append(("  reference / SDPA", f"{r.over_sdpa:.1f}x", goal, r.over_sdpa <= SLOWER_THAN_SDPA))
        if r.under_fake_quant is not None:
            goal, met = f"at least {FASTER_THAN_FAKE_QUANT:.0f}x", r.under_fake_quant >= FASTER_THAN_FAKE_QUANT
            found.append(("  fake-quant / reference", f"{r.under_fake_quant:.1f}x", goal, met))
            worst = max(r.difference.values())
            found.append(("  fake-quant: relative difference", f"{worst:.1e}", "at most 1e-3", worst <= 1e-3))
    if "memory" in results:
        m = results["memory"]
        found.append((f"memory: T={m.tokens}, one head ({m.seconds:.0f} s)", "", "", None))
        goal = f"below {GOAL_BYTES / 1e6:.0f} MB"
        found.append(("  whole process", f"{m.peak / 1e6:.0f} MB", goal, m.met))
        inputs = f"  above imports (inputs: {m.inputs / 1e6:.0f} MB)"
        found.append((inputs, f"{(m.peak - m.imported) / 1e6:.0f} MB", "", None))
    if "quantization" in results:
        s = results["quantization"]
        found.append(("bfloat16 to E4M3, one core", "", "", None))
        for block, speed in s.speed.items():
            goal = f"at least {s.goal / 1e6:.0f} M/s"
            found.append((f"  B={block}", f"{speed / 1e6:.0f} M/s", goal, speed >= s.goal))
        found.append(("  the memory's limit, 3 B/element", f"{s.memory_limit / 1e6:.0f} M/s", "", None))
    if "bit-accurate" in results:
        b = results["bit-accurate"]
        found.append((f"{b.profile}: T={b.tokens}, one head, causal", "", "", None))
        found.append(("  reference", f"{b.total:.1f} s", f"below {GOAL_SECONDS:.0f} s", b.met))
    return found
