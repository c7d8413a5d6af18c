"""``flamia bench attention``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.status import Status

    from flamia.bench.gpu_attention import Workload
    from flamia.bench.recorded import Recorded


def attention(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", "-w", help="What to time; repeat for several. Default: all, without --input and --lengths."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Time documents of these lengths, such as 8192 or 109x300,4096; without --workload these alone."
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="With --lengths: query heads; 16 if not given.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="With --lengths. Default: as many as --heads.")] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="With --lengths: 64 or 128, which FLAMIA takes; 128 if not given.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="With --lengths: without a causal mask.")] = False,
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
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Also write a Markdown table to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times to this file (PNG, SVG or PDF).")] = None,
) -> None:
    """Time the GPU kernels, quantization included, beside PyTorch's attention in the same run."""
    from rich.console import Console

    from flamia.bench.gpu_attention import CONTESTANTS, measure, workloads
    from flamia.bench.gpu_table import markdown, record, table

    known = workloads()
    names = workload or ([] if input or lengths else list(known))
    _require("workload", names, known)
    timed: list[tuple[Workload, Recorded | None]] = [(known[name], None) for name in names]
    if lengths is not None:
        timed.append((_own_workload(lengths, heads or 16, kv_heads, head_dim or 128, not full), None))
    elif heads or kv_heads or head_dim or full:
        raise typer.BadParameter("--heads, --kv-heads, --head-dim and --full go with --lengths")
    timed += [(r.workload, r) for r in _read_inputs(input or ())]
    _require("contestant", contestant or (), CONTESTANTS)
    console = Console()
    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device")
    except (ImportError, RuntimeError) as error:
        text = f"flamia bench attention needs a GPU: {error}; `flamia doctor` says what this machine has"
        console.print(text, style="bold yellow", markup=False, soft_wrap=True)
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
    if markdown_file is not None:
        markdown_file.write_text(markdown(found), "utf-8")
        console.print(f"Written to {markdown_file}.", markup=False)
    if plot is not None:
        from flamia.bench.gpu_plot import draw

        draw(found, versions["device"], plot)
        console.print(f"Drawn to {plot}.", markup=False)


def _require(what: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{what} must be one of {list(known)}, got {name!r}")


def _own_workload(lengths: str, heads: int, kv_heads: int | None, head_dim: int, causal: bool) -> Workload:
    """The workload of ``--lengths``. :raises BadParameter: for anything else than its form."""
    from flamia.bench.gpu_attention import Workload

    found: list[int] = []
    for part in lengths.split(","):
        match = re.fullmatch(r"(?:(0*[1-9]\d*)x)?(0*[1-9]\d*)", part.strip())
        if match is None:
            raise typer.BadParameter(
                f"must be lengths, or counts x lengths, such as 109x300,4096, got {part!r}", param_hint="--lengths"
            )
        found += [int(match[2])] * int(match[1] or 1)
    if heads % (kv_heads or heads):
        raise typer.BadParameter(f"must divide the {heads} query heads, got {kv_heads}", param_hint="--kv-heads")
    return Workload("lengths", tuple(found), heads, kv_heads or heads, head_dim, causal)


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
