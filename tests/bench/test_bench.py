"""The benchmarks run, on tiny sizes; how fast they are is not tested."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from flamia.bench import command
from flamia.bench.attention import AttentionTimes, Shape, measure_attention
from flamia.bench.bit_accurate import measure_bit_accurate
from flamia.bench.memory import measure_memory
from flamia.bench.quantization import QuantizationSpeed, measure_quantization
from flamia.cli import app

TINY = Shape(130, 2, 1, 32)


def test_without_torch_the_reference_is_timed_and_the_rest_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    steps = []
    found = measure_attention(TINY, repeats=2, advance=lambda: steps.append(1))
    assert set(found.seconds) == {"reference"} and found.seconds["reference"] > 0 and len(steps) == 6
    assert found.cpu_seconds["reference"] > 0
    assert set(found.missing) == {"math_sdpa", "fake_quant"} and "pip install torch" in found.missing["fake_quant"]
    assert found.over_sdpa is None and found.under_fake_quant is None
    shown = command.lines({"attention": found})
    assert any("pip install torch" in measured for _, measured, _, _ in shown)


def test_ratios_are_held_against_the_goals() -> None:
    seconds = {"reference": 2.0, "math_sdpa": 1.0, "fake_quant": 5.0}
    found = AttentionTimes(TINY, 2, True, seconds, seconds, difference={"out": 1e-5})
    assert found.over_sdpa == 2 and found.under_fake_quant == 2.5
    met = {what.strip(): met for what, _, _, met in command.lines({"attention": found}) if met is not None}
    assert met == {
        "reference / SDPA": True,
        "fake-quant / reference": False,
        "fake-quant: relative difference": True,
    }


def test_peak_memory_is_of_a_process_of_its_own() -> None:
    held = bytearray(400_000_000)  # written, so resident here; a child that inherited the peak would show it
    found = measure_memory(tokens=200, head_dim=64)
    assert 10e6 < found.imported <= found.peak < len(held) and found.met and found.seconds > 0
    with pytest.raises(RuntimeError, match="measuring process failed"):
        measure_memory(tokens=-1)


def test_quantization_speed_and_its_limit() -> None:
    found = measure_quantization(tokens=256, heads=2, head_dim=64, repeats=1)
    assert set(found.speed) == {1, 32} and min(found.speed.values()) > 0 and found.elements == 256 * 2 * 64
    slow_memory = QuantizationSpeed(1, {1: 60e6, 32: 60e6}, memory_limit=50e6)
    assert slow_memory.goal == 50e6 and slow_memory.met
    assert not QuantizationSpeed(1, {1: 90e6, 32: 120e6}, memory_limit=1e9).met


def test_bit_accurate_profile_runs() -> None:
    found = measure_bit_accurate(tokens=16)
    assert found.total == found.forward + found.backward > 0 and found.met


def test_the_command_prints_chosen_rows_and_writes_json(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flamia.bench.quantization.measure_quantization", lambda: measure_quantization(256, 2, 64, 1))
    monkeypatch.setitem(sys.modules, "torch", None)
    file = tmp_path / "bench.json"
    options = ["--row", "attention", "--row", "quantization", "--tokens", "64", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(app, ["bench", "reference", *options])
    assert done.exit_code == 0, done.output
    assert "T=64" in done.output and "B=32" in done.output and "memory:" not in done.output
    found = json.loads(file.read_text())
    assert set(found) == {"attention", "quantization", "rows"}
    assert found["attention"]["shape"]["tokens"] == 64 and found["quantization"]["speed"]["32"] > 0


def test_an_unknown_row_is_named() -> None:
    done = CliRunner().invoke(app, ["bench", "reference", "--row", "speed"])
    assert done.exit_code == 2 and "row must be one of" in done.output
