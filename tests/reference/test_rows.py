"""A few rows against many keys give the bits of full attention."""

from __future__ import annotations

import numpy as np
import pytest

from flamia.reference import RECIPES, attention_forward, rows
from flamia.reference.rows import attention_rows
from tests.reference.cases import assert_bitwise_equal, random_inputs


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_rows_equal_full_attention(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the rows are tokens of the document, and the keys come in pieces of two tiles, the last one partial."""
    monkeypatch.setattr(rows, "KEYS_AT_ONCE", 256)
    q, k, v, _ = random_inputs(0, 333, 4, 2)
    q[0] = np.abs(q.astype(np.float32)).max()  # a tensor's scale is then that of its first rows
    whole = attention_forward(q, k, v, [0, 333], recipe=recipe, causal=False).out
    assert_bitwise_equal(out=(attention_rows(q[:160], k, v, recipe=recipe), whole[:160]))


@pytest.mark.parametrize("profile", ["blackwell", "hopper"])
def test_rows_equal_full_attention_in_the_bits_of_a_machine(profile: str) -> None:
    q, k, v, _ = random_inputs(1, 140, 2, 1)
    v[5::32] *= v.dtype.type(2.0**20)  # so that a token's own exponent and its block's give other codes
    whole = attention_forward(q, k, v, [0, 140], causal=False, profile=profile).out
    assert_bitwise_equal(out=(attention_rows(q[:7], k, v, profile=profile), whole[:7]))


def test_bad_arguments_are_named() -> None:
    q, k, v, _ = random_inputs(2, 40, 2, 1)
    with pytest.raises(ValueError, match=r"v must have the shape of k \(40, 1, 64\), got \(39, 1, 64\)"):
        attention_rows(q, k, v[1:])
    with pytest.raises(ValueError, match="k must have at least one token"):
        attention_rows(q, k[:0], v[:0])
    with pytest.raises(ValueError, match="q must have a multiple of k's 2 heads, got 1"):
        attention_rows(k, q, q)
    with pytest.raises(TypeError, match="q must be a NumPy array"):
        attention_rows([1.0], k, v)
