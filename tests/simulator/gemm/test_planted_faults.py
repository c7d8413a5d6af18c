"""The example GEMM is right over many seeds, and every planted fault is found and named."""

import pytest

from flamia.conformance.simulator.examples.gemm import VARIANTS, Variant, gemm_case
from flamia.conformance.simulator.tools import sweep
from tests.simulator.gemm.mutations import MUTATIONS, WRONG_BYTES, Mutation

SEEDS = 50


@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_the_gemm_is_right_over_seeds(index: int) -> None:
    """Ten seeds for each of five variants, bit for bit; nothing relies on what PTX does not promise."""
    first = SEEDS // len(VARIANTS) * index
    result = sweep(gemm_case(VARIANTS[index]), range(first, first + SEEDS // len(VARIANTS)), strict=True)
    assert result.right, [*map(str, result.faults.values()), *result.mismatches.values()]
    assert len(result.passed) == SEEDS // len(VARIANTS)


def test_deeper_products_are_right() -> None:
    assert sweep(gemm_case(Variant(tiles=9)), [1000], strict=True).right


def test_there_are_enough_mutations() -> None:
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 25


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_planted_fault_is_found(mutation: Mutation) -> None:
    seeds = range(1) if mutation.always else range(12)
    result = sweep(mutation.case(), seeds, stop=True, strict=mutation.strict)
    assert not result.right, f"not found in {len(seeds)} seeds"
    (name,) = result.found()
    assert name in mutation.found
    text = str([*result.faults.values(), *result.mismatches.values()][0])
    assert mutation.says in text
    if name != WRONG_BYTES and name not in ("LeftBehind", "Deadlock"):
        assert "gemm" in text and ".cu" in text, f"no line of the source: {text}"
