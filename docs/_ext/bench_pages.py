"""Tables and the picture of a recorded ``flamia bench attention --json``: ``.. bench:: data/file.json``."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from literal_tables import list_table
from sphinx.util.docutils import SphinxDirective

from flamia.bench.gpu_plot import draw


def rows(timings: list[dict[str, Any]]) -> list[list[str]]:
    """Microseconds of forward + backward by workload and contestant, and the ratios to the fastest baseline."""
    names = list(dict.fromkeys(name for t in timings for name in t["total"]))
    found = [["", *names, "forward", "total"]]
    for t in timings:
        cells = [
            f"{t['forward'][n]:.0f} + {t['total'][n] - t['forward'][n]:.0f}" if n in t["total"] else "--" for n in names
        ]
        ratios = [f"{t[key]:.2f}x" for key in ("forward_ratio", "total_ratio")]
        found.append([t["title"], *cells, *ratios])
    return found


class Bench(SphinxDirective):
    """``.. bench:: file``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {text}" for name, text in data["versions"].items())
        return self.parse_text_to_nodes(f"{versions}.\n\n{list_table(rows(data['timings']))}")


def draw_recorded(app: Any) -> None:
    """``_generated/<file>.svg`` of every recorded benchmark."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    for path in (Path(app.srcdir) / "data").glob("attention_*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        draw(data["timings"], data["versions"]["device"], folder / f"{path.stem}.svg")


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("bench", Bench)
    app.connect("builder-inited", draw_recorded)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
