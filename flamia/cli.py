"""The ``flamia`` command.

A subcommand is one line of `COMMANDS`. Its module is imported only when the subcommand or its help is asked for,
and keeps its own heavy imports (all but NumPy) inside the function that runs.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flamia import __version__

COMMANDS: dict[str, str] = {
    "study": "flamia.study.command:study",
    "conform": "flamia.conformance.command:conform",
    "simulate": "flamia.conformance.simulator.command:app",
    "bench": "flamia.bench.command:app",
    "kernels": "flamia.kernels.command:app",
    "doctor": "flamia.doctor:doctor",
}
"""Name -> ``module:attribute``: a function with Typer's annotations, or a `typer.Typer` of its own."""


class LazyGroup(TyperGroup):
    """A command group that looks its subcommands up in `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module_name, attribute = COMMANDS[cmd_name].split(":")
        found = getattr(import_module(module_name), attribute)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(found)
            found = single
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flamia {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Training attention on block-scaled FP8 and FP4: its reference, its study and its conformance."""


def main() -> None:
    """Run the command line; the ``flamia`` console script."""
    app(prog_name="flamia")
