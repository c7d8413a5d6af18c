"""Results of a run of the kernels, as a file, and their comparison.

A file is an ``.npz``: an array ``<kernel>/<output>`` per output and the text ``meta`` in JSON: where the run was made,
the seed, and per kernel its PTX digest, its time and what went wrong.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flamia.conformance.comparison import as_bits
from flamia.conformance.simulator.agreement.case import Array, Kernel


@dataclass
class Run:
    """What came out of the kernels in one place.

    :param place: ``simulator``, or the chip and its driver.
    :param outputs: kernel -> output -> array.
    :param digests: kernel -> SHA-256 of its PTX.
    :param seconds: kernel -> time of the launch.
    :param errors: kernel -> why it has no outputs.
    """

    place: str
    seed: int = 0
    compiler: str = ""
    outputs: dict[str, dict[str, Array]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Into an ``.npz``."""
        meta = {k: v for k, v in vars(self).items() if k != "outputs"}
        arrays = {f"{k}/{name}": x for k, found in self.outputs.items() for name, x in found.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> Run:
        """From an ``.npz`` that `write` made."""
        with np.load(path) as file:
            run = cls(**json.loads(str(file["meta"])))
            for key in file.files:
                if key != "meta":
                    kernel, _, name = key.partition("/")
                    run.outputs.setdefault(kernel, {})[name] = file[key]
        return run

    def merge(self, other: Run) -> None:
        """Take over the kernels of another run of the same place and seed."""
        for name in ("outputs", "digests", "seconds", "errors"):
            getattr(self, name).update(getattr(other, name))
        self.compiler = self.compiler or other.compiler


@dataclass(frozen=True)
class Verdict:
    """One kernel in two places.

    :param values: numbers compared. :param differing: of them, how many differ in a bit.
    :param first: the first difference, or why nothing could be compared. :param worst: units in the last place of the
        largest difference, for kernels that are not exact.
    """

    kernel: str
    family: str
    exact: bool
    values: int
    differing: int
    first: str = ""
    worst: float = 0.0

    @property
    def agrees(self) -> bool:
        """Every bit is equal."""
        return not self.first and not self.differing

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def digest(arrays: dict[str, Array]) -> str:
    """SHA-256 of outputs, in order of name."""
    state = hashlib.sha256()
    for name in sorted(arrays):
        state.update(np.ascontiguousarray(arrays[name]).tobytes())
    return state.hexdigest()


def compare(kernel: Kernel, got: Run, expected: Run) -> Verdict:
    """The outputs of a kernel in two runs, bit for bit; NaN payloads count."""
    size = sum(int(np.prod(o.shape)) for o in kernel.outputs)
    for run in (got, expected):
        if kernel.name not in run.outputs:
            reason = run.errors.get(kernel.name, "was not run")
            return Verdict(kernel.name, kernel.family, kernel.exact, 0, 0, f"{run.place}: {reason}")
    differing, first, worst = 0, "", 0.0
    for output in kernel.outputs:
        a, b = (run.outputs[kernel.name][output.name] for run in (got, expected))
        bits_a, bits_b = as_bits(a), as_bits(b)
        wrong = bits_a != bits_b
        differing += int(np.count_nonzero(wrong))
        if not kernel.exact:
            worst = max(worst, _ulps(a, b))
        if wrong.any() and not first:
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
            first = _describe(kernel, output.name, output.labels, at, bits_a[at], bits_b[at], got, expected)
    return Verdict(kernel.name, kernel.family, kernel.exact, size, differing, first, worst)


def _describe(
    kernel: Kernel,
    name: str,
    labels: tuple[str, ...],
    at: tuple[int, ...],
    mine: Any,
    theirs: Any,
    got: Run,
    expected: Run,
) -> str:
    digits = 2 * mine.dtype.itemsize
    text = f"{kernel.name}.{name}{list(at)}: {got.place} 0x{mine:0{digits}x}, {expected.place} 0x{theirs:0{digits}x}"
    if labels:
        text += f"; {labels[at[0]]}"
    if labels and len(at) == 2:
        drawn = {k: x for k, x in kernel.draw(got.seed).items() if x.ndim == 1 and x.size > at[1]}
        shown = (f"{k} = 0x{int(as_bits(x)[at[1]]):0{2 * x.dtype.itemsize}x}" for k, x in drawn.items())
        text += f" of {', '.join(shown)}"
    return text


def _ulps(a: Array, b: Array) -> float:
    """The largest distance in steps of the FP32 number line; NaN against a number counts as infinite."""
    if a.dtype != np.float32:
        return float("inf") if (as_bits(a) != as_bits(b)).any() else 0.0
    nan = np.isnan(a) | np.isnan(b)
    if (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    lines = []
    for x in (a[~nan], b[~nan]):
        bits = x.view(np.int32).astype(np.int64)
        lines.append(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    return float(np.abs(lines[0] - lines[1]).max(initial=0))
