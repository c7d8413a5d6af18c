"""The cache of compiled kernels on disk.

An entry is a folder whose name is a hash of everything that determines its content. It is written beside its
place and then renamed, so that it exists as a whole or not at all: processes that build the same kernel at
once all succeed, and the first one's files stay. A folder whose files do not have their recorded hashes (a
full disk, a copy that broke off) counts as absent and is replaced.

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
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"
"""File of an entry that holds the SHA-256 of its other files."""


def cache_dir() -> Path:
    """Where the cache lies, see the top of this file; not created by asking."""
    chosen = os.environ.get("FLAMIA_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flamia"


def hash_key(parts: Mapping[str, object]) -> str:
    """SHA-256 of named JSON values, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_entry(key: str) -> Path | None:
    """The folder of ``key`` if it is there and whole."""
    folder = _place(key)
    try:
        hashes = json.loads((folder / MANIFEST).read_bytes())
        whole = all(_digest((folder / name).read_bytes()) == digest for name, digest in hashes.items())
    except (OSError, ValueError):
        return None
    return folder if whole else None


def publish_entry(key: str, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` as the entry of ``key`` unless another process has just done so; return its folder.

    :raises OSError: naming the folder, when it cannot be written.
    """
    place = _place(key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-", suffix=".draft", dir=place.parent))
    except OSError as error:
        raise OSError(
            f"the kernel cache {place.parent} cannot be written ({error}): set FLAMIA_CACHE_DIR to a folder that can"
        ) from error
    try:
        for name, data in files.items():
            (draft / name).write_bytes(data)
        hashes = {name: _digest(data) for name, data in files.items()}
        (draft / MANIFEST).write_text(json.dumps(hashes, indent=1))
        draft.chmod(0o755)
        for last_try in (False, False, True):
            try:
                draft.rename(place)
                break
            except OSError:
                if find_entry(key) is not None:
                    break
                if last_try or not place.exists():
                    raise
                _discard(place)
        return place
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _place(key: str) -> Path:
    return cache_dir() / "kernels" / key[:2] / key[2:34]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _discard(place: Path) -> None:
    """Take a broken entry away, under another name first, so that no one sees half of it removed."""
    grave = Path(tempfile.mkdtemp(suffix=".broken", dir=place.parent))
    try:
        place.rename(grave / "entry")
    except OSError:
        pass  # another process took it
    shutil.rmtree(grave, ignore_errors=True)
