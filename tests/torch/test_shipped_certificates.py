"""Certificates that come with the package are those of the kernels that come with it."""

import dataclasses

import pytest

from flamia.conformance.certificates import SHIPPED, hash_sources, read_certificate
from flamia.conformance.results import LEVELS
from flamia.conformance.targets.hopper import KERNELS, HopperTarget

TARGETS = {"hopper": HopperTarget}


def test_one_for_each_recipe_is_shipped():
    found = {read_certificate(path).identity.recipe for path in SHIPPED.glob("*.json")}
    assert found == set(KERNELS)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_certificate_is_of_the_shipped_source(path):
    """A changed kernel needs a new certificate, from ``flamia conform --certify`` on that chip."""
    certificate = read_certificate(path)
    target = TARGETS[certificate.identity.kernel]("cuda")
    target.recipe = certificate.identity.recipe
    shipped = hash_sources(target.sources())
    here = dataclasses.replace(certificate.identity, source_hash=shipped)
    assert certificate.invalid_because(here, LEVELS) == []
    assert path.name == certificate.file_name
