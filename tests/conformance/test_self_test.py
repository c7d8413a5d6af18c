"""The planted faults: each can be planted, touches nothing but its copy, and is found by every check meant for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import flamia.reference
from flamia.conformance.cases import BUG_CLASSES, CASES
from flamia.conformance.report.self_test_result import self_test_to_json
from flamia.conformance.self_test import FAULTS, Fault, run_self_test, runner, try_fault
from flamia.conformance.self_test.copies import PACKAGE, Edit, EditError, planted
from flamia.conformance.self_test.fault import Kill, bits
from flamia.conformance.targets import PROMISES, ReferenceTarget

EQUIVALENT = Fault(
    "equivalent",
    "Another way to write the same.",
    kills=(bits(2, "values/ones"),),
    edits=(Edit("forward", "natural = np.log(2.0) * (", "natural = np.log(1.0 + 1.0) * ("),),
)


def test_every_fault_is_killed_by_every_check_meant_for_it():
    found = run_self_test()
    assert [str(a.kill) for a in found.controls] == []
    survived = {
        v.fault.name: [(str(a.kill), a.status, a.message) for a in v.attempts if a.status != "failed"]
        for v in found.survivors
    }
    assert survived == {} and found.passed
    assert len(found.verdicts) == len(FAULTS) >= 80


def test_faults_cover_every_bug_class_and_every_promise():
    assert {f.bug_class for f in FAULTS.values()} - {None} == set(BUG_CLASSES)
    kills = [k for f in FAULTS.values() for k in f.kills]
    assert {k.check for k in kills if k.level == 4} == set(PROMISES)
    assert {k.level for k in kills} == {1, 2, 3, 4, 5}
    for kill in kills:
        case = CASES[kill.case]
        assert kill.level in case.levels and case.size == "quick", str(kill)
        assert kill.level != 4 or kill.check in case.promises, str(kill)


def test_a_fault_that_changes_nothing_survives():
    verdict = try_fault(EQUIVALENT)
    assert not verdict.killed and [a.status for a in verdict.attempts] == ["passed"]


def test_a_crash_is_no_kill():
    crash = dataclasses.replace(
        EQUIVALENT, edits=(Edit("forward", "natural = np.log(2.0) * (", "natural = 1 / 0 * ("),)
    )
    verdict = try_fault(crash)
    assert not verdict.killed and verdict.attempts[0].status == "error"
    assert "ZeroDivisionError" in verdict.attempts[0].message


def test_a_fault_that_no_longer_fits_the_source_survives(monkeypatch):
    gone = dataclasses.replace(EQUIVALENT, edits=(Edit("forward", "a passage that is not there", ""),))
    monkeypatch.setitem(FAULTS, "equivalent", gone)
    found = run_self_test(["equivalent"])
    assert not found.passed and [v.fault.name for v in found.survivors] == ["equivalent"]
    assert "must contain exactly once, but contains 0 times" in found.survivors[0].attempts[0].message
    written = self_test_to_json(found)
    assert not written["passed"] and not written["faults"]["equivalent"]["killed"]


@pytest.mark.parametrize(
    ("kill", "status"),
    [
        (Kill(4, "leak/transformer_engine_3248", "leak"), "failed"),
        (Kill(4, "arguments/graph", "graph"), "not_applicable"),
    ],
)
def test_a_check_that_does_not_pass_without_a_fault_fails_the_self_test(monkeypatch, kill, status):
    broken = ReferenceTarget("cudnn_mxfp8")
    monkeypatch.setattr(runner, "_target", lambda kill, package: broken)
    monkeypatch.setitem(FAULTS, "equivalent", dataclasses.replace(EQUIVALENT, kills=(kill,)))
    found = run_self_test(["equivalent"])
    assert not found.passed and [(a.kill, a.status) for a in found.controls] == [(kill, status)]


def test_unknown_faults_are_named():
    with pytest.raises(ValueError, match=r"fault must be one of .*additive-mask.*, got 'nothing'"):
        run_self_test(["nothing"])


# ---- copies ------------------------------------------------------------------------------------------------


def test_a_copy_is_apart_from_the_original_and_gone_afterwards():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 1, 64)).astype(np.float32)
    arguments = (x, x, x, np.array([0, 40]))
    before = flamia.reference.attention_forward(*arguments)
    edit = Edit("forward", "natural = np.log(2.0) * (", "natural = (")
    with planted([edit]) as package:
        copy = __import__(f"{package}.forward", fromlist=["attention_forward"])
        found = copy.attention_forward(*arguments)
        during = flamia.reference.attention_forward(*arguments)
        assert copy.Forward is not flamia.reference.Forward
        with pytest.raises(RuntimeError, match="must not be nested"), planted([]):
            pass
    np.testing.assert_allclose(found.lse * np.log(2.0), before.lse, rtol=1e-6)
    assert np.array_equal(during.lse, before.lse) and np.array_equal(found.out, before.out)
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        __import__(PACKAGE)


def test_edits_match_any_white_space_and_keep_the_indentation():
    text = "def f(x):\n    if x:\n        return g(\n            x, 1\n        )\n"
    assert Edit("m", "return g( x, 1 )", "y = x\nreturn y").apply(text) == (
        "def f(x):\n    if x:\n        y = x\n        return y\n"
    )
    with pytest.raises(EditError, match=r"flamia.reference.m must contain exactly once, but contains 2 times: 'x'"):
        Edit("m", "x", "y").apply("x x")


def test_faults_without_edits_or_kills_are_refused():
    with pytest.raises(ValueError, match="fault 'empty' must have edits or a wrapper, and checks that kill it"):
        Fault("empty", "", kills=())
    with pytest.raises(ValueError, match="bug_class must be one of"):
        dataclasses.replace(EQUIVALENT, bug_class="unheard-of")
