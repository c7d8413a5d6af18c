"""What a chip gave, in brief: the file ``h200.json``, with which the simulator is compared where there is no chip.

It holds a digest for every row of every output (every 32nd part where it has many rows), so that a difference is
narrowed down to an instruction form; a file that `Run.write` made on a chip names the coordinate.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flamia.conformance.simulator.agreement.case import Array, Kernel
from flamia.conformance.simulator.agreement.results import Run, Verdict

RECORD = Path(__file__).with_name("h200.json")


@dataclass(frozen=True)
class Record:
    """Digests of the outputs of one run on a chip.

    :param place: the chip and its driver. :param seed: of the inputs.
    :param ptx: kernel -> SHA-256 of its PTX. :param rows: kernel -> output -> digest of each part.
    """

    place: str
    compiler: str
    seed: int
    ptx: dict[str, str]
    rows: dict[str, dict[str, list[str]]]

    @classmethod
    def of(cls, run: Run) -> Record:
        """The digests of a run."""
        rows = {
            k: {name: [_digest(part) for part in _parts(x)] for name, x in found.items()}
            for k, found in run.outputs.items()
        }
        return cls(run.place, run.compiler, run.seed, dict(run.digests), rows)

    def write(self, path: Path = RECORD) -> None:
        """As JSON, a kernel a line."""
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self.rows.items()))
        ptx = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self.ptx.items()))
        head = f' "place": {json.dumps(self.place)},\n "compiler": {json.dumps(self.compiler)},\n "seed": {self.seed}'
        text = f'{{\n{head},\n "ptx": {{\n{ptx}\n }},\n "rows": {{\n{rows}\n }}\n}}\n'
        path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path = RECORD) -> Record:
        """From `write`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def compare(self, kernel: Kernel, got: Run) -> Verdict:
        """The outputs of a kernel against the record; the first difference names the part."""
        size = sum(int(np.prod(o.shape)) for o in kernel.outputs)
        why = got.errors.get(kernel.name, "was not run") if kernel.name not in got.outputs else ""
        if kernel.name not in self.rows:
            why = f"{self.place} has no record of it"
        if got.seed != self.seed:
            why = f"the record has inputs of seed {self.seed}, the run of seed {got.seed}"
        if why:
            return Verdict(kernel.name, kernel.family, kernel.exact, 0, 0, why)
        differing, first = 0, ""
        for output in kernel.outputs:
            array, known = got.outputs[kernel.name][output.name], self.rows[kernel.name][output.name]
            parts = _parts(array)
            wrong = [i for i, part in enumerate(parts) if _digest(part) != known[i]]
            differing += sum(parts[i].size for i in wrong)
            if wrong and not first:
                label = f", {output.labels[wrong[0]]}" if output.labels else ""
                first = (
                    f"{kernel.name}.{output.name}: {len(wrong)} of {len(known)} parts differ, part {wrong[0]}{label}"
                )
        return Verdict(kernel.name, kernel.family, kernel.exact, size, differing, first)


def _parts(array: Array) -> list[Array]:
    """The rows of an output, or 32 pieces where it has many."""
    return list(array) if len(array) <= 64 else np.array_split(array, 32)


def _digest(row: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()[:12]
