"""What ``flamia bench attention`` times; the timing itself needs a GPU."""

import numpy as np
import pytest
from typer.testing import CliRunner

from flamia.bench.command import app
from flamia.bench.gpu_attention import Timing, Workload, log_normal_lengths, workloads
from flamia.bench.gpu_command import record
from flamia.bench.gpu_plot import draw


def test_flops_count_the_pairs_that_are_seen():
    causal, full = (Workload("w", (3, 5), q_heads=2, head_dim=64, causal=c) for c in (True, False))
    seen = sum(1 for n in (3, 5) for i in range(n) for j in range(i + 1))
    assert causal.flops == 4 * seen * 2 * 64
    assert full.flops == 4 * (9 + 25) * 2 * 64


def test_drawn_lengths_fill_the_pack():
    lengths = log_normal_lengths(20000, 500, 1.0)
    assert sum(lengths) == 20000 and min(lengths) > 0
    assert 250 < np.median(lengths[:-1]) < 1000
    assert lengths == log_normal_lengths(20000, 500, 1.0)


def test_workloads_cover_dense_and_packed_calls():
    found = workloads()
    assert all(name == w.name for name, w in found.items())
    assert found["dense-8k"].dense and not found["packed-code"].dense
    assert {(w.q_heads, w.kv_heads) for w in found.values()} == {(16, 16), (32, 8)}


def test_the_ratio_is_against_the_fastest_baseline():
    timing = Timing(Workload("w", (128,)), forward={"flamia": 10.0, "flamia bf16": 1.0, "a": 30.0, "b": 20.0})
    assert timing.ratio("forward") == 2.0
    assert timing.ratio("total") is None


def test_without_a_gpu_the_command_says_so():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["attention"])
    assert done.exit_code == 2 and "needs a GPU" in done.output
    for option in ("--workload", "--contestant"):
        assert CliRunner().invoke(app, ["attention", option, "nothing"]).exit_code == 2


def test_a_record_holds_what_was_timed_and_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    timing = Timing(Workload("w", (128,)), {"flamia": 10.0, "a": 8.0}, {"flamia": 30.0, "a": 36.0}, {"b": "absent"})
    found = record(timing)
    assert found["workload"]["name"] == "w" and found["missing"] == {"b": "absent"}
    assert (found["forward_ratio"], found["total_ratio"]) == (0.8, 1.2)
    draw([found], "GPU", tmp_path / "w.svg")
    assert "<svg" in (tmp_path / "w.svg").read_text()
