"""Reports: every form says the same, survives odd contents, and the command's exit code is its verdict."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
from ml_dtypes import bfloat16
from rich.console import Console

from flamia.conformance import CaseResult, Report, run
from flamia.conformance.report import EXIT_CODES, exit_code, read_json, verdict, write_html, write_json, write_junit
from flamia.conformance.report.figures import budget_chart, leak_map
from flamia.conformance.report.page import to_html
from flamia.conformance.report.terminal import LiveTable, print_report

ROOT = Path(__file__).resolve().parents[2]
NASTY = 'out[1, 2]: got <nan> & "0" \x00\x1b[31m, expected 1\nsecond line'
MAP = np.array([[0, 2, 64, np.nan], [0, 0, 0, 0]])

RESULTS = (
    CaseResult(0, "probes", "probe", "not_applicable", "no CUDA device"),
    CaseResult(2, "values/ones", "forward", "passed", numbers={"stages": 3.0}, seconds=0.25),
    CaseResult(
        4,
        "leak/tiles",
        "leak",
        "failed",
        NASTY,
        (1, 2),
        {"smallest_distance": 1.0, "far": np.inf},
        0.5,
        {"leak_map": MAP},
    ),
    CaseResult(4, "values/ones", "ones", "passed"),
    CaseResult(5, "values/ones", "accuracy", "error", "RuntimeError: no", None, {"out_worst_over_budget": 41.5}),
)


def make(results: tuple[CaseResult, ...] = RESULTS) -> Report:
    return Report(
        "my & target",
        {"numpy": "2.0", "device": "<GPU>"},
        "mxfp8",
        "ideal",
        "quick",
        results,
        "2026-01-02T03:04:05+00:00",
        2.5,
    )


# ---- verdict -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "word", "code"),
    [
        (["passed", "not_applicable"], "passed", 0),
        (["passed", "failed"], "failed", 1),
        (["passed", "error"], "failed", 1),
        (["not_applicable"], "nothing checked", 4),
        ([], "nothing checked", 4),
    ],
)
def test_the_verdict_and_the_exit_code(statuses, word, code):
    report = make(tuple(CaseResult(4, "values/ones", f"c{i}", s) for i, s in enumerate(statuses)))
    assert verdict(report) == word and exit_code(report) == code and code in EXIT_CODES


# ---- JSON --------------------------------------------------------------------------------------------------


def test_json_gives_the_report_back(tmp_path):
    write_json(make(), tmp_path / "folder" / "report.json")
    found = read_json(tmp_path / "folder" / "report.json")
    assert found == make()
    np.testing.assert_array_equal(found.results[2].arrays["leak_map"], MAP)
    assert [f.name for f in (tmp_path / "folder").iterdir()] == ["report.json"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, ">f8", bool])
def test_json_keeps_arrays_of_any_type(tmp_path, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    write_json(make((dataclasses.replace(RESULTS[2], arrays={"x": x, "empty": x[:0]}),)), tmp_path / "r.json")
    arrays = read_json(tmp_path / "r.json").results[0].arrays
    np.testing.assert_array_equal(arrays["x"], x)
    assert arrays["x"].dtype == np.dtype(dtype).newbyteorder("=") and arrays["empty"].shape == (0, 2)


def test_json_widens_bfloat16(tmp_path):
    write_json(make((dataclasses.replace(RESULTS[2], arrays={"x": np.ones(3, bfloat16)}),)), tmp_path / "r.json")
    assert read_json(tmp_path / "r.json").results[0].arrays["x"].dtype == np.float32


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]", '{"format": 1, "target": "x"}'])
def test_another_file_is_no_report(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json must hold a report of `flamia conform --json`"):
        read_json(tmp_path / "r.json")


# ---- JUnit -------------------------------------------------------------------------------------------------


def test_junit_counts_and_places_every_result(tmp_path):
    write_junit(make(), tmp_path / "r.xml")
    root = Xml.parse(tmp_path / "r.xml").getroot()
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "1", "errors": "1", "skipped": "1"
    }  # fmt: skip
    suites = {s.get("name"): s for s in root}
    assert list(suites) == ["level 0: probes", "level 2: forward bits", "level 4: promises", "level 5: accuracy"]
    failure = suites["level 4: promises"].find("testcase/failure")
    assert failure.get("message").startswith('out[1, 2]: got <nan> & "0" ')
    assert "second line" in failure.text and "coordinate: [1, 2]" in failure.text and "\x00" not in failure.text
    assert suites["level 0: probes"].find("testcase/skipped").get("message") == "not applicable: no CUDA device"
    assert suites["level 5: accuracy"].find("testcase/error").get("message") == "RuntimeError: no"
    assert suites["level 2: forward bits"].find("testcase").get("name") == "values/ones:forward"


# ---- the page ----------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Checks that tags are balanced, and collects text and addresses."""

    VOID = frozenset(("meta", "br", "line", "rect", "image", "circle"))

    def __init__(self):
        super().__init__()
        self.open, self.text, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [v for k, v in attrs if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.addresses += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html: str) -> tuple[str, list[str]]:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return " ".join(" ".join(reader.text).split()), reader.addresses


def test_the_page_shows_everything_and_needs_nothing(tmp_path):
    write_html(make(), tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    text, addresses = read(html)
    parts = ("my & target", "failed", "<GPU>", '[1, 2]: got <nan> & "0"', "second line", "coordinate [1, 2]")
    for part in (*parts, "smallest distance 1", "no CUDA device", "RuntimeError: no", "moved by a token 1 after it"):
        assert part in text
    assert addresses and all(a.startswith("data:image/png;base64,") for a in addresses)
    assert "http" not in html.replace("http-equiv", "") and "<script" not in html and "@import" not in html


def test_the_page_of_a_pass_has_no_failures():
    text, _ = read(to_html(make(RESULTS[1:2])))
    assert "What failed" not in text and "Leak maps" not in text and "my & target passed" in text
    text, _ = read(to_html(make(())))
    assert "nothing checked" in text


def test_a_leak_map_has_a_pixel_per_document_and_position():
    import base64
    import struct
    import zlib

    svg = leak_map(RESULTS[2])
    data = base64.b64decode(re.search(r"base64,([^\"]+)", svg).group(1))
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (4, 2)
    body = data[data.index(b"IDAT") + 4 :]
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(2, 1 + 3 * 4)[:, 1:].reshape(2, 4, 3)
    unmoved, few, many, nothing = rows[0].tolist()
    assert (rows[1] == unmoved).all() and nothing == [0xEE] * 3
    assert many == [0x9E, 0x0B, 0x2A] and few[0] > many[0] and few != unmoved
    assert leak_map(RESULTS[1]) == ""


def test_the_budget_chart_marks_each_output_left_or_right_of_one():
    good = CaseResult(
        5, "values/ones", "accuracy", "passed", numbers={"out_rms_over_budget": 0.5, "dq_worst_over_budget": 0}
    )
    svg = budget_chart([good, RESULTS[4], dataclasses.replace(good, numbers={"lse_worst_over_budget": np.inf})])
    one = float(re.search(r'class="over" x="([\d.]+)"', svg).group(1))
    marks = {
        tip: float(x)
        for x, tip in re.findall(r'<circle cx="([\d.]+)" cy="[\d.]+" r="3" fill="[^"]+"><title>([^<]+)</title>', svg)
    }
    assert marks["values/ones, out: 0.5 of the budget"] < one < marks["values/ones, out: 41.5 of the budget"]
    assert marks["values/ones, dq: 0 of the budget"] < one < marks["values/ones, lse: inf of the budget"]
    assert budget_chart([RESULTS[1]]) == ""


# ---- the terminal ------------------------------------------------------------------------------------------


def test_the_terminal_prints_failures_as_they_happen_and_the_sum():
    out = io.StringIO()
    console = Console(file=out, width=100)
    with LiveTable(console, "my target") as table:
        for i, r in enumerate(RESULTS):
            table(r, i + 1, len(RESULTS))
    early = out.getvalue()
    assert "✗ level 4 leak/tiles:leak" in early and "second line" in early and "! level 5 values/ones:accuracy" in early
    print_report(console, make(), failures=False)
    late = out.getvalue()[len(early) :]
    assert "failed: 2 passed, 1 failed, 1 raised, 1 not applicable" in late
    assert "not applicable, 1 check: no CUDA device" in late and "leak/tiles" not in late


def test_the_live_table_counts_levels():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with LiveTable(console, "my target") as table:
        for i, r in enumerate(RESULTS):
            table(r, i + 1, len(RESULTS))
    assert "5/5" in out.getvalue() and "leak/tiles:leak" in out.getvalue()


# ---- a real run --------------------------------------------------------------------------------------------


def test_a_leaking_recipe_draws_the_published_leak():
    report = run("reference", [4], ["leak/transformer_engine_3248"], recipe="cudnn_mxfp8")
    (found,) = report.results
    moved = np.nan_to_num(found.arrays["leak_map"][0, :32]) > 0
    assert found.status == "failed" and moved[:16].all() and not moved[16:].any()
    assert read(to_html(report))[0].count("leak/transformer_engine_3248") >= 2


def conform(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flamia", "conform", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env=environment(folder),
    )  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    import os

    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLAMIA_CERTIFICATE_DIR": str(folder / "certificates"),
        "COLUMNS": "200",
    }


def test_the_command_writes_every_form_and_exits_with_the_verdict(tmp_path):
    files = ("--json", "r.json", "--junit", "r.xml", "--html", "r.html")
    done = conform("--recipe", "cudnn_mxfp8", "--case", "leak/transformer*", *files, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "v[16] = 1 from token 16 on moved out[0, 0, 0]" in done.stdout
    assert read_json(tmp_path / "r.json").count("failed") == 1
    assert Xml.parse(tmp_path / "r.xml").getroot().get("failures") == "1"
    assert "leak/transformer_engine_3248" in read((tmp_path / "r.html").read_text(encoding="utf-8"))[0]
    refused = conform("--recipe", "cudnn_mxfp8", "--case", "values/ones", "--level", "5", "--certify", folder=tmp_path)
    assert refused.returncode == 1 and "no certificate: report must have every quick case" in refused.stdout
    listed = conform("--certificates", folder=tmp_path)
    assert listed.returncode == 1
    assert (
        "no valid certificate for reference; `flamia conform --target reference --certify` writes one" in listed.stdout
    )
    assert listed.stdout.count("– for another target: hopper") == 2 and "not valid" not in listed.stdout


def test_a_pattern_of_larger_cases_is_told_their_size(tmp_path):
    done = conform("--case", "heads/dim_96", "--level", "5", folder=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "nothing checked" in done.stdout and "these cases are of the full class: --size full" in done.stdout
    assert "--size" not in conform("--case", "values/ones", "--level", "5", folder=tmp_path).stdout


def test_certificates_are_listed_without_their_device(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = conform("--certificates", "--target", "hopper", folder=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "because the Hopper kernels cannot run here: PyTorch finds no CUDA device" in done.stdout
    assert "? hopper (mxfp8, hopper) on NVIDIA H200 (9.0), NVRTC 13.0, source " in done.stdout
    missing = conform("--certificates", "--target", "flash-attn", folder=tmp_path)
    assert missing.returncode == 3 and "because flash-attn is not installed" in missing.stdout
    assert missing.stdout.count("– for another target: hopper") == 2
