"""Recorded activations as workloads of ``flamia bench attention``; the timing itself needs a GPU."""

import json

import numpy as np
import pytest
from ml_dtypes import bfloat16
from typer.testing import CliRunner

from flamia.bench import gpu_attention
from flamia.bench.command import app
from flamia.bench.gpu_attention import Timing, Workload
from flamia.bench.gpu_table import record
from flamia.bench.recorded import PACK_TOKENS, read_recorded
from flamia.reference.oracle import attention_oracle

NAMES = ("q", "k", "v", "dout")


def save(path, lengths=(30, 0, 17), heads=(4, 2), dim=64, **other):
    """A file of random activations."""
    rng = np.random.default_rng(sum(lengths))
    shapes = dict(zip(NAMES, (heads[0], heads[1], heads[1], heads[0]), strict=True))
    x = {name: rng.standard_normal((sum(lengths), n, dim), np.float32) for name, n in shapes.items()}
    np.savez(path, **x | {"cu_seqlens": np.concatenate([[0], np.cumsum(lengths)])} | other)
    return str(path)


def test_whole_documents_are_repeated_to_a_pack(tmp_path):
    found = read_recorded(save(tmp_path / "layer3.npz"))
    w = found.workload
    assert (w.name, w.q_heads, w.kv_heads, w.head_dim, w.causal) == ("real-layer3", 4, 2, 64, True)
    assert w.lengths == (30, 17) * found.repeats and abs(w.tokens - PACK_TOKENS) <= 47 / 2
    assert "values of layer3.npz" in str(w) and not w.dense
    (first,) = found.sets(1)
    q, k, v, dout = first
    assert q.shape == dout.shape == (w.tokens, 4, 64) and k.shape == v.shape == (w.tokens, 2, 64)
    assert {x.dtype for x in first} == {np.dtype(bfloat16)}
    with np.load(tmp_path / "layer3.npz") as data:
        for name, x in zip(NAMES[:3], first, strict=False):
            want = data[name].astype(bfloat16)
            assert (x[:47] == want).all() and (x[-47:] == want).all(), name


def test_a_long_file_is_taken_as_it_is(tmp_path):
    found = read_recorded(save(tmp_path / "long.npz", (50_000,), (1, 1), 32))
    assert found.workload.lengths == (50_000,) and found.workload.dense


def test_sets_are_the_same_attention_with_its_numbers_in_other_places(tmp_path):
    found = read_recorded(save(tmp_path / "a.npz", (40_000,), (4, 2), 64))
    sets = list(found.sets(5))
    assert all((a == b).all() for a, b in zip(sets[0], sets[4], strict=True)), "2 KV heads x 2 blocks of channels"
    for i, j in ((0, 1), (0, 2), (1, 3), (2, 3)):
        assert all((a != b).mean() > 0.9 for a, b in zip(sets[i], sets[j], strict=True)), (i, j)
    cu = [0, 30, 47]
    outs = [attention_oracle(*(x[:47].astype(np.float32) for x in each[:3]), cu).out for each in sets[:4]]
    for i, (heads, channels) in enumerate(((0, 0), (2, 0), (0, 32), (2, 32))):
        assert np.allclose(np.roll(outs[0], (heads, channels), (1, 2)), outs[i], rtol=1e-10, atol=1e-12), i


def test_the_packages_sample():
    found = read_recorded("sample")
    assert found.workload.name == "real-sample" and found.workload.lengths[:3] == (33, 1, 368)
    assert (found.workload.q_heads, found.workload.kv_heads, found.workload.head_dim) == (9, 3, 128)


def test_tensors_have_the_bits_of_the_arrays(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    (first,) = read_recorded(save(tmp_path / "a.npz", (40_000,), (2, 1), 32)).sets(1)
    (tensors,) = gpu_attention._upload([first], "cpu")
    assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in tensors)
    assert all((t.view(torch.int16).numpy() == x.view(np.int16)).all() for t, x in zip(tensors, first, strict=True))


def invoke(*options):
    done = CliRunner().invoke(app, ["attention", *options])
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def test_errors_name_the_option(tmp_path):
    code, output = invoke("--input", str(tmp_path / "none.npz"))
    assert code == 2 and "Invalid value for --input" in output and "does not exist" in output
    wrong = save(tmp_path / "wrong.npz", mask=np.zeros(3))
    code, output = invoke("--input", wrong)
    assert code == 2 and "Invalid value for --input" in output and "mask" in output
    code, output = invoke("--input", save(tmp_path / "odd.npz", dim=30))
    assert code == 2 and "Invalid value for --input" in output and "multiple of 32, got 30" in output
    (tmp_path / "b").mkdir()
    same = [save(folder / "same.npz") for folder in (tmp_path, tmp_path / "b")]
    code, output = invoke("--input", same[0], "--input", same[1])
    assert code == 2 and "Invalid value for --input" in output and "'real-same' twice" in output


@pytest.mark.parametrize("options, expected", [([], ["real-x"]), (["-w", "packed-300"], ["packed-300", "real-x"])])
def test_the_command_times_the_inputs(tmp_path, monkeypatch, options, expected):
    """With a stand-in for the timing, as there is no GPU."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    given = {}

    def measure(workload, backward, contestants, advance, recorded):
        given[workload.name] = None if recorded is None else recorded.workload
        return Timing(workload, {"flamia": 10.0, "a": 20.0})

    monkeypatch.setattr(gpu_attention, "measure", measure)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 0)
    file = tmp_path / "x.json"
    code, output = invoke("--input", save(tmp_path / "x.npz"), "--json", str(file), "--forward-only", *options)
    assert code == 0, output
    timings = json.loads(file.read_text())["timings"]
    assert [t["workload"]["name"] for t in timings] == expected == list(given)
    assert timings[-1]["workload"]["source"] == "x.npz" and given["real-x"].name == "real-x"
    assert "values of x.npz" in timings[-1]["title"]


def test_a_record_of_drawn_numbers_names_no_file():
    found = record(Timing(Workload("w", (128,)), {"flamia": 10.0}))
    assert found["workload"]["source"] == "" and "values" not in found["title"]


def test_help_says_how_sets_differ():
    code, output = invoke("--help")
    assert code == 0 and "--input" in output and "rotated" in output and "32,768" in output
