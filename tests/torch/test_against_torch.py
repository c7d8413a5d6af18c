"""PyTorch as a second witness: exact attention by autograd in float64, and its FP8 casts."""

import ml_dtypes
import numpy as np
import pytest

from flamia.reference import attention_oracle
from flamia.reference.formats import E4M3, E5M2, decode, encode

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LENGTHS = [0, 1, 31, 129, 300, 33]
PADDING = 6


def attention_by_autograd(q, k, v, dout, cu, causal, scale):
    """out, lse and gradients of every document by itself, from whole float64 score matrices and autograd."""
    leaves = [torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in (q, k, v)]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if start == stop:
            continue
        group = q.shape[1] // k.shape[1]
        queries, keys, values = (x[start:stop].transpose(0, 1) for x in leaves)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = scale * queries @ keys.transpose(1, 2)
        if causal:
            visible = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, -torch.inf)
        lse[:, start:stop] = scores.logsumexp(-1).detach()
        out[start:stop] = (scores.softmax(-1) @ values).transpose(0, 1)
    gradients = torch.autograd.grad(out, leaves, torch.from_numpy(dout.astype(np.float64)))
    return [x.detach().numpy() for x in (out, lse, *gradients)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (6, 2), (4, 1)])
def test_oracle_equals_autograd(causal, q_heads, kv_heads):
    rng = np.random.default_rng(q_heads)
    cu = np.concatenate([[0], np.cumsum(LENGTHS)])
    total = int(cu[-1]) + PADDING
    q, dout = rng.standard_normal((2, total, q_heads, 64)).astype(np.float32)
    k, v = rng.standard_normal((2, total, kv_heads, 64)).astype(np.float32)
    oracle = attention_oracle(q, k, v, cu, dout, causal=causal, softmax_scale=0.25)
    expected = attention_by_autograd(q, k, v, dout, cu, causal, 0.25)
    for name, exact in zip(("out", "lse", "dq", "dk", "dv"), expected, strict=True):
        np.testing.assert_allclose(getattr(oracle, name), exact, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")])
def test_encoding_equals_torch_after_clipping(fmt, dtype):
    """All 65,536 bfloat16 inputs. Clipping first, because casts of larger values changed between releases."""
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = x[~np.isnan(x)]
    clipped = torch.from_numpy(np.clip(x, -fmt.max_finite, fmt.max_finite))
    theirs = clipped.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode(x, fmt), theirs)


@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")])
def test_decoding_equals_torch(fmt, dtype):
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(decode(codes, fmt), theirs)
