"""``flamia simulate``."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flamia.cli import app
from flamia.conformance.simulator.agreement.results import Run

runner = CliRunner()


def invoke(*arguments: str) -> tuple[int, str]:
    result = runner.invoke(app, ["simulate", *arguments])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_list_names_kernels_and_cases() -> None:
    code, text = invoke("list")
    assert code == 0
    assert "gemm: example" in text and "mn_mn:" in text and "bulk_ring:" in text


def test_run_shows_a_kernel(tmp_path: Path) -> None:
    picture = tmp_path / "t.png"
    code, text = invoke("run", "gemm", "--timeline", "--png", str(picture), "--counts", "--cycles", "--width", "40")
    assert code == 0, text
    assert "gemm k_k: 1 of 1 seeds gave the expected bytes" in text
    assert "CTA 0 multiply" in text and "█" in text and "tcgen05.mma 16" in text
    assert "no measurement" in text and "tensor core" in text
    assert picture.stat().st_size > 10_000


def test_run_ends_with_1_where_bytes_are_wrong() -> None:
    code, text = invoke("run", "tests.simulator.test_tools:WRONG", "--seeds", "2")
    assert code == 1
    assert "seed 1: b[0] (byte 0): got" in text and "0 of 2 seeds" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("run", "nothing"), "kernel must be one of"),
     (("run", "tests.simulator.test_tools:WRONG", "--case", "x"), "case must not be given with"),
     (("agree", "--target", "b200"), "target must be h200 or simulator"),
     (("agree", "--kernel", "x"), "kernel must be one of")],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments: tuple[str, ...], says: str) -> None:
    code, text = invoke(*arguments)
    assert code == 2 and says in text.replace("│ ", "")


def test_agree_compares_with_the_record_and_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    code, text = invoke("agree", "--kernel", "lop3", "--kernel", "shifts", "--out", str(path))
    assert code == 0 and "2 of 2 kernels agree in every bit" in text
    run = Run.read(path)
    run.outputs["lop3"]["d"][4, 7] ^= 1
    run.write(path)
    code, text = invoke("agree", "--kernel", "lop3", "--against", str(path))
    assert code == 1 and "lop3.d[4, 7]: simulator" in text and "lop3.b32 $d, $a, $b, $c, 202;" in text
