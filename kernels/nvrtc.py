"""NVRTC, NVIDIA's compiler as a library, called through ctypes.

It needs neither a GPU nor a driver nor a CUDA toolkit: the package ``nvidia-cuda-nvrtc`` holds all of it. One
compilation for an exact target gives both PTX and machine code (a *cubin*).

The library is looked for in this order: the path in ``FLAMIA_NVRTC``; the ``nvidia-cuda-nvrtc`` package; the
system's loader and ``CUDA_HOME`` / ``CUDA_PATH``. Its companion ``libnvrtc-builtins`` is loaded first, because
the packaged libnvrtc carries no path to it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flamia.kernels.targets import Target

INSTALL = "pip install 'nvidia-cuda-nvrtc==13.0.*'"


class NvrtcNotFoundError(RuntimeError):
    """No usable NVRTC library on this machine."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its whole log, source lines included."""


@dataclass(frozen=True)
class Compiled:
    """What one compilation gives.

    :param ptx: PTX text, without the terminating zero.
    :param cubin: ELF image of the machine code; empty where only PTX was asked for.
    :param log: the compiler's and the assembler's messages.
    """

    ptx: bytes
    cubin: bytes
    log: str


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC.

    :param path: file of the library.
    :param version: major and minor.
    :param architectures: the numbers of the architectures it compiles for: 90 for sm_90 and sm_90a.
    """

    library: ctypes.CDLL
    path: str
    version: tuple[int, int]
    architectures: tuple[int, ...]

    def compile(
        self,
        name: str,
        source: str,
        headers: Mapping[str, str],
        target: Target,
        options: Sequence[str] = (),
        ptx_only: bool = False,
    ) -> Compiled:
        """Compile one translation unit. Safe to call from several threads at once.

        :param name: file name for messages.
        :param headers: text by the name in ``#include "name"``; nothing else can be included.
        :param options: further options of NVRTC.
        :param ptx_only: the same PTX without machine code, in half the time.
        :raises CompileError: with NVRTC's log.
        """
        major, minor = target.compute_capability
        if 10 * major + minor not in self.architectures:
            raise NvrtcNotFoundError(
                f"NVRTC {self.version[0]}.{self.version[1]} at {self.path} cannot compile for {target.name}: "
                f"{INSTALL}, or set FLAMIA_NVRTC to the path of a newer libnvrtc"
            )
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
        texts = (ctypes.c_char_p * len(headers))(*(t.encode() for t in headers.values()))
        created = self.library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        self._check(created, "nvrtcCreateProgram")
        try:
            architecture = target.name.replace("sm_", "compute_") if ptx_only else target.name
            flags = [f"--gpu-architecture={architecture}", *options]
            array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
            result = self.library.nvrtcCompileProgram(program, len(flags), array)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if result:
                raise CompileError(f"NVRTC could not compile {name} for {target.name}:\n{log or self._say(result)}")
            cubin = b"" if ptx_only else self._fetch(program, "CUBIN")
            return Compiled(self._fetch(program, "PTX").rstrip(b"\0"), cubin, log)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return buffer.raw

    def _check(self, result: int, call: str) -> None:
        if result:
            raise RuntimeError(f"{call} failed: {self._say(result)}")

    def _say(self, result: int) -> str:
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return str(self.library.nvrtcGetErrorString(result).decode())


@cache
def load_nvrtc() -> Nvrtc:
    """The first NVRTC that loads, see the top of this file.

    :raises NvrtcNotFoundError: in one sentence that says how to get one.
    """
    wanted = os.environ.get("FLAMIA_NVRTC")
    candidates = [wanted] if wanted else list(_candidates())
    problem = ""
    for path in candidates:
        try:
            return _open(path)
        except (OSError, AttributeError) as error:
            problem = f" (last tried {path}: {error})"
    raise NvrtcNotFoundError(f"NVRTC was not found: {INSTALL}, or set FLAMIA_NVRTC to the path of libnvrtc{problem}")


def package_folders(*parts: str) -> Iterator[Path]:
    """Folders ``nvidia/<one of CUDA's packages>/<parts>`` of the installed NVIDIA packages, newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for package in sorted(Path(root).glob("cu[0-9]*"), reverse=True):
            yield package.joinpath(*parts)
        yield Path(root).joinpath("cuda_nvrtc", *parts)


def _candidates() -> Iterator[str]:
    patterns = ("libnvrtc.so.[0-9]*", "libnvrtc.*dylib", "nvrtc64_*_0.dll")
    folders = [*package_folders("lib"), *package_folders("bin"), *package_folders("bin", "x86_64")]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            folders += [Path(home) / "lib64", Path(home) / "bin"]
    for folder in folders:
        for pattern in patterns:
            yield from (str(p) for p in sorted(folder.glob(pattern), key=lambda p: (len(p.name), p.name)))
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found


def _open(path: str) -> Nvrtc:
    folder = Path(path).parent
    for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
        if ".alt." not in builtins.name:
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(architectures)
    return Nvrtc(library, path, (major.value, minor.value), tuple(architectures))
