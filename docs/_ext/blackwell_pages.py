"""The Blackwell forward: its tensor-memory map, a timeline, tables of its counts and of the model, made from the code.

``.. blackwell:: counts``, and likewise ``model`` and ``faults``.
"""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from docutils import nodes
from literal_tables import list_table
from ml_dtypes import bfloat16
from sphinx.util.docutils import SphinxDirective

from flamia.conformance.simulator.attention import ROLES, Build, Operands, run_forward, sources
from flamia.conformance.simulator.forward_model import predict, read_counts
from flamia.conformance.simulator.tools import draw_timeline

ROOT = Path(__file__).parents[2]


def constant(name: str) -> int:
    """A number of layout.cuh."""
    found = re.search(rf"\b{name} = (\d+)", sources()["blackwell/layout.cuh"])
    if found is None:
        raise RuntimeError(f"layout.cuh has no {name}")
    return int(found[1])


def regions(dim: int) -> list[tuple[int, int, str, int]]:
    """First column, columns, label, depth of everything in tensor memory."""
    out = []
    for i in range(2):
        s = 128 * i
        out.append((s, 128, f"S{i}", 0))
        inside = [
            (0, 32, "P"),
            (constant("ONE_SCALE_COLUMN"), 4, ""),
            (constant("P_SCALE_COLUMN"), 4, ""),
            (constant("V_SCALE_COLUMN"), 4, ""),
        ]
        inside += [
            (constant("Q_SCALE_COLUMN"), 16, f"Q K\nof S{1 - i}"),
            (constant("FOLDED_COLUMN"), 32, "P'"),
            (112, 4, ""),
        ]
        if dim == 128:
            inside.append((constant("L_IN_S"), constant("L_COLUMNS"), "l"))
        out += [(s + at, width, label, 1) for at, width, label in inside]
        out.append((256 + dim * i, dim, f"O{i}", 0))
        if dim == 64:
            out.append((256 + 2 * dim + 16 * i, constant("L_COLUMNS"), f"l{i}", 0))
    return out


def draw_map(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(11, 3.4), constrained_layout=True)
    for axis, dim in zip(axes, (128, 64), strict=True):
        for at, width, label, depth in regions(dim):
            color = "#d98032" if depth else "#2f6f9f" if label[0] in "SO" else "#5a9f5a"
            box = plt.Rectangle((at, 0.45 * (1 - depth)), width, 0.45, facecolor=color, edgecolor="white", lw=0.8)
            axis.add_patch(box)
            axis.text(
                at + width / 2, 0.45 * (1 - depth) + 0.22, label, ha="center", va="center", fontsize=7, color="white"
            )
        axis.set(xlim=(0, 512), ylim=(0, 0.92), yticks=[], xticks=range(0, 513, 64), title=f"head_dim {dim}")
        axis.tick_params(labelsize=7)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def draw_steady_state(path: Path) -> None:
    """Two work items of two query tiles against four key tiles each, full attention."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((512, 1, 128), np.float32).astype(bfloat16) for _ in range(3))
    operands = Operands.of(q, k, v, [0, 512], "mxfp8", False)
    report = run_forward(Build(hooks=0), operands, seed=5, trace=True, longest_delay=4).report
    draw_timeline(report, {**ROLES, "idle": (14, 15)}, path)


def counts_rows() -> list[list[str]]:
    rows = [["target", "recipe", "head_dim", "exp2", "registers", "spills", "shared memory", "machine code",
             "softmax instructions per element", "per tile and row"]]  # fmt: skip
    for c in read_counts():
        top = ", ".join(f"{n} {name}" for name, n in c.softmax.most_common(8))
        rows.append([c.target, c.recipe, str(c.dim), c.exp2, str(c.registers), str(c.spills), f"{c.shared_bytes:,}",
                     f"{c.code_bytes:,}", f"{c.softmax.total() / 128:.2f}", top])  # fmt: skip
    return rows


def model_rows() -> list[list[str]]:
    rows = [["target", "recipe", "head_dim", "exp2", "tensor core", "shared memory", "issue", "FP32", "ALU", "MUFU",
             "chain", "clocks per tile", "PFLOP/s (model)", "ceiling (model)"]]  # fmt: skip
    for c in read_counts():
        p = predict(c.target, c.softmax, c.dim, c.recipe != "mxfp8")
        units = [f"{p.units[name]:.0f}" for name in ("tensor core", "shared memory", "issue", "FP32", "ALU", "MUFU")]
        rows.append([c.target, c.recipe, str(c.dim), c.exp2, *units, f"{p.chain:.0f}", f"{p.clocks:.0f}",
                     f"{p.petaflops(c.dim, p.clocks):.2f}", f"{p.petaflops(c.dim, p.ceiling):.2f}"])  # fmt: skip
    return rows


def fault_rows() -> list[list[str]]:
    path = ROOT / "tests/blackwell/faults.py"
    spec = importlib.util.spec_from_file_location("planted_in_blackwell", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [["planted", "found as one of"], *([f.name, ", ".join(f.found)] for f in module.FAULTS)]


TABLES = {"counts": counts_rows, "model": model_rows, "faults": fault_rows}


class Blackwell(SphinxDirective):
    """``.. blackwell:: table``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(list_table(TABLES[self.arguments[0]]()))


def draw(app: Any) -> None:
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    draw_map(folder / "blackwell_tensor_memory.svg")
    draw_steady_state(folder / "blackwell_timeline.svg")


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("blackwell", Blackwell)
    app.connect("builder-inited", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
