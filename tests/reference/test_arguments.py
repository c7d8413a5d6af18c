"""Bad input is an error that names the argument, what it was and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

from flamia.reference import attention_backward, attention_forward, attention_oracle
from tests.reference.cases import BF16, random_inputs

Q, K, V, DOUT = random_inputs(0, 40, 4, 2)


def bad(**changes):
    """Arguments of a valid call with some replaced."""
    return {"q": Q, "k": K, "v": V, "cu_seqlens": [0, 40]} | changes


CASES = [
    (bad(q=Q.tolist()), TypeError, "q must be a NumPy array"),
    (bad(q=Q.astype(np.float64)), TypeError, "q must be float32 or ml_dtypes.bfloat16, got float64"),
    (bad(k=K.astype(np.float16)), TypeError, "k must be float32 or ml_dtypes.bfloat16, got float16"),
    (bad(v=V.astype(np.float32)), TypeError, "v must have the dtype of q"),
    (bad(q=Q[0]), ValueError, r"q must have shape \(T, H, D\), got \(4, 64\)"),
    (bad(k=K[:39]), ValueError, "k must have the 40 tokens of q"),
    (bad(k=K[:, :, :32]), ValueError, r"k must have the head_dim of q \(64\), got 32"),
    (bad(v=V[:, :1]), ValueError, "v must have the 2 heads of k, got 1"),
    (bad(q=Q[:, :3]), ValueError, "q must have a multiple of k's 2 heads, got 3"),
    (bad(k=K[:, :0], v=V[:, :0]), ValueError, "k must have at least one head"),
    (bad(q=Q[..., :48], k=K[..., :48], v=V[..., :48]), ValueError, "a multiple of 32 up to 256, got 48"),
    (bad(q=Q[..., :32], k=K[..., :32], v=V[..., :32], profile="hopper"), ValueError, r"head_dim in \(64, 128\)"),
    (bad(cu_seqlens=[0.0, 40.0]), TypeError, "cu_seqlens must hold integers"),
    (bad(cu_seqlens=[[0, 40]]), ValueError, r"cu_seqlens must have shape \(documents \+ 1,\), got shape \(1, 2\)"),
    (bad(cu_seqlens=np.zeros(0, np.int32)), ValueError, "cu_seqlens must have shape"),
    (bad(cu_seqlens=[1, 40]), ValueError, r"cu_seqlens\[0\] must be 0, got 1"),
    (bad(cu_seqlens=[0, 30, 20, 40]), ValueError, r"cu_seqlens\[1\]=30 > cu_seqlens\[2\]=20"),
    (bad(cu_seqlens=[0, 41]), ValueError, r"at most the number of packed tokens 40, got 41"),
    (bad(recipe="fp8"), ValueError, "recipe must be one of .*'mxfp8'.* got 'fp8'"),
    (bad(recipe=8), TypeError, "recipe must be a Recipe or a name, got 8"),
    (bad(profile="ampere"), ValueError, "profile must be one of .* got 'ampere'"),
    (bad(profile=None), TypeError, "profile must be a Profile or a name, got None"),
    (
        bad(recipe="cudnn_mxfp8", profile="blackwell"),
        ValueError,
        "study-only, because of its scores: profile must",
    ),
    (bad(causal=1), TypeError, "causal must be a bool, got 1"),
    (bad(softmax_scale=-1.0), ValueError, r"softmax_scale must be from 0 to 1.701e\+38, got -1.0"),
    (bad(softmax_scale=float("nan")), ValueError, r"softmax_scale must be from 0 to 1.701e\+38, got nan"),
    (bad(softmax_scale="1"), TypeError, "softmax_scale must be a number, got '1'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), CASES, ids=[c[2][:40] for c in CASES])
def test_forward_names_the_bad_argument(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        attention_forward(**arguments)


def test_backward_names_the_bad_argument() -> None:
    forward = attention_forward(Q, K, V, [0, 40])
    with pytest.raises(ValueError, match=r"dout must have the shape of out \(40, 4, 64\), got \(39, 4, 64\)"):
        attention_backward(DOUT[:39], forward)
    with pytest.raises(TypeError, match="dout must have the dtype of out"):
        attention_backward(DOUT.astype(np.float32), forward)
    with pytest.raises(TypeError, match="forward must be the result of attention_forward, got tuple"):
        attention_backward(DOUT, (forward,))


def test_oracle_checks_too() -> None:
    with pytest.raises(ValueError, match=r"dout must have the shape of q"):
        attention_oracle(Q, K, V, [0, 40], DOUT[:3])
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention_oracle(Q, K, V, [0, 50])


def test_unsigned_and_int32_cu_seqlens_are_taken() -> None:
    for kind in (np.int32, np.int64, np.uint32):
        assert attention_forward(Q, K, V, np.array([0, 40], kind)).out.dtype == BF16
