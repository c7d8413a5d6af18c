"""The kernels on the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flamia.conformance.simulator.agreement.case import Kernel
from flamia.conformance.simulator.agreement.compiling import compile_kernel, digest_ptx
from flamia.conformance.simulator.agreement.results import Run
from flamia.conformance.simulator.machine.launch import simulate


def run_on_simulator(
    kernels: list[Kernel],
    seed: int,
    *,
    schedule: int = 0,
    progress: Callable[[Kernel], Any] = lambda kernel: None,
) -> Run:
    """Simulate every kernel. What a kernel raises is kept as its error.

    :param seed: of the inputs. :param schedule: of the order of warps and the delays.
    """
    run = Run("simulator", seed)
    for kernel in kernels:
        progress(kernel)
        start = time.perf_counter()
        try:
            compiled, run.compiler = compile_kernel(kernel)
            run.digests[kernel.name] = digest_ptx(compiled.ptx)
            outputs = kernel.allocate()
            simulate(
                compiled.ptx.decode(),
                "kernel",
                kernel.blocks,
                kernel.threads,
                [*kernel.draw(seed).values(), *outputs.values()],
                cluster=(kernel.cluster, 1, 1),
                shared_bytes=kernel.shared_bytes,
                seed=schedule,
            )
            run.outputs[kernel.name] = outputs
        except Exception as error:
            run.errors[kernel.name] = f"{type(error).__name__}: {error}"
        run.seconds[kernel.name] = time.perf_counter() - start
    return run
