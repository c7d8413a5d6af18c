"""Every fault planted in the Blackwell backward is found.

One in eleven by default; all with ``FLAMIA_THOROUGH=1``.
"""

import os

import pytest

from tests.blackwell.backward_faults import COMPILER, FAULTS, WRONG, PlantedFault

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"


def test_there_are_enough_faults() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 40


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        fault.planted()


@pytest.mark.parametrize("fault", FAULTS if THOROUGH else FAULTS[::11], ids=lambda f: f.name)
def test_a_planted_fault_is_found(fault: PlantedFault) -> None:
    kind, message = fault.find()
    assert kind in fault.found, f"found {kind or 'nothing'}: {message}"
    if kind not in (WRONG, "Deadlock", COMPILER):
        assert "blackwell/" in message, f"no line of the source: {message}"
