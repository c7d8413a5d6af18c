"""Machine code as text and as a histogram of instructions, by NVIDIA's ``nvdisasm``.

``nvdisasm`` is looked for in the ``nvidia-cuda-nvdisasm`` package, then in ``PATH``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from flamia.kernels.nvrtc import package_folders

INSTALL = "pip install nvidia-cuda-nvdisasm"

_ENTRY = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


class DisassemblerNotFoundError(RuntimeError):
    """No nvdisasm on this machine."""


def find_nvdisasm() -> str:
    """Path of nvdisasm.

    :raises DisassemblerNotFoundError: in one sentence that says how to get it.
    """
    for folder in package_folders("bin"):
        for name in ("nvdisasm", "nvdisasm.exe"):
            if (folder / name).is_file():
                return str(folder / name)
    found = shutil.which("nvdisasm")
    if found is None:
        raise DisassemblerNotFoundError(f"nvdisasm was not found: {INSTALL}")
    return found


def disassemble(cubin: Path) -> str:
    """The machine code of a cubin as SASS text.

    :raises DisassemblerNotFoundError: see `find_nvdisasm`.
    """
    done = subprocess.run([find_nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed on {cubin}: {done.stderr.strip()}")
    return done.stdout


def count_instructions(sass: str) -> dict[str, Counter[str]]:
    """Static instruction counts of each entry by full opcode (``LDG.E.128.CONSTANT``), padding NOPs left out."""
    parts = _ENTRY.split(sass)[1:]
    counts = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        counts[name] = Counter(op for op in _INSTRUCTION.findall(text) if op != "NOP")
    return counts


MEMORY = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS")
"""Opcodes that are grouped with their width."""


def group_opcodes(counts: Counter[str]) -> Counter[str]:
    """Counts by the opcode's first word; of loads and stores also by their width in bits, where it is above 32."""
    out: Counter[str] = Counter()
    for opcode, number in counts.items():
        first, *rest = opcode.split(".")
        widths = [word for word in rest if word in ("64", "128", "256")] if first in MEMORY else []
        out[".".join([first, *widths])] += number
    return out
