"""Sphinx configuration. Pages are read from docstrings; tables and figures are computed at build time."""

import pkgutil
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

import flamia  # noqa: E402
import flamia.reference  # noqa: E402

project = "FLAMIA"
author = "the FLAMIA authors"
copyright = "the FLAMIA authors, Apache-2.0"
version = release = flamia.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "literal_tables",
    "figures",
    "study_run",
    "conformance_tables",
    "simulator_pages",
    "blackwell_pages",
]
myst_enable_extensions = ["dollarmath", "deflist"]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_ext"]
default_role = "py:obj"
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_title = f"FLAMIA {version}"
html_static_path: list[str] = []


def check_specification(app) -> None:
    """Every module of the reference has its page: what is missing from specification.rst fails the build."""
    listed = (HERE / "specification.rst").read_text(encoding="utf-8").split()
    for module in pkgutil.iter_modules(flamia.reference.__path__, "flamia.reference."):
        if module.name not in listed:
            raise RuntimeError(f"docs/specification.rst does not list {module.name}")


def shorten_arrays(app, what, name, obj, options, signature, return_annotation):
    """``NDArray[float32]`` instead of what NumPy expands it to."""

    def shorten(text: str | None) -> str | None:
        return text and re.sub(r"ndarray\[tuple\[Any, \.\.\.\], dtype\[((?:\w|\[|\])+?)\]\]", r"NDArray[\1]", text)

    return shorten(signature), shorten(return_annotation)


def setup(app) -> None:
    app.connect("builder-inited", check_specification)
    app.connect("autodoc-process-signature", shorten_arrays)
