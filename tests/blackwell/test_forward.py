"""The Blackwell forward on the simulator gives the reference's bits: out, m, l, LSE, and every tile of P."""

import os

import numpy as np
import pytest

from flamia.conformance.simulator.attention import Build, Operands, run_forward
from flamia.conformance.simulator.machine.faults import Fault
from flamia.kernels.targets import SM_100A, SM_103A, Target
from flamia.reference.documents import TILE
from flamia.reference.oracle import attention_oracle
from tests.blackwell.forward import Expected, check, draw

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"
SEEDS = 50 if THOROUGH else 2

BUILDS = [
    Build(recipe=recipe, dim=dim, target=target)
    for recipe, dim, target in (
        ("mxfp8", 128, SM_100A),
        ("mxfp8", 64, SM_103A),
        ("nvfp4_fp8", 128, SM_103A),
        ("nvfp4_fp8", 64, SM_100A),
    )
]
RELIANCE = "multiply.cuh"
"""The only file whose instructions rely on an order that PTX does not promise."""


def name(build: Build) -> str:
    return f"{build.recipe} {build.dim} {build.target.name}"


@pytest.mark.parametrize("build", BUILDS, ids=name)
def test_two_documents_with_grouped_heads(build: Build) -> None:
    got = check(build, (130, 33), (2, 1), seed=1)
    if build.dim == 128:
        assert not got.report.unpromised
    else:  # Note [P under the next scores]
        assert all(text.count(RELIANCE) == 2 for text in got.report.unpromised)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_timings_give_the_same_bits(seed: int) -> None:
    """50 with ``FLAMIA_THOROUGH=1``."""
    check(BUILDS[seed % 4], (130, 33), (2, 1), seed=100 + seed, ctas=1 + seed % 3)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_strict_build_relies_on_nothing_and_gives_the_same_bits(dim: int) -> None:
    build = Build(dim=dim, strict=1)
    check(build, (130, 33), (2, 1), seed=2, strict=True)


def test_the_default_build_relies_on_what_the_note_says() -> None:
    with pytest.raises(Fault, match="without a wait between them"):
        check(Build(dim=64), (300,), (1, 1), strict=True)


def test_full_attention() -> None:
    check(BUILDS[0], (129, 31), (1, 1), causal=False)


def test_documents_of_every_awkward_length() -> None:
    check(BUILDS[3], (0, 1, 31, 0, 33, 127, 128, 129), (1, 1), ctas=3)


@pytest.mark.parametrize("growing", [False, True])
def test_three_key_tiles(growing: bool) -> None:
    """With maxima that grow by many octaves, O is rescaled; otherwise hardly ever."""
    check(BUILDS[1], (300,), (1, 1), growing=growing)


@pytest.mark.parametrize("dtype", ["float32"])
def test_output_in_float32(dtype: str) -> None:
    check(BUILDS[1], (40,), (1, 1), dtype=dtype)


@pytest.mark.parametrize("target", [SM_100A, SM_103A], ids=lambda t: t.name)
def test_hardware_exponentials_stay_as_accurate(target: Target) -> None:
    """Against float64: no worse than 1.1 times the exact build, whose error is that of the formats."""
    inputs = draw((140,), (1, 1), 64, seed=5, dtype=np.float32)
    truth = attention_oracle(**inputs).out
    operands = Operands.of(**inputs, recipe="mxfp8", causal=True)
    errors = {}
    for exp2 in ("exact", "hardware"):
        got = run_forward(Build(dim=64, target=target, exp2=exp2, hooks=0), operands)
        errors[exp2] = float(np.linalg.norm(got.out - truth))
        assert ("out" in got.report.approximate) == (exp2 == "hardware")
    assert 0 < errors["hardware"] < 1.1 * errors["exact"]


def test_a_lost_token_reaches_the_rows_that_see_it_and_no_others() -> None:
    inputs = draw((150, 33), (2, 1), 64, seed=3)
    inputs["k"][140, 0, 3] = np.nan
    inputs["v"][155, 0, 0] = np.inf
    inputs["q"][7, 1, 5] = np.nan
    expected = Expected(inputs, "mxfp8", True, None)
    got = run_forward(Build(dim=64), Operands.of(**inputs, recipe="mxfp8", causal=True))
    assert expected.mismatch(got) is None
    lost = np.isnan(got.out.astype(np.float32)).any(axis=2)
    assert lost[7].tolist() == [False, True] and lost[140:150].all() and lost[155:].all()
    assert lost.sum() == 1 + 2 * (10 + 28)


def test_no_later_token_moves_an_earlier_row() -> None:
    """At every t mod 32 with ``FLAMIA_THOROUGH=1``: tokens behind t become huge, tiny, NaN and infinite."""
    inputs = draw((130, 33), (1, 1), 64, seed=6)
    before = run_forward(Build(dim=64), Operands.of(**inputs, recipe="mxfp8", causal=True))
    for t in range(64, 96) if THOROUGH else (70,):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name, value in (("q", 2.0**20), ("k", np.nan), ("v", np.inf)):
            changed[name][t + 1 : 130] *= 2.0**-20 if t % 2 else 2.0**20
            changed[name][t + 2 : t + 4] = value
        after = run_forward(Build(dim=64), Operands.of(**changed, recipe="mxfp8", causal=True), seed=t)
        for rows in (slice(0, t + 1), slice(130, 163)):
            assert after.out[rows].tobytes() == before.out[rows].tobytes(), t
            assert after.lse[:, rows].tobytes() == before.lse[:, rows].tobytes(), t


def test_tickets_are_zero_again_after_a_launch() -> None:
    inputs = draw((130, 33), (2, 1), 64)
    operands = Operands.of(**inputs, recipe="mxfp8", causal=True)
    first = run_forward(Build(dim=64), operands, ctas=3)
    assert operands.arrays["status"][8:10].tolist() == [0, 0]
    assert run_forward(Build(dim=64), operands, ctas=2, seed=1).out.tobytes() == first.out.tobytes()


def test_extreme_scores_take_the_slow_path_and_keep_the_contract() -> None:
    inputs = draw((140,), (1, 1), 64, seed=4)
    inputs["q"][:40] *= 2.0**20
    inputs["k"][60] *= 2.0**30
    inputs["v"][:30] *= 2.0**-100
    for scale in (None, 0.0, 2.0**-120):
        expected = Expected(inputs, "mxfp8", True, scale)
        operands = Operands.of(**inputs, recipe="mxfp8", causal=True, softmax_scale=scale)
        wrong = expected.mismatch(run_forward(Build(dim=64), operands))
        assert wrong is None, wrong


@pytest.mark.parametrize("seed", range(24) if THOROUGH else (14,))
def test_wild_exponents_of_scores_and_values(seed: int) -> None:
    """Maxima run over hundreds of octaves, values from 2^-120 to 2^100: both sides of `REACH` and `SLACK`."""
    rng = np.random.default_rng(seed)
    inputs = draw((int(rng.integers(200, 260)),), (1, 1), 64, seed, np.float32)
    length = len(inputs["v"])

    def per_block(low: int, high: int, tokens: int) -> np.ndarray:
        powers = np.exp2(rng.integers(low, high, -(-length // tokens))).astype(np.float32)
        return powers.repeat(tokens)[:length, None, None]

    inputs["v"] *= per_block(-120, 100, 32)
    inputs["v"][rng.random(length) < 0.1] = 0
    inputs["q"] = np.abs(inputs["q"])
    signs = rng.choice(np.float32([-1, 1]), -(-length // TILE)).repeat(TILE)[:length, None, None]
    inputs["k"] = np.abs(inputs["k"]) * per_block(-3, 6, 64) * signs
    causal = bool(seed % 2)
    expected = Expected(inputs, "mxfp8", causal, None)
    got = run_forward(Build(dim=64), Operands.of(**inputs, recipe="mxfp8", causal=causal), seed=seed)
    wrong = expected.mismatch(got)
    assert wrong is None, wrong
