"""`flamia.flash_attn_varlen_func`: FlashAttention's signature, FLAMIA's bits, and refusals by name."""

import inspect
import re

import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from tests.torch.tensors import CU, assert_same_bits, random_qkv  # noqa: E402

pytestmark = pytest.mark.torch

LONGEST = int(CU.diff().max())

# flash_attn 2.8's flash_attn_varlen_func, in order.
SIGNATURE = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap "
    "alibi_slopes deterministic return_attn_probs block_table"
).split()


def test_signature_is_that_of_flash_attention():
    parameters = inspect.signature(flamia.flash_attn_varlen_func).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURE
    defaults = {name: parameters[name].default for name in SIGNATURE[7:]}
    assert defaults == {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "block_table": None,
    }


@pytest.mark.parametrize("causal", [True, False])
def test_same_bits_as_attention(causal):
    q, k, v, dout = random_qkv()
    expected, expected_lse = flamia.attention(q, k, v, CU, causal=causal, softmax_scale=0.2, return_lse=True)
    out, lse, probabilities = flamia.flash_attn_varlen_func(
        q, k, v, CU, CU.clone(), LONGEST, LONGEST + 3, 0.0, 0.2, causal, deterministic=True, return_attn_probs=True
    )
    assert probabilities is None
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected)), strict=True):
        assert_same_bits(a, b)
    alone = flamia.flash_attn_varlen_func(q, k, v, CU, CU, LONGEST, LONGEST, softmax_scale=0.2, causal=causal)
    assert_same_bits(alone, expected)
    four = flamia.flash_attn_varlen_func(q, k, v, CU, CU, LONGEST, LONGEST, recipe="nvfp4_fp8")
    assert_same_bits(four, flamia.attention(q, k, v, CU, recipe="nvfp4_fp8", causal=False))


SHIFTED = CU.clone()
SHIFTED[2] -= 1


@pytest.mark.parametrize(
    ("changes", "exception", "message"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p must be 0.0, got 0.1"),
        ({"window_size": (128, 0)}, ValueError, "window_size must be (-1, -1), got (128, 0)"),
        ({"softcap": 30.0}, ValueError, "softcap must be 0.0, got 30.0"),
        ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes must be None, got Tensor"),
        ({"block_table": CU[None]}, ValueError, "block_table must be None, got Tensor"),
        ({"cu_seqlens_k": CU[:-1]}, ValueError, "cu_seqlens_k must equal cu_seqlens_q"),
        ({"cu_seqlens_k": SHIFTED}, ValueError, "cu_seqlens_k must equal cu_seqlens_q"),
        ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
        ({"cu_seqlens_q": None, "cu_seqlens_k": None}, TypeError, "cu_seqlens_q must be a torch.Tensor, got NoneType"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"window_size": -1}, ValueError, "window_size must be (-1, -1), got -1"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int, got NoneType"),
        ({"max_seqlen_k": LONGEST - 1}, ValueError, "max_seqlen must be at least the longest document"),
        ({"k": torch.zeros(7, 2, 32, dtype=torch.bfloat16)}, ValueError, "k must have the tokens (T) of q"),
        ({"causal": None}, TypeError, "causal must be a bool"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, exception, message):
    q, k, v, _ = random_qkv(grad=False)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    arguments |= {"max_seqlen_q": LONGEST, "max_seqlen_k": LONGEST} | changes
    with pytest.raises(exception, match=re.escape(message)):
        flamia.flash_attn_varlen_func(**arguments)


def test_compiles():
    q, k, v, _ = random_qkv(grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(flamia.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, CU, CU.clone(), LONGEST, LONGEST, causal=True)
    assert_same_bits(out, flamia.attention(q, k, v, CU))
    with pytest.raises(RuntimeError, match="cu_seqlens_k must equal cu_seqlens_q"):
        compiled(q, k, v, CU, SHIFTED, LONGEST, LONGEST, causal=True)
