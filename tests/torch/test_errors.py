"""Wrong arguments raise before anything is computed, naming the argument and the rule."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from flamia import dispatch  # noqa: E402
from flamia.conformance.certificates import write_certificate  # noqa: E402
from flamia.pytorch import blackwell, call  # noqa: E402
from tests.torch.tensors import certified, random_qkv  # noqa: E402

pytestmark = pytest.mark.torch

T = 20
CU = torch.tensor([0, 5, T])


def good():
    q, k, v, _ = random_qkv(total=T, grad=False)
    return {"q": q, "k": k, "v": v, "cu_seqlens": CU}


def batch():
    return {name: x.view(2, 10, *x.shape[1:]) for name, x in good().items() if name != "cu_seqlens"}


CASES = {
    # name: (changes, exception, message)
    "q is no tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "int q": (lambda a: {"q": a["q"].int()}, TypeError, "q must be bfloat16, float16 or float32, got torch.int32"),
    "float64 v": (lambda a: {"v": a["v"].double()}, TypeError, "v must be bfloat16, float16 or float32"),
    "fp8 k": (lambda a: {"k": a["k"].to(torch.float8_e4m3fn)}, TypeError, "k must be bfloat16, float16 or float32"),
    "sparse q": (lambda a: {"q": a["q"].float().to_sparse()}, TypeError, "q must be a dense tensor"),
    "nested q": (
        lambda a: {"q": torch.nested.nested_tensor([a["q"]])},
        TypeError,
        "q must be a dense tensor (torch.strided), got a nested tensor",
    ),
    "sparse cu_seqlens": ({"cu_seqlens": CU.to_sparse()}, TypeError, "cu_seqlens must be a dense tensor"),
    "mixed dtypes": (
        lambda a: {"k": a["k"].float()},
        TypeError,
        "k must have the dtype of q (torch.bfloat16), got torch.float32",
    ),
    "mixed devices": (lambda a: {"v": a["v"].to("meta")}, ValueError, "v must be on the device of q (cpu), got meta"),
    "cu_seqlens elsewhere": (
        {"cu_seqlens": CU.to("meta")},
        ValueError,
        "cu_seqlens must be on the device of q (cpu), got meta",
    ),
    "two dimensions": (lambda a: {"q": a["q"][0]}, ValueError, "q must have shape (T, H, D), got (4, 32)"),
    "packed without cu_seqlens": ({"cu_seqlens": None}, ValueError, "cu_seqlens must be given for packed tensors"),
    "T of k": (lambda a: {"k": a["k"][1:]}, ValueError, "k must have the tokens (T) of q (20, 4, 32), got shape (19,"),
    "T of v": (lambda a: {"v": a["v"][1:]}, ValueError, "v must have the tokens (T) of q"),
    "head_dim of v": (lambda a: {"v": a["v"][..., :16]}, ValueError, "v must have the head_dim of q (32), got 16"),
    "head_dim 48": (
        lambda a: {n: torch.zeros(T, 2, 48) for n in "qkv"},
        ValueError,
        "q must have a head_dim that is a multiple of 32 up to 256, got 48",
    ),
    "head_dim 288": (lambda a: {n: torch.zeros(T, 2, 288) for n in "qkv"}, ValueError, "up to 256, got 288"),
    "no heads": (lambda a: {"k": a["k"][:, :0], "v": a["v"][:, :0]}, ValueError, "k must have at least one head"),
    "heads of v": (lambda a: {"v": a["v"][:, :1]}, ValueError, "v must have the 2 heads of k, got 1"),
    "heads of q": (lambda a: {"q": a["q"][:, :3]}, ValueError, "q must have a multiple of k's 2 heads, got 3"),
    "strided channels": (
        lambda a: {"k": a["k"].transpose(1, 2).contiguous().transpose(1, 2)},
        ValueError,
        "k must have contiguous channels (stride 1 in its last dimension), got strides (64, 1, 2)",
    ),
    "cu_seqlens is a list": ({"cu_seqlens": [0, T]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    "float cu_seqlens": ({"cu_seqlens": CU.float()}, TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
    "cu_seqlens of two dimensions": ({"cu_seqlens": CU[None]}, ValueError, "shape (documents + 1,), got (1, 3)"),
    "empty cu_seqlens": ({"cu_seqlens": CU[:0]}, ValueError, "shape (documents + 1,), got (0,)"),
    "cu_seqlens from 1": ({"cu_seqlens": CU + 1}, ValueError, "cu_seqlens[0] must be 0, got 1"),
    "falling cu_seqlens": ({"cu_seqlens": CU.flip(0) - CU.flip(0)[0] + CU}, ValueError, "cu_seqlens must not decrease"),
    "cu_seqlens past T": (
        {"cu_seqlens": CU * 2},
        ValueError,
        "cu_seqlens[-1] must be at most the number of packed tokens 20, got 40",
    ),
    "max_seqlen": ({"max_seqlen": 14}, ValueError, "max_seqlen must be at least the longest document of cu_seqlens"),
    "negative max_seqlen": ({"max_seqlen": -1}, ValueError, "max_seqlen must be >= 0, got -1"),
    "huge max_seqlen": ({"max_seqlen": 2**63}, ValueError, "max_seqlen must be below 2^63, got 9223372036854775808"),
    "max_seqlen is a tensor": ({"max_seqlen": CU[1]}, TypeError, "max_seqlen must be an int or None, got Tensor"),
    "causal": ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    "return_lse": ({"return_lse": None}, TypeError, "return_lse must be a bool, got NoneType"),
    "softmax_scale is a tensor": ({"softmax_scale": torch.ones(())}, TypeError, "softmax_scale must be a number"),
    "softmax_scale < 0": ({"softmax_scale": -1.0}, ValueError, "softmax_scale must be from 0 to 1.701e+38, got -1.0"),
    "softmax_scale is NaN": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be from 0"),
    "recipe name": ({"recipe": "fp8"}, ValueError, "recipe must be a flamia.Recipe or one of ['bf16'"),
    "recipe type": ({"recipe": 8}, TypeError, "recipe must be a flamia.Recipe or a name, got int"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of ('auto', 'reference'"),
    "study recipe under a profile": (
        lambda a: {n: torch.zeros(T, 2, 64) for n in "qkv"} | {"recipe": "tensor_fp8", "backend": "reference:hopper"},
        ValueError,
        "profile must be 'ideal'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments(case, monkeypatch):
    changes, exception, message = CASES[case]
    arguments = good()
    arguments |= changes(arguments) if callable(changes) else changes
    monkeypatch.setattr("flamia.reference.forward.prepare", None)  # nothing may be quantized
    with pytest.raises(exception, match=re.escape(message)):
        flamia.attention(**arguments)


BATCH_CASES = {
    "with cu_seqlens": ({"cu_seqlens": CU}, "q must have shape (T, H, D) when cu_seqlens is given, got (2, 10, 4, 32)"),
    "S of k": (lambda a: {"k": a["k"][:, :9]}, "k must have the batch and tokens (B, S) of q (2, 10, 4, 32)"),
    "B of v": (lambda a: {"v": a["v"][:1]}, "v must have the batch and tokens (B, S) of q"),
    "mixed layouts": (lambda a: {"v": a["v"][0]}, "cu_seqlens must be given for packed tensors"),
    "five dimensions": (lambda a: {"q": a["q"][None]}, "q must have shape (B, S, H, D), got (1, 2, 10, 4, 32)"),
}


@pytest.mark.parametrize("case", BATCH_CASES)
def test_wrong_batches(case):
    changes, message = BATCH_CASES[case]
    arguments = batch()
    arguments |= changes(arguments) if callable(changes) else changes
    with pytest.raises(ValueError, match=re.escape(message)):
        flamia.attention(**arguments)


def test_the_good_arguments_are_good():
    assert flamia.attention(**good()).shape == (T, 4, 32)
    assert flamia.attention(**batch()).shape == (2, 10, 4, 32)


# ---- backends ----------------------------------------------------------------------------------------------


def test_backend_cuda_refuses_cpu_tensors_in_one_sentence():
    with pytest.raises(ValueError) as raised:
        flamia.attention(**good(), backend="cuda")
    text = str(raised.value)
    assert "\n" not in text and "got cpu" in text and "flamia doctor" in text


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_other_devices_are_refused(backend):
    with pytest.raises(ValueError, match="q must be on the CPU or a CUDA device, got meta"):
        flamia.attention(**{name: x.to("meta") for name, x in good().items()}, backend=backend)


@pytest.fixture
def cuda_device(monkeypatch):
    """A q that says it is on an H200 of which no kernel is known yet."""
    monkeypatch.setattr(dispatch, "_table", {})
    monkeypatch.setattr(call, "_registered", {0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    class Device:
        type, index = "cuda", 0

    class Query:
        device, dtype, shape = Device, torch.bfloat16, (10, 4, 128)

    return Query


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_cuda_without_certified_kernels_says_what_to_run(cuda_device, backend):
    with pytest.raises(dispatch.NoCertifiedKernel) as raised:
        call.choose_implementation(cuda_device, "mxfp8", True, backend)
    assert str(raised.value) == (
        "no certified kernel for recipe 'mxfp8', head_dim 128 and bfloat16 on NVIDIA H200 (sm_90); run `flamia doctor` "
        "to see which kernels exist and what certifies them, or pass backend='reference' to compute on the CPU"
    )


def test_a_certified_kernel_is_chosen_for_its_recipe_only(cuda_device, tmp_path):
    def row(name, **changes):
        values = {
            "identity": certified("hopper").identity,
            "capability": (9, 0),
            "recipes": ("mxfp8",),
            "head_dims": (64, 128),
            "dtypes": ("bfloat16",),
        } | changes
        return dispatch.AttentionKernel(name, **values, forward=print, backward=print, empty_saved=print)

    write_certificate(certified("hopper"), tmp_path)
    others = [
        row("other chip", capability=(10, 0)),
        row("other dim", head_dims=(64,)),
        row("other dtype", dtypes=("float16",)),
    ]
    for kernel in (*others, row("hopper")):
        dispatch.register(kernel, [tmp_path])
    derived = dataclasses.replace(flamia.recipes.MXFP8, p_exponent=7)
    for recipe in ("mxfp8", flamia.recipes.MXFP8):
        assert call.choose_implementation(cuda_device, recipe, True, "auto") == "hopper"
    with pytest.raises(dispatch.NoCertifiedKernel, match=r"'mxfp8 \(derived\)'"):
        call.choose_implementation(cuda_device, derived, True, "auto")
    assert call.choose_implementation(cuda_device, "mxfp8", True, "reference") == "reference:ideal"


def test_the_table_takes_certified_kernels_only(tmp_path):
    certificate = certified("x")
    row = dispatch.AttentionKernel(
        "x", certificate.identity, (9, 0), ("mxfp8",), (64,), ("bfloat16",), print, print, print
    )
    with pytest.raises(dispatch.NoCertifiedKernel, match=r"x .* has no certificate; run `flamia conform --target x"):
        dispatch.register(row, [tmp_path])
    write_certificate(certificate, tmp_path)
    changed = dataclasses.replace(row, identity=dataclasses.replace(row.identity, source_hash="1" * 64))
    with pytest.raises(dispatch.NoCertifiedKernel, match="the source has changed"):
        dispatch.register(changed, [tmp_path])
    write_certificate(dataclasses.replace(certificate, levels=(0, 1, 2, 4, 5)), tmp_path)
    with pytest.raises(dispatch.NoCertifiedKernel, match=r"it does not have level 3"):
        dispatch.register(row, [tmp_path])
    with pytest.raises(dispatch.NoCertifiedKernel, match="kernel 'x' is not certified in this process"):
        dispatch.get_kernel("x")
    with pytest.raises(ValueError, match="name must not start with 'reference'"):
        dispatch.register(dataclasses.replace(row, name="reference:x"), [tmp_path])


def test_why_a_kernel_was_not_registered_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAMIA_CERTIFICATE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "_table", {})
    monkeypatch.setattr(dispatch, "_refusals", {})
    monkeypatch.setattr(call, "_registered", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("flamia.pytorch.hopper.make_kernels", lambda device: [row])
    write_certificate(certified("hopper"), tmp_path)
    changed = dataclasses.replace(certified("hopper").identity, source_hash="1" * 64)
    row = dispatch.AttentionKernel("hopper", changed, (9, 0), ("mxfp8",), (64,), ("bfloat16",), print, print, print)
    call.register_kernels(0)
    assert "the source has changed" in dispatch.refusals()["hopper"]


def test_a_chip_may_have_a_row_for_each_recipe(monkeypatch, tmp_path):
    """As Blackwell has: a recipe without a certificate keeps no other from being served."""
    monkeypatch.setenv("FLAMIA_CERTIFICATE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "_table", {})
    monkeypatch.setattr(dispatch, "_refusals", {})
    monkeypatch.setattr(call, "_registered", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    monkeypatch.setattr("flamia.conformance.targets.kernels.describe_device", describe_b300)
    monkeypatch.setattr("flamia.conformance.targets.kernels.load_nvrtc", lambda: SimpleNamespace(version=(13, 0)))
    rows = blackwell.make_kernels(0)
    assert [(row.recipes, row.capability) for row in rows] == [(("mxfp8",), (10, 3)), (("nvfp4_fp8",), (10, 3))]
    made = dataclasses.replace(certified("any"), identity=rows[1].identity)
    write_certificate(made, tmp_path)
    call.register_kernels(0)
    assert [kernel.name for kernel, _ in dispatch.certified_kernels()] == ["blackwell nvfp4_fp8"]
    (reason,) = dispatch.refusals().values()
    assert "flamia conform --target blackwell --recipe mxfp8 --certify" in reason


def describe_b300(device):
    return {"device": "NVIDIA B300", "compute capability": "10.3"}
