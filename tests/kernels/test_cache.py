"""The cache on disk: whole entries only, whatever other processes do."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flamia.kernels import cache, registry, targets
from flamia.kernels.build import build

ROOT = Path(__file__).resolve().parents[2]

FILES = {"a": b"first", "b": b"second"}

BUILD_ONE = """
import sys, time
from flamia.kernels import build, registry, targets
while time.time() < float(sys.argv[1]):
    pass
artifact = build.build(registry.FORMATS.unit(), targets.SM_90A)
print(artifact.folder, artifact.cached, len(artifact.cubin.read_bytes()))
"""


def entries(folder):
    return [p for p in folder.glob("kernels/*/*")]


def test_an_entry_is_found_as_it_was_published(empty_cache):
    key = cache.hash_key({"x": 1})
    assert cache.find_entry(key) is None
    folder = cache.publish_entry(key, FILES)
    assert cache.find_entry(key) == folder
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert entries(empty_cache) == [folder], "drafts are left behind"


def test_the_first_of_two_equal_entries_stays(empty_cache):
    key = cache.hash_key({"x": 2})
    first = cache.publish_entry(key, FILES)
    stamp = (first / "a").stat().st_mtime_ns
    assert cache.publish_entry(key, FILES) == first
    assert (first / "a").stat().st_mtime_ns == stamp
    assert entries(empty_cache) == [first]


MANIFESTS = {"broken off": "{", "of no files": "{}", "a list": "[]", "null": "null", "of numbers": '{"a": 1}'}


@pytest.mark.parametrize("damage", ["cut", "missing file", "no manifest", "a file", *MANIFESTS])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(empty_cache, damage):
    key = cache.hash_key({"x": 3})
    folder = cache.publish_entry(key, FILES)
    if damage == "cut":
        (folder / "a").write_bytes(b"fir")
    elif damage == "missing file":
        (folder / "b").unlink()
    elif damage == "no manifest":
        (folder / cache.MANIFEST).unlink()
    elif damage == "a file":
        folder.rename(folder.parent / "moved")
        (folder.parent / "moved").rename(empty_cache / "moved")
        folder.write_text("where a folder should be")
    else:
        (folder / cache.MANIFEST).write_text(MANIFESTS[damage])
    assert cache.find_entry(key) is None
    cache.publish_entry(key, FILES)
    assert cache.find_entry(key) == folder
    assert (folder / "a").read_bytes() == b"first"
    assert entries(empty_cache) == [folder]


def test_keys_differ_when_a_part_differs():
    keys = {cache.hash_key(parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": [1]})}
    assert len(keys) == 5
    assert cache.hash_key({"a": 1, "b": 2}) == cache.hash_key({"b": 2, "a": 1})


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("FLAMIA_CACHE_DIR", str(blocked))
    with pytest.raises(OSError, match="set FLAMIA_CACHE_DIR to a folder that can"):
        cache.publish_entry(cache.hash_key({"x": 4}), FILES)


def test_a_full_disk_says_what_to_do_and_leaves_nothing(empty_cache, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device.*set FLAMIA_CACHE_DIR to a folder that can"):
        cache.publish_entry(cache.hash_key({"x": 5}), FILES)
    assert entries(empty_cache) == []


def test_a_cache_that_is_only_readable_serves_what_it_holds(nvrtc, empty_cache, monkeypatch):
    unit = registry.FORMATS.unit()
    first = build(unit, targets.SM_90A)

    def read_only(*arguments, **named):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    assert build(unit, targets.SM_90A).folder == first.folder
    with pytest.raises(OSError, match=f"the kernel cache {empty_cache}.* cannot be written .*Read-only file system"):
        build(registry.DECODE.unit(), targets.SM_90A)


@pytest.mark.parametrize("name", ["with space", "Gedächtnis/漢字", "a\nb", "#;'[x]"])
def test_any_folder_can_be_the_cache(nvrtc, tmp_path, monkeypatch, name):
    monkeypatch.setenv("FLAMIA_CACHE_DIR", str(tmp_path / name))
    artifact = build(registry.FORMATS.unit(), targets.SM_90A)
    assert artifact.cubin.is_relative_to(tmp_path / name)
    assert build(registry.FORMATS.unit(), targets.SM_90A).cached


def test_a_home_folder_that_cannot_be_found_is_a_message(monkeypatch):
    monkeypatch.setenv("FLAMIA_CACHE_DIR", "~no_such_user_here/cache")
    with pytest.raises(OSError, match=r"^FLAMIA_CACHE_DIR must be a folder, got '~no_such_user_here/cache'"):
        cache.cache_dir()

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLAMIA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OSError, match=r"^FLAMIA_CACHE_DIR must be a folder, got None, and Could not determine home"):
        cache.cache_dir()


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.ptx", "report.json"])
def test_a_cut_file_is_built_again(nvrtc, empty_cache, file):
    unit = registry.FORMATS.unit()
    first = build(unit, targets.SM_90A)
    whole = (first.folder / file).read_bytes()
    (first.folder / file).write_bytes(whole[: len(whole) // 2])
    second = build(unit, targets.SM_90A)
    assert not second.cached and second.folder == first.folder
    assert len((first.folder / file).read_bytes()) >= len(whole) // 2 + 1
    assert build(unit, targets.SM_90A).cached


KILLED = """
import os, signal
from pathlib import Path
from flamia.kernels import build, registry, targets
Path.rename = lambda draft, to: os.kill(os.getpid(), signal.SIGKILL)
build.build(registry.FORMATS.unit(), targets.SM_90A)
"""


def test_what_a_killed_process_leaves_is_taken_away(nvrtc, empty_cache):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, env=environment, check=False, timeout=100)
    assert killed.returncode == -9
    (left,) = entries(empty_cache)
    assert left.suffix == cache.DRAFT and (left / cache.MANIFEST).exists()
    artifact = build(registry.FORMATS.unit(), targets.SM_90A)
    assert not artifact.cached and left.exists(), "another process may still be writing it"
    old = time.time() - 2 * cache.DRAFT_SECONDS
    os.utime(left, (old, old))
    (artifact.folder / cache.MANIFEST).unlink()
    build(registry.FORMATS.unit(), targets.SM_90A)
    assert entries(empty_cache) == [artifact.folder]


@pytest.mark.parametrize("before", ["nothing", "a broken entry"])
def test_processes_that_build_the_same_kernel_at_once_all_succeed(nvrtc, empty_cache, before):
    if before != "nothing":
        (build(registry.FORMATS.unit(), targets.SM_90A).folder / "kernel.cubin").write_bytes(b"cut")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = str(time.time() + 1.5)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_ONE, start],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=100) for process in running]
    assert [p.returncode for p in running] == [0] * 4, outputs
    folders = {out.split()[0] for out, _ in outputs}
    assert len(folders) == 1
    assert [str(p) for p in entries(empty_cache)] == list(folders), "drafts are left behind"
    manifest = json.loads((Path(folders.pop()) / cache.MANIFEST).read_text())
    assert set(manifest) == {"kernel.cubin", "kernel.ptx", "report.json"}
