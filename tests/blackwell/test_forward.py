"""The Blackwell forward on the simulator gives the reference's bits: out, m, l, LSE, and every tile of P."""

import pytest

from flamia.conformance.simulator.attention import Build
from flamia.kernels.targets import SM_100A, SM_103A
from tests.blackwell.forward import check

BUILDS = [
    Build(recipe=recipe, dim=dim, target=target)
    for recipe, dim, target in (
        ("mxfp8", 128, SM_100A),
        ("mxfp8", 64, SM_103A),
        ("nvfp4_fp8", 128, SM_103A),
        ("nvfp4_fp8", 64, SM_100A),
    )
]


def name(build: Build) -> str:
    return f"{build.recipe} {build.dim} {build.target.name}"


@pytest.mark.parametrize("build", BUILDS, ids=name)
def test_two_documents_with_grouped_heads(build: Build) -> None:
    got = check(build, (130, 33), (2, 1), seed=1)
    assert not got.report.unpromised


def test_full_attention() -> None:
    check(BUILDS[0], (129, 31), (1, 1), causal=False)


def test_documents_of_every_awkward_length() -> None:
    check(BUILDS[3], (0, 1, 31, 0, 33, 127, 128, 129), (1, 1), ctas=3)
