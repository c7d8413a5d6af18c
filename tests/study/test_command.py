"""``flamia study`` end to end, on few tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from flamia.cli import app
from flamia.reference import RECIPES
from flamia.study import run

PLOTS = ("errors.png", "leaks.png", "position.png", "dynamic_range.png")


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FLAT_KEYS", 1000)
    monkeypatch.setenv("COLUMNS", "160")


def study(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["study", *options])
    return done.exit_code, done.output


def test_all_recipes_with_tables_plots_and_json(tmp_path) -> None:
    code, text = study("--tokens", "70", "--out", str(tmp_path))
    assert code == 0, text
    for name in RECIPES:
        assert name in text
    for title in ("Error against float64", "Leak test", "First number", "Kept for", "differentiate", "Long context"):
        assert title in text
    for name in PLOTS:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 10_000
    found = json.loads((tmp_path / "study.json").read_text())
    assert set(found) == {
        *("flamia", "input", "profile", "seed", "recipes", "long_context", "dynamic_range"),
    }
    assert found["input"]["documents"] == [33, 1, 36] and found["input"]["tokens"] == 70
    assert list(found["recipes"]) == list(RECIPES)
    for name, entry in found["recipes"].items():
        assert set(entry) == {"summary", "errors", "leaks", "memory", "consistency"}
        assert set(entry["errors"]["geometric_mean"]) == {"o", "dq", "dk", "dv"}
        assert len(entry["errors"]["per_head"]["dq"]) == 9 and len(entry["errors"]["per_head"]["dk"]) == 3
        leaky = name in ("cudnn_mxfp8", "tile_32x32", "tensor_fp8")
        assert entry["leaks"]["safe"] == (not leaky) == (entry["leaks"]["first"] is None)
        if leaky:
            assert {"document", "token", "head", "channel", "t", "output"} <= set(entry["leaks"]["first"])
    assert [x["recipe"] for x in found["long_context"]] == ["mxfp8", "mxfp8, constant P scale"]


def test_a_file_without_dout_and_chosen_recipes(tmp_path) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((20, heads, 64)).astype(np.float16) for heads in (2, 1, 1))
    np.savez(tmp_path / "mine.npz", q=q, k=k, v=v)
    options = ("--input", str(tmp_path / "mine.npz"), "--recipe", "mxfp8", "--recipe", "tensor_fp8", "--seed", "3")
    code, text = study(*options, "--out", str(tmp_path / "deep" / "out"))
    assert code == 0, text
    assert "There is no dout" in text and "mine.npz: 20 tokens" in text
    found = json.loads((tmp_path / "deep" / "out" / "study.json").read_text())
    assert list(found["recipes"]) == ["mxfp8", "tensor_fp8"] and found["seed"] == 3
    assert found["input"]["random_dout"]


def test_a_machine_profile_leaves_study_only_recipes_out(tmp_path) -> None:
    code, text = study("--tokens", "5", "--profile", "hopper", "--recipe", "mxfp8", "--out", str(tmp_path))
    assert code == 0, text
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["profile"] == "hopper" and found["recipes"]["mxfp8"]["leaks"]["safe"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "mxfp9"], "recipe must be one of"),
        (["--profile", "volta"], "profile must be one of"),
        (["--tokens", "0"], "tokens must be 1 to 402"),
        (["--input", "missing.npz"], "missing.npz, which does not exist"),
        (["--profile", "blackwell", "--recipe", "cudnn_mxfp8"], "profile must be 'ideal'"),
        (["--out", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    code, text = study(*options)
    assert code == 2 and message in " ".join(text.split()).replace("│ ", ""), text


def test_files_that_cannot_be_studied_are_named(tmp_path) -> None:
    x = np.zeros((40, 1, 48), np.float32)
    np.savez(tmp_path / "dim.npz", q=x, k=x, v=x)
    np.save(tmp_path / "x.npy", x)
    for name, message in (
        ("dim.npz", "q must have a head_dim that is a multiple of 32 up to 256, got 48"),
        ("x.npy", "as numpy.savez writes it"),
    ):
        code, text = study("--input", str(tmp_path / name), "--out", str(tmp_path))
        assert code == 2 and message in " ".join(text.split()).replace("│ ", ""), text
