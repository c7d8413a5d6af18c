"""The oracle against a dense computation and against finite differences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flamia.reference import attention_oracle
from tests.reference.cases import random_inputs


def dense(q, k, v, cu, causal, scale):
    """out and lse with whole score matrices, float64."""
    out, lse = np.zeros(q.shape), np.full((q.shape[1], q.shape[0]), -np.inf)
    group = q.shape[1] // k.shape[1]
    for a, b in pairwise(cu):
        for h in range(q.shape[1]):
            s = scale * q[a:b, h].astype(np.float64) @ k[a:b, h // group].astype(np.float64).T
            if causal:
                s = np.where(np.tri(b - a, dtype=bool), s, -np.inf)
            if b > a:
                lse[h, a:b] = np.log(np.exp(s).sum(axis=1))
                out[a:b, h] = np.exp(s - lse[h, a:b, None]) @ v[a:b, h // group].astype(np.float64)
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
def test_forward_equals_the_dense_computation(causal: bool) -> None:
    q, k, v, _ = random_inputs(0, 300, 4, 2, dim=32)
    cu = [0, 0, 1, 140, 290]
    oracle = attention_oracle(q, k, v, cu, causal=causal)
    out, lse = dense(q, k, v, cu, causal, 32**-0.5)
    np.testing.assert_allclose(oracle.out, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(oracle.lse, lse, rtol=1e-12)
    assert oracle.dq is None and oracle.dk is None and oracle.dv is None


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_finite_differences(causal: bool) -> None:
    inputs = random_inputs(1, 12, 2, 1, dim=32, dtype=np.float32)
    q, k, v, dout = inputs
    cu = [0, 7, 12]
    oracle = attention_oracle(q, k, v, cu, dout, causal=causal)
    rng = np.random.default_rng(0)
    for index, gradient in enumerate((oracle.dq, oracle.dk, oracle.dv)):
        direction = rng.standard_normal(inputs[index].shape).astype(np.float32)
        step = np.float32(2.0**-10)
        values = []
        for sign in (1, -1):
            moved = list(inputs[:3])
            moved[index] = inputs[index] + sign * step * direction
            actual = (moved[index] - inputs[index]).astype(np.float64)
            values.append((float((attention_oracle(*moved, cu, causal=causal).out * dout).sum()), actual))
        expected = float((gradient * (values[0][1] - values[1][1])).sum())
        assert values[0][0] - values[1][0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
