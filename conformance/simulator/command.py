"""``flamia simulate``: run a kernel on the simulator, look at it, and compare the simulator with a chip."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flamia.conformance.simulator.agreement.results import Run, Verdict
    from flamia.conformance.simulator.case import Data, Simulated
    from flamia.conformance.simulator.machine.launch import Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run CUDA kernels on a functional PTX machine in NumPy. Needs NVRTC, but no GPU.",
)

Kernel = Annotated[str, typer.Argument(help="A kernel (see `list`), or package.module:attribute, a Case of your own.")]
CaseName = Annotated[str | None, typer.Option("--case", help="Which of its cases; default: the first.")]


@app.command("list")
def list_kernels() -> None:
    """List the kernels and their cases."""
    from flamia.conformance.simulator.registry import SUBJECTS

    console = _console()
    for name, (summary, cases) in SUBJECTS.items():
        console.print(f"{name}: {summary}", style="bold", markup=False, highlight=False)
        for key, case in cases().items():
            console.print(f"  {key}: {case.summary}, {case.target.name}", markup=False, highlight=False)


@app.command("run")
def run_kernel(
    kernel: Kernel,
    case: CaseName = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs, the order of warps and the delays.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Orderings that PTX does not promise are errors.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Products in float64, not bit for bit.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Print a timeline of the first seed.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write the timeline as a picture.")] = None,
    counts: Annotated[bool, typer.Option("--counts", help="Print instructions per warp role.")] = False,
    cycles: Annotated[bool, typer.Option("--cycles", help="Print the cycle model; it is no measurement.")] = False,
    width: Annotated[int, typer.Option(min=20, help="Columns of the timeline.")] = 100,
) -> None:
    """Run a kernel. Exit code 0: no fault and the expected bytes; 1: otherwise."""
    from flamia.conformance.simulator.ptx import PtxError
    from flamia.conformance.simulator.registry import find_case
    from flamia.conformance.simulator.tools import sweep
    from flamia.kernels.nvrtc import CompileError

    console = _console()
    try:
        subject = find_case(kernel, case)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    reports: list[tuple[Report, Data]] = []
    try:
        result = sweep(
            subject,
            range(seed, seed + seeds),
            inspect=lambda s, report, data: reports.append((report, data)) if not reports else None,
            strict=strict,
            fast_mma=fast,
            trace=timeline or png is not None,
        )
    except (PtxError, CompileError, ImportError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    if reports:
        _show(console, subject, reports[0][0], timeline, png, counts, cycles, width)
    for what, times in result.unpromised.most_common():
        console.print(f"not promised by PTX, {times} times: {what}", style="yellow", markup=False, highlight=False)
    for failed, problem in sorted({**result.faults, **result.mismatches}.items()):
        console.print(f"seed {failed}: {problem}", style="red", markup=False, highlight=False)
    held = not reports or bool(reports[0][1].expected)
    expected = "the expected bytes" if held else "no fault; nothing is expected of the outputs"
    console.print(
        f"{subject.name}: {len(result.passed)} of {seeds} seeds gave {expected}", markup=False, highlight=False
    )
    raise typer.Exit(0 if result.right else 1)


@app.command("agree")
def agree(
    target: Annotated[str, typer.Option(help="h200: run on this machine's GPU; simulator.")] = "simulator",
    out: Annotated[Path | None, typer.Option(help="Write the outputs, as an .npz.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with such a file; default: the record of an H200 that comes with FLAMIA."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel or family; repeat for several; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs.")] = 0,
) -> None:
    """Do the simulator and a chip give the same bits? Exit code 0: they do; 1: they differ."""
    from flamia.conformance.simulator.agreement.kernels import find_kernels
    from flamia.conformance.simulator.agreement.record import Record
    from flamia.conformance.simulator.agreement.results import Run, compare

    if target not in ("h200", "simulator"):
        raise typer.BadParameter(f"target must be h200 or simulator, got {target!r}")
    console = _console()
    try:
        chosen = find_kernels(kernel or [])
        made = _execute(target, chosen, seed)
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    if out is not None:
        made.write(out)
        console.print(f"written: {out}", markup=False, highlight=False)
    if against is not None:
        other = Run.read(against)
        verdicts = [compare(k, made, other) for k in chosen]
    else:
        record = Record.read()
        verdicts = [record.compare(k, made) for k in chosen]
    raise typer.Exit(_print_verdicts(console, verdicts))


def _execute(target: str, chosen: list, seed: int) -> Run:  # type: ignore[type-arg]
    if target == "h200":
        from flamia.conformance.simulator.agreement.device import run_on_device

        return run_on_device(chosen, seed)
    from flamia.conformance.simulator.agreement.simulated import run_on_simulator

    return run_on_simulator(chosen, seed)


def _show(
    console: Console,
    case: Simulated,
    report: Report,
    timeline: bool,
    png: Path | None,
    counts: bool,
    cycles: bool,
    width: int,
) -> None:
    from flamia.conformance.simulator.tools import count_by_role, draw_timeline, estimate_cycles, format_timeline

    if timeline:
        console.print(format_timeline(report, case.roles, width), markup=False, highlight=False, soft_wrap=True)
    if png is not None:
        draw_timeline(report, case.roles, png, title=f"{case.name}, seed {report.seed}")
        console.print(f"written: {png}", markup=False, highlight=False)
    if counts:
        for role, counter in count_by_role(report, case.roles).items():
            listed = "  ".join(f"{opcode} {times}" for opcode, times in counter.most_common())
            console.print(f"{role}: {counter.total()} warp instructions: {listed}", markup=False, highlight=False)
    if cycles:
        from rich.table import Table

        rows = estimate_cycles(report, case.roles)
        table = Table(
            "role", *next(iter(rows.values())), title="clocks per unit: a model at peak rates, no measurement"
        )
        for role, row in rows.items():
            table.add_row(role, *(f"{x:.0f}" for x in row.values()))
        console.print(table)


def _print_verdicts(console: Console, verdicts: list[Verdict]) -> int:
    from rich.table import Table

    table = Table("family", "kernels", "values compared", "differ")
    for family in dict.fromkeys(v.family for v in verdicts):
        part = [v for v in verdicts if v.family == family]
        numbers = (len(part), sum(v.values for v in part), sum(v.differing for v in part))
        table.add_row(family, *(f"{n:,}" for n in numbers))
    console.print(table)
    bad = [v for v in verdicts if v.exact and not v.agrees]
    for v in bad:
        console.print(f"{v.kernel}: {v.first}", style="red", markup=False, highlight=False)
    for v in verdicts:
        if not v.exact and not v.agrees:
            console.print(f"{v.kernel} (a stand-in, not held to bits): {v.first}", markup=False, highlight=False)
    agreeing = sum(v.agrees for v in verdicts)
    console.print(f"{agreeing} of {len(verdicts)} kernels agree in every bit", markup=False, highlight=False)
    return 1 if bad else 0


def _console() -> Console:
    """Standard output; in a file or a pipe, wide enough for every table."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)
