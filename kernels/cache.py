"""The cache of compiled kernels on disk.

An entry is a folder whose name is a hash of everything that determines its content. It is written beside its
place and then renamed, so that it exists as a whole or not at all: processes that build the same kernel at
once all succeed, and the first one's files stay. A folder whose files do not have their recorded hashes (a
full disk, a copy that broke off) counts as absent and is replaced.

What a process leaves behind that is killed while it writes is taken away by later ones, `DRAFT_SECONDS` after.

The cache lies in ``FLAMIA_CACHE_DIR``, else in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``;
``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows) under ``flamia``. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"
"""File of an entry that holds the SHA-256 of its other files."""

DRAFT, BROKEN = ".draft", ".broken"
"""Suffixes of folders beside the entries: one that is being written, one that is being taken away."""

DRAFT_SECONDS = 3600.0
"""Age from which nobody writes to such a folder any more."""


def cache_dir() -> Path:
    """Where the cache lies, see the top of this file; not created by asking.

    :raises OSError: naming ``FLAMIA_CACHE_DIR``, where the user has no home folder, or another one is unknown.
    """
    chosen = os.environ.get("FLAMIA_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser()
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"FLAMIA_CACHE_DIR must be a folder, got {chosen!r}, and {error}") from error
    return Path(base) / "flamia"


def hash_key(parts: Mapping[str, object]) -> str:
    """SHA-256 of named JSON values, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_entry(key: str) -> Path | None:
    """The folder of ``key`` if it is there and whole."""
    folder = _place(key)
    return folder if _is_whole(folder) else None


def publish_entry(key: str, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` as the entry of ``key`` unless another process has just done so; return its folder.

    :raises OSError: naming the folder, when it cannot be written.
    """
    place = _place(key)
    draft = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place.parent)
        draft = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-", suffix=DRAFT, dir=place.parent))
        for name, data in files.items():
            (draft / name).write_bytes(data)
        hashes = {name: _digest(data) for name, data in files.items()}
        (draft / MANIFEST).write_text(json.dumps(hashes, indent=1))
        draft.chmod(0o755)
        _rename(draft, place)
    except OSError as error:
        raise OSError(
            f"the kernel cache {place.parent} cannot be written ({error}): set FLAMIA_CACHE_DIR to a folder that can"
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
    return place


def _rename(draft: Path, place: Path) -> None:
    """Make ``draft`` the entry at ``place``, unless there is a whole one; a broken one makes way."""
    for tries_left in reversed(range(10)):  # as many other processes may damage or replace it meanwhile
        try:
            draft.rename(place)
            return
        except OSError:
            if _is_whole(place):
                return
            if not tries_left:
                raise
            if os.path.lexists(place):
                _discard(place)


def _place(key: str) -> Path:
    return cache_dir() / "kernels" / key[:2] / key[2:34]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / MANIFEST).read_bytes())
        if not isinstance(hashes, dict) or not hashes:
            return False
        return all(_digest((folder / name).read_bytes()) == digest for name, digest in hashes.items())
    except (OSError, ValueError):
        return False


def _discard(place: Path) -> None:
    """Take a broken entry away, under another name first, so that no one sees half of it removed."""
    grave = Path(tempfile.mkdtemp(suffix=BROKEN, dir=place.parent))
    try:
        place.rename(grave / "entry")
        if _is_whole(grave / "entry"):  # another process has replaced it meanwhile
            (grave / "entry").rename(place)
    except OSError:
        pass  # another process took it, or made the next one
    shutil.rmtree(grave, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Take away what processes have left in ``folder`` that were killed while they wrote there."""
    for left in folder.iterdir():
        if left.suffix in (DRAFT, BROKEN):
            try:
                stale = time.time() - left.stat().st_mtime > DRAFT_SECONDS
            except OSError:
                continue  # its process has just renamed it
            if stale:
                shutil.rmtree(left, ignore_errors=True)
