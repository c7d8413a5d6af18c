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
    """The exact value: in few decimal digits if that is possible, else as an odd number times a power of two."""
    short = f"{value:.5g}"
    if not math.isfinite(value) or value == 0 or (0.1 <= abs(value) < 1e5 and float(short) == value):
        return short
    numerator, exponent = abs(value), 0
    while numerator != int(numerator):
        numerator, exponent = numerator * 2, exponent - 1
    while numerator % 2 == 0:
        numerator, exponent = numerator / 2, exponent + 1
    sign, factor = "-" if value < 0 else "", "" if numerator == 1 else f"{numerator:.0f}·"
    return f"{sign}{factor}2\\ :sup:`{exponent}`"


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
        fields = self.arguments[1:] or [f.name for f in dataclasses.fields(kind) if f.name not in ("name", "summary")]
        rows = [["", *(f"``{name}``" for name in literals)]]
        for field in fields:
            rows.append([f"``{field}``", *(cell_text(field, getattr(v, field)) for v in literals.values())])
        return self.parse_text_to_nodes(list_table(rows))


class CodeGrid(SphinxDirective):
    """``.. code-grid:: FORMAT``: values as `flamia.reference.formats` decodes them, of the codes without a sign bit."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        formats = import_module("flamia.reference.formats")
        fmt = getattr(formats, self.arguments[0])
        signed = isinstance(fmt, formats.ElementFormat)
        codes = np.arange(1 << (fmt.bits - signed), dtype=np.uint8)
        if signed:
            values = formats.decode(codes, fmt)
        else:
            values = getattr(formats, f"decode_{fmt.name.lower()}")(codes)
        columns = max(1, len(codes) // 16)
        rows = [["", *(f"``0x{column:X}_``" for column in range(columns))]]
        for low, line in enumerate(np.asarray(values, np.float64).reshape(columns, -1).T):
            rows.append([f"``_{low:X}``", *(number_text(v) for v in line)])
        return self.parse_text_to_nodes(list_table(rows))


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("literals", Literals)
    app.add_directive("code-grid", CodeGrid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
