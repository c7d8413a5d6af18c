"""Every fault planted in the Blackwell forward is found, with the message that a developer would need.

A quarter of them by default; all with ``FLAMIA_THOROUGH=1``.
"""

import os

import pytest

from tests.blackwell.faults import FAULTS, WRONG, PlantedFault
from tests.blackwell.find import find

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"


def test_there_are_enough_faults() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 45


@pytest.mark.parametrize("fault", FAULTS if THOROUGH else FAULTS[::4], ids=lambda f: f.name)
def test_a_planted_fault_is_found(fault: PlantedFault) -> None:
    kind, message = find(fault)
    assert kind in fault.found, f"found {kind or 'nothing'}: {message}"
    assert fault.says in message
    if kind not in (WRONG, "Deadlock", "CompileError"):
        assert f"blackwell/{fault.file}" in message or ".cuh" in message, f"no line of the source: {message}"
