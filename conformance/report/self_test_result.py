"""What a self-test found, in the terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flamia.conformance.report.files import write_whole
from flamia.conformance.results import SUITE_VERSION
from flamia.conformance.self_test.runner import SelfTest


def print_self_test(console: Console, found: SelfTest) -> None:
    """A line per fault with the checks that caught it, then what went wrong, then the sum."""
    table = Table("fault", "", "caught by", title="planted faults", title_justify="left")
    for verdict in found.verdicts:
        word = Text("killed", "green") if verdict.killed else Text("survived", "bold red")
        caught = [str(a.kill) for a in verdict.attempts if a.status == "failed"]
        table.add_row(Text(verdict.fault.name), word, Text("\n".join(caught)))
    console.print(table)
    for verdict in found.survivors:
        console.print(Text(f"survived: {verdict.fault.name}: {verdict.fault.summary}", "bold red"))
        for attempt in verdict.attempts:
            if attempt.status != "failed":
                console.print(Text(f"  {attempt.kill}: {attempt.status} {attempt.message}".rstrip()))
    for attempt in found.controls:
        text = f"must pass without a fault: {attempt.kill}: {attempt.status} {attempt.message}"
        console.print(Text(text, "bold red"))
    killed = len(found.verdicts) - len(found.survivors)
    clean = f"{found.checks - len(found.controls)} of {found.checks} checks pass or are refused without a fault"
    console.print(
        f"{killed} of {len(found.verdicts)} planted faults killed; {clean}; {found.seconds:.0f} s", highlight=False
    )


def self_test_to_json(found: SelfTest) -> dict[str, Any]:
    """Faults by name with their edits and verdicts, and the checks that failed without a fault."""
    return {
        "format": 1,
        "suite_version": SUITE_VERSION,
        "passed": found.passed,
        "seconds": round(found.seconds, 3),
        "faults": {
            v.fault.name: {
                "summary": v.fault.summary,
                "bug_class": v.fault.bug_class,
                "edits": [asdict(edit) for edit in v.fault.edits],
                "killed": v.killed,
                "seconds": round(v.seconds, 3),
                "attempts": [{"check": str(a.kill), "status": a.status, "message": a.message} for a in v.attempts],
            }
            for v in found.verdicts
        },
        "failed_without_a_fault": [{"check": str(a.kill), "message": a.message} for a in found.controls],
    }


def write_self_test(found: SelfTest, path: Path) -> None:
    """Write `self_test_to_json`."""
    write_whole(path, json.dumps(self_test_to_json(found), indent=1) + "\n")
