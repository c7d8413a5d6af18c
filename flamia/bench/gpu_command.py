"""``flamia bench attention``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.status import Status

    from flamia.bench.gpu_attention import Timing, Workload
    from flamia.bench.recorded import Recorded


def attention(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="What to time; repeat for several. Default: all, without --input."),
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(
            help="Time the activations of this .npz file, as of `flamia study --input`, or of the package's `sample`; "
            "repeat for several. Without --workload these alone are timed. The file's documents are repeated, each "
            "whole, to a pack of about 32,768 tokens. Each set of inputs has the heads rotated by one more, and after "
            "all KV heads the channels by 32 more: the same attention with its numbers in other places."
        ),
    ] = None,
    contestant: Annotated[
        list[str] | None, typer.Option("--contestant", "-c", help="Who takes part; repeat for several. Default: all.")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the backward out.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the numbers to this file, after each workload.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times to this file (PNG, SVG or PDF).")] = None,
) -> None:
    """Time the GPU kernels, quantization included, beside PyTorch's attention in the same run."""
    from rich.console import Console

    from flamia.bench.gpu_attention import CONTESTANTS, measure, workloads

    known = workloads()
    names = workload or ([] if input else list(known))
    _require("workload", names, known)
    recorded = _read_inputs(input or ())
    timed: list[tuple[Workload, Recorded | None]] = [(known[name], None) for name in names]
    timed += [(r.workload, r) for r in recorded]
    _require("contestant", contestant or (), CONTESTANTS)
    console = Console()
    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device")
    except (ImportError, RuntimeError) as error:
        console.print(f"flamia bench attention needs a GPU: {error}", style="bold yellow", markup=False)
        raise typer.Exit(2) from None
    versions = describe_versions()
    console.print(", ".join(f"{name} {text}" for name, text in versions.items()), markup=False, highlight=False)
    found: list[dict[str, Any]] = []
    for each, values in timed:
        with console.status(each.name) as status:

            def advance(who: str, at: str = each.name, status: Status = status) -> None:
                status.update(f"{at}: {who}")

            timing = measure(each, not forward_only, contestant, advance, values)
        console.print(table(timing))
        found.append(record(timing))
        if json_file is not None:
            json_file.write_text(json.dumps({"versions": versions, "timings": found}, indent=1) + "\n", "utf-8")
    if json_file is not None:
        console.print(f"Written to {json_file}.", markup=False)
    if plot is not None:
        from flamia.bench.gpu_plot import draw

        draw(found, versions["device"], plot)
        console.print(f"Drawn to {plot}.", markup=False)


def _require(what: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{what} must be one of {list(known)}, got {name!r}")


def _read_inputs(sources: Collection[str]) -> list[Recorded]:
    """The workloads of files. :raises BadParameter: for a file that is none, or two of one name."""
    from flamia.bench.recorded import read_recorded

    found: dict[str, Recorded] = {}
    for source in sources:
        try:
            recorded = read_recorded(source)
            if recorded.workload.name in found:
                raise ValueError(f"files must have different names, got {recorded.workload.name!r} twice")
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(str(error), param_hint="--input") from error
        found[recorded.workload.name] = recorded
    return list(found.values())


def describe_versions() -> dict[str, str]:
    """Device and versions, by name."""
    from flamia import __version__

    torch: Any = import_module("torch")
    return {
        "device": torch.cuda.get_device_name(),
        "flamia": __version__,
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }


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
