"""Peak memory of a long document, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

GOAL_BYTES = 1_000_000_000
"""Goal: the whole process stays below this."""

PROGRAM = """
import json, resource, sys, time
import numpy as np
from ml_dtypes import bfloat16
from flamia.reference import attention_backward, attention_forward

def peak():
    try:  # Linux's ru_maxrss is inherited from the process that forked this one
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except OSError:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else 1024 * size

tokens, dim = map(int, sys.argv[1:])
imported = peak()
rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((tokens, 1, dim), np.float32).astype(bfloat16) for _ in range(4))
start = time.perf_counter()
forward = attention_forward(q, k, v, [0, tokens])
attention_backward(dout, forward)
print(json.dumps([imported, peak(), time.perf_counter() - start]))
"""


@dataclass(frozen=True)
class PeakMemory:
    """Resident bytes of a process that runs forward and backward of one causal document and head.

    :param imported: before the inputs are made.
    :param peak: at most.
    :param inputs: of q, k, v and dout in bfloat16.
    """

    tokens: int
    head_dim: int
    imported: int
    peak: int
    inputs: int
    seconds: float

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.peak < GOAL_BYTES


def measure_memory(tokens: int = 16384, head_dim: int = 128) -> PeakMemory:
    """Run MXFP8 in the ideal profile on ``tokens`` tokens.

    :raises RuntimeError: if the process fails, or the system cannot tell (Windows).
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tokens), str(head_dim)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"the measuring process failed: {' '.join(last) or f'exit status {done.returncode}'}")
    imported, peak, seconds = json.loads(done.stdout)
    return PeakMemory(tokens, head_dim, imported, peak, 4 * 2 * tokens * head_dim, seconds)
