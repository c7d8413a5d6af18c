"""Cases: reproducible, documented, and complete over the bug classes."""

import numpy as np
import pytest

from flamia.conformance.calls import TENSORS
from flamia.conformance.cases import BUG_CLASSES, CASES, Case, case, find_larger_sizes, select_cases
from flamia.reference.documents import validate_cu_seqlens

SMALL = [c for c in CASES.values() if c.size == "quick"]


@pytest.mark.parametrize("chosen", SMALL, ids=lambda c: c.name)
def test_a_case_is_legal_and_the_same_every_time(chosen: Case) -> None:
    inputs, again, other = chosen.inputs(0), chosen.inputs(0), chosen.inputs(1)
    validate_cu_seqlens(inputs.cu_seqlens, inputs.total)
    for name in TENSORS:
        x, y = getattr(inputs, name), getattr(again, name)
        assert x.dtype == y.dtype and np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()
    if inputs.cu_seqlens[-1] and chosen.name != "values/activations":
        assert any(getattr(inputs, n).tobytes() != getattr(other, n).tobytes() for n in TENSORS)
    hq, hkv = inputs.head_counts
    assert hq % hkv == 0 and inputs.v.shape == inputs.k.shape and inputs.dout.shape == inputs.q.shape


@pytest.mark.parametrize("name", list(BUG_CLASSES))
def test_every_bug_class_has_a_case_whose_docstring_names_its_trigger(name: str) -> None:
    covering = [c for c in CASES.values() if name in c.classes]
    assert covering
    for c in covering:
        assert f"{name}:" in c.doc or f"{name}, " in c.doc, c.name


def test_the_quick_class_covers_all_but_the_offsets_of_real_tensors() -> None:
    assert {name for c in SMALL for name in c.classes} == set(BUG_CLASSES)


def test_the_required_shapes_and_ratios_exist() -> None:
    lengths = {n for c in SMALL for n in c.inputs().lengths}
    assert {0, 1, 31, 32, 33, 127, 128, 129} <= lengths
    ratios = {int(c.name.rsplit("_", 1)[1]) for c in CASES.values() if c.name.startswith("heads/group_of_")}
    assert ratios == {1, 2, 3, 5, 7, 8, 12}


def test_views_keep_their_strides() -> None:
    assert CASES["strides/expanded_dout"].inputs().dout.strides == (0, 0, 0)
    sliced, turned = CASES["strides/sliced_qkv"].inputs(), CASES["strides/transposed_heads"].inputs()
    assert not sliced.k.flags.c_contiguous and turned.q.strides[1] > turned.q.strides[0]


def test_selection_by_pattern_and_size() -> None:
    assert {c.name for c in select_cases(["leak/transformer*"])} == {"leak/transformer_engine_3248"}
    quick, full, stress = (len(select_cases(size=size)) for size in ("quick", "full", "stress"))
    assert quick < full < stress == len(CASES)
    assert all(c.tiny for c in select_cases(profile="hopper"))
    assert len(select_cases(profile="hopper")) < quick and len(select_cases(size="full", profile="hopper")) == full
    with pytest.raises(ValueError, match="'leek/\\*'"):
        select_cases(["leek/*"])
    with pytest.raises(ValueError, match="'huge'"):
        select_cases(size="huge")


def test_patterns_of_larger_classes_are_told_the_smallest_of_them() -> None:
    patterns = ["heads/dim_96", "heads/dim_*", "values/gaussian", "leak/*"]
    assert find_larger_sizes(patterns, "quick", "ideal") == {"heads/dim_96": "full"}
    assert find_larger_sizes(patterns, "quick", "hopper")["values/gaussian"] == "full"
    assert find_larger_sizes(patterns, "full", "hopper") == {}
    stress = next(c.name for c in CASES.values() if c.size == "stress")
    assert find_larger_sizes([stress], "quick", "ideal") == {stress: "stress"}


def test_a_case_needs_a_new_name_a_docstring_and_known_classes() -> None:
    def build(rng):
        return CASES["values/gaussian"].build(rng)

    with pytest.raises(ValueError, match="'values/new' must be new and have a docstring"):
        case("values/new")(build)
    build.__doc__ = "Something."
    with pytest.raises(ValueError, match="no-such-class"):
        case("values/new", classes=("no-such-class",))(build)
    with pytest.raises(ValueError, match="must be new"):
        case("values/gaussian")(build)
