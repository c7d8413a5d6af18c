"""The example of a case in the documentation is one, and is right."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from flamia.conformance.simulator.case import Case
from flamia.conformance.simulator.registry import find_case
from flamia.conformance.simulator.tools import count_by_role, sweep

PAGE = Path(__file__).parents[2] / "docs/simulator.md"


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    """``my_kernels:my_case`` of the page."""
    (text,) = (t for t in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S) if "Case(" in t)
    module = ModuleType("my_kernels")
    exec(compile(text, "my_kernels.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_kernels", module)
    found = find_case("my_kernels:my_case")
    assert isinstance(found, Case)
    return found


def test_the_example_is_right_over_seeds(case: Case) -> None:
    result = sweep(case, range(4), strict=True)
    assert result.right and result.passed == [0, 1, 2, 3]
    report, _ = case.simulate()
    assert list(count_by_role(report, case.roles)) == ["CTA 0 load", "CTA 0 double"]


def test_without_its_barrier_the_example_is_caught(case: Case) -> None:
    result = sweep(replace(case, source=case.source.replace("__syncthreads();", "")), range(12), strict=True)
    assert set(result.found()) == {"UnwrittenRead"}
