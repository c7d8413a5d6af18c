"""The tutorial of docs/conformance.md, followed word by word."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
PLACE = "# one line will come here"


def block(caption: str) -> str:
    """The code block of that caption."""
    found = re.findall(rf"```\{{code-block\}} \w+\n:caption: {re.escape(caption)}\n\n(.*?)\n```", PAGE, re.DOTALL)
    assert len(found) == 1, f"docs/conformance.md must have one code block with the caption {caption!r}"
    return found[0]


def follow(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Write the file, and type the command of the page."""
    (folder / "my_attention.py").write_text(source, encoding="utf-8")
    prompt, program, *arguments = shlex.split(block("the honest version"))
    assert (prompt, program) == ("$", "flamia")
    return subprocess.run(
        [sys.executable, "-m", "flamia", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_honest_attention_passes(tmp_path):
    done = follow(tmp_path, block("my_attention.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed, 0 failed, 0 raised" in words(done.stdout)


def test_the_leak_is_caught_as_the_page_shows(tmp_path):
    honest = block("my_attention.py")
    assert honest.count(PLACE) == 1 and "\n" not in block("the leak")
    done = follow(tmp_path, honest.replace(PLACE, block("the leak")))
    assert done.returncode == 1, done.stdout + done.stderr
    said = words(done.stdout)
    shown = block("what it says").split("✗")[1:]
    assert len(shown) == 2
    for failure in shown:
        for passage in failure.split("…"):  # counts of differing numbers depend on the machine's BLAS
            assert words(passage) in said


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("promise", ["validation", "containment"])
def test_the_page_is_right_about_what_the_honest_attention_does_not_promise(promise):
    from flamia.conformance import run

    scope: dict = {}
    exec(block("my_attention.py"), scope)
    case = {"validation": "arguments/malformed", "containment": "extremes/nan_in_v"}[promise]
    report = run(scope["attend"], [4], [case], promises=[promise])
    assert [r.check for r in report.failures()] == [promise]


def test_the_python_example_runs():
    example = re.search(r"From Python:\n\n```python\n(.*?)\n```", PAGE, re.DOTALL)
    assert example is not None
    scope: dict = {}
    exec(block("my_attention.py"), scope)
    code = example.group(1).replace('["leak/*", "values/*"]', '["leak/transformer_engine_3248", "values/ones"]')
    assert code != example.group(1)
    exec(code, scope)
    assert scope["report"].passed and scope["report"].target == "attend"
