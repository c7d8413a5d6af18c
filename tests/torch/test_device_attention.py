"""`flamia.attention` on a GPU: the bits are those that the reference predicts, however the tensors lie in memory."""

import re

import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from flamia.dispatch import NoCertifiedKernel  # noqa: E402
from flamia.pytorch.call import find_kernel  # noqa: E402
from tests.torch.tensors import CU, assert_same_bits, random_qkv, saved_bytes  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ("out", "lse", "dq", "dk", "dv")
LONG = torch.tensor([0, 300, 301, 700], dtype=torch.int32)


def attend(q, k, v, dout, cu, **options):
    """out, lse and the gradients."""
    out, lse = flamia.attention(q, k, v, cu, return_lse=True, **options)
    return (out, lse, *torch.autograd.grad(out, (q, k, v), dout))


def on(device, *tensors):
    """Leaves on a device, with gradients where the tensors have them."""
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors]


def draw(device, total=720, heads=(4, 2), dim=64, **options):
    """q, k, v, dout and boundaries on a device: three documents and, by default, twenty rows of padding."""
    return [*on(device, *random_qkv(total, heads, dim, **options)), LONG.to(device)]


def assert_all_same(actual, expected):
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert_same_bits(a.cpu(), b.cpu(), name)


# ---- bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "causal", "heads", "dim"),
    [
        (torch.bfloat16, True, (4, 2), 64),
        (torch.bfloat16, False, (3, 1), 128),
        (torch.bfloat16, True, (2, 2), 128),
        (torch.float16, True, (2, 1), 128),
        (torch.float16, False, (4, 2), 64),
        (torch.float32, True, (3, 1), 64),
        (torch.float32, False, (2, 2), 128),
    ],
)
def test_bits_are_those_that_the_reference_predicts(gpu, prediction, dtype, causal, heads, dim):
    tensors = random_qkv(heads=heads, dim=dim, dtype=dtype)
    options = {"causal": causal, "softmax_scale": 0.11}
    expected = attend(*tensors, CU, backend=prediction, **options)
    for backend in ("auto", "cuda"):
        assert_all_same(attend(*on(gpu, *tensors), CU.to(gpu), backend=backend, **options), expected)


@pytest.mark.parametrize(("causal", "heads", "dim"), [(True, (4, 2), 64), (False, (3, 3), 128)])
def test_so_are_those_of_the_recipe_bf16_where_it_is_certified(gpu, prediction, causal, heads, dim):
    try:
        find_kernel("bf16", dim, torch.bfloat16, causal, gpu.index)
    except NoCertifiedKernel as error:
        pytest.skip(str(error))
    tensors = random_qkv(heads=heads, dim=dim)
    options = {"causal": causal, "recipe": "bf16"}
    expected = attend(*tensors, CU, backend=prediction, **options)
    assert_all_same(attend(*on(gpu, *tensors), CU.to(gpu), **options), expected)


@pytest.mark.parametrize("boundaries", [torch.int32, torch.int64])
def test_a_batch_is_documents_of_one_length(gpu, prediction, boundaries):
    tensors = random_qkv(total=140, heads=(2, 1), dim=64)
    batch = [x.detach().unflatten(0, (2, 70)).requires_grad_(x.requires_grad) for x in tensors]
    expected = attend(*batch, None, backend=prediction)
    found = attend(*on(gpu, *batch), None)
    assert found[1].shape == (2, 2, 70)
    assert_all_same(found, expected)
    out, lse, *gradients = attend(*on(gpu, *tensors), torch.tensor([0, 70, 140], dtype=boundaries, device=gpu))
    assert_same_bits(found[1].transpose(0, 1).flatten(1), lse)
    for a, b in zip((found[0], *found[2:]), (out, *gradients), strict=True):
        assert_same_bits(a.flatten(0, 1), b)


def test_the_references_copy_of_cuda_tensors_gives_cuda_tensors(gpu, prediction):
    tensors = random_qkv(total=40, heads=(2, 1), dim=64)
    cu = torch.tensor([0, 3, 40])
    found = attend(*on(gpu, *tensors), cu.to(gpu), backend=prediction)
    assert all(x.device == gpu for x in found)
    assert_all_same(found, attend(*tensors, cu, backend=prediction))


def test_strides_do_not_matter(gpu):
    """Sliced qkv, heads before tokens, a strided dout, one whose channels are strided and one of stride 0."""
    q, k, v, dout, cu = draw(gpu, heads=(3, 3))
    expected = attend(q, k, v, dout, cu)

    qkv = torch.stack([q, k, v], 1).detach().requires_grad_()
    out, lse = flamia.attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu, return_lse=True)
    gradient = torch.autograd.grad(out, qkv, dout.transpose(0, 1).contiguous().transpose(0, 1))[0]
    assert_all_same((out, lse, *gradient.unbind(1)), expected)

    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    assert not turned[0].is_contiguous()
    assert_all_same(attend(*turned, dout.transpose(0, 2).contiguous().transpose(0, 2), cu), expected)

    ones = torch.autograd.grad(flamia.attention(q, k, v, cu), (q, k, v), torch.ones_like(dout))
    flamia.attention(q, k, v, cu).sum().backward()
    for x, gradient in zip((q, k, v), ones, strict=True):
        assert_same_bits(x.grad, gradient)


def test_documents_in_a_pack_are_as_if_alone(gpu):
    q, k, v, dout, cu = draw(gpu)
    out, lse, *gradients = attend(q, k, v, dout, cu)
    for start, stop in zip(LONG[:-1].tolist(), LONG[1:].tolist(), strict=True):
        alone = [x[start:stop].detach().requires_grad_() for x in (q, k, v)]
        found = attend(*alone, dout[start:stop], torch.tensor([0, stop - start], device=gpu))
        assert_all_same(found, (out[start:stop], lse[:, start:stop], *(g[start:stop] for g in gradients)))
    assert not out[700:].any() and lse[:, 700:].isneginf().all() and not any(g[700:].any() for g in gradients)


@pytest.mark.parametrize("total", [0, 3])
def test_nothing_but_padding(gpu, total):
    tensors = on(gpu, *random_qkv(total=total, dim=64))
    out, lse, *gradients = attend(*tensors, torch.zeros(1, dtype=torch.int64, device=gpu))
    assert out.shape == (total, 4, 64) and not out.any() and not any(g.any() for g in gradients)
    assert torch.isneginf(lse).all()


def test_autocast_casts_like_sdpa(gpu):
    q, k, v, dout, cu = draw(gpu, dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = attend(*narrow, dout.bfloat16(), cu)
    with torch.autocast(gpu.type, torch.bfloat16):
        out, lse = flamia.attention(q, k, v.bfloat16(), cu, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
    assert out.dtype == torch.bfloat16 and gradients[0].dtype == torch.float32
    assert_all_same((out, lse, *(g.bfloat16() for g in gradients)), expected)


def test_the_drop_in_has_the_same_bits(gpu):
    q, k, v, _, cu = draw(gpu)
    out = flamia.flash_attn_varlen_func(q, k, v, cu, cu.clone(), 399, 399, causal=True)
    assert_same_bits(out, flamia.attention(q, k, v, cu))


# ---- what autograd keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_gradients(gpu, mode):
    q, k, v, _, cu = draw(gpu)
    expected = flamia.attention(q, k, v, cu)
    with mode():
        size, out = saved_bytes(lambda: flamia.attention(q, k, v, cu))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]
        again = flamia.attention(q, k, v, cu)
        grown = torch.cuda.memory_stats(gpu)["requested_bytes.all.current"] - before
    assert size == 0 and out.grad_fn is None
    assert grown == again.nbytes, "a tensor beside out outlives the call"
    assert_same_bits(out, expected)


def test_activation_checkpointing_gives_the_same_bits(gpu):
    q, k, v, dout, cu = draw(gpu)
    expected = attend(q, k, v, dout, cu)

    def block(q, k, v):
        return flamia.attention(q * 1, k * 1, v * 1, cu)

    out = torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)
    assert_all_same((out, expected[1], *torch.autograd.grad(out, (q, k, v), dout)), expected)


def test_double_backward_is_refused(gpu):
    q, k, v, _, cu = draw(gpu)
    out = flamia.attention(q, k, v, cu)
    gradient = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"flamia\.attention cannot be differentiated twice"):
        gradient.float().sum().backward()


def test_some_inputs_may_need_no_gradient(gpu):
    q, k, v, dout, cu = draw(gpu)
    expected = attend(q, k, v, dout, cu)
    alone = v.detach().requires_grad_()
    out = flamia.attention(q.detach(), k.detach(), alone, cu)
    assert_same_bits(torch.autograd.grad(out, alone, dout)[0], expected[4])


# ---- errors ------------------------------------------------------------------------------------------------

ERRORS = {
    "mixed devices": (lambda a: {"k": a["k"].cpu()}, ValueError, "k must be on the device of q ({gpu}), got cpu"),
    "cu_seqlens on the CPU": (
        lambda a: {"cu_seqlens": LONG},
        ValueError,
        "cu_seqlens must be on the device of q ({gpu}), got cpu",
    ),
    "mixed dtypes": (lambda a: {"v": a["v"].float()}, TypeError, "v must have the dtype of q (torch.bfloat16)"),
    "int q": (lambda a: {"q": a["q"].int()}, TypeError, "q must be bfloat16, float16 or float32, got torch.int32"),
    "float cu_seqlens": (
        lambda a: {"cu_seqlens": a["cu_seqlens"].float()},
        TypeError,
        "cu_seqlens must be int32 or int64",
    ),
    "T of v": (lambda a: {"v": a["v"][1:]}, ValueError, "v must have the tokens (T) of q"),
    "heads of q": (lambda a: {"q": a["q"][:, :3]}, ValueError, "q must have a multiple of k's 2 heads, got 3"),
    "strided channels": (
        lambda a: {"k": a["k"].transpose(1, 2).contiguous().transpose(1, 2)},
        ValueError,
        "k must have contiguous channels",
    ),
    "batch with cu_seqlens": (
        lambda a: {n: a[n][None] for n in "qkv"},
        ValueError,
        "q must have shape (T, H, D) when cu_seqlens is given",
    ),
    "packed without cu_seqlens": ({"cu_seqlens": None}, ValueError, "cu_seqlens must be given for packed tensors"),
    "head_dim 48": (lambda a: {n: a[n][..., :48] for n in "qkv"}, ValueError, "multiple of 32 up to 256, got 48"),
    "head_dim without a kernel": (
        lambda a: {n: a[n][..., :32] for n in "qkv"},
        NoCertifiedKernel,
        "no certified kernel for recipe 'mxfp8', head_dim 32 and bfloat16 on",
    ),
    "recipe without a kernel": ({"recipe": "cudnn_mxfp8"}, NoCertifiedKernel, "recipe 'cudnn_mxfp8', head_dim 64"),
    "recipe": ({"recipe": "fp8"}, ValueError, "recipe must be a flamia.Recipe or one of"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of"),
    "softmax_scale": ({"softmax_scale": -1.0}, ValueError, "softmax_scale must be from 0"),
    "causal": ({"causal": 1}, TypeError, "causal must be a bool, got int"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_arguments_raise_before_anything_is_computed(gpu, case):
    q, k, v, _, cu = draw(gpu, grad=False)
    changes, exception, message = ERRORS[case]
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens": cu}
    arguments |= changes(arguments) if callable(changes) else changes
    allocated = "allocation.all.allocated"
    before = torch.cuda.memory_stats(gpu)[allocated]
    with pytest.raises(exception, match=re.escape(message.format(gpu=gpu))):
        flamia.attention(**arguments)
    assert torch.cuda.memory_stats(gpu)[allocated] == before, "memory was taken before the error"
