"""The page on the Blackwell backward shows what the record and the model say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flamia.conformance.simulator import backward_model
from flamia.conformance.simulator.backward_model import (
    ATTAINED,
    Comparison,
    Counts,
    apart_clocks,
    busiest_share,
    compare,
    kernel_units,
    read_counts,
)

PAGE = Path(__file__).parents[2] / "docs" / "blackwell_backward.md"


@pytest.mark.parametrize("table", ["resource_table", "model_table", "prediction_table", "comparison_table"])
def test_the_page_shows_the_tables(table: str) -> None:
    lines = set(PAGE.read_text(encoding="utf-8").splitlines())
    missing = [line for line in getattr(backward_model, table)() if line not in lines]
    assert not missing, f"docs/blackwell_backward.md lacks {missing[0]}"


def test_the_page_compares_what_the_models_say_with_published_times() -> None:
    at_8k, at_32k = compare(8192), compare(32768)
    assert at_8k.gain >= 1.2 and at_32k.gain >= 1.3

    def attained(c: Comparison, gain: float) -> float:
        """Which part of the bound it takes to be ``gain`` times faster than what was published."""
        return 100 * ATTAINED * (c.forward + c.backward) / (c.published / gain - c.rest)

    own, stored = (
        max(kernel_units(next(c for c in counts_of(owner) if (c.target, c.dim) == ("sm_100a", 128))).values())
        for owner in ("keys", "stored")
    )
    shares = {8192: busiest_share(8192, 8), 32768: busiest_share(32768, 3)}
    uneven = [compare(length, own * share + stored).gain for length, share in shares.items()]
    apart = apart_clocks()
    apart_gains = f"{compare(8192, apart).gain:.2f} at 8K and {compare(32768, apart).gain:.2f} at 32K"
    at_8ks_speed = 16 * at_8k.published / at_32k.total  # of 16 times the work
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for part in (
        f"1.2 at 8K takes {attained(at_8k, 1.2):.1f} % of it, 1.3 at 32K {attained(at_32k, 1.3):.1f} %",
        f"at 8K's PFLOP/s the factor at 32K would be {at_8ks_speed:.2f}",
        f"{100 * (shares[8192] - 1):.1f} % more than its share at 8K and {100 * (shares[32768] - 1):.1f} % at 32K",
        f"({100 * (busiest_share(32768, 1) - 1):.1f} % with one",
        f"the factors are {uneven[0]:.3f} and {uneven[1]:.3f}",
        f"its {kernel_units(counts_of('stored')[0])['shared memory']:.0f} clocks of shared memory",
        f"{apart:.0f} clocks in all, which is {apart_gains}",
    ):
        assert part in text, f"docs/blackwell_backward.md lacks {part!r}"


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
