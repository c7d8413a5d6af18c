"""The benchmark's fake quantization in PyTorch computes what the reference computes."""

import ml_dtypes
import numpy as np
import pytest

from flamia.bench.attention import Shape, make_inputs, measure_attention, run_reference

torch = pytest.importorskip("torch")
fake_quant = pytest.importorskip("flamia.bench.fake_quant")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(2, 1, 64), (2, 2, 128)])
def test_fake_quantization_agrees_in_float32(q_heads, kv_heads, dim):
    """To FP32 rounding: so every quantized payload is the same, or next to none differs."""
    inputs = [x.astype(np.float32) for x in make_inputs(Shape(384, q_heads, kv_heads, dim))]
    inputs[0] *= 3
    found = fake_quant.attention(*map(torch.from_numpy, inputs))
    for a, b in zip(found, run_reference(inputs), strict=True):
        assert np.linalg.norm(a.numpy() - b) <= 1e-4 * np.linalg.norm(b)


def test_uneven_tokens_fold_alike():
    """V1's exponents differ from token to token, as do those of Q and K."""
    inputs = [x.astype(np.float32) for x in make_inputs(Shape(256, 1, 1, 64))]
    rng = np.random.default_rng(1)
    for x in inputs:
        x *= np.exp2(rng.integers(-9, 2, (256, 1, 1))).astype(np.float32)
    found = fake_quant.attention(*map(torch.from_numpy, inputs))
    for a, b in zip(found, run_reference(inputs), strict=True):
        assert np.linalg.norm(a.numpy() - b) <= 1e-4 * np.linalg.norm(b)


def test_scales_and_casts_are_those_of_the_reference():
    from flamia.reference.scaling import quantize_tokens

    x = make_inputs(Shape(64, 1, 1, 32))[0]
    x[3], x[5, 0, 0], x[6, 0, 0] = 2.0**-100, 448, 449
    for block in (1, 32):
        code, e = fake_quant.quantize_tokens(torch.from_numpy(x[:, 0].astype(np.float32)), block)
        expected = quantize_tokens(x, [0, 64], block)
        values = expected.payload[:, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert (code.numpy() == values).all()
        assert (e.numpy() + 127 == expected.scale[:, 0]).all()


def test_all_contestants_are_timed_and_compared():
    found = measure_attention(Shape(256, 2, 1, 64), repeats=1)
    assert set(found.seconds) == {"reference", "math_sdpa", "fake_quant"} and not found.missing
    assert found.over_sdpa > 0 and found.under_fake_quant > 0
    assert set(found.difference) == {"out", "dq", "dk", "dv"} and max(found.difference.values()) < 1e-3
    odd = measure_attention(Shape(130, 2, 1, 64), repeats=1)
    assert set(odd.seconds) == {"reference", "math_sdpa"} and "multiples of 128" in odd.missing["fake_quant"]
