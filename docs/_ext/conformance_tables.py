"""The conformance suite's own tables, and leak maps of a recipe that leaks, made from the code when pages are built.

``.. conformance:: levels``, and likewise ``promises``, ``targets``, ``exit-codes``, ``cases``, ``faults``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from literal_tables import list_table
from sphinx.util.docutils import SphinxDirective

from flamia.conformance import CASES, LEVELS, run
from flamia.conformance.report import EXIT_CODES
from flamia.conformance.report.figures import leak_map
from flamia.conformance.report.page import MEANINGS
from flamia.conformance.self_test import FAULTS
from flamia.conformance.targets import BUILT_IN, PROMISES

SVG_STYLE = "<style>text{font:11px sans-serif;fill:#5b6672}.weak{stroke:#d9dee3}.strong{stroke:#1c2530}</style>"


def plain(text: str) -> str:
    """Text that reStructuredText does not read as markup."""
    for sign in ("\\", "*", "|", "`"):
        text = text.replace(sign, "\\" + sign)
    return text.replace("_ ", "\\_ ")


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "levels": lambda: [["", "level", "passing says"], *([str(n), x, MEANINGS[n]] for n, x in LEVELS.items())],
    "promises": lambda: [["promise", "what must hold"], *([f"``{k}``", plain(x)] for k, x in PROMISES.items())],
    "targets": lambda: [["name", "what it is"], *([f"``{k}``", plain(x)] for k, (x, _) in BUILT_IN.items())],
    "exit-codes": lambda: [["code", "says"], *([str(code), plain(text)] for code, text in EXIT_CODES.items())],
    "cases": lambda: [
        ["case", "size", "what it is", "covers"],
        *([f"``{c.name}``", c.size, plain(c.summary), ", ".join(c.classes) or "--"] for c in CASES.values()),
    ],
    "faults": lambda: [
        ["fault", "what is wrong", "caught by"],
        *([f.name, plain(f.summary), ", ".join(f"``{k}``" for k in f.kills)] for f in FAULTS.values()),
    ],
}


class Conformance(SphinxDirective):
    """``.. conformance:: table``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(list_table(TABLES[self.arguments[0]]()))


def draw_leak_maps(app: Any) -> None:
    """``_generated/leak_<case>.svg`` of the recipe whose V leaks in blocks of 32 tokens."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    cases = ["leak/every_residue", "leak/transformer_engine_3248"]
    report = run("reference", levels=[4], cases=cases, recipe="cudnn_mxfp8", promises=["leak"])
    drawn = {r.case: svg for r in report.results if (svg := leak_map(r))}
    for case in cases:
        svg = drawn[case].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        svg = svg.replace(">", f">{SVG_STYLE}", 1)
        (folder / f"{case.replace('/', '_')}.svg").write_text(svg, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("conformance", Conformance)
    app.connect("builder-inited", draw_leak_maps)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
