"""Builds: from a unit and a target to machine code in the cache, with a report, held to the declared limits."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from flamia.kernels.cache import find_entry, hash_key, publish_entry
from flamia.kernels.nvrtc import Compiled, CompileError, load_nvrtc
from flamia.kernels.registry import OPTIONS, Unit
from flamia.kernels.targets import Target

FORMAT = 2
"""Version of what a cache entry holds."""

CUBIN, PTX, REPORT = "kernel.cubin", "kernel.ptx", "report.json"


class BuildError(RuntimeError):
    """A kernel compiled, but is not what its registry entry declares."""


@dataclass(frozen=True)
class EntryReport:
    """What one entry of a built unit needs.

    :param registers: per thread.
    :param stack_bytes: local memory per thread.
    :param spill_bytes: spill stores and loads per thread.
    :param shared_bytes: static shared memory per CTA.
    :param dynamic_shared_bytes: dynamic shared memory per CTA that a launch must give: the constant
        ``<entry>_shared_bytes`` of the source.
    :param barriers: named barriers.
    :param threads: per CTA, the first of its ``__launch_bounds__``.
    :param ctas: per multiprocessor, the second; 0 without one.
    :param code_bytes: machine code.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    barriers: int
    threads: int
    ctas: int
    code_bytes: int


@dataclass(frozen=True)
class Artifact:
    """A built unit.

    :param folder: of the cache entry.
    :param compiler: for example ``NVRTC 13.0``.
    :param seconds: that the compilation took, when it was made.
    :param cached: whether it was there before.
    """

    unit: Unit
    target: Target
    key: str
    folder: Path
    entries: tuple[EntryReport, ...]
    compiler: str
    seconds: float
    cached: bool

    @property
    def cubin(self) -> Path:
        """The machine code."""
        return self.folder / CUBIN

    @property
    def ptx(self) -> Path:
        """The PTX."""
        return self.folder / PTX


def build(unit: Unit, target: Target) -> Artifact:
    """The machine code of ``unit`` for ``target``, from the cache or made now.

    :raises CompileError, NvrtcNotFoundError: see `nvrtc`.
    :raises BuildError: for more spills or registers than declared (registers: of released units), or other entries or
        threads.
    """
    nvrtc = load_nvrtc()
    compiler = f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}"
    options = (*OPTIONS, *unit.defines)
    source, headers = unit.source(), unit.headers()
    key = hash_key(
        {
            "format": FORMAT,
            "compiler": compiler,
            "target": target.name,
            "options": options,
            "name": unit.kernel.source,
            "source": source,
            "headers": headers,
        }
    )
    folder = find_entry(key)
    cached = folder is not None
    if folder is None:
        start = time.perf_counter()
        compiled = nvrtc.compile(unit.kernel.source, source, headers, target, options)
        seconds = time.perf_counter() - start
        report = {"seconds": round(seconds, 3), "entries": [asdict(e) for e in read_report(compiled)]}
        files = {CUBIN: compiled.cubin, PTX: compiled.ptx, REPORT: json.dumps(report, indent=1).encode()}
        folder = publish_entry(key, files)
    report = json.loads((folder / REPORT).read_bytes())
    entries = tuple(EntryReport(**e) for e in report["entries"])
    _check_limits(unit, target, entries)
    return Artifact(unit, target, key, folder, entries, compiler, float(report["seconds"]), cached)


def build_all(
    units: Iterable[Unit], targets: Iterable[Target], jobs: int | None = None
) -> Iterator[tuple[Unit, Target, Artifact | BuildError | CompileError]]:
    """`build` for every unit and each of its targets among ``targets``, in order, ``jobs`` at a time.

    Without ``jobs``, one for each core that this process may use. The longest start first, so that no core is left
    with one of them at the end. A unit that fails yields its error and does not stop the others.

    :raises NvrtcNotFoundError: see `nvrtc`.
    :raises OSError: if the cache cannot be written; no further build is begun then.
    """
    wanted = tuple(targets)
    pairs = [(u, t) for u in units for t in wanted if t in u.kernel.targets]
    load_nvrtc()

    def attempt(pair: tuple[Unit, Target]) -> Artifact | BuildError | CompileError:
        try:
            return build(*pair)
        except (BuildError, CompileError) as error:
            return error

    with ThreadPoolExecutor(jobs or count_cores()) as pool:
        longest_first = sorted(pairs, key=lambda pair: -pair[0].kernel.seconds)
        running = {pair: pool.submit(attempt, pair) for pair in longest_first}
        try:
            done, _ = wait(running.values(), return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for future in done:
            future.result()  # raises what no further build can mend: a cache that cannot be written
    for pair in pairs:
        yield *pair, running[pair].result()


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_report(compiled: Compiled) -> tuple[EntryReport, ...]:
    """Reports of the entries of a compilation: from the assembler's messages, the PTX and the ELF image."""
    ptx = compiled.ptx.decode()
    bounds = dict(re.findall(r"\.entry\s+(\w+)\s*\(([^{]*)", ptx))
    code = {n[len(".text.") :]: size for n, size in _elf_sections(compiled.cubin) if n.startswith(".text.")}
    out = []
    for part in re.split(r"Compiling entry function '", compiled.log)[1:]:
        name = part.split("'")[0]

        def number(pattern: str, text: str = part) -> int:
            return sum(int(n) for n in re.findall(pattern, text))

        out.append(
            EntryReport(
                name=name,
                registers=number(r"Used (\d+) registers"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
                shared_bytes=number(r"(\d+) bytes smem"),
                dynamic_shared_bytes=number(rf"\.u32 {name}_shared_bytes = (\d+)", ptx),
                barriers=number(r"used (\d+) barriers"),
                threads=number(r"\.maxntid (\d+)", bounds[name]),
                ctas=number(r"\.minnctapersm (\d+)", bounds[name]),
                code_bytes=code[name],
            )
        )
    return tuple(sorted(out, key=lambda e: e.name))


def _check_limits(unit: Unit, target: Target, entries: tuple[EntryReport, ...]) -> None:
    faults = []
    found = {e.name: e for e in entries}
    declared = {e.name for e in unit.kernel.entries_of(target)}
    if declared != set(found):
        faults.append(f"entries {sorted(found)} where {sorted(declared)} are declared")
    for limit in unit.kernel.entries_of(target):
        got = found.get(limit.name)
        if got is None:
            continue
        if max(got.spill_bytes, got.stack_bytes) > limit.spills:
            faults.append(
                f"{limit.name} spills: {got.spill_bytes} bytes of spills, {got.stack_bytes} bytes of stack per thread, "
                f"{limit.spills} declared"
            )
        if got.registers > limit.max_registers and unit in unit.kernel.units:
            faults.append(f"{limit.name} needs {got.registers} registers, {limit.max_registers} declared")
        if got.threads not in limit.threads:
            faults.append(f"{limit.name} is bound to {got.threads} threads, one of {limit.threads} declared")
    if faults:
        raise BuildError(f"{unit.name} for {target.name}: " + "; ".join(faults))


def _elf_sections(image: bytes) -> Iterator[tuple[str, int]]:
    """Names and sizes of the sections of a 64-bit little-endian ELF image (ELF-64 Object File Format, 1.5)."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise BuildError("NVRTC's machine code is not a 64-bit little-endian ELF image")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_index = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<2I4Q", image, table + size * i) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, _, length in headers:
        start = names + name
        yield image[start : image.index(b"\0", start)].decode(), length
