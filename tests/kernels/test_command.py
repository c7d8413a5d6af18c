"""``flamia kernels`` on a machine without a GPU, and the disassembly behind it."""

import sys
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flamia.kernels import disassembly, registry, targets
from flamia.kernels.build import build
from flamia.kernels.command import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def need_nvdisasm():
    try:
        disassembly.find_nvdisasm()
    except disassembly.DisassemblerNotFoundError as error:
        pytest.skip(str(error))


def test_list_names_every_kernel_and_entry():
    done = run("list")
    assert done.exit_code == 0
    for kernel in registry.KERNELS:
        assert kernel.name in done.output
        for entry in kernel.entries:
            assert entry.name in done.output


def test_build_prints_what_a_kernel_needs(nvrtc, cold_cache):
    first = run("build", "formats", "-t", "sm_90a", "-t", "sm_100a")
    assert first.exit_code == 0, first.output
    row = next(line for line in first.output.splitlines() if "sm_100a" in line)
    assert "formats" in row and "convert" in row and "256" in row
    assert "0 failed" in first.output
    second = run("build", "formats", "-t", "sm_90a")
    assert "0 compiled, 1 cached, 0 failed" in second.output


def test_build_exits_with_1_when_a_limit_is_broken(nvrtc, cold_cache, monkeypatch):
    strict = replace(registry.FORMATS, entries=(replace(registry.FORMATS.entries[0], max_registers=1),))
    monkeypatch.setattr(registry, "KERNELS", (strict, registry.DECODE))
    done = run("build", "formats", "decode", "-t", "sm_90a")
    assert done.exit_code == 1
    assert "1 failed" in done.output
    assert "formats for sm_90a: convert needs" in done.output
    assert "decode_tokens" in done.output, "one failure must not stop the others"


def test_unknown_names_and_targets_are_refused():
    wrong_kernel, wrong_target = run("build", "nothing"), run("inspect", "formats", "-t", "sm_80")
    assert wrong_kernel.exit_code == wrong_target.exit_code == 2
    assert "kernel must be one of" in wrong_kernel.output
    assert "target must be one of" in wrong_target.output
    nothing_to_do = run("build", "blackwell_dq", "blackwell_forward", "-t", "sm_90a")
    assert nothing_to_do.exit_code == 2
    said = " ".join(nothing_to_do.output.replace("│", " ").split())
    assert "target must be one of ['sm_100a', 'sm_103a'] for blackwell_dq blackwell_forward, got ['sm_90a']" in said


def test_some_kernels_are_built_by_a_pattern_and_others_by_name(nvrtc, empty_cache):
    done = run("build", "hopper_fa*", "row_pass[bf16,d32]", "-t", "sm_90a", "-t", "sm_100a")
    assert done.exit_code == 0, done.output
    for name in ("hopper_factors", "row_pass[bf16,d32]"):
        assert name in done.output
    assert "3 compiled, 0 cached, 0 failed" in done.output


def test_the_cache_is_named_whatever_it_is_called(nvrtc, tmp_path, monkeypatch):
    folder = tmp_path / "[/red] [bold]"
    monkeypatch.setenv("FLAMIA_CACHE_DIR", str(folder))
    done = run("build", "formats", "-t", "sm_90a")
    assert done.exit_code == 0 and f"cache {folder}" in done.output


def test_a_cache_that_cannot_be_written_is_a_message(nvrtc, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLAMIA_CACHE_DIR", str(tmp_path / "file"))
    done = run("build", "formats", "-t", "sm_90a")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "set FLAMIA_CACHE_DIR to a folder that can" in done.output


def test_a_measurement_without_a_gpu_is_a_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    done = run("bandwidth")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "the measurement needs a GPU" in done.output and "flamia doctor" in done.output


def test_inspect_counts_instructions(nvrtc, cold_cache):
    need_nvdisasm()
    done = run("inspect", "formats", "-t", "sm_100a", "--full", "--sass", "--ptx")
    assert done.exit_code == 0, done.output
    assert "instructions:" in done.output
    assert "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C" in done.output
    assert ".visible .entry convert(" in done.output


def test_inspect_without_a_disassembler_says_so(nvrtc, cold_cache, monkeypatch):
    def missing():
        raise disassembly.DisassemblerNotFoundError("nvdisasm was not found: " + disassembly.INSTALL)

    monkeypatch.setattr(disassembly, "find_nvdisasm", missing)
    done = run("inspect", "formats", "-t", "sm_90a")
    assert done.exit_code == 0
    assert "no instruction histogram: nvdisasm was not found: pip install nvidia-cuda-nvdisasm" in done.output


def test_native_conversions_are_used_where_the_target_has_them(nvrtc, cold_cache):
    unit = registry.FORMATS.unit()
    blackwell = build(unit, targets.SM_100A).ptx.read_text()
    hopper = build(unit, targets.SM_90A).ptx.read_text()
    assert "cvt.rn.satfinite.e4m3x2.f32" in hopper and "cvt.rn.satfinite.e4m3x2.f32" in blackwell
    for narrow in ("cvt.rn.satfinite.e2m1x2.f32", "cvt.rp.satfinite.ue8m0x2.f32"):
        assert narrow in blackwell
        assert narrow not in hopper


def test_loads_of_the_quantizer_are_16_bytes_wide(nvrtc, cold_cache):
    need_nvdisasm()
    for kernel in (registry.QUANTIZE, registry.ROW_PASS):
        artifact = build(kernel.unit(element="bf16", dim=128), targets.SM_90A)
        found = disassembly.count_instructions(disassembly.disassemble(artifact.cubin))
        assert set(found) == {entry.name for entry in kernel.entries}
        for counts in found.values():
            grouped = disassembly.group_opcodes(counts)
            assert grouped["LDGSTS.128"] >= 8, "copies to shared memory"
            assert grouped["LDS.128"] >= 4
            assert not any(opcode.startswith(("LDL", "STL")) for opcode in grouped), "local memory"


def test_opcodes_are_counted_and_grouped():
    sass = (
        ".text.f:\n        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;\n"
        "        /*0010*/              @!P0 LDG.E.64.CONSTANT R8, desc[UR4][R2.64] ;\n"
        "        /*0020*/                   FADD R1, R2, R3 ;\n        /*0030*/                   NOP;\n"
        ".text.g:\n        /*0000*/              @P1 EXIT ;\n"
    )
    counts = disassembly.count_instructions(sass)
    assert counts == {"f": Counter({"LDG.E.128": 1, "LDG.E.64.CONSTANT": 1, "FADD": 1}), "g": Counter({"EXIT": 1})}
    assert disassembly.group_opcodes(counts["f"]) == Counter({"LDG.128": 1, "LDG.64": 1, "FADD": 1})
