"""Every quantization, row-pass, schedule, decode, epilogue and conversion kernel, built for each target, on the
simulator: the tests of tests/kernels that compare a GPU with the reference, on small cases."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flamia.conformance.simulator.host import simulated_device  # noqa: E402
from flamia.conformance.simulator.machine import faults  # noqa: E402
from flamia.kernels import conversions, epilogue, quantize, schedule  # noqa: E402, F401  whose launches are simulated
from flamia.kernels.targets import SM_90A, TARGETS  # noqa: E402
from flamia.reference import formats  # noqa: E402
from flamia.reference.recipes import BF16, MXFP8  # noqa: E402
from tests.kernels import test_device_formats as formats_tests  # noqa: E402
from tests.kernels import test_device_quantize as quantize_tests  # noqa: E402
from tests.kernels import test_device_row_pass as row_tests  # noqa: E402
from tests.kernels import test_device_schedule as schedule_tests  # noqa: E402

DTYPES = ("bfloat16", "float16", "float32")
RAGGED = [33, 1, 0, 129]
"""Tails, an empty and a one-token document, a whole tile."""


def to_numpy(x):
    from ml_dtypes import bfloat16

    return x.view(torch.int16).numpy().view(bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def draw(shape, dtype, seed, specials=True):
    """Tokens of uneven size; with specials, some hold NaN, Inf, zeros, subnormals or the largest number."""
    rng = np.random.default_rng(seed)
    tokens, heads, dim = shape
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 12, (tokens, heads, 1)))
    if specials and tokens:
        tiny, top = float(torch.finfo(dtype).smallest_normal), float(torch.finfo(dtype).max)
        kinds = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny / 4, top, 448.0])
        x = np.where(rng.random(shape) < 0.3 / dim, rng.choice(kinds, shape), x)
        kind = rng.random((tokens, heads, 1))
        with np.errstate(invalid="ignore"):
            x = np.where(kind < 0.05, 0.0, np.where(kind < 0.1, x * tiny, np.where(kind < 0.15, -0.0, x)))
    return torch.from_numpy(x).to(dtype)


@pytest.fixture(params=TARGETS, ids=[t.name for t in TARGETS])
def device(request, monkeypatch):
    """A simulated device of each target; the cases of the shared tests are made small."""
    monkeypatch.setattr(quantize_tests, "LENGTHS", {"ragged": (RAGGED, 7), "all padding": ([0, 0], 3), "none": ([], 0)})
    monkeypatch.setattr(row_tests, "LENGTHS", RAGGED)
    monkeypatch.setattr(formats_tests, "inputs", conversion_inputs)
    with simulated_device(request.param, seed=1) as (device, _):
        yield device


def conversion_inputs():
    """Every E4M3 and E2M1 number and midpoint and their neighbours, special values, random bits."""
    whole = np.concatenate([formats.decode_table(f) for f in (formats.E4M3, formats.E2M1)])
    values = np.unique(whole[np.isfinite(whole)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([values, middles, [480.0, 464.0, 5.0, 7.0, 2.0**-127, 2.0**127]]).astype(np.float32)
    near = (edges.view(np.uint32)[:, None] + np.arange(-1, 2, dtype=np.int64)).astype(np.uint32).reshape(-1)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 1, 0x80000001], np.uint32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 2000, dtype=np.uint32)
    return np.concatenate([near, special, random]).view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantization(device, dtype):
    """q, k, v in token blocks of 1 and 32 and in NVFP4, grouped heads, padding cleared."""
    quantize_tests.test_quick_qkv(device, to_numpy, draw, "ragged", 64, dtype)


def test_quantization_of_128_channels(device):
    quantize_tests.test_quick_qkv(device, to_numpy, draw, "ragged", 128, "bfloat16")


@pytest.mark.parametrize("documents", ["all padding", "none"])
def test_quantization_of_no_tokens(device, documents):
    quantize_tests.test_quick_qkv(device, to_numpy, draw, documents, 64, "bfloat16")


def test_quantization_of_other_head_dims(device):
    quantize_tests.test_other_head_dims(device, to_numpy, draw, 96, "float16")


def test_quantization_of_a_tensor_at_an_odd_address(device):
    quantize_tests.test_quick_strides(device, to_numpy, draw, "odd start", "bfloat16")


def test_decoding(device):
    quantize_tests.test_decoding_gives_the_values_of_the_reference(device, to_numpy, draw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_pass(device, dtype):
    row_tests.test_quick_row_pass(device, to_numpy, draw, 64, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", [MXFP8, BF16], ids=lambda r: r.name)
def test_row_pass_with_wide_tiles(monkeypatch, recipe, dtype):
    monkeypatch.setattr(row_tests, "LENGTHS", [*RAGGED, 5])
    with simulated_device(SM_90A, seed=1) as (device, _):
        row_tests.check_row_pass(device, to_numpy, draw, 64, dtype, True, recipe)


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(device, dtype):
    """A group of four heads, with exponents."""
    row_tests.test_quick_reduce_heads(device, to_numpy, 4, True, dtype)


@pytest.mark.parametrize("form", ["", "_software"])
@pytest.mark.parametrize("conversion", ["e4m3", "e2m1", "e8m0_rp"])
def test_conversions(device, conversion, form):
    formats_tests.test_quick_conversions(device, to_numpy, conversion, form)


def test_scale_rule(device):
    formats_tests.test_quick_rceil(device, to_numpy)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=["shared", "own"])
@pytest.mark.parametrize("pack", ["no documents", "one token", "every small length", "equal costs"])
def test_schedule(device, pack, heads):
    schedule_tests.test_quick_schedule_is_the_twins(device, to_numpy, pack, heads, True)


def test_illegal_cu_seqlens(device):
    schedule_tests.test_quick_illegal_cu_seqlens_empty_every_list(device, to_numpy, [0, 7, 5, 20], "must not decrease")


def test_reads_of_tensors_that_nothing_wrote_are_found():
    with simulated_device(TARGETS[0]) as (device, _):
        plan = schedule.build_schedule(torch.tensor([0, 5], device=device), 5, 1, 1, True)
        x = torch.empty((5, 1, 64), dtype=torch.bfloat16, device=device)
        with pytest.raises(faults.UnwrittenRead, match="global memory"):
            quantize.quantize_tokens(x, plan, 1)


def test_pytorch_is_itself_again_afterwards():
    before = torch.Tensor.data_ptr, torch.empty, quantize.launch
    with simulated_device(TARGETS[0]) as (device, reports):
        assert torch.zeros(1, device=device).device.type == "cuda"
        schedule.build_schedule(torch.tensor([0, 5], device=device), 5, 1, 1, True)
        assert [r.entry for r in reports] == ["build_schedule"]
    assert (torch.Tensor.data_ptr, torch.empty, quantize.launch) == before
    assert torch.zeros(1).device.type == "cpu"
