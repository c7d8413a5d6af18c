"""Tables of the simulator, and the timeline of its example, made from the code when pages are built.

``.. simulator:: faults``, and likewise ``agreement``, ``forms``, ``mutations``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from literal_tables import list_table
from sphinx.util.docutils import SphinxDirective

from flamia.conformance.simulator.agreement.kernels import KERNELS
from flamia.conformance.simulator.agreement.record import Record
from flamia.conformance.simulator.examples.gemm import VARIANTS, gemm_case
from flamia.conformance.simulator.machine.faults import Fault
from flamia.conformance.simulator.tools import draw_timeline


def subclasses(kind: type) -> Iterator[type]:
    """Every class below, in order of definition."""
    for found in kind.__subclasses__():
        yield found
        yield from subclasses(found)


def fault_rows() -> list[list[str]]:
    rows = [[f"``{k.__name__}``", " ".join((k.__doc__ or "").split())] for k in subclasses(Fault)]
    return [["fault", "what it says"], *sorted(rows)]


def agreement_rows() -> list[list[str]]:
    """One row per family: kernels, forms and values."""
    record = Record.read()
    rows = [["family", "kernels", "instruction forms or outputs", "values compared", "differ"]]
    for family in dict.fromkeys(k.family for k in KERNELS.values()):
        part = [k for k in KERNELS.values() if k.family == family and k.name in record.rows]
        forms = sum(len(o.labels) or 1 for k in part for o in k.outputs)
        values = sum(_size(o.shape) for k in part for o in k.outputs)
        differ = "0" if all(k.exact for k in part) else "stand-ins, not held to bits"
        rows.append([family, str(len(part)), str(forms), f"{values:,}", differ])
    return rows


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


TABLES: dict[str, Callable[[], list[list[str]]]] = {"faults": fault_rows, "agreement": agreement_rows}


class Simulator(SphinxDirective):
    """``.. simulator:: table``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(list_table(TABLES[self.arguments[0]]()))


def draw(app: Any) -> None:
    """``_generated/simulator_timeline.svg``: the example GEMM, one seed."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    case = gemm_case(VARIANTS[0])
    report, data = case.simulate(seed=3, trace=True)
    if (wrong := data.mismatch()) is not None:
        raise RuntimeError(f"the example's product is wrong: {wrong}")
    draw_timeline(report, case.roles, folder / "simulator_timeline.svg")


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("simulator", Simulator)
    app.connect("builder-inited", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
