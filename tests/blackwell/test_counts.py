"""Machine code of the Blackwell forward: no spills, and the counts that the pages print."""

import os

import pytest

from flamia.conformance.simulator.forward_model import count_builds, predict, read_counts, softmax_counts
from flamia.kernels.disassembly import DisassemblerNotFoundError, find_nvdisasm

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"


def test_the_record_is_what_the_compiler_gives() -> None:
    """Within a few percent: releases of the compiler schedule differently."""
    try:
        find_nvdisasm()
    except DisassemblerNotFoundError as error:
        pytest.skip(str(error))
    record = {(c.target, c.recipe, c.dim, c.exp2): c for c in read_counts()}
    assert len(record) == 16
    for found in count_builds() if THOROUGH else count_builds((128,), ("mxfp8",)):
        recorded = record[found.target, found.recipe, found.dim, found.exp2]
        name = f"{found.target} {found.recipe} {found.dim} {found.exp2}"
        assert found.spills == recorded.spills == 0, name
        assert found.shared_bytes == recorded.shared_bytes, name
        assert found.softmax.total() == pytest.approx(recorded.softmax.total(), rel=0.05), name
        assert found.softmax["FFMA2"] == pytest.approx(recorded.softmax["FFMA2"], rel=0.02), name


def test_exact_exponentials_take_four_packed_multiply_adds_per_pair() -> None:
    for counts in read_counts():
        if counts.exp2 == "exact":
            assert counts.softmax["FFMA2"] == 4 * 64 and counts.softmax["FADD2"] == 64
            assert counts.softmax["MUFU"] == 0
        else:
            assert counts.softmax["MUFU"] > 0


def test_the_model_reaches_its_goals() -> None:
    """Of the model, not of a chip: 1.9 PFLOP/s on B200 and 2.6 on B300, MXFP8, head_dim 128, hardware exponentials."""
    for counts in read_counts():
        p = predict(counts.target, counts.softmax, counts.dim, counts.recipe != "mxfp8")
        assert p.clocks >= p.ceiling > 0
        if (counts.recipe, counts.dim, counts.exp2) == ("mxfp8", 128, "hardware"):
            assert p.petaflops(128, p.clocks) >= (1.9 if counts.target == "sm_100a" else 2.6)


def test_other_machine_code_is_refused() -> None:
    with pytest.raises(ValueError, match="not the softmax"):
        softmax_counts("        /*0000*/                   EXIT ;\n")
