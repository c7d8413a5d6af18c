"""What ``flamia bench attention`` times; the timing itself needs a GPU."""

import gc
import weakref
from unittest.mock import MagicMock

import numpy as np
import pytest
from typer.testing import CliRunner

from flamia.bench import gpu_attention
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


class Tensor:
    """Something that can be looked for."""


def test_what_a_captured_call_reads_lives_as_long_as_its_graph(monkeypatch):
    monkeypatch.setattr(gpu_attention, "import_module", lambda name: MagicMock())
    tensor = Tensor()
    alive = weakref.ref(tensor)
    captured = gpu_attention._capture(lambda i, tensor=tensor: i, 2)
    del tensor
    gc.collect()
    assert captured.results == [0, 1] and alive() is not None


def test_every_round_replays_each_graph_once_in_a_new_order(monkeypatch):
    torch, replayed = MagicMock(), []
    torch.cuda.Event.return_value.elapsed_time.side_effect = lambda end: float(len(replayed))
    monkeypatch.setattr(gpu_attention, "import_module", lambda name: torch)
    monkeypatch.setattr(gpu_attention, "WARM_SECONDS", 0.0)
    keys = [("forward", name) for name in "abcd"]
    graphs = {key: MagicMock(graph=MagicMock(replay=lambda key=key: replayed.append(key))) for key in keys}
    found = gpu_attention._time_rounds(graphs)
    rounds = [tuple(replayed[i : i + 4]) for i in range(0, len(replayed), 4)]
    assert len(rounds) == gpu_attention.ROUNDS and all(sorted(r) == keys for r in rounds) and len(set(rounds)) > 5
    # the clock says how many replays there were after each round; the median is that of the middle one
    assert found == dict.fromkeys(keys, 4e3 * (gpu_attention.ROUNDS + 1) / 2)


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
