"""The custom operators under PyTorch's own checks, under torch.compile, and with a kernel in the reference's place."""

import dataclasses
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.library import opcheck  # noqa: E402

import flamia  # noqa: E402
from flamia import dispatch  # noqa: E402
from flamia.conformance.certificates import write_certificate  # noqa: E402
from flamia.pytorch import cpu, saved  # noqa: E402
from flamia.pytorch.call import attention as _defined  # noqa: E402, F401
from flamia.pytorch.recipe_text import decode_recipe, encode_recipe  # noqa: E402
from tests.torch.tensors import CU, assert_same_bits, certified, random_qkv  # noqa: E402

pytestmark = pytest.mark.torch

forward_op = torch.ops.flamia.attention_forward.default
backward_op = torch.ops.flamia.attention_backward.default


# ---- opcheck -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("mxfp8", torch.bfloat16),
        ("mxfp8", torch.float32),
        ("nvfp4_fp8", torch.bfloat16),
        ("bf16", torch.float16),
        ("cudnn_mxfp8", torch.bfloat16),
    ],
)
def test_opcheck(recipe, dtype):
    q, k, v, dout = random_qkv(total=70, dtype=dtype)
    cu = torch.tensor([0, 1, 40, 66], dtype=torch.int32)
    rest = (recipe, True, 0.2, "reference:ideal")
    opcheck(forward_op, (q, k, v, cu, None, *rest, True))
    opcheck(forward_op, (q.detach(), k.detach(), v.detach(), cu, None, *rest, False))
    results = forward_op(q, k, v, cu, None, *rest, True)
    out, _, m, l, kept = (x if isinstance(x, list) else x.detach() for x in results)  # noqa: E741
    opcheck(backward_op, (dout, out, m, l, cu, kept, 2, *rest, 39))
    opcheck(backward_op, (dout[:1].expand_as(dout), out, m, l, cu, kept, 2, *rest))


# ---- what is saved -----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What each forward of the reference was told about saving."""
    seen = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *rest: (seen.append(rest[-1]), forward(*rest))[1])
    return seen


def attend(q, k, v):
    return flamia.attention(q, k, v, CU)


def test_operands_are_saved_where_a_gradient_is_wanted_alone(asked):
    q, k, v, dout = random_qkv()
    with torch.no_grad():
        out = attend(q, k, v)
    with torch.inference_mode():
        attend(q, k, v)
    attend(q.detach(), k.detach(), v.detach())
    assert asked == [False, False, False]
    wanted = attend(q, k, v)
    for i in range(3):
        attend(*(x if i == j else x.detach() for j, x in enumerate((q, k, v))))
    assert asked[3:] == [True] * 4
    assert_same_bits(out, wanted)
    del asked[:]
    torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=True).backward(dout)
    assert asked == [False, True]
    assert_same_bits(q.grad, torch.autograd.grad(wanted, q, dout)[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_saves_as_an_eager_one(asked, backend):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    q, k, v, dout = random_qkv()
    with torch.no_grad():
        compiled(q, k, v)
    gradients = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
    assert asked == [False, True]
    for a, b in zip(gradients, torch.autograd.grad(attend(q, k, v), (q, k, v), dout), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("strict", [True, False])
def test_a_program_exported_without_gradients_can_be_trained(strict):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, cu):
            return flamia.attention(q, k, v, cu)

    q, k, v, dout = random_qkv()
    with torch.no_grad():
        exported = torch.export.export(Layer(), (q.detach(), k.detach(), v.detach(), CU), strict=strict).module()
    gradients = torch.autograd.grad(exported(q, k, v, CU), (q, k, v), dout)
    for a, b in zip(gradients, torch.autograd.grad(attend(q, k, v), (q, k, v), dout), strict=True):
        assert_same_bits(a, b)


def test_a_kernel_is_told_whether_to_save(kernel, monkeypatch):
    told, kept = [], dispatch._table[kernel.name][1]
    spy = dataclasses.replace(kernel, forward=lambda *rest: (told.append(rest[-1]), kernel.forward(*rest))[1])
    monkeypatch.setitem(dispatch._table, kernel.name, (spy, kept))
    q, k, v, _ = random_qkv(total=70)
    for saves in (True, False):
        forward_op(q, k, v, torch.tensor([0, 70]), None, "mxfp8", True, None, kernel.name, saves)
    assert told == [True, False]


def test_nothing_is_differentiated_from_nothing():
    q, k, v, _ = random_qkv()
    out, *_, kept = forward_op(q, k, v, CU, None, "mxfp8", True, None, "reference:ideal", False)
    assert kept == []
    with pytest.raises(RuntimeError, match="it was called or traced where no gradient was wanted"):
        out.sum().backward()


# ---- torch.compile -----------------------------------------------------------------------------------------


def layer(qkv, cu, recipe="mxfp8"):
    """Attention between things that a compiler would fuse."""
    qkv = qkv * 2
    out, lse = flamia.attention(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], cu, recipe=recipe, return_lse=True)
    return out + 1, lse


def compare_compiled(compiled, lengths, **options):
    for total, boundaries in lengths:
        qkv = torch.randn(total, 8, 32).bfloat16().requires_grad_()
        cu = torch.tensor(boundaries, dtype=torch.int32)
        out, lse = compiled(qkv, cu, **options)
        expected, expected_lse = layer(qkv, cu, **options)
        assert_same_bits(out, expected, "out")
        assert_same_bits(lse, expected_lse, "lse")
        assert not lse.requires_grad
        gradient, wanted = (torch.autograd.grad(x.sum(), qkv)[0] for x in (out, expected))
        assert_same_bits(gradient, wanted, "gradient")


PACKS = [(70, [0, 1, 40, 66]), (133, [0, 133]), (200, [0, 0, 10, 20, 200, 200]), (70, [0, 30, 70])]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_every_pack(backend):
    """Changing T, number of documents and boundaries: one graph, and the bits of eager mode."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler on the CPU")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    compare_compiled(compiled, PACKS)
    assert counter.frame_count == 1


def test_a_derived_recipe_compiles():
    torch._dynamo.reset()
    mine = dataclasses.replace(flamia.recipes.NVFP4_FP8, name="mine", head_scale=0.125, hadamard=True)
    compare_compiled(torch.compile(layer, fullgraph=True, backend="aot_eager"), PACKS[:1], recipe=mine)


def test_a_batch_compiles_under_autocast():
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 20, 2, 32, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda: flamia.attention(q, k, v, causal=False), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled()
        assert_same_bits(out, flamia.attention(q, k, v, causal=False))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_exports_with_dynamic_shapes():
    class Layer(torch.nn.Module):
        def forward(self, qkv, cu):
            return layer(qkv, cu)

    qkv, cu = torch.randn(70, 8, 32), torch.tensor(PACKS[0][1])
    dims = ({0: torch.export.Dim("tokens")}, {0: torch.export.Dim("boundaries", min=2)})
    exported = torch.export.export(Layer(), (qkv, cu), dynamic_shapes=dims).module()
    for total, boundaries in PACKS[1:3]:
        qkv, cu = torch.randn(total, 8, 32), torch.tensor(boundaries)
        assert_same_bits(exported(qkv, cu)[0], layer(qkv, cu)[0])


def test_the_first_use_may_be_inside_torch_compile():
    code = """
import torch, flamia
attend = torch.compile(lambda q, cu: flamia.attention(q, q, q, cu), fullgraph=True, backend="aot_eager")
print(tuple(attend(torch.randn(10, 1, 32), torch.tensor([0, 10])).shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(10, 1, 32)\n"


def test_errors_of_the_operator_reach_the_caller_of_a_compiled_function():
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"cu_seqlens must not decrease"):
        compiled(torch.randn(70, 8, 32).bfloat16(), torch.tensor([0, 40, 20]))


@pytest.mark.parametrize("recipe", list(flamia.reference.RECIPES.values()))
def test_recipes_survive_as_text(recipe):
    derived = dataclasses.replace(recipe, name="a = b\nc", head_scale=1 / 3)
    for r in (recipe, derived):
        assert decode_recipe(encode_recipe(r)) == r
    assert decode_recipe(encode_recipe(recipe.name)) == recipe


def test_hopper_keeps_one_copy_of_v():
    """And the operator says so while it is traced."""
    q, k, v, _ = random_qkv(total=9, dim=64)
    arguments = (q, k, v, torch.tensor([0, 9]), None, "mxfp8", True, None, "reference:hopper", True)
    opcheck(forward_op, arguments)
    kept = [[s.tensor for s in saved.saved_operands(flamia.recipes.MXFP8, True, p)] for p in ("hopper", "blackwell")]
    assert kept == [["q", "k", "v"], ["q", "k", "v", "v"]]


# ---- a kernel ----------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path):
    """A registered kernel that computes with the reference, padding what it saves as kernels do."""

    def forward(q, k, v, cu, recipe, causal, scale, longest, saves):
        *results, kept = cpu.forward(q, k, v, cu, None, recipe, causal, scale, "ideal", saves)
        return (*results, [*kept, torch.zeros(7)] if saves else [])

    def backward(dout, out, m, l, cu, kept, heads, recipe, causal, scale, longest):  # noqa: E741
        return cpu.backward(dout, out, m, l, cu, kept[:-1], heads, recipe, causal, scale, "ideal")

    def empty_saved(q, k, v, cu, recipe, causal):
        return [*saved.empty_operands(q, k, v, recipe, causal, "ideal"), q.new_empty(7, dtype=torch.float32)]

    certificate = certified("stand-in")
    write_certificate(certificate, tmp_path)
    made = dispatch.AttentionKernel(
        "stand-in", certificate.identity, (0, 0), ("mxfp8",), (32,), ("bfloat16",), forward, backward, empty_saved
    )
    assert dispatch.register(made, [tmp_path]) == certificate
    yield made
    dispatch.unregister("stand-in")


def test_a_registered_kernel_serves_both_passes(kernel, monkeypatch):
    monkeypatch.setattr("flamia.pytorch.call.choose_implementation", lambda *_: kernel.name)
    q, k, v, dout = random_qkv()
    out = flamia.attention(q, k, v, CU)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    monkeypatch.undo()
    expected = flamia.attention(q, k, v, CU)
    assert_same_bits(out, expected)
    for a, b in zip(gradients, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        assert_same_bits(a, b)


def test_opcheck_of_a_registered_kernel(kernel):
    q, k, v, _ = random_qkv(total=70)
    cu = torch.tensor([0, 70], dtype=torch.int32)
    opcheck(forward_op, (q, k, v, cu, None, "mxfp8", True, None, kernel.name, True))


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_way_to_a_kernel_needs_no_data_and_compiles(kernel, monkeypatch, dynamic):
    """CUDA tensors without memory go through the call, as they do when PyTorch traces: nothing reads or waits."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kernel.capability)
    torch._dynamo.reset()

    def attend(q, k, v, cu):
        return flamia.attention(q, k, v, cu, return_lse=True)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    with torch._subclasses.FakeTensorMode():
        for total in (70, 90) if dynamic else (70,):
            q, k, v = (torch.empty(total, h, 32, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
            for run in (attend, compiled):
                out, lse = run(q, k, v, torch.empty(5, device="cuda", dtype=torch.int32))
                assert out.shape == q.shape and lse.shape == (4, total)
                assert out.device.type == lse.device.type == "cuda"
        batch = [x.unflatten(0, (2, -1)) for x in (q, k, v)]
        assert flamia.attention(*batch).shape == batch[0].shape
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("boundaries", "longest", "message"),
    [
        ([1, 70], None, "cu_seqlens must start at 0, never decrease, and end at or before T = 70"),
        ([0, 40, 20], None, "cu_seqlens must start at 0"),
        ([0, 71], None, "cu_seqlens must start at 0"),
        ([0, 30, 70], 39, "max_seqlen must be at least the longest document of cu_seqlens, got 39"),
    ],
)
def test_documents_of_a_kernel_are_checked_on_the_device(kernel, boundaries, longest, message):
    q, k, v, _ = random_qkv(total=70)
    with pytest.raises(RuntimeError, match=message):
        forward_op(q, k, v, torch.tensor(boundaries), longest, "mxfp8", True, None, kernel.name, True)


def test_a_kernel_that_checks_documents_is_not_checked_twice(kernel, monkeypatch):
    calls = []
    kept = dispatch._table[kernel.name][1]
    counted = dataclasses.replace(kernel, forward=lambda *rest: (calls.append(rest[-2]), kernel.forward(*rest))[1])
    monkeypatch.setitem(dispatch._table, kernel.name, (counted, kept))
    monkeypatch.setattr("flamia.pytorch.operators.assert_documents", lambda *_: calls.append("boundaries"))
    monkeypatch.setattr("flamia.pytorch.operators.assert_longest", lambda *_: calls.append("longest"))
    q, k, v, _ = random_qkv(total=70)
    rest = ("mxfp8", True, None, kernel.name, True)
    forward_op(q, k, v, torch.tensor([0, 70]), None, *rest)
    forward_op(q, k, v, torch.tensor([0, 70]), 71, *rest)
    assert calls == ["boundaries", None, "boundaries", "longest", 71]
    monkeypatch.setitem(dispatch._table, kernel.name, (dataclasses.replace(counted, checks_documents=True), kept))
    del calls[:]
    forward_op(q, k, v, torch.tensor([0, 70]), None, *rest)
    forward_op(q, k, v, torch.tensor([0, 70]), 70, *rest)
    assert calls == [None, 70]


def test_checking_documents_on_the_device_waits_for_nothing():
    """No operator of the check returns a Python number: it can be traced without data."""
    from flamia.pytorch.arguments import assert_documents, assert_longest

    with torch._subclasses.FakeTensorMode():
        assert_documents(torch.empty(5, dtype=torch.int32), 70)
        assert_longest(torch.empty(5, dtype=torch.int32), 40)
