"""Compilation without a GPU: every unit for every target, limits, errors, and the report of a build."""

import re
import time
from dataclasses import replace

import pytest

from flamia.kernels import build as build_module
from flamia.kernels import cache, nvrtc, registry, targets
from flamia.kernels.build import BuildError, build, build_all
from flamia.kernels.registry import Entry, Kernel, find_units


def small_kernel(tmp_path, text, **limits):
    """A kernel from source text, with an entry ``f`` of 32 threads."""
    path = tmp_path / "small.cu"
    path.write_text(text)
    entry = replace(Entry("f", threads=(32,), max_registers=255), **limits)
    return Kernel("small", "for this test", str(path), params=8, entries=(entry,))


SMALL = 'extern "C" __global__ void __launch_bounds__(32) f(float* x) { x[threadIdx.x] = 1.0f; }\n'

SPILLING = """
extern "C" __global__ void __launch_bounds__(32) f(float* x) {
  float held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] += held[int(x[i]) & 63];
}
"""


@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda t: t.name)
def test_every_unit_compiles_within_its_limits(nvrtc, cold_cache, target):
    results = list(build_all(find_units(), [target]))
    assert len(results) == len([unit for unit in find_units() if target in unit.kernel.targets])
    for unit, _, result in results:
        assert not isinstance(result, Exception), f"{unit.name}: {result}"
        assert {e.name for e in result.entries} == {e.name for e in unit.kernel.entries_of(target)}
        for e in result.entries:
            assert e.spill_bytes == e.stack_bytes == 0
            assert 0 < e.registers <= 255 and e.code_bytes > 0 and e.threads % 32 == 0
        assert result.cubin.read_bytes()[:4] == b"\x7fELF"
        assert f".target {target.name}" in result.ptx.read_text()


def test_the_longest_start_first_and_results_come_in_order(monkeypatch, nvrtc):
    started = []
    monkeypatch.setattr(build_module, "build", lambda unit, target: started.append(unit) or (unit, target))
    units = find_units(["formats", "hopper_forward", "schedule", "blackwell_backward"])
    results = list(build_all(units, targets.TARGETS, jobs=1))
    assert [result for *_, result in results] == [(u, t) for u in units for t in u.kernel.targets]
    seconds = [unit.kernel.seconds for unit in started]
    assert seconds == sorted(seconds, reverse=True) and started[0].kernel is registry.HOPPER_FORWARD


def test_as_many_builds_at_once_as_the_process_may_use_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert build_module.count_cores() == 3


def test_an_error_of_the_cache_ends_the_build_at_once(nvrtc, monkeypatch):
    started = []

    def fail(unit, target):
        started.append(unit)
        time.sleep(0.05)
        raise OSError("the kernel cache cannot be written")

    monkeypatch.setattr(build_module, "build", fail)
    with pytest.raises(OSError, match="cannot be written"):
        list(build_all(find_units(), targets.TARGETS, jobs=1))
    assert len(started) < 10


def test_a_second_build_comes_from_the_cache_with_the_same_bytes(nvrtc, cold_cache):
    unit = registry.FORMATS.unit()
    first = build(unit, targets.SM_90A)
    second = build(unit, targets.SM_90A)
    assert second.cached
    assert first.cubin.read_bytes() == second.cubin.read_bytes()
    assert first.entries == second.entries


def test_the_key_follows_every_header(nvrtc, empty_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SOURCES", tmp_path)
    (tmp_path / "deep.cuh").write_text("#define VALUE 1.0f\n")
    (tmp_path / "top.cuh").write_text('#include "deep.cuh"\n')
    (tmp_path / "small.cu").write_text('#include "top.cuh"\n' + SMALL.replace("1.0f", "VALUE"))
    unit = Kernel("small", "", "small.cu", 8, (Entry("f", (32,), 255),)).unit()
    first = build(unit, targets.SM_90A)
    (tmp_path / "deep.cuh").write_text("#define VALUE 2.0f\n")
    second = build(unit, targets.SM_90A)
    assert not second.cached
    assert first.key != second.key
    assert first.ptx.read_bytes() != second.ptx.read_bytes()


@pytest.mark.parametrize("dim", [32, 96, 160, 192, 224, 256])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_other_head_dims_compile_on_demand_without_spills(nvrtc, cold_cache, dim, element):
    for kernel in (registry.QUANTIZE, registry.ROW_PASS):
        artifact = build(kernel.unit(element=element, dim=dim), targets.SM_90A)
        assert {e.spill_bytes for e in artifact.entries} == {0}


@pytest.mark.parametrize("dim", [64, 128])
def test_the_variant_that_measures_the_numerics_compiles_on_demand(nvrtc, cold_cache, dim):
    backward = {"recipe": "bf16", "dim": dim, "element": "fp32"}
    for unit in (
        registry.HOPPER_FORWARD.unit(recipe="bf16", dim=dim),
        registry.HOPPER_BACKWARD_OPERANDS.unit(recipe="bf16", dim=dim, widens=0),
        registry.HOPPER_BACKWARD_KEYS.unit(**backward, widens=0),
        registry.HOPPER_BACKWARD_DQ.unit(**backward),
    ):
        assert unit not in find_units()
        (entry,) = build(unit, targets.SM_90A).entries
        assert entry.spill_bytes == entry.stack_bytes == 0
        assert entry.registers <= unit.kernel.entries[0].max_registers


def test_spills_fail_the_build_unless_declared(nvrtc, empty_cache, tmp_path):
    with pytest.raises(BuildError, match=r"small for sm_90a: f spills: .* 256 bytes of stack per thread, 0 declared"):
        build(small_kernel(tmp_path, SPILLING).unit(), targets.SM_90A)
    artifact = build(small_kernel(tmp_path, SPILLING, spills=256).unit(), targets.SM_90A)
    assert artifact.entries[0].stack_bytes == 256


def test_registers_threads_and_entries_are_held_to_the_registry(nvrtc, empty_cache, tmp_path):
    for limits, words in [
        ({"max_registers": 2}, r"f needs \d+ registers, 2 declared"),
        ({"threads": (64,)}, r"f is bound to 32 threads, one of \(64,\) declared"),
        ({"name": "g"}, r"entries \['f'\] where \['g'\] are declared"),
    ]:
        with pytest.raises(BuildError, match=words):
            build(small_kernel(tmp_path, SMALL, **limits).unit(), targets.SM_90A)


def test_a_compile_error_shows_the_log_with_the_source_line(nvrtc, empty_cache, tmp_path):
    kernel = small_kernel(tmp_path, SMALL.replace("1.0f", "undeclared_name"))
    with pytest.raises(nvrtc_module.CompileError) as caught:
        build(kernel.unit(), targets.SM_100A)
    message = str(caught.value)
    assert message.startswith(f"NVRTC could not compile {kernel.source} for sm_100a:\n")
    assert 'small.cu(1): error: identifier "undeclared_name" is undefined' in message
    assert "x[threadIdx.x] = undeclared_name;" in message


def test_params_of_another_size_do_not_compile(nvrtc, empty_cache):
    wrong = replace(registry.FORMATS, params=registry.FORMATS.params + 8)
    with pytest.raises(nvrtc_module.CompileError, match=r"FormatsParams must match structs\.FORMATS"):
        build(wrong.unit(), targets.SM_90A)


def test_a_target_without_the_suffix_is_refused_by_the_sources(nvrtc, empty_cache):
    plain = targets.Target("sm_90", (9, 0), "")
    with pytest.raises(nvrtc_module.CompileError, match="compile for an exact target: sm_90a, sm_100a or sm_103a"):
        build(registry.FORMATS.unit(), plain)


def test_an_unknown_compute_capability_is_answered_in_one_sentence():
    with pytest.raises(ValueError) as caught:
        targets.target_for((8, 9))
    assert str(caught.value) == (
        "compute_capability 8.9 has no FLAMIA kernels; "
        "supported GPUs have one of 9.0 (H100, H200), 10.0 (B200), 10.3 (B300)"
    )
    assert targets.target_for((9, 0)) is targets.SM_90A
    assert targets.target_for((10, 3)) is targets.SM_103A


def test_a_missing_nvrtc_is_answered_in_one_sentence(monkeypatch, tmp_path):
    nvrtc_module.load_nvrtc.cache_clear()
    monkeypatch.setenv("FLAMIA_NVRTC", str(tmp_path / "libnvrtc.so"))
    try:
        with pytest.raises(nvrtc_module.NvrtcNotFoundError, match=r"pip install 'nvidia-cuda-nvrtc==13\.0\.\*'"):
            nvrtc_module.load_nvrtc()
    finally:
        nvrtc_module.load_nvrtc.cache_clear()


def test_names_find_units_and_kernels():
    assert [u.name for u in find_units(["quantize"])] == [
        "quantize[bf16,d64]",
        "quantize[bf16,d128]",
        "quantize[fp16,d64]",
        "quantize[fp16,d128]",
        "quantize[fp32,d64]",
        "quantize[fp32,d128]",
    ]
    assert find_units(["row_pass[fp32,d64]", "row_pass[fp32,d64]"]) == (registry.ROW_PASS.unit(element="fp32", dim=64),)
    for name in ("nothing", "nothing*", "quantize[bf16]", "quantize[bf16,d64", "schedule[]", "nothing[d64]", ""):
        with pytest.raises(ValueError, match=rf"kernel must be one of .*'schedule'.*, got '{re.escape(name)}'"):
            find_units([name])
    with pytest.raises(ValueError, match=r"dim must be one of \(64, 128\) or a multiple of 32 up to 256, got 80"):
        registry.QUANTIZE.unit(element="bf16", dim=80)
    with pytest.raises(ValueError, match="element must be one of"):
        registry.QUANTIZE.unit(element="int8", dim=64)


def test_a_star_stands_for_any_characters():
    names = {u.name for u in find_units(["blackwell_*", "quantize[*,d64]", "schedul*"])}
    assert {n.split("[")[0] for n in names} == {k.name for k in registry.KERNELS if k.name[0] == "b"} | {
        "quantize",
        "schedule",
    }
    assert {n for n in names if n[0] == "q"} == {"quantize[bf16,d64]", "quantize[fp16,d64]", "quantize[fp32,d64]"}
    assert find_units(["*"]) == find_units()


def test_units_that_are_not_released_are_found_by_name():
    assert find_units(["quantize[bf16,d96]"]) == (registry.QUANTIZE.unit(element="bf16", dim=96),)
    (unit,) = find_units(["blackwell_forward[mxfp8,d64,hardware,s1,h1]"])
    assert unit.name == "blackwell_forward[mxfp8,d64,hardware,s1,h1]" and unit not in unit.kernel.units
    for kernel in registry.KERNELS:
        assert find_units([u.name for u in kernel.units]) == kernel.units
    for name, words in [
        ("quantize[bf16,d80]", r"dim must be one of \(64, 128\) or a multiple of 32 up to 256, got 80"),
        ("quantize[int8,d64]", "element must be one of .*, got 'int8'"),
        ("quantize[bf16,64]", "dim must be one of .*, got '64'"),
        ("blackwell_forward[mxfp8,d64,exact,s2,h0]", r"strict must be one of .*, got 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            find_units([name])


def test_every_source_is_a_kernel_or_included_by_one():
    used = set()
    for kernel in registry.KERNELS:
        used |= {kernel.source, *kernel.units[0].headers()}
    present = {str(p.relative_to(registry.SOURCES)) for p in registry.SOURCES.rglob("*.cu*")}
    assert used == present


def test_inline_ptx_is_in_one_file_only():
    for path in registry.SOURCES.rglob("*.cu*"):
        if path.name != "ptx.cuh":
            assert not re.search(r"\basm\b", path.read_text()), path


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAMIA_CACHE_DIR", str(tmp_path))
    assert cache.cache_dir() == tmp_path
    monkeypatch.delenv("FLAMIA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache.cache_dir() == tmp_path / "xdg" / "flamia"


nvrtc_module = nvrtc  # fixtures of the same name shadow it inside the tests
