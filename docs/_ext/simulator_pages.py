"""Tables of the simulator, and the timeline of its example, made from the code when pages are built.

``.. simulator:: faults``, and likewise ``agreement``, ``mutations`` and ``message``, the text of one fault.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from literal_tables import list_table
from sphinx.util.docutils import SphinxDirective

from flamia.conformance.simulator.agreement.kernels import KERNELS
from flamia.conformance.simulator.agreement.record import Record
from flamia.conformance.simulator.agreement.simulated import run_on_simulator
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
    """One row per family: kernels, forms and values; all are run here, and compared with the record of the chip."""
    record = Record.read()
    run = run_on_simulator([k for k in KERNELS.values() if k.name in record.rows], record.seed)
    rows = [["family", "kernels", "instruction forms or outputs", "values compared", "differ"]]
    for family in dict.fromkeys(k.family for k in KERNELS.values()):
        part = [k for k in KERNELS.values() if k.family == family and k.name in record.rows]
        forms = sum(len(o.labels) or 1 for k in part for o in k.outputs)
        values = sum(_size(o.shape) for k in part for o in k.outputs)
        verdicts = [record.compare(k, run) for k in part]
        if problem := next((v.first for v in verdicts if not v.values), None):
            raise RuntimeError(f"a kernel of the agreement table did not run: {problem}")
        differ = f"{sum(v.differing for v in verdicts):,}"
        if not all(k.exact for k in part):
            differ = "stand-ins, not held to bits"
        rows.append([family, str(len(part)), str(forms), f"{values:,}", differ])
    return rows


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def mutations() -> Any:
    """The tests' planted faults, from their file."""
    path = Path(__file__).parents[2] / "tests/simulator/gemm/mutations.py"
    spec = importlib.util.spec_from_file_location("planted_mutations", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.MUTATIONS


def mutation_rows() -> list[list[str]]:
    rows = [["planted", "found as"]]
    for m in mutations():
        found = ", ".join(k if " " in k else f"``{k}``" for k in m.found)
        rows.append([m.name, f"{found} (--strict)" if m.strict else found])
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "faults": fault_rows,
    "agreement": agreement_rows,
    "mutations": mutation_rows,
}


def message() -> str:
    """What is said of one planted fault."""
    mutation = next(m for m in mutations() if m.name == "no fence after the wait for D")
    try:
        mutation.case().simulate(seed=0)
    except Fault as fault:
        return str(fault)
    raise RuntimeError(f"planted fault not found: {mutation.name}")


class Simulator(SphinxDirective):
    """``.. simulator:: table``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.arguments[0] == "message":
            return [nodes.literal_block(text := message(), text, language="text")]
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
