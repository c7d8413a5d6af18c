"""`flamia doctor` and what a machine without PyTorch, CuPy, driver or kernels is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from flamia import dispatch, doctor
from flamia.conformance.certificates import Certificate, Identity, write_certificate
from flamia.conformance.results import LEVELS, SUITE_VERSION
from flamia.kernels import nvrtc

ROOT = Path(__file__).resolve().parents[1]
H200 = doctor.Gpu("NVIDIA H200", (9, 0))

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run_without(code, *absent):
    """Run ``code`` where the packages ``absent`` cannot be imported; returns the finished process."""
    source = WITHOUT.format(absent=absent) + code
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)


def find(findings, subject, state=None):
    """The only finding about a subject."""
    (found,) = [f for f in findings if f.subject == subject and state in (None, f.state)]
    return found


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with chosen packages and GPUs, and no certificates."""
    monkeypatch.setenv("FLAMIA_CERTIFICATE_DIR", str(tmp_path))
    monkeypatch.setattr("flamia.conformance.certificates.SHIPPED", tmp_path / "none")

    def make(gpus=None, **versions):
        monkeypatch.setattr(doctor, "read_gpus", lambda: gpus)
        monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name.replace("-", "_")))

    return make


# ---- the command -------------------------------------------------------------------------------------------


def test_doctor_runs_on_a_bare_machine():
    code = "sys.argv = ['flamia', 'doctor']; from flamia.cli import main; main()"
    done = run_without(code, "torch", "cupy", "transformers")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "reference computes; NumPy" in said
    assert "not installed: no flamia.attention pip install 'flamia[torch]'" in said
    assert "CUDA tensors: there is no GPU here; each chip, an H100 too, needs a certificate of its own" in said
    assert "refused" not in said and "pip install 'flamia[cuda]'" not in said.partition("CuPy")[2].partition("NVRTC")[0]


def test_what_is_broken_sets_the_exit_code(monkeypatch):
    import typer

    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("x", doctor.OK, "fine")])
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 0
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("x", doctor.BROKEN, "[bold]not[/] fine")])
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_text_in_brackets_is_printed_as_it_is(monkeypatch, capsys, terminal):
    import typer

    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("x", doctor.MISSING, "[a]", "pip install 'f[b]'")])
    with pytest.raises(typer.Exit):
        doctor.doctor()
    said = capsys.readouterr().out
    assert "[a]" in said and "pip install 'f[b]'" in said


def test_a_pipe_gets_lines_that_are_not_broken(monkeypatch, capsys):
    import typer

    path = "/a/path/that/is/longer/than/forty/columns/" + 20 * "x"
    findings = [
        doctor.Finding("x", doctor.OK, f"it is at {path}", f"remove {path}"),
        doctor.Finding("long name", "note", "y"),
    ]
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    with pytest.raises(typer.Exit):
        doctor.doctor()
    lines = [f"ok  x          it is at {path}", f"               remove {path}", "    long name  y"]
    assert capsys.readouterr().out.splitlines() == lines


# ---- findings ----------------------------------------------------------------------------------------------


def test_a_wrong_reference_is_found(monkeypatch):
    assert find(doctor.examine_flamia(), "reference").state == doctor.OK
    monkeypatch.setattr("flamia.reference.forward.sum_tokens", lambda profile, sums, p: sums.__iadd__(1))
    wrong = find(doctor.examine_flamia(), "reference")
    assert wrong.state == doctor.BROKEN and wrong.fix


def test_an_exception_in_a_check_becomes_a_finding(machine, monkeypatch):
    machine()
    monkeypatch.setattr(nvrtc, "load_nvrtc", lambda: 1 / 0)
    found = find(doctor.examine(), "NVRTC")
    assert found.state == doctor.BROKEN and found.text.startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("version", "state", "fix"),
    [
        (None, doctor.MISSING, "pip install 'flamia[transformers]'"),
        ("4.57.1", doctor.MISSING, "pip install --upgrade 'transformers>=5'"),
        ("5.24.0", doctor.OK, ""),
    ],
)
def test_transformers(machine, version, state, fix):
    machine(transformers=version)
    found = find(doctor.examine_transformers(), "transformers")
    assert (found.state, found.fix) == (state, fix)


def test_without_a_gpu_nothing_of_cuda_is_missing(machine, monkeypatch):
    machine()
    monkeypatch.setattr(nvrtc, "load_nvrtc", not_found)
    findings = doctor.examine()
    assert find(findings, "GPU").text == "no NVIDIA driver: everything runs on the CPU"
    assert {find(findings, name).state for name in ("CuPy", "NVRTC")} == {doctor.NOTE}
    assert find(findings, "CuPy").fix == ""
    told = find(findings, "flamia.attention", doctor.NOTE)
    assert told.text.startswith("CUDA tensors: there is no GPU here") and "refused" not in told.text
    assert told.fix == (
        "on the chip: flamia conform --target hopper --certify or flamia conform --target blackwell --certify"
    )


def test_with_a_gpu_what_is_missing_comes_with_its_command(machine, monkeypatch):
    machine([H200])
    monkeypatch.setattr(nvrtc, "load_nvrtc", not_found)
    findings = doctor.examine()
    assert find(findings, "NVIDIA H200").text == "compute capability 9.0, target sm_90a"
    for name in ("CuPy", "NVRTC"):
        found = find(findings, name)
        assert (found.state, found.fix) == (doctor.MISSING, "pip install 'flamia[cuda]'")
    refused = find(findings, "flamia.attention", doctor.MISSING)
    assert "no kernel for attention is certified" in refused.text and "backend='reference'" in refused.fix
    assert "each chip, an H100 too, needs a certificate of its own" in refused.text
    assert "flamia conform --target hopper --certify" in refused.fix


@pytest.mark.parametrize(("name", "capability"), [("NVIDIA B200", (10, 0)), ("NVIDIA B300", (10, 3))])
def test_blackwell_is_told_its_own_command(machine, name, capability):
    machine([doctor.Gpu(name, capability)])
    assert (
        "flamia conform --target blackwell --certify" in find(doctor.examine(), "flamia.attention", doctor.MISSING).fix
    )


def not_found():
    raise nvrtc.NvrtcNotFoundError("none")


def test_a_gpu_without_kernels_is_named(machine):
    machine([doctor.Gpu("NVIDIA A100", (8, 0))])
    found = find(doctor.examine(), "NVIDIA A100")
    assert found.state == doctor.NOTE and "8.0 has no FLAMIA kernels; supported GPUs have one of 9.0" in found.text


def test_a_driver_that_does_not_answer_is_broken(machine, monkeypatch):
    machine()

    def broken():
        raise RuntimeError("cuInit gives error 999")

    monkeypatch.setattr(doctor, "read_gpus", broken)
    found = find(doctor.examine(), "GPU")
    assert found.state == doctor.BROKEN and "cuInit gives error 999" in found.text


def test_certificates_are_listed(machine, tmp_path):
    machine([H200])
    identity = Identity("hopper-forward", "mxfp8", "hopper", "0" * 64, "NVIDIA H200", "9.0", "NVRTC 13.0")
    made = Certificate(identity, SUITE_VERSION, tuple(LEVELS), "full", 1, "2025-01-01T00:00:00+00:00", {})
    write_certificate(made, tmp_path)
    (tmp_path / "spoiled.json").write_text("{}")
    findings = [f for f in doctor.examine_certificates([H200]) if f.subject == "certificate"]
    states = {f.state: f for f in findings}
    assert "hopper-forward, recipe mxfp8, on NVIDIA H200: levels 0, 1, 2, 3, 4, 5" in states[doctor.NOTE].text
    assert states[doctor.BROKEN].fix == f"remove {tmp_path / 'spoiled.json'}"


def test_kernels_are_listed_with_their_certificate_or_the_reason_for_its_lack(machine, tmp_path, monkeypatch):
    machine([H200])
    monkeypatch.setattr(dispatch, "_table", {})
    monkeypatch.setattr(dispatch, "_refusals", {})
    identity = Identity("hopper", "mxfp8", "hopper", "0" * 64, "NVIDIA H200", "9.0", "NVRTC 13.0")
    made = Certificate(identity, SUITE_VERSION, tuple(LEVELS), "full", 1, "2025-01-31T00:00:00+00:00", {})
    dtypes = ("bfloat16", "float32")
    row = dispatch.AttentionKernel("hopper", identity, (9, 0), ("mxfp8",), (64, 128), dtypes, print, print, print)
    dispatch.refuse("hopper", "it has no certificate")
    dispatch.refuse("other", "the source has changed")
    write_certificate(made, tmp_path)
    dispatch.register(row)
    findings = list(doctor.examine_certificates([]))
    served = find(findings, "flamia.attention")
    assert (served.state, served.text) == (
        doctor.OK,
        "CUDA tensors: kernel hopper, certified on NVIDIA H200 with NVRTC 13.0 at 2025-01-31; recipe mxfp8, head_dim "
        "64 or 128, bfloat16, float32",
    )
    assert find(findings, "kernel other").text == "not certified here: the source has changed"
    assert [f.subject for f in findings].count("kernel hopper") == 0


# ---- without PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "caller"),
    [
        ("flamia.attention(1, 2, 3)", "flamia.attention"),
        ("flamia.flash_attn_varlen_func(1, 2, 3, 4, 5, 6, 7)", "flamia.flash_attn_varlen_func"),
    ],
)
def test_without_torch_a_call_says_which_extra_to_install(call, caller):
    code = f"import flamia, inspect; inspect.signature(flamia.attention); print('imported'); {call}"
    done = run_without(code, "torch")
    assert done.stdout == "imported\n"
    assert done.stderr.rstrip().endswith(f"ImportError: {caller} needs PyTorch: run `pip install 'flamia[torch]'`")


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_the_integration_says_which_extra_to_install(absent):
    done = run_without("import flamia; flamia.integrations.transformers", absent)
    assert "run `pip install 'flamia[transformers]'`" in done.stderr.splitlines()[-1]


def test_integrations_have_no_other_names():
    import flamia

    with pytest.raises(AttributeError, match=r"module 'flamia\.integrations' has no attribute 'nothing'"):
        flamia.integrations.nothing  # noqa: B018
