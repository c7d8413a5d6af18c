"""The cache on disk: whole entries only, whatever other processes do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flamia.kernels import cache

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


@pytest.mark.parametrize("damage", ["cut", "missing file", "no manifest", "bad manifest"])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(empty_cache, damage):
    key = cache.hash_key({"x": 3})
    folder = cache.publish_entry(key, FILES)
    if damage == "cut":
        (folder / "a").write_bytes(b"fir")
    elif damage == "missing file":
        (folder / "b").unlink()
    elif damage == "no manifest":
        (folder / cache.MANIFEST).unlink()
    else:
        (folder / cache.MANIFEST).write_text("{")
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


def test_processes_that_build_the_same_kernel_at_once_all_succeed(nvrtc, empty_cache):
    import time

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
