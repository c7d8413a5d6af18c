"""Certificates: what is certified, when a certificate holds, and how the files behave."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flamia.conformance import CASES, LEVELS, SUITE_VERSION, CaseResult, Report
from flamia.conformance import certificates as c
from flamia.conformance.report.certificate_table import print_certificates
from flamia.conformance.targets import CallableTarget, ReferenceTarget

IDENTITY = c.Identity("hopper", "mxfp8", "hopper", "ab" * 32, "NVIDIA H200", "9.0", "NVRTC 13.0.88")


def complete_report(levels=(1, 2, 3, 4, 5), status="passed", size="quick", **changes) -> Report:
    """A report of every case of a size: all checks have one status."""
    results = tuple(
        CaseResult(level, case.name, check, status)
        for case in CASES.values()
        if case.size == "quick" or size != "quick"
        for level in levels
        if level in case.levels
        for check in (case.promises if level == 4 else ("check",))
    )
    made = Report(
        "hopper", {"device": "NVIDIA H200"}, "mxfp8", "ideal", size, results, "2026-01-02T03:04:05+00:00", 1.0
    )
    return dataclasses.replace(made, **changes)


def issued(**changes) -> c.Certificate:
    return dataclasses.replace(c.issue_certificate(complete_report(), IDENTITY), **changes)


# ---- issuing -----------------------------------------------------------------------------------------------


def test_a_complete_report_is_certified_with_the_levels_that_passed():
    made = c.issue_certificate(complete_report(levels=(1, 4)), IDENTITY)
    assert made.levels == (1, 4) and made.suite_version == SUITE_VERSION and made.size == "quick"
    assert made.checks == complete_report(levels=(1, 4)).count("passed")
    assert made.date == "2026-01-02T03:04:05+00:00" and made.environment == {"device": "NVIDIA H200"}


@pytest.mark.parametrize("status", ["failed", "error"])
def test_one_failure_is_enough_for_no_certificate(status):
    report = complete_report()
    wrong = dataclasses.replace(report.results[7], status=status)
    report = dataclasses.replace(report, results=(*report.results, wrong))
    with pytest.raises(
        ValueError, match=f"must be without failures to certify hopper, got 1, first: level .*{wrong.case}"
    ):
        c.issue_certificate(report, IDENTITY)


def test_what_never_applied_is_no_level_and_is_named():
    report = complete_report()
    results = tuple(
        dataclasses.replace(r, status="not_applicable") if r.level == 3 or r.check == "graph" else r
        for r in report.results
    )
    made = c.issue_certificate(dataclasses.replace(report, results=results), IDENTITY)
    assert made.levels == (1, 2, 4, 5) and made.not_applicable == ("graph",)
    with pytest.raises(ValueError, match="must have checks that passed"):
        c.issue_certificate(complete_report(status="not_applicable"), IDENTITY)


def test_cases_that_may_be_refused_and_are_stand_in_the_way_of_no_certificate():
    report = complete_report()
    results = tuple(
        dataclasses.replace(r, status="not_applicable") if CASES[r.case].may_refuse else r for r in report.results
    )
    made = c.issue_certificate(dataclasses.replace(report, results=results), IDENTITY)
    assert made.levels == (1, 2, 3, 4, 5) and made.not_applicable == ()
    assert made.checks == sum(not CASES[r.case].may_refuse for r in results) < len(results)


def test_a_run_of_some_cases_is_not_certified():
    report = complete_report()
    some = tuple(r for r in report.results if r.level != 2 or r.case != "values/sink")
    with pytest.raises(ValueError, match="every quick case to certify hopper, got none of level 2 for values/sink"):
        c.issue_certificate(dataclasses.replace(report, results=some), IDENTITY)
    with pytest.raises(ValueError, match="every full case"):
        c.issue_certificate(dataclasses.replace(report, size="full"), IDENTITY)


# ---- validity ----------------------------------------------------------------------------------------------


def test_a_certificate_holds_for_what_it_names():
    assert issued().invalid_because(IDENTITY, (1, 2, 3, 4, 5)) == []


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("source_hash", "cd" * 32, "the source has changed: certified was abababababab, this is cdcdcdcdcdcd"),
        ("chip", "NVIDIA H100", "it was issued on NVIDIA H200 (9.0), this is NVIDIA H100 (9.0)"),
        ("compute_capability", "10.0", "it was issued on NVIDIA H200 (9.0), this is NVIDIA H200 (10.0)"),
        ("compiler", "NVRTC 13.1", "it was compiled by NVRTC 13.0.88, this is NVRTC 13.1"),
        ("kernel", "blackwell", "it is for hopper (mxfp8, hopper), this is blackwell (mxfp8, hopper)"),
        ("recipe", "nvfp4_fp8", "it is for hopper (mxfp8, hopper), this is hopper (nvfp4_fp8, hopper)"),
    ],
)
def test_anything_else_is_not_valid_and_says_why(field, value, reason):
    assert issued().invalid_because(dataclasses.replace(IDENTITY, **{field: value})) == [reason]


def test_an_older_suite_is_not_valid_and_a_newer_one_is(monkeypatch):
    monkeypatch.setattr(c, "SUITE_VERSION", "1.10")
    assert issued(suite_version="1.9").invalid_because(IDENTITY) == [
        "it passed suite 1.9, this is suite 1.10, which checks more"
    ]
    assert issued(suite_version="1.11").invalid_because(IDENTITY) == []


def test_missing_levels_and_smaller_cases_are_not_valid():
    assert issued().invalid_because(IDENTITY, LEVELS) == ["it does not have level 0 (probes)"]
    assert issued().invalid_because(IDENTITY, size="full") == ["it passed the quick cases, not the full ones"]
    assert issued(size="stress").invalid_because(IDENTITY, size="full") == []


# ---- identities --------------------------------------------------------------------------------------------


def test_a_callable_is_identified_by_the_file_that_defines_it(tmp_path, monkeypatch):
    file = tmp_path / "someones_attention.py"
    file.write_text("def attend(q, k, v, cu, *, causal, softmax_scale): return q\nattend.tensors = 'numpy'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import someones_attention

    target = CallableTarget(someones_attention.attend)
    first = c.identify_target(target)
    assert (first.kernel, first.recipe, first.profile) == ("attend", "bf16", "ideal") and "numpy" in first.compiler
    file.write_text(file.read_text() + "# one more line\n")
    assert c.identify_target(target).source_hash != first.source_hash
    with pytest.raises(ValueError, match="target must have a source file to be certified"):
        c.defining_sources(len)


def test_the_reference_is_identified_by_all_its_modules():
    sources = c.defining_sources(ReferenceTarget())
    assert {"forward.py", "backward.py", "formats.py", "tensorcore.py"} <= set(sources)
    assert c.hash_sources(sources) == c.identify_target(ReferenceTarget()).source_hash
    assert c.hash_sources({"a": "1", "b": "2"}) == c.hash_sources({"b": "2", "a": "1"})
    assert c.hash_sources({"a": "12", "b": ""}) != c.hash_sources({"a": "1", "b": "2"})


def test_a_target_may_name_its_sources_and_compiler():
    class Kernel(ReferenceTarget):
        def sources(self):
            return {"kernel.cu": "__global__ void f();"}

        def environment(self):
            return {"device": "NVIDIA H200", "compute capability": "9.0", "compiler": "NVRTC 13.0.88"}

    found = c.identify_target(Kernel())
    assert found.source_hash == c.hash_sources({"kernel.cu": "__global__ void f();"})
    assert (found.device, found.compiler) == ("NVIDIA H200 (9.0)", "NVRTC 13.0.88")


def test_without_its_device_chip_and_compiler_are_unknown():
    here, elsewhere = c.identify_target(ReferenceTarget()), c.identify_target(ReferenceTarget(), here=False)
    assert here.unknown == () and not here.compute_capability
    assert elsewhere.unknown == ("chip", "compute_capability", "compiler")
    assert elsewhere.source_hash == here.source_hash


def listed(current: c.Identity, missing: str = "", **certificates: c.Certificate) -> tuple[bool, list[str]]:
    """Verdict and lines of the listing, which a narrow pipe must not break."""
    out = io.StringIO()
    found = {Path(f"/a/long/path/that/is/not/to/be/broken/{name}.json"): x for name, x in certificates.items()}
    valid = print_certificates(Console(file=out, width=40), found, current, Path("/mine"), missing)
    return valid, out.getvalue().splitlines()


def test_a_listing_without_a_valid_one_names_the_other_targets():
    other = issued(identity=dataclasses.replace(IDENTITY, kernel="reference", chip="a CPU"))
    valid, lines = listed(IDENTITY, other=other)
    assert not valid and "`flamia conform --target hopper --certify` writes one into /mine" in lines[-2]
    assert lines[-1] == "whether another target's hold: --target reference"


def test_the_listing_has_one_line_for_what_is_another_targets():
    other = issued(identity=dataclasses.replace(IDENTITY, kernel="reference", chip="a CPU"))
    recipe = issued(identity=dataclasses.replace(IDENTITY, recipe="bf16"))
    valid, lines = listed(IDENTITY, mine=issued(), other=other, recipe=recipe)
    assert valid and len(lines) == 4
    assert lines[1].startswith(
        "✓ hopper (mxfp8, hopper) on NVIDIA H200 (9.0), NVRTC 13.0.88, source abababababab: levels"
    )
    assert lines[2].startswith("– for another target: reference (mxfp8, hopper) on a CPU (9.0)")
    assert lines[3].startswith("– for another recipe or profile: hopper (bf16, hopper)")
    assert all(line.endswith(".json") for line in lines[1:])


def test_the_listing_without_the_device_checks_the_source():
    away = dataclasses.replace(IDENTITY, chip="", compute_capability="", compiler="")
    changed = issued(identity=dataclasses.replace(IDENTITY, source_hash="cd" * 32))
    valid, lines = listed(away, "there is no GPU", same=issued(), changed=changed)
    assert not valid and lines[0] == f"held against hopper (mxfp8, hopper), source abababababab, suite {SUITE_VERSION}"
    assert lines[1] == "cannot be checked: chip, compute capability, compiler, because there is no GPU"
    assert lines[2].startswith("? hopper") and lines[3] == "    what can be checked here agrees"
    assert lines[4].startswith("✗ hopper") and "not valid: the source has changed" in lines[5] and len(lines) == 6


# ---- files -------------------------------------------------------------------------------------------------


def test_files_give_the_certificate_back(tmp_path):
    path = c.write_certificate(issued(not_applicable=("graph",)), tmp_path / "new" / "folder")
    assert c.read_certificate(path) == issued(not_applicable=("graph",))
    assert path.name.startswith("hopper--nvidia-h200-9.0--") and [f.name for f in path.parent.iterdir()] == [path.name]


def test_a_newer_certificate_of_the_same_identity_replaces_the_older_one(tmp_path):
    c.write_certificate(issued(), tmp_path)
    c.write_certificate(issued(date="2026-05-05T00:00:00+00:00"), tmp_path)
    c.write_certificate(issued(identity=dataclasses.replace(IDENTITY, chip="NVIDIA H100")), tmp_path)
    dates = sorted(x.date for x in c.list_certificates([tmp_path]).values())
    assert dates == ["2026-01-02T03:04:05+00:00", "2026-05-05T00:00:00+00:00"]


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    path = c.write_certificate(issued(), tmp_path)
    before = path.read_bytes()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        c.write_certificate(issued(date="2026-05-05T00:00:00+00:00"), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [path.name] and path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"certificates cannot be written to .*file.*set FLAMIA_CERTIFICATE_DIR"):
        c.write_certificate(issued(), tmp_path / "file")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"levels": [9]},
        {"size": "tiny"},
        {"date": "yesterday"},
        {"date": "2026-01-01T00:00:00"},
        {"suite_version": "new"},
        {"identity": {"kernel": "hopper"}},
        {"surprise": 1},
        {"environment": {"device": 1}},
    ],
)
def test_a_file_of_another_form_is_refused_and_listed_with_the_reason(tmp_path, change):
    path = c.write_certificate(issued(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="must hold a certificate of format 1"):
        c.read_certificate(path)
    assert str(path) in str(c.list_certificates([tmp_path])[path])


def test_the_user_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAMIA_CERTIFICATE_DIR", str(tmp_path / "mine"))
    assert c.user_folder() == tmp_path / "mine" and not c.user_folder().exists()
    monkeypatch.delenv("FLAMIA_CERTIFICATE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert c.user_folder() == tmp_path / "data" / "flamia" / "certificates"


def test_find_valid_takes_the_best_and_says_why_there_is_none(tmp_path):
    with pytest.raises(LookupError, match=r"hopper \(mxfp8, hopper\) has no certificate"):
        c.find_valid(IDENTITY, folders=[tmp_path])
    c.write_certificate(issued(identity=dataclasses.replace(IDENTITY, source_hash="0" * 64)), tmp_path)
    with pytest.raises(
        LookupError, match=r"no valid certificate on NVIDIA H200 \(9.0\):\n- of 2026-.*source has changed"
    ):
        c.find_valid(IDENTITY, folders=[tmp_path])
    c.write_certificate(issued(levels=(1, 2, 3, 4), date="2026-12-01T00:00:00+00:00"), tmp_path)
    other = tmp_path / "other"
    c.write_certificate(issued(), other)
    assert c.find_valid(IDENTITY, folders=[tmp_path, other]) == issued()
    with pytest.raises(LookupError, match="does not have level 5"):
        c.find_valid(IDENTITY, [5], folders=[tmp_path])
