"""Instruction descriptors: every field of every kind, and what must be refused."""

import pytest

from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.instruction import decode_instruction


def fields(m, n, *, a=0, b=0, d=0, neg=(0, 0), mn=(0, 0), e8m0=0, ids=(0, 0), extra=0):
    """A descriptor from its fields, bit positions as in PTX tables 42 and 43."""
    word = d << 4 | ids[1] << 4 | a << 7 | b << 10 | neg[0] << 13 | neg[1] << 14 | mn[0] << 15 | mn[1] << 16
    return word | (n // 8) << 17 | e8m0 << 23 | (m // 16) << 24 | ids[0] << 29 | extra


def test_mxfp8_example():
    """The word for 128 x 128, both K-major, as kernels write it."""
    found = decode_instruction(1 << 23 | 128 >> 3 << 17 | 128 >> 4 << 24, "mxf8f6f4", 1, "1X")
    assert (found.m, found.n, found.k, found.scales, found.e8m0) == (128, 128, 32, 1, True)
    assert (found.a.name, found.b.name, found.a_mn_major, found.b_mn_major) == ("e4m3", "e4m3", False, False)


@pytest.mark.parametrize(("code", "name"), [(0, "e4m3"), (1, "e5m2"), (3, "e2m3"), (4, "e3m2"), (5, "e2m1")])
@pytest.mark.parametrize("kind", ["f8f6f4", "mxf8f6f4"])
def test_8_bit_kinds_types(kind, code, name):
    scaled = kind.startswith("mx")
    word = fields(128, 64, a=code, b=1, d=0 if scaled else 1, e8m0=int(scaled))
    found = decode_instruction(word, kind, 1, "1X" if scaled else None)
    assert (found.a.name, found.b.name) == (name, "e5m2")


@pytest.mark.parametrize("number", range(4))
def test_scale_ids(number):
    word = fields(128, 128, e8m0=1, ids=(number, 3 - number))
    found = decode_instruction(word, "mxf8f6f4", 1, "block32")
    assert (found.sfa_id, found.sfb_id) == (number, 3 - number)


def test_fields_of_f16():
    found = decode_instruction(fields(64, 24, a=1, b=1, d=1, neg=(0, 1), mn=(1, 0)), "f16", 1, None)
    assert (found.a.name, found.m, found.n, found.k) == ("bf16", 64, 24, 16)
    assert (found.negate_a, found.negate_b, found.a_mn_major, found.b_mn_major) == (False, True, True, False)


def test_nvfp4():
    found = decode_instruction(fields(128, 128, a=1, b=1), "mxf4nvf4", 1, "4X")
    assert (found.a.name, found.k, found.scales, found.e8m0) == ("e2m1", 64, 4, False)
    found = decode_instruction(fields(256, 128, a=1, b=1, e8m0=1, ids=(2, 0)), "mxf4nvf4", 2, "2X")
    assert (found.m, found.rows_per_cta, found.scales, found.sfa_id) == (256, 128, 2, 2)


NVF4 = {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("word", "kind", "group", "vector", "fault", "text"),
    [
        (fields(64, 128, e8m0=1), "mxf8f6f4", 1, "1X", "shape", "M of kind::mxf8f6f4 must be 128"),
        (fields(256, 128, e8m0=1), "mxf8f6f4", 1, "1X", "shape", r"M must be one of \(128,\)"),
        (fields(128, 264, e8m0=1), "mxf8f6f4", 1, "1X", "shape", "N must be a multiple of 8"),
        (fields(128, 0, e8m0=1), "mxf8f6f4", 1, "1X", "shape", "got 0"),
        (fields(128, 24, d=1), "f8f6f4", 1, None, "shape", "multiple of 16"),
        (fields(256, 24, e8m0=1), "mxf8f6f4", 2, "1X", "shape", "multiple of 16"),
        (fields(128, 24, e8m0=1, mn=(0, 1)), "mxf8f6f4", 1, "1X", "shape", "MN-major 8-bit B"),
        (fields(128, 128, mn=(0, 1), **NVF4), "mxf4nvf4", 1, "4X", "majorness", "B of type e2m1"),
        (fields(128, 128, mn=(1, 0), a=1, b=1, e8m0=1), "mxf4", 1, "2X", "majorness", "A of type e2m1"),
        (fields(128, 128, a=5, e8m0=1, mn=(1, 0)), "mxf8f6f4", 1, "1X", "majorness", "must be K-major"),
        (fields(128, 128, ids=(1, 0), **NVF4), "mxf4nvf4", 1, "4X", "scale-id", "SFA id"),
        (fields(128, 128, ids=(0, 1), e8m0=1, **NVF4), "mxf4", 1, "2X", "scale-id", "SFB id"),
        (fields(128, 128), "mxf8f6f4", 1, "1X", "descriptor", "UE8M0"),
        (fields(128, 128, e8m0=1), "mxf4nvf4", 1, "4X", "descriptor", "type code of A"),
        (fields(128, 128, a=2, d=1), "f16", 1, None, "descriptor", "type code of A"),
        (fields(128, 128, d=0), "f16", 1, None, "unsupported", "D must be F32"),
        (fields(128, 128, d=1, extra=4), "f16", 1, None, "unsupported", "sparse"),
        (fields(128, 128, e8m0=1, extra=1 << 31), "mxf8f6f4", 1, "1X", "unsupported", "bit 31"),
        (fields(128, 128, d=1, extra=8), "f16", 1, None, "descriptor", "bits 0, 1, 3 and 6"),
        (fields(128, 128, d=1, e8m0=1), "f16", 1, None, "descriptor", "bits 23"),
        (fields(128, 128, e8m0=1), "mxf8f6f4", 1, "2X", "shape", "scale vector"),
        (fields(128, 128, d=1), "tf32", 1, None, "unsupported", "kind::tf32"),
        (fields(128, 128, a=0, b=1, d=1), "f16", 1, None, "unsupported", "A f16 and B bf16"),
    ],
)
def test_refused(word, kind, group, vector, fault, text):
    with pytest.raises(Illegal, match=text) as caught:
        decode_instruction(word, kind, group, vector)
    assert caught.value.kind == fault
