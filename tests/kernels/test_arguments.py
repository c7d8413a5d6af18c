"""Wrong arguments of the wrappers: refused before a launch, by a message that names the argument. Needs no GPU."""

import re

import pytest

torch = pytest.importorskip("torch")

from flamia.conformance.simulator.host import simulated_device  # noqa: E402
from flamia.kernels import conversions, epilogue, launch, quantize, registry, schedule, targets  # noqa: E402
from flamia.kernels import tensors as checks  # noqa: E402
from flamia.kernels.quantize import Nvfp4  # noqa: E402

TOKENS, HEADS, KV_HEADS, DIM = 5, 2, 1, 64
BOUNDARIES = [0, TOKENS]
ROW, ONES = torch.ones(HEADS, TOKENS), torch.ones(HEADS, 2)


def tokens(heads=HEADS, count=TOKENS, dim=DIM, dtype=torch.bfloat16):
    return torch.ones(count, heads, dim).to(dtype)


@pytest.fixture(scope="module")
def schedule_of_one(nvrtc, cold_cache):
    with simulated_device(targets.SM_90A):
        return schedule.build_schedule(torch.tensor(BOUNDARIES), TOKENS, HEADS, KV_HEADS, True)


@pytest.fixture
def plan(schedule_of_one):
    """A schedule of one document on a simulated device, whose tensors pass for CUDA tensors."""
    with simulated_device(targets.SM_90A):
        yield schedule_of_one


@pytest.fixture
def no_launch(monkeypatch):
    """A launch fails the test: every argument is to be checked before."""

    def refuse(unit, entry, *rest, **more):
        raise AssertionError(f"{entry} was launched")

    for module in (conversions, epilogue, quantize, schedule):
        monkeypatch.setattr(module, "launch", refuse)


def refused(error, words, call, *arguments, **named):
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        call(*arguments, **named)


@pytest.mark.parametrize(
    ("error", "words", "changed"),
    [
        (TypeError, "cu_seqlens must be a torch.Tensor, got list", {"cu_seqlens": BOUNDARIES}),
        (TypeError, "cu_seqlens must be int32 or int64, got", {"cu_seqlens": torch.tensor(BOUNDARIES).float()}),
        (TypeError, "cu_seqlens must be int32 or int64, got", {"cu_seqlens": torch.tensor([False, True])}),
        (TypeError, "cu_seqlens must be a torch.Tensor, got ndarray", {"cu_seqlens": torch.tensor(BOUNDARIES).numpy()}),
        (ValueError, "cu_seqlens must have shape (documents + 1,)", {"cu_seqlens": torch.tensor([BOUNDARIES])}),
        (ValueError, "cu_seqlens must have shape (documents + 1,)", {"cu_seqlens": torch.tensor(BOUNDARIES)[:0]}),
        (TypeError, "num_tokens must be an integer, got 5.0", {"num_tokens": 5.0}),
        (ValueError, "num_tokens must be 0..2147483647, got 2147483648", {"num_tokens": 2**31}),
        (ValueError, "num_tokens must be 0..2147483647, got -1", {"num_tokens": -1}),
        (ValueError, "num_tokens 2147483647 and 512 heads make more", {"num_tokens": 2**31 - 1, "num_q_heads": 512}),
        (ValueError, "num_q_heads must be a multiple of num_kv_heads, both at least 1, got 0", {"num_q_heads": 0}),
        (ValueError, "num_q_heads must be a multiple of num_kv_heads, both at least 1", {"num_kv_heads": 0}),
        (ValueError, "num_q_heads must be a multiple of num_kv_heads", {"num_q_heads": 3, "num_kv_heads": 2}),
        (TypeError, "num_kv_heads must be an integer, got None", {"num_kv_heads": None}),
        (TypeError, "causal must be a bool, got 'no'", {"causal": "no"}),
    ],
)
def test_schedule(plan, no_launch, error, words, changed):
    right = {"cu_seqlens": torch.tensor(BOUNDARIES), "num_tokens": TOKENS, "num_q_heads": HEADS, "num_kv_heads": 1}
    refused(error, words, schedule.build_schedule, **{**right, "causal": True, **changed})


def strided():
    """Channels 2 elements apart."""
    return torch.ones(TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16)[..., ::2]


@pytest.mark.parametrize(
    ("error", "words", "changed"),
    [
        (TypeError, "q must be a torch tensor of", {"q": tokens(dtype=torch.float64)}),
        (TypeError, "q must be a torch tensor of", {"q": tokens().float().numpy()}),
        (TypeError, "q must be a torch tensor of ['torch.bfloat16', 'torch.float16', 'torch.float32']", {"q": None}),
        (TypeError, "k must have dtype torch.bfloat16, got torch.float32", {"k": tokens(KV_HEADS).float()}),
        (ValueError, "q must have adjacent channels (last stride 1), got strides", {"q": strided()}),
        (ValueError, "q must have shape (T, H, D) with H >= 1, got (5, 0, 64)", {"q": tokens(heads=0)}),
        (ValueError, "q must have shape (T, H, D) with H >= 1, got (5, 64)", {"q": tokens()[:, 0]}),
        (ValueError, "q must have 2 heads, got 3", {"q": tokens(heads=3)}),
        (ValueError, "q must have a head_dim that is a multiple of 32 up to 256, got 48", {"q": tokens(dim=48)}),
        (ValueError, "q must have a head_dim that is a multiple of 32 up to 256, got 288", {"q": tokens(dim=288)}),
        (ValueError, "k must have 1 heads, got 2", {"k": tokens(HEADS)}),
        (ValueError, "v must have 5 tokens and head_dim 64, got shape (6, 1, 64)", {"v": tokens(KV_HEADS, count=6)}),
        (ValueError, "v must have 5 tokens and head_dim 64", {"v": tokens(KV_HEADS, dim=128)}),
        (TypeError, "nvfp4 must be an Nvfp4 or None, got bool", {"nvfp4": True}),
        (TypeError, "nvfp4.q_scales must be a float32 torch tensor", {"nvfp4": Nvfp4(ONES.double(), None)}),
        (ValueError, "nvfp4.q_scales must have shape (2, 2), got (1, 2)", {"nvfp4": Nvfp4(ONES[:1], None)}),
        (TypeError, "nvfp4.k_scales must be a float32 torch tensor, got NoneType", {"nvfp4": Nvfp4(ONES, None)}),
        (ValueError, "out must have shape (5, H, D), got (4, 2, 64)", {"out": tokens(count=4)}),
        (ValueError, "out must have adjacent channels", {"out": strided()}),
        (ValueError, "rows[1] must have shape (2, 5), got (5, 2)", {"rows": [(ROW, 0.0), (ROW.t(), 0.0)]}),
        (TypeError, "rows[0] must be a float32 torch tensor, got torch.float64", {"rows": [(ROW.double(), 0.0)]}),
        (ValueError, "a launch clears at most 3 outputs", {"rows": [(ROW, 0.0)] * 4}),
    ],
)  # fmt: skip
def test_quantizer(plan, no_launch, error, words, changed):
    right = {"q": tokens(), "k": tokens(KV_HEADS), "v": tokens(KV_HEADS), "schedule": plan}
    refused(error, words, quantize.quantize_qkv, **{**right, **changed})


def test_quantizer_of_one_tensor(plan, no_launch):
    one, four, longer, d96 = quantize.quantize_tokens, quantize.quantize_nvfp4, tokens(count=6), tokens(dim=96)
    refused(ValueError, "x must have the 5 tokens of the schedule, got 6", one, longer, plan, 1)
    refused(ValueError, "block must be 1 or 32 tokens, got 16", one, tokens(), plan, 16)
    refused(ValueError, "v must have adjacent channels", quantize.quantize_values, strided(), plan)
    refused(ValueError, "x must have a head_dim that is a multiple of 64", four, d96, plan, ONES)
    refused(TypeError, "head_scales must be a float32", four, tokens(), plan, 1.0)


@pytest.mark.parametrize(
    ("error", "words", "changed"),
    [
        (TypeError, "dout must have dtype torch.bfloat16, got torch.float32", {"dout": tokens(dtype=torch.float32)}),
        (TypeError, "dout must be a torch tensor of", {"dout": None}),
        (ValueError, "dout must have 2 heads, got 1", {"dout": tokens(KV_HEADS)}),
        (ValueError, "out must have adjacent channels", {"out": strided()}),
        (TypeError, "row_sum must be a float32 torch tensor, got torch.float16", {"row_sum": ROW.half()}),
        (ValueError, "row_max must have shape (2, 5), got (2, 6)", {"row_max": torch.ones(2, 6)}),
        (ValueError, "row_max must have adjacent tokens", {"row_max": torch.ones(5, 2).t()}),
        (TypeError, "gradients[0] must be a torch tensor of", {"gradients": [tokens(dtype=torch.int32)]}),
        (ValueError, "gradients[2] must have shape (5, H, D)", {"gradients": [tokens(), tokens(), tokens(count=2)]}),
        (ValueError, "a launch clears at most 3 outputs", {"gradients": [tokens()] * 4}),
        (ValueError, "wide must be a tensor without scaled", {"scaled": False}),
    ],
)
def test_row_pass(plan, no_launch, error, words, changed):
    right = {"dout": tokens(), "out": tokens(), "row_sum": ROW, "row_max": ROW, "schedule": plan}
    refused(error, words, quantize.row_pass, **{**right, **changed})


def test_epilogue(plan, no_launch):
    partial, out, exponents = torch.ones(2, plan.max_tiles, 128, DIM), tokens(KV_HEADS), torch.ones(2, 1, 128)
    for error, words, arguments in [
        (ValueError, "out must have the 5 tokens of the schedule, got 4", (partial, tokens(count=4), plan)),
        (TypeError, "partial must be a float32 torch tensor", (partial.double(), out, plan)),
        (ValueError, "partial must be contiguous", (partial.transpose(2, 3), out, plan)),
        (ValueError, "partial must have shape (g * 1,", (partial[:0], out, plan)),
        (ValueError, "partial must have shape (g * 1,", (partial[:, :, :64].contiguous(), out, plan)),
        (ValueError, "exponents must have shape (1, 1, 128), got (2, 1, 128)", (partial, out, plan, exponents)),
        (TypeError, "exponents must be a float32 torch tensor, got float", (partial, out, plan, 1.0)),
    ]:
        refused(error, words, epilogue.reduce_heads, *arguments)
    tiles = quantize.TokenTiles(torch.ones(2, plan.max_tiles + 1, 128 * DIM, dtype=torch.uint8), None)
    refused(ValueError, "tiles must be 1, as in the schedule, got 2", epilogue.decode_tiles, tiles, plan)
    refused(TypeError, "x must be a float32 CUDA tensor, got float", conversions.convert, 1.0, "e4m3")
    refused(ValueError, "conversion must be one of", conversions.convert, torch.ones(1), "e5m2")


def test_tensors_on_the_cpu(no_launch):
    """Without the simulated device they are what they are."""
    x = tokens()
    refused(ValueError, "q must be on a CUDA device, got cpu", checks.check_tokens, "q", x)
    refused(ValueError, "x must be on a CUDA device, got cpu", quantize.quantize_tokens, x, None, 1)
    refused(ValueError, "x must be on a CUDA device, got cpu", conversions.convert, torch.ones(1), "e4m3")
    cu = torch.tensor(BOUNDARIES)
    refused(ValueError, "cu_seqlens must be on a CUDA device", schedule.build_schedule, cu, TOKENS, 1, 1, True)


class Many:
    """What the checks ask of a CUDA tensor with more tokens than memory has room for."""

    dtype, ndim, shape, device = torch.bfloat16, 3, (2**31, 1, 64), torch.device("cuda")

    def data_ptr(self):
        return 0

    def stride(self, dim=None):
        return (64, 64, 1) if dim is None else (64, 64, 1)[dim]


def test_more_tokens_than_an_index_holds():
    refused(ValueError, "q must have at most 2147483647 tokens, got 2147483648", checks.check_tokens, "q", Many())


def test_entries_are_those_of_the_kernel(nvrtc):
    words = "formats has no entry 'decode'; it has ['convert']"
    refused(ValueError, words, launch._load, registry.FORMATS.unit(), "decode", 0, lambda: False)
