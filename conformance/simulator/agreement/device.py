"""The kernels on a real chip, through CuPy.

Each family runs in a process of its own, so that a kernel that hangs or breaks the context costs its family alone:
``python -m flamia.conformance.simulator.agreement.device FAMILY SEED FILE``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from flamia.conformance.simulator.agreement.case import Kernel
from flamia.conformance.simulator.agreement.compiling import compile_kernel, digest_ptx
from flamia.conformance.simulator.agreement.kernels import find_kernels
from flamia.conformance.simulator.agreement.results import Run

SECONDS_PER_FAMILY = 60


def run_on_device(kernels: list[Kernel], seed: int) -> Run:
    """Launch every kernel on the current CUDA device.

    :raises RuntimeError: without a device of compute capability 9.0.
    """
    place = describe_device()
    run = Run(place, seed)
    for family in dict.fromkeys(k.family for k in kernels):
        wanted = [k.name for k in kernels if k.family == family]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.npz"
            command = [sys.executable, "-m", __spec__.name, str(path), str(seed), *wanted]
            try:
                subprocess.run(command, check=True, timeout=SECONDS_PER_FAMILY, capture_output=True, text=True)
            except subprocess.TimeoutExpired:
                run.errors.update(dict.fromkeys(wanted, f"the family did not end within {SECONDS_PER_FAMILY} s"))
            except subprocess.CalledProcessError as error:
                run.errors.update(dict.fromkeys(wanted, error.stderr.strip()[-600:]))
            if path.exists():
                part = Run.read(path)
                for name in part.outputs:
                    run.errors.pop(name, None)
                run.merge(part)
    return run


def describe_device() -> str:
    """Name and driver of the current device.

    :raises RuntimeError: without one of compute capability 9.0.
    """
    import cupy

    if not cupy.is_available():
        raise RuntimeError("target h200 needs a CUDA device and CuPy; --target simulator runs anywhere")
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    if (properties["major"], properties["minor"]) != (9, 0):
        capability = f"{properties['major']}.{properties['minor']}"
        raise RuntimeError(f"target h200 needs compute capability 9.0 (H100, H200), this device has {capability}")
    return f"{properties['name'].decode()}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}"


def _run_here(kernels: list[Kernel], seed: int, path: Path) -> None:
    """All kernels in this process; the file is rewritten after each, so that what ran before an error is kept."""
    import cupy

    run = Run(describe_device(), seed)
    with tempfile.TemporaryDirectory() as folder:
        for kernel in kernels:
            try:
                compiled, run.compiler = compile_kernel(kernel)
                run.digests[kernel.name] = digest_ptx(compiled.ptx)
                cubin = Path(folder) / f"{kernel.name}.cubin"
                cubin.write_bytes(compiled.cubin)
                function = cupy.RawModule(path=str(cubin)).get_function("kernel")
                if kernel.shared_bytes:
                    function.max_dynamic_shared_size_bytes = kernel.shared_bytes
                inputs = [cupy.asarray(x) for x in kernel.draw(seed).values()]
                outputs = {name: cupy.asarray(x) for name, x in kernel.allocate().items()}
                cupy.cuda.runtime.deviceSynchronize()
                start = time.perf_counter()
                arguments = (*inputs, *outputs.values())
                function((kernel.blocks,), (kernel.threads,), arguments, shared_mem=kernel.shared_bytes)
                cupy.cuda.runtime.deviceSynchronize()
                run.seconds[kernel.name] = time.perf_counter() - start
                run.outputs[kernel.name] = {name: np.asarray(cupy.asnumpy(x)) for name, x in outputs.items()}
            except Exception as error:
                run.errors[kernel.name] = f"{type(error).__name__}: {error}"[:600]
            run.write(path)


if __name__ == "__main__":
    _run_here(find_kernels(sys.argv[3:]), int(sys.argv[2]), Path(sys.argv[1]))
