"""The page on the Blackwell backward shows what the record and the model say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flamia.conformance.simulator import backward_model
from flamia.conformance.simulator.backward_model import Counts, kernel_units, read_counts

PAGE = Path(__file__).parents[2] / "docs" / "blackwell_backward.md"


@pytest.mark.parametrize("table", ["resource_table", "model_table", "prediction_table"])
def test_the_page_shows_the_tables(table: str) -> None:
    lines = set(PAGE.read_text(encoding="utf-8").splitlines())
    missing = [line for line in getattr(backward_model, table)() if line not in lines]
    assert not missing, f"docs/blackwell_backward.md lacks {missing[0]}"


def test_no_build_spills_and_every_build_is_recorded() -> None:
    counts = read_counts()
    assert len(counts) == 2 * (2 * 2 * 2 + 2)
    assert all(c.spills == 0 for c in counts)


def test_the_busiest_unit_of_the_owner_of_keys_is_the_issue_of_instructions() -> None:
    for c in counts_of("keys"):
        units = kernel_units(c)
        assert max(units, key=lambda name: units[name]) == "issue"


def counts_of(owner: str) -> list[Counts]:
    """Records of one kernel."""
    return [c for c in read_counts() if c.owner == owner]
