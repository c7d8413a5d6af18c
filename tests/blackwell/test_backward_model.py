"""The page on the Blackwell backward shows what the record and the model say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flamia.conformance.simulator import backward_model, forward_model
from flamia.conformance.simulator.backward_model import ATTAINED, Counts, kernel_units, petaflops, read_counts

PAGE = Path(__file__).parents[2] / "docs" / "blackwell_backward.md"


@pytest.mark.parametrize("table", ["resource_table", "model_table", "prediction_table"])
def test_the_page_shows_the_tables(table: str) -> None:
    lines = set(PAGE.read_text(encoding="utf-8").splitlines())
    missing = [line for line in getattr(backward_model, table)() if line not in lines]
    assert not missing, f"docs/blackwell_backward.md lacks {missing[0]}"


def test_the_page_compares_what_the_models_say_with_published_times() -> None:
    """8K causal, 64 heads of 128 on sm_100a, with half of the attention matrix counted, as published."""
    (record,) = (
        c
        for c in forward_model.read_counts()
        if (c.target, c.recipe, c.dim, c.exp2) == ("sm_100a", "mxfp8", 128, "exact")
    )
    own, stored = (
        next(c for c in read_counts() if (c.target, c.owner, c.dim) == ("sm_100a", owner, 128))
        for owner in ("keys", "stored")
    )
    turn = own.turn.total()
    clocks = max(kernel_units(own).values()) + max(kernel_units(stored).values())
    predicted = forward_model.predict(record.target, record.softmax, record.dim)
    forward_work, backward_work, rest = 4 * 8192**2 * 128 * 64 / 2 / 1e15, 10 * 8192**2 * 128 * 64 / 2 / 1e15, 0.10
    forward = 1e3 * forward_work / predicted.petaflops(128, predicted.clocks)
    backward = 1e3 * backward_work / petaflops("sm_100a", 128, clocks)
    cudnn = 1e3 * (forward_work / 1.574 + backward_work / 1.332)
    ours = (forward + backward) / ATTAINED + rest

    def clocks_for(gain: float) -> float:
        return clocks * (ATTAINED * (cudnn / gain - rest) - forward) / backward

    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    fewer = (clocks - clocks_for(1.2)) / 2  # two warps on a scheduler
    for part in (
        f"{forward / ATTAINED:.2f} ms (forward) + {backward / ATTAINED:.2f} ms (backward) + {rest:.2f} ms",
        f"= {ours:.2f} ms, if both kernels reach {ATTAINED:.0%}".replace("%", " %"),
        f"**{cudnn / ours:.2f} times faster**",
        f"1.2 times takes {100 * (forward + backward) / (cudnn / 1.2 - rest):.1f} % of the bound",
        f"{fewer:.0f} of the {turn} instructions of a turn less",
        f"a backward of about {clocks_for(1.3):.0f} clocks per tile",
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
