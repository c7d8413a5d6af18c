"""Writing reports to files. A file appears whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from flamia.conformance.report.json_form import from_json, to_json
from flamia.conformance.report.junit import to_junit
from flamia.conformance.results import Report


def write_json(report: Report, path: Path) -> None:
    """Write a report as JSON, arrays included."""
    write_whole(path, json.dumps(to_json(report), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Report:
    """The report that `write_json` wrote.

    :raises ValueError: naming the file, if it holds none.
    """
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold a report of `flamia conform --json`: {error!r}") from error


def write_junit(report: Report, path: Path) -> None:
    """Write a report as JUnit XML."""
    write_whole(path, to_junit(report))


def write_html(report: Report, path: Path) -> None:
    """Write a report as one HTML page that needs no other file and no network."""
    from flamia.conformance.report.page import to_html

    write_whole(path, to_html(report))


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and rename it, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(draft).chmod(0o644)  # mkstemp's 0600 would hide it from a web server or a CI collector
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
