"""examples/pretrain_llama.py: it trains, resumes with the same bits, and draws its runs."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_llama.py"
SHAPE = "--layers 2 --width 64 --heads 2 --kv-heads 1 --head-dim 32 --tokens 96"
TINY = [*SHAPE.split(), *"--every 2 --held-out 2 --warmup 1 --device cpu".split()]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("pretrain_llama", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n\n".join(f"passage {i}: " + "the quick brown fox jumps. " * (3 + i % 4) for i in range(60)))
    return path


def state(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=True)


def test_it_trains_resumes_and_draws(example, text, tmp_path, capsys):
    base = [*TINY, "--data", str(text)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    example.main([*base, "--attention", "mxfp8", "--steps", "6", "--out", str(whole)])
    example.main([*base, "--attention", "mxfp8", "--steps", "2", "--out", str(parts)])
    example.main([*base, "--attention", "mxfp8", "--steps", "6", "--out", str(parts), "--resume"])
    assert "2 of 6 steps done" in capsys.readouterr().out
    expected, resumed = state(whole, "mxfp8-0"), state(parts, "mxfp8-0")
    assert expected["losses"] == resumed["losses"] and expected["held_out"] == resumed["held_out"]
    for name, weight in expected["model"].items():
        assert torch.equal(weight, resumed["model"][name]), name
    assert expected["held_out"][-1][1] < expected["held_out"][0][1] - 0.1, "the loss does not fall"

    example.main([*base, "--attention", "bf16", "--steps", "2", "--out", str(whole)])
    other = state(whole, "bf16-0")["losses"]
    assert other[0] == pytest.approx(expected["losses"][0], rel=1e-2) and other[0] != expected["losses"][0]
    figure = whole / "loss.png"
    assert figure.stat().st_size > 10_000

    record = json.loads((whole / "mxfp8-0.json").read_text())
    assert record["losses"] == expected["losses"] and record["tokens_per_second"] > 0
    for checkpoint in whole.glob("*.pt"):
        checkpoint.unlink()  # losses alone can be drawn, on another machine
    figure.unlink()
    (whole / "notes.json").write_text("{}")
    example.main(["--draw", "--out", str(whole)])
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--kv-heads", "2", "must divide the 3 query heads, got 2"),
        ("--kv-heads", "0", "must divide the 3 query heads, got 0"),
        ("--device", "cuda", "PyTorch finds no CUDA device"),
    ],
)
def test_options_that_cannot_be_met_are_named(example, monkeypatch, capsys, option, value, rule):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.main([option, value])
    assert f"argument {option}: {rule}" in capsys.readouterr().err


def test_a_pack_holds_whole_documents_and_one_cut(example):
    documents = [b"a" * 70, b"b" * 80]
    ids, targets, positions, cu = example.pack(documents, 200, np.random.default_rng(0))
    assert cu[0] == 0 and cu[-1] == 200 and cu.dtype == torch.int32
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        assert ids[start] == example.BEGIN and len(set(ids[start + 1 : stop].tolist())) == 1
        assert positions[start:stop].tolist() == list(range(stop - start))
        assert targets[start : stop - 1].tolist() == ids[start + 1 : stop].tolist()
        assert targets[stop - 1] == example.SKIP


def test_text_without_a_passage_is_refused(example, tmp_path):
    (tmp_path / "short.txt").write_text("no")
    with pytest.raises(SystemExit, match="no passage of 64 bytes or more in"):
        example.read_documents([tmp_path / "short.txt"])


def test_compiled_blocks_train_alike_without_recompiling(example, text, tmp_path, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(example.Block, "compile", lambda block, **options: compile_in_place(block, counter, options))
    base = [*TINY, "--data", str(text), "--attention", "bf16", "--steps", "4", "--every", "9", "--out"]
    plain = example.train(example.parse([*base, str(tmp_path / "plain")])).losses
    compiled = example.train(example.parse([*base, str(tmp_path / "compiled"), "--compile"])).losses
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert counter.frame_count == 2, "one graph for training and one for evaluation"


def compile_in_place(block, backend, options):
    torch.nn.Module.compile(block, backend=backend, **options)
