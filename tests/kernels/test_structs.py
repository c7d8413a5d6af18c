"""Parameter structs, filled from nested mappings."""

import numpy as np
import pytest

from flamia.kernels import structs

STRUCTS = {name: x for name, x in vars(structs).items() if isinstance(x, np.dtype)}


def leaves(dtype, start=0, path=()):
    """Offset, dtype and path of every number of a struct."""
    for name, (kind, offset, *_) in dtype.fields.items():
        element = kind.subdtype[0] if kind.subdtype else kind
        for i in range(kind.itemsize // element.itemsize):
            at, here = start + offset + i * element.itemsize, (*path, (name, i if kind.subdtype else None))
            if element.fields is None:
                yield at, element, here
            else:
                yield from leaves(element, at, here)


def nest(numbers):
    """Nested mappings and lists from numbers by path."""
    out = {}
    for path, number in numbers.items():
        at = out
        for name, i in path[:-1]:
            at = at.setdefault(name, {} if i is None else [])
            if i is not None:
                at += [{} for _ in range(i + 1 - len(at))]
                at = at[i]
        at[path[-1][0]] = number
    return out


@pytest.mark.parametrize("name", STRUCTS)
def test_every_number_lies_where_numpy_has_it(name):
    dtype = STRUCTS[name]
    rng = np.random.default_rng(0)
    numbers, expected = {}, bytearray(dtype.itemsize)
    for at, kind, path in leaves(dtype):
        x = rng.standard_normal() if kind.kind == "f" else int(rng.integers(1, 2**31 - 1))
        numbers[path] = x
        expected[at : at + kind.itemsize] = np.array(x, kind).tobytes()
    filled = structs.fill(dtype, nest(numbers))
    assert filled.dtype == dtype and filled.shape == (1,) and filled.tobytes() == bytes(expected)
    assert structs.fill(dtype, {}).tobytes() == bytes(dtype.itemsize)


def test_a_filled_struct_goes_into_another():
    padding = structs.fill(structs.PADDING, {"rows": [{"heads": 3}], "num_tokens": 7})[0]
    filled = structs.fill(structs.QUANTIZE, {"padding": padding, "jobs": [{}, {"heads": 2}]})[0]
    assert filled["padding"] == padding and filled["jobs"]["heads"].tolist() == [0, 2, 0]


def test_what_does_not_fit_is_refused():
    with pytest.raises(KeyError, match=r"\['head'\] are no fields"):
        structs.fill(structs.QUANTIZE, {"head": 1, "halves": 1})
    with pytest.raises(ValueError, match="jobs must have at most 3 elements, got 4"):
        structs.fill(structs.QUANTIZE, {"jobs": [{}] * 4})
