"""Directives that print what the code says.

``.. literals:: module.Class`` prints a table of every literal of a frozen dataclass in its module: a row per field,
a column per literal. ``.. code-grid:: FORMAT`` prints the value of every code of a number format.
"""

import dataclasses
import enum
import math
from importlib import import_module
from typing import Any

import numpy as np
from docutils import nodes
from sphinx.util.docutils import SphinxDirective


def number_text(value: float) -> str:
    """A power of two beyond the small integers as ``2^n``, anything else as Python prints it."""
    if math.isfinite(value) and value != 0:
        mantissa, exponent = math.frexp(abs(value))
        if mantissa == 0.5 and not 1 <= abs(value) < 1024:
            return f"{'-' if value < 0 else ''}2\\ :sup:`{exponent - 1}`"
    return f"{value:g}"


def cell_text(field: str, value: Any) -> str:
    """reStructuredText of one field of one literal."""
    if value is None or value == ():
        return "--"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, enum.Enum):
        return f"``{value.name}``"
    if isinstance(value, tuple):
        return ", ".join(cell_text(field, v) for v in value)
    if "code" in field or "encodes_to" in field:
        return f"``0x{value:02X}``"
    if isinstance(value, int | float):
        return number_text(float(value))
    if dataclasses.is_dataclass(value):
        return str(getattr(value, "name", value))
    return str(value)


def list_table(rows: list[list[str]]) -> str:
    """A list-table with one header row and one stub column."""
    lines = [".. list-table::", "   :header-rows: 1", "   :stub-columns: 1", ""]
    for row in rows:
        lines += [f"   {'* - ' if i == 0 else '  - '}{text}" for i, text in enumerate(row)]
    return "\n".join(lines)


class Literals(SphinxDirective):
    """``.. literals:: module.Class [field ...]``: the named fields, or all but ``name`` and ``summary``."""

    required_arguments = 1
    optional_arguments = 40

    def run(self) -> list[nodes.Node]:
        module_name, _, class_name = self.arguments[0].rpartition(".")
        module = import_module(module_name)
        kind = getattr(module, class_name)
        literals = {name: value for name, value in vars(module).items() if isinstance(value, kind)}
        fields = self.arguments[1:] or [
            f.name for f in dataclasses.fields(kind) if f.name not in ("name", "summary")
        ]
        rows = [["", *(f"``{name}``" for name in literals)]]
        for field in fields:
            rows.append([f"``{field}``", *(cell_text(field, getattr(v, field)) for v in literals.values())])
        return self.parse_text_to_nodes(list_table(rows))


class CodeGrid(SphinxDirective):
    """``.. code-grid:: FORMAT``: high digit down, low digit across, as `flamia.reference.formats` decodes them."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        formats = import_module("flamia.reference.formats")
        fmt = getattr(formats, self.arguments[0])
        codes = np.arange(1 << fmt.bits, dtype=np.uint8)
        if isinstance(fmt, formats.ElementFormat):
            values = formats.decode(codes, fmt)
        else:
            values = getattr(formats, f"decode_{fmt.name.lower()}")(codes)
        rows = [["", *(f"``_{low:X}``" for low in range(16))]]
        for high, line in enumerate(np.asarray(values, np.float64).reshape(-1, 16)):
            rows.append([f"``{high:X}_``", *(number_text(v) if np.isfinite(v) else str(v) for v in line)])
        return self.parse_text_to_nodes(list_table(rows))


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("literals", Literals)
    app.add_directive("code-grid", CodeGrid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
