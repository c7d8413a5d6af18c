"""`flamia.attention`: its bits are the reference's, whatever the strides, the dtype or the way it is called."""

import dataclasses
import gc
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from flamia.pytorch.exchange import to_numpy, to_torch  # noqa: E402
from tests.torch.tensors import CU, TOTAL, assert_same_bits, random_qkv, saved_bytes  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ("out", "lse", "dq", "dk", "dv")
MINE = dataclasses.replace(flamia.recipes.MXFP8, name="mine", scale_rule="floor", p_exponent=6)


def by_torch(q, k, v, dout, cu=CU, **options):
    out, lse = flamia.attention(q, k, v, cu, return_lse=True, **options)
    return (out, lse, *torch.autograd.grad(out, (q, k, v), dout))


def by_reference(q, k, v, dout, cu=CU, **options):
    """The reference itself, with its results in the dtype of q."""
    forward = flamia.reference.attention_forward(*(to_numpy(x) for x in (q, k, v)), cu.numpy(), **options)
    out = to_torch(forward.out, q.dtype)
    forward = dataclasses.replace(forward, out=to_numpy(out))
    g = flamia.reference.attention_backward(to_numpy(dout), forward)
    return (out, to_torch(forward.lse), *(to_torch(x, q.dtype) for x in (g.dq, g.dk, g.dv)))


def assert_all_same(actual, expected):
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8", "bf16", "cudnn_mxfp8", "tensor_fp8", MINE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_equal_the_reference(recipe, dtype, causal):
    tensors = random_qkv(dtype=dtype)
    options = {"recipe": recipe, "causal": causal, "softmax_scale": 0.3}
    assert_all_same(by_torch(*tensors, **options), by_reference(*tensors, **options))


@pytest.mark.parametrize("profile", ["blackwell", "hopper"])
def test_a_profile_can_be_chosen(profile):
    tensors = random_qkv(total=40, heads=(2, 1), dim=64)
    cu = torch.tensor([0, 3, 40])
    actual = by_torch(*tensors, cu=cu, backend=f"reference:{profile}")
    assert_all_same(actual, by_reference(*tensors, cu=cu, profile=profile))


def test_nan_and_padding_pass_through():
    q, k, v, dout = random_qkv()
    with torch.no_grad():
        k[100], v[int(CU[-1]) :], dout[int(CU[-1]) + 1] = torch.nan, torch.nan, torch.inf
    assert_all_same(by_torch(q, k, v, dout), by_reference(q, k, v, dout))


def test_strides_do_not_matter():
    """Sliced qkv, heads before tokens, a strided dout and one of stride 0."""
    q, k, v, dout = random_qkv(heads=(3, 3))
    expected = by_torch(q, k, v, dout)

    qkv = torch.stack([q, k, v], 1).detach().requires_grad_()
    out, lse = flamia.attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], CU, return_lse=True)
    gradient = torch.autograd.grad(out, qkv, dout.transpose(0, 1).contiguous().transpose(0, 1))[0]
    assert_all_same((out, lse, *gradient.unbind(1)), expected)

    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    assert not turned[0].is_contiguous()
    assert_all_same(by_torch(*turned, dout), expected)

    ones = torch.autograd.grad(flamia.attention(q, k, v, CU), (q, k, v), torch.ones_like(dout))
    for seed in (q, k, v):
        seed.grad = None
    flamia.attention(q, k, v, CU).sum().backward()
    for x, gradient in zip((q, k, v), ones, strict=True):
        assert_same_bits(x.grad, gradient)


def test_a_batch_is_equal_documents():
    batch, tokens = 3, 37
    q, k, v, dout = random_qkv(total=batch * tokens)
    cu = torch.arange(batch + 1) * tokens
    out, lse, *gradients = by_torch(q, k, v, dout, cu=cu)
    wide = [x.detach().view(batch, tokens, -1, 32).requires_grad_() for x in (q, k, v)]
    wide_out, wide_lse = flamia.attention(*wide, return_lse=True)
    wide_gradients = torch.autograd.grad(wide_out, wide, dout.view_as(wide_out))
    assert wide_lse.shape == (batch, 4, tokens)
    assert_same_bits(wide_out.flatten(0, 1), out)
    assert_same_bits(wide_lse.transpose(0, 1).flatten(1), lse)
    for a, b in zip(wide_gradients, gradients, strict=True):
        assert_same_bits(a.flatten(0, 1), b)


def test_batch_of_heads_before_tokens():
    """(B, H, S, D) tensors, transposed: B and S cannot be flattened in place."""
    q, k, v = (torch.randn(2, 3, 20, 32).transpose(1, 2) for _ in range(3))
    expected = flamia.attention(*(x.contiguous() for x in (q, k, v)))
    assert_same_bits(flamia.attention(q, k, v), expected)


@pytest.mark.parametrize("total", [0, 3])
def test_nothing_but_padding(total):
    q, k, v, dout = random_qkv(total=total)
    out, lse, *gradients = by_torch(q, k, v, dout, cu=torch.zeros(1, dtype=torch.int64))
    assert out.shape == (total, 4, 32) and not out.any() and not any(g.any() for g in gradients)
    assert torch.isneginf(lse).all()
    assert flamia.attention(*(torch.zeros(2, 0, 1, 32) for _ in range(3))).shape == (2, 0, 1, 32)
    again = flamia.attention(out, out, out, torch.zeros(1, dtype=torch.int64))  # also if empty, as contiguous as q
    assert again.stride() == q.stride()


def test_autocast_casts_like_sdpa():
    q, k, v, dout = random_qkv(dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = by_torch(*narrow, dout.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flamia.attention(q, k, v.bfloat16(), CU, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert_same_bits(lse, expected[1])
    gradient = torch.autograd.grad(out, q, dout.bfloat16())[0]
    assert gradient.dtype == torch.float32
    assert_same_bits(gradient, expected[2].float())


def test_only_out_is_differentiable():
    q, k, v, _ = random_qkv(total=20)
    out, lse = flamia.attention(q, k, v, torch.tensor([0, 20]), return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()


def test_some_inputs_may_need_no_gradient():
    q, k, v, dout = random_qkv()
    expected = by_torch(q, k, v, dout)
    alone = v.detach().requires_grad_()
    out = flamia.attention(q.detach(), k.detach(), alone, CU)
    assert_same_bits(torch.autograd.grad(out, alone, dout)[0], expected[4])


def test_double_backward_is_refused():
    q, k, v, _ = random_qkv(total=20)
    out = flamia.attention(q, k, v, torch.tensor([0, 20]))
    gradient = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"flamia\.attention cannot be differentiated twice"):
        gradient.float().sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_mode_is_refused(compiled):
    """Nothing would carry the tangent on: it would be lost, and read as 0."""
    torch._dynamo.reset()
    q, k, v, dout = random_qkv(total=20, grad=False)
    cu = torch.tensor([0, 20])

    def derive(x, name):
        tensors = {"q": q, "k": k, "v": v}
        return torch.func.jvp(lambda y: flamia.attention(**tensors | {name: y}, cu_seqlens=cu), (x,), (x,))

    run = torch.compile(derive, backend="aot_eager") if compiled else derive
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"{name} must carry no tangent"):
            run(x, name)
    if compiled:
        return
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(dout, dout)
        leaf = q.clone().requires_grad_()
        out = flamia.attention(leaf, k, v, cu)
        with pytest.raises(ValueError, match="dout must carry no tangent"):
            torch.autograd.grad(out, leaf, dual)


# ---- what is saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "causal", "bytes_q", "bytes_k", "bytes_v"),
    [
        ("mxfp8", True, 128 + 1, 128 + 1, 2 * (128 + 1)),
        ("mxfp8", False, 128 + 1, 128 + 1, 128 + 1),
        ("nvfp4_fp8", True, 64 + 8 + 128 + 1, 64 + 8 + 128 + 1, 2 * (128 + 1)),
        ("bf16", True, 256 + 1, 256 + 1, 256 + 1),
    ],
)
def test_saved_are_payloads_and_not_qkv(recipe, causal, bytes_q, bytes_k, bytes_v):
    total, hq, hkv = 1000, 4, 2
    q, k, v, _ = random_qkv(total=total, heads=(hq, hkv), dim=128)
    cu = torch.tensor([0, 10], dtype=torch.int32)
    size, out = saved_bytes(lambda: flamia.attention(q, k, v, cu, recipe=recipe, causal=causal))
    per_token = hq * (bytes_q + 256 + 4 + 4) + hkv * (bytes_k + bytes_v)  # with out, m and l
    assert size == total * per_token + cu.nbytes
    node = out.grad_fn
    assert not any(x.data_ptr() in {t.data_ptr() for t in (q, k, v)} for x in node.saved_tensors)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_gradients(mode):
    q, k, v, _ = random_qkv(total=50)
    cu = torch.tensor([0, 50])
    with mode():
        size, out = saved_bytes(lambda: flamia.attention(q, k, v, cu))
        before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
        again = flamia.attention(q, k, v, cu)
        after = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in before]
    assert size == 0 and out.grad_fn is None and not out.requires_grad
    assert [x is again for x in after] == [True], "a tensor beside out outlives the call"
    assert_same_bits(out, again)


def test_inputs_are_freed_when_the_model_drops_them():
    q, k, v, dout = random_qkv(total=50)
    copies = [x * 1 for x in (q, k, v)]
    alive = [weakref.ref(x) for x in copies]
    out = flamia.attention(*copies, torch.tensor([0, 50]))
    del copies
    assert [x() for x in alive] == [None] * 3
    out.backward(dout)
    assert q.grad is not None


def test_changing_cu_seqlens_in_place_before_backward_is_an_error():
    q, k, v, dout = random_qkv(total=50)
    cu = torch.tensor([0, 20, 50])
    out = flamia.attention(q, k, v, cu)
    cu[1] = 30
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_activation_checkpointing_gives_the_same_bits():
    q, k, v, dout = random_qkv()
    expected = by_torch(q, k, v, dout)

    def block(q, k, v):
        return flamia.attention(q * 1, k * 1, v * 1, CU)

    out = torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)
    assert_all_same((out, expected[1], *torch.autograd.grad(out, (q, k, v), dout)), expected)


def test_the_operator_costs_what_the_reference_costs():
    """Processor time, which other processes do not change; the least of three."""
    q, k, v, dout = random_qkv(total=512, heads=(8, 2), dim=128)
    cu = torch.tensor([0, 512])

    def directly():
        arrays = [to_numpy(x) for x in (q, k, v)]
        flamia.reference.attention_backward(
            to_numpy(dout), flamia.reference.attention_forward(*arrays, cu.numpy(), recipe="mxfp8")
        )

    def through_torch():
        torch.autograd.grad(flamia.attention(q, k, v, cu), (q, k, v), dout)

    def cost(run):
        start = time.process_time()
        run()
        return time.process_time() - start

    costs = [(cost(directly), cost(through_torch)) for _ in range(3)]
    direct, ours = (min(x) for x in zip(*costs, strict=True))
    assert ours < 1.15 * direct


# ---- exchange with NumPy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_exchange_shares_memory(dtype):
    x = torch.arange(24).to(dtype).view(2, 3, 4)
    for view in (x, x.transpose(0, 1), x[:, 1], x[:1].expand(5, 3, 4)):
        array = to_numpy(view)
        assert array.__array_interface__["data"][0] == view.data_ptr()
        assert array.strides == tuple(s * x.element_size() for s in view.stride())
        assert array.astype(np.float64).tolist() == view.double().tolist()
        back = to_torch(array)
        assert back.data_ptr() == view.data_ptr() and back.dtype == dtype


def test_float16_is_widened_exactly():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    wide = to_numpy(x)
    assert wide.dtype == np.float32
    assert_same_bits(to_torch(wide, torch.float16)[~x.isnan()], x[~x.isnan()])
    assert to_numpy(x.bfloat16()).dtype == ml_dtypes.bfloat16


def test_results_do_not_share_memory_with_inputs():
    q, k, v, _ = random_qkv(grad=False)
    inputs = [q, k, v]
    out, lse, m, l, saved = torch.ops.flamia.attention_forward(  # noqa: E741
        q, k, v, CU, None, "bf16", True, None, "reference:ideal", True
    )
    pointers = [x.untyped_storage().data_ptr() for x in (*inputs, out, lse, m, l, *saved)]
    assert len(set(pointers)) == len(pointers)
    assert out.shape[0] == TOTAL
