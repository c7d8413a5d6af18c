"""``flamia conform``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flamia.conformance.results import Report
    from flamia.conformance.targets import Target


def conform(
    target: Annotated[
        str,
        typer.Option(help="A built-in target (see --list), or package.module:attribute, also of the current folder."),
    ] = "reference",
    recipe: Annotated[
        str | None, typer.Option(help="Whose bits or budget it is held to. Default: what the target says.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Machine profile: ideal, blackwell or hopper. Default: what the target says.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where torch targets run: cpu, cuda, cuda:1.")] = "cpu",
    size: Annotated[str, typer.Option(help="quick (under a minute), full or stress.")] = "quick",
    level: Annotated[list[int] | None, typer.Option(help="A level, 0 to 5; repeat for several. Default: all.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="A case or a pattern of cases, such as 'leak/*'; repeat for several.")
    ] = None,
    promise: Annotated[
        list[str] | None,
        typer.Option(help="A promise to hold the target to in place of those it claims, or 'all'; repeat for several."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all cases.")] = 0,
    stop: Annotated[bool, typer.Option("--stop", help="Stop at the first failure.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML.")] = None,
    certify: Annotated[bool, typer.Option("--certify", help="Write a certificate if everything passes.")] = False,
    certificates: Annotated[
        bool, typer.Option("--certificates", help="List the certificates and whether they hold for the target here.")
    ] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Run the suite against faults planted in a copy of the reference.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print targets, promises and cases, and exit.")] = False,
) -> None:
    """Does an implementation of attention leak, drift or break? Exit code 0: no; 1: it does."""
    from rich.console import Console

    console = Console()
    if list_:
        _print_lists(console)
        return
    if self_test:
        raise typer.Exit(_run_self_test(console, json))

    from flamia.conformance.cases import find_larger_sizes
    from flamia.conformance.report import write_html, write_json, write_junit
    from flamia.conformance.report.terminal import LiveTable, print_report
    from flamia.conformance.report.verdict import UNAVAILABLE, exit_code
    from flamia.conformance.runner import run
    from flamia.conformance.targets import PROMISES, TargetUnavailableError, resolve_target

    try:
        held = None if promise is None else list(PROMISES) if "all" in promise else promise
        if certificates:
            raise typer.Exit(_show_certificates(console, target, recipe, profile, device))
        subject = resolve_target(target, recipe=recipe, profile=profile, device=device, promises=held)
        with LiveTable(console, f"{subject.name}: {size}") as table:
            report = run(subject, level, case, size, seed=seed, stop_on_failure=stop, progress=table)
    except TargetUnavailableError as error:
        console.print(str(error), style="bold yellow", markup=False, highlight=False)
        raise typer.Exit(UNAVAILABLE) from None
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    print_report(console, report, failures=console.is_terminal)
    for pattern, larger in find_larger_sizes(case or (), size, report.profile).items():
        text = f"--case {pattern}: no {size} case under profile {report.profile}; these cases are of the {larger} class"
        console.print(f"{text}: --size {larger}", style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    for path, write in ((html, write_html), (json, write_json), (junit, write_junit)):
        if path is not None:
            write(report, path)
            console.print(f"written: {path}", markup=False, highlight=False)
    if certify:
        _certify(console, report, subject)
    raise typer.Exit(exit_code(report))


def _certify(console: Console, report: Report, target: Target) -> None:
    from flamia.conformance.certificates import identify_target, issue_certificate, write_certificate

    try:
        path = write_certificate(issue_certificate(report, identify_target(target)))
    except (ValueError, OSError) as error:
        console.print(f"no certificate: {error}", style="bold yellow", markup=False, highlight=False)
        raise typer.Exit(1) from None
    console.print(f"certificate: {path}", markup=False, highlight=False)


def _show_certificates(console: Console, target: str, recipe: str | None, profile: str | None, device: str) -> int:
    from flamia.conformance.certificates import Identity, identify_target, list_certificates, user_folder
    from flamia.conformance.report.certificate_table import print_certificates
    from flamia.conformance.report.verdict import UNAVAILABLE
    from flamia.conformance.targets import TargetUnavailableError, build_target

    subject, missing = None, ""
    try:
        subject = build_target(target, recipe=recipe, profile=profile, device=device)
        subject.require_device()
    except TargetUnavailableError as error:
        missing = str(error)
    if subject is None:
        current = Identity(target, recipe or "", profile or "", "", "", "", "")
    else:
        current = identify_target(subject, here=not missing)
    valid = print_certificates(console, list_certificates(), current, user_folder(), missing)
    return UNAVAILABLE if missing else int(not valid)


def _run_self_test(console: Console, json: Path | None) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flamia.conformance.report.self_test_result import print_self_test, write_self_test
    from flamia.conformance.self_test import run_self_test

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the suite without a fault", total=None)
        found = run_self_test(
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    print_self_test(console, found)
    if json is not None:
        write_self_test(found, json)
        console.print(f"written: {json}", markup=False, highlight=False)
    return 0 if found.passed else 1


def _print_lists(console: Console) -> None:
    from flamia.conformance.cases import CASES
    from flamia.conformance.targets import BUILT_IN, PROMISES

    for title, rows in (
        ("targets", {name: text for name, (text, _) in BUILT_IN.items()}),
        ("promises", PROMISES),
        ("cases", {f"{c.name} ({c.size})": c.summary for c in CASES.values()}),
    ):
        console.print(title, style="bold")
        for name, text in rows.items():
            console.print(f"  {name}: {text}", markup=False, highlight=False, soft_wrap=True)
