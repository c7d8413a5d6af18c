"""``flamia kernels``: build the kernels, list them, and look into them. Needs no GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flamia.kernels.build import Artifact
    from flamia.kernels.registry import Unit
    from flamia.kernels.targets import Target

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Build the CUDA kernels, list them, look into them.")

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Kernels or units, such as quantize[bf16,d128]; * is any characters (hopper_*); default: all."),
]
Targets = Annotated[list[str] | None, typer.Option("--target", "-t", help="sm_90a, sm_100a or sm_103a; default: all.")]


@app.command("list")
def list_kernels() -> None:
    """List the kernels, their entries, parameters and targets."""
    from rich.table import Table

    from flamia.kernels.registry import KERNELS

    table = Table()
    for column in ("kernel", "what it does", "source", "entries", "parameters", "targets"):
        table.add_column(column, no_wrap=column in ("kernel", "entries"))
    for kernel in KERNELS:
        table.add_row(
            kernel.name,
            kernel.summary,
            kernel.source,
            "\n".join(e.name for e in kernel.entries),
            "\n".join(f"{p.label}: {', '.join(map(str, p.values))}" for p in kernel.parameters),
            " ".join(t.name for t in kernel.targets),
        )
    _console().print(table)


@app.command("build")
def build_kernels(
    names: Names = None,
    target: Targets = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Compilations at once.")] = None,
) -> None:
    """Compile kernels into the cache and hold them to their declared limits; exit 1 if one breaks them."""
    from flamia.kernels.build import build_all
    from flamia.kernels.cache import cache_dir

    units, targets = _choose(names, target)
    console, table, failures = _console(), _resource_table(), []
    start = time.perf_counter()
    made = found = 0
    for unit, chip, result in _guarded(lambda: list(build_all(units, targets, jobs))):
        if isinstance(result, Exception):
            failures.append(f"{unit.name} for {chip.name}: {result}" if unit.name not in str(result) else str(result))
            continue
        made, found = made + (not result.cached), found + result.cached
        _add_rows(table, result)
    console.print(table)
    seconds = time.perf_counter() - start
    summary = f"{made} compiled, {found} cached, {len(failures)} failed in {seconds:.1f} s; cache {cache_dir()}"
    console.print(summary, markup=False, soft_wrap=True)
    for failure in failures:
        console.print(failure, style="red", markup=False, highlight=False)
    if failures:
        raise typer.Exit(1)


@app.command("inspect")
def inspect_kernels(
    names: Names = None,
    target: Targets = None,
    sass: Annotated[bool, typer.Option(help="Print the machine code.")] = False,
    ptx: Annotated[bool, typer.Option(help="Print the PTX.")] = False,
    full: Annotated[bool, typer.Option(help="Count full opcodes (LDG.E.128) instead of groups (LDG.128).")] = False,
) -> None:
    """Show registers, spills, shared memory, code size and an instruction histogram of each entry."""
    from flamia.kernels.build import build
    from flamia.kernels.disassembly import DisassemblerNotFoundError, count_instructions, disassemble, group_opcodes

    units, targets = _choose(names, target)
    console = _console()
    for unit in units:
        for chip in targets:
            if chip not in unit.kernel.targets:
                continue
            artifact = _guarded(partial(build, unit, chip))
            table = _resource_table()
            _add_rows(table, artifact)
            console.print(table)
            if ptx:
                typer.echo(artifact.ptx.read_text())
            try:
                text = disassemble(artifact.cubin)
            except DisassemblerNotFoundError as error:
                console.print(f"no instruction histogram: {error}", markup=False)
                continue
            for name, counts in count_instructions(text).items():
                chosen = counts if full else group_opcodes(counts)
                line = "  ".join(f"{op} {number}" for op, number in chosen.most_common())
                console.print(f"{name}: {sum(counts.values())} instructions: {line}", markup=False, highlight=False)
            if sass:
                typer.echo(text)


@app.command("bandwidth")
def measure_bandwidth(
    tokens: Annotated[list[int] | None, typer.Option(help="Packed tokens; default: 16384 and 65536.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    dim: Annotated[int, typer.Option(help="Head dimension.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    """Time the quantization kernels against a copy of as many bytes, and against cuDNN's attention. Needs a GPU."""
    from rich.table import Table

    from flamia.kernels.bandwidth import cudnn_milliseconds, measure, schedule_milliseconds

    _need_gpu()
    console = _console()
    for count in tokens or [16384, 65536]:
        table = Table("call", title=f"T={count}, {heads} heads, D={dim}, {dtype}")
        for column in ("ms", "GB/s", "copy GB/s", "of the copy"):
            table.add_column(column, justify="right")
        results = measure(count, heads, dim, dtype)
        for m in results:
            speeds = (m.moved / 1e6 / m.milliseconds, m.moved / 1e6 / m.copy_milliseconds)
            table.add_row(m.name, f"{m.milliseconds:.4f}", *(f"{s:.0f}" for s in speeds), f"{m.fraction:.1%}")
        console.print(table)
        attention = cudnn_milliseconds(count, heads, dim)
        whole = next(m for m in results if m.name == "q, k, v and schedule").milliseconds
        console.print(
            f"cuDNN bfloat16 forward, causal: {attention:.3f} ms; q, k, v and schedule: {whole / attention:.1%}"
        )
    for name, lengths in (
        ("8 x 2048", [2048] * 8),
        ("30,000 and 1,000 x 32", [30_000] + [32] * 1000),
        ("100,000 empty", [0] * 100_000),
    ):
        console.print(f"schedule of {name} tokens: {1e3 * schedule_milliseconds(lengths, heads):.1f} microseconds")


def _choose(names: list[str] | None, target: list[str] | None) -> tuple[tuple[Unit, ...], tuple[Target, ...]]:
    from flamia.kernels.registry import find_units
    from flamia.kernels.targets import TARGETS, get_target

    try:
        units, targets = find_units(names or []), tuple(get_target(t) for t in target) if target else TARGETS
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not any(t in unit.kernel.targets for unit in units for t in targets):
        possible = sorted({t.name for unit in units for t in unit.kernel.targets})
        raise typer.BadParameter(f"target must be one of {possible} for {' '.join(names or [])}, got {target}")
    return units, targets


def _need_gpu() -> None:
    """Exit with a message where kernels cannot be launched."""
    try:
        import cupy  # noqa: F401
        import torch

        from flamia.kernels.launch import device_target

        if torch.cuda.is_available():
            device_target()
            return
        problem = "PyTorch finds no CUDA device"
    except (ImportError, ValueError) as error:
        problem = str(error)
    typer.secho(f"the measurement needs a GPU: {problem}; `flamia doctor` says more", fg="red", err=True)
    raise typer.Exit(1)


def _guarded(work: Callable[[], T]) -> T:
    """``work()``, with the errors of a build as a message instead of a traceback."""
    from flamia.kernels.build import BuildError
    from flamia.kernels.nvrtc import CompileError, NvrtcNotFoundError

    try:
        return work()
    except (BuildError, CompileError, NvrtcNotFoundError, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from error


def _console() -> Console:
    """Standard output; in a file or a pipe, wide enough for every table."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)


def _resource_table() -> Table:
    from rich.table import Table

    table = Table("kernel", "target", "entry")
    for column in ("threads", "registers", "spills B", "shared B", "code B", "seconds"):
        table.add_column(column, justify="right")
    return table


def _add_rows(table: Table, artifact: Artifact) -> None:
    from rich.markup import escape

    for e in artifact.entries:
        spills = max(e.spill_bytes, e.stack_bytes)
        numbers = (e.threads, e.registers, spills, e.shared_bytes + e.dynamic_shared_bytes, e.code_bytes)
        seconds = "cached" if artifact.cached else f"{artifact.seconds:.1f}"
        table.add_row(escape(artifact.unit.name), artifact.target.name, e.name, *map(str, numbers), seconds)
