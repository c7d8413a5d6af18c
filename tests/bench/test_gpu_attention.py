"""What ``flamia bench attention`` times; the timing itself needs a GPU."""

import gc
import json
import weakref
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from flamia.bench import gpu_attention
from flamia.bench.command import app
from flamia.bench.gpu_attention import Timing, Workload, log_normal_lengths, workloads
from flamia.bench.gpu_command import _own_workload
from flamia.bench.gpu_plot import draw
from flamia.bench.gpu_table import markdown, record


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


@pytest.mark.parametrize("backward", [True, False])
def test_times_are_of_one_set_and_who_fails_is_named(monkeypatch, backward):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(gpu_attention, "_draw", lambda workload: [()] * 4)
    monkeypatch.setattr(gpu_attention, "_capture", lambda call, sets: call(sets))
    monkeypatch.setattr(gpu_attention, "_time_rounds", lambda graphs: {key: float(g) for key, g in graphs.items()})
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda x, dtype, device: tensor(x, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fail(i):
        raise AssertionError

    calls = {"a": (lambda i: 10 * i, lambda i: 30 * i), "b": (lambda i: 20 * i, fail), "c": (fail, fail)}
    contestants = {name: lambda workload, sets, cu, name=name: calls[name] for name in calls}
    monkeypatch.setattr(gpu_attention, "CONTESTANTS", contestants)
    seen = []
    timing = gpu_attention.measure(Workload("w", (128,)), backward, advance=seen.append)
    assert seen == ["a", "b", "c", "rounds"]
    assert timing.forward == ({"a": 10.0} if backward else {"a": 10.0, "b": 20.0})
    assert timing.total == ({"a": 30.0} if backward else {})
    assert timing.missing == dict.fromkeys(("b", "c") if backward else ("c",), "AssertionError")


def test_every_round_replays_each_graph_once_in_a_new_order(monkeypatch):
    torch, replayed = MagicMock(), []
    torch.cuda.Event.return_value.elapsed_time.side_effect = lambda end: float(len(replayed)) ** 2
    monkeypatch.setattr(gpu_attention, "import_module", lambda name: torch)
    clock = iter([0.0, *(0.2 * i for i in range(100))])  # at the beginning, and before each round
    monkeypatch.setattr(gpu_attention.time, "perf_counter", lambda: next(clock))
    keys = [("forward", name) for name in "abcd"]
    graphs = {key: MagicMock(graph=MagicMock(replay=lambda key=key: replayed.append(key))) for key in keys}
    found = gpu_attention._time_rounds(graphs)
    rounds = [tuple(replayed[i : i + 4]) for i in range(0, len(replayed), 4)]
    warm = 3  # rounds, those that begin before .5 s
    assert len(rounds) == warm + gpu_attention.ROUNDS
    assert all(sorted(r) == keys for r in rounds) and len(set(rounds)) > 5
    # the events say how many replays there were after each round, squared; the median is that of the middle one
    assert found == dict.fromkeys(keys, 1e3 * (4 * (warm + (gpu_attention.ROUNDS + 1) / 2)) ** 2)


def test_lengths_of_ones_own_are_a_workload():
    w = _own_workload("109x300, 4096", 32, 8, 64, False)
    assert w == Workload("lengths", (300,) * 109 + (4096,), 32, 8, 64, False)
    assert _own_workload("7", 3, None, 128, True).kv_heads == 3


@pytest.mark.parametrize("lengths", ["", "x7", "3x", "0", "0x5", "1.5", "-4", "2x3x4", "a", "4,,5"])
def test_lengths_of_another_form_are_refused_by_name(lengths):
    with pytest.raises(typer.BadParameter, match="such as 109x300,4096") as raised:
        _own_workload(lengths, 16, None, 128, True)
    assert raised.value.param_hint == "--lengths"
    with pytest.raises(typer.BadParameter, match="must divide the 16 query heads, got 3"):
        _own_workload("128", 16, 3, 128, True)


def test_documents_are_described():
    assert Workload("w", (300,) * 109).documents == "109 x 300"
    assert Workload("w", (8192,), causal=False).documents == "1 x 8,192, full"
    assert Workload("w", (5, 1000, 3)).documents == "3 of 3 to 1,000, median 5"


def test_a_markdown_table_has_a_cell_for_everyone():
    first = Timing(Workload("v", (128,)), {"a": 8.0, "flamia": 10.0}, {"a": 2036.0, "flamia": 30.0})
    second = Timing(Workload("w", (128, 64), 4, 2, 64, False), {"cuDNN": 7.4}, {}, {"flamia": "absent"})
    assert markdown([record(first), record(second)]).splitlines()[2:] == [
        "| v | 1 x 128 | 16/16 | 128 | 10 + 20 |  | 8 + 2,028 | 0.80 | 67.87 |",
        "| w | 2 of 64 to 128, median 64, full | 4/2 | 64 |  | 7 |  |  |  |",
    ]


def test_the_page_shows_the_recorded_numbers():
    docs = Path(__file__).parents[2] / "docs"
    timings = json.loads((docs / "data" / "attention_h200.json").read_text("utf-8"))["timings"]
    assert markdown(timings) in (docs / "attention_h200.md").read_text("utf-8")


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


@pytest.mark.parametrize("option", [["--heads", "32"], ["--kv-heads", "8"], ["--head-dim", "64"], ["--full"]])
def test_what_goes_with_lengths_is_refused_without_them(option):
    done = CliRunner().invoke(app, ["attention", *option])
    assert done.exit_code == 2 and "go with --lengths" in done.output


def test_a_forward_alone_is_timed_as_one_without_gradients(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from flamia.kernels import hopper, hopper_backward

    forward = MagicMock()
    monkeypatch.setattr(hopper, "attention_forward", forward)
    monkeypatch.setattr(hopper_backward, "attention_backward", MagicMock())
    calls = gpu_attention._flamia(Workload("w", (128,)), [(None,) * 4], None)
    for call in calls:
        call(0)
    alone, whole = (call.kwargs for call in forward.call_args_list)
    assert (alone["backward"], alone["saves"]) == (False, False)
    assert whole.get("backward", True) and whole.get("saves", True)
