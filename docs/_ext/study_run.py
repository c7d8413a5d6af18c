"""The study, run when the pages are built: its figures and tables go to ``docs/_generated/study``."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from flamia.reference.profiles import IDEAL
from flamia.study import plots, report, run, sample


def run_study(app: Any) -> None:
    """Write the plots and the tables of the default study, unless an earlier build left them.

    Remove ``docs/_generated`` to run it anew.
    """
    folder = Path(app.srcdir) / "_generated" / "study"
    tables = folder / "tables.txt"
    if tables.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    result = run.run_study(
        sample.load(), run.recipes_for(IDEAL), IDEAL, seed=0, progress=lambda description, steps: lambda: None
    )
    plots.draw_all(result, folder)
    console = Console(file=io.StringIO(), record=True, width=100, color_system=None)
    for table in report.all_tables(result):
        console.print(table)
        console.print()
    tables.write_text(console.export_text(), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", run_study)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
