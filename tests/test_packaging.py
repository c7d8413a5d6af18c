"""What every way to install and import FLAMIA keeps: cold imports, lazy names, whole wheels, the rooms' rules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flamia
from flamia.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("reference", "kernels", "conformance")

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def run_python(code: str, *arguments: str, blocked: tuple[str, ...] = ()) -> str:
    """Run ``code`` in a fresh interpreter at the root of the checkout; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- imports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flamia", "flamia.reference", "flamia.kernels", "flamia.conformance"])
def test_cold_import_needs_no_heavy_package(name):
    heavy = ("torch", "cupy", "matplotlib", "rich", "typer", "numba", "scipy")
    out = run_python(f"import {name}; print([m for m in {heavy!r} if m in sys.modules])", blocked=heavy)
    assert out.strip() == "[]"


def test_import_costs_less_than_a_third_of_a_second_more_than_numpy():
    code = "import time, numpy; t = time.perf_counter(); import flamia; print(time.perf_counter() - t)"
    assert min(float(run_python(code)) for _ in range(5)) < 0.3


def test_importing_flamia_imports_nothing_of_its_rooms():
    out = run_python("import flamia; print([m for m in sys.modules if m.startswith('flamia')])")
    assert out.strip() == "['flamia']"


def test_lazy_names_are_the_objects_of_the_reference():
    import flamia.reference.recipes as recipes

    assert flamia.recipes is recipes
    assert flamia.Recipe is recipes.Recipe
    assert flamia.reference.__name__ == "flamia.reference"
    assert set(flamia.__all__) <= set(dir(flamia))
    with pytest.raises(AttributeError, match="'flamia' has no attribute 'nothing'"):
        flamia.nothing  # noqa: B018


def test_lazy_names_work_in_a_fresh_interpreter():
    code = "import flamia; print(flamia.recipes.MXFP8.name, isinstance(flamia.recipes.MXFP8, flamia.Recipe))"
    assert run_python(code).split() == ["mxfp8", "True"]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_linked_into_the_package(room):
    link = ROOT / "flamia" / room
    assert link.resolve() == ROOT / room, f"{link} is no symlink: check out with git's core.symlinks=true"


# ---- what a wheel holds ------------------------------------------------------------------------------------


def files_of(folder: Path) -> set[str]:
    kinds = {".py", ".typed", ".cu", ".cuh", ".npz", ".json"}
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f.suffix in kinds}


def test_a_wheel_holds_every_file_of_every_room(tmp_path):
    code = "import sys, setuptools; setuptools.setup(script_args=sys.argv[1:])"
    lib = tmp_path / "lib"
    run_python(code, "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(lib))
    built = files_of(lib)
    # pathlib does not follow the symlinks; each room is listed from its own folder
    expected = {f"flamia/{f}" for f in files_of(ROOT / "flamia") if f.partition("/")[0] not in ROOMS}
    for room in ROOMS:
        expected |= {f"flamia/{room}/{f}" for f in files_of(ROOT / room)}
    assert built == expected
    assert {"flamia/py.typed", "flamia/reference/layout.py", "flamia/kernels/__init__.py"} <= built


# ---- who may import whom -----------------------------------------------------------------------------------

ALLOWED = {
    "reference": {"flamia.reference", "numpy", "ml_dtypes", "threadpoolctl"},
    "kernels": {"flamia.kernels", "numpy", "typer"},
    "conformance": {
        "flamia",
        "flamia.conformance",
        "flamia.reference",
        "flamia.kernels",
        "numpy",
        "ml_dtypes",
        "typer",
    },
}
OPTIONAL = {
    "reference": {"numba"},
    "kernels": {"torch", "cupy", "rich"},
    "conformance": {"torch", "cupy", "rich", "matplotlib"},
}
"""May be imported inside a function."""


def imported_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room):
    allowed = ALLOWED[room] | OPTIONAL.get(room, set())
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        for name in imported_names(ast.parse(file.read_text(encoding="utf-8"))):
            first = ".".join(name.split(".")[:2]) if name.startswith("flamia.") else name.partition(".")[0]
            assert first in allowed or first in sys.stdlib_module_names, f"{file.relative_to(ROOT)}: {name}"


# ---- the command -------------------------------------------------------------------------------------------


def test_command_prints_version_and_help_without_heavy_imports():
    code = "from flamia.cli import main; sys.argv = ['flamia', *sys.argv[1:]]; main()"
    heavy = ("torch", "cupy", "matplotlib", "numba")
    assert run_python(code, "--version", blocked=heavy) == f"flamia {flamia.__version__}\n"
    listed = run_python(code, "--help", blocked=heavy)
    assert all(f" {name} " in listed for name in COMMANDS)
    for name in COMMANDS:
        assert f"flamia {name}" in run_python(code, name, "--help", blocked=heavy)


def test_python_m_flamia_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "flamia", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"flamia {flamia.__version__}\n"


def test_an_unknown_command_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "flamia", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "No such command 'nothing'" in done.stderr
