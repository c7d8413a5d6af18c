"""The quantization kernels on a GPU over all bfloat16 values and over 10^8 random elements, byte for byte."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.kernels import quantize, schedule
from flamia.reference import layout, nvfp4, scaling

SEED = 20


def quantize_packed(gpu, x, cu, block):
    """Payload and scale tiles of a NumPy tensor from the kernel, those in use."""
    import torch

    bits = torch.from_numpy(x.view(np.int16)).to(gpu).view(torch.bfloat16)
    plan = schedule.build_schedule(torch.tensor(cu, device=gpu), x.shape[0], x.shape[1], x.shape[1], True)
    tiles = int(layout.tile_offsets(cu)[-1])
    got = quantize.quantize_tokens(bits, plan, block)
    return bits, plan, got.payload[:, :tiles].cpu().numpy(), got.scales[:, :tiles].cpu().numpy()


def compare(gpu, x, cu, block):
    bits, plan, payload, scales = quantize_packed(gpu, x, cu, block)
    want = scaling.quantize_tokens(x, cu, block)
    assert np.array_equal(payload, layout.pack_payload(want.payload, cu))
    assert np.array_equal(scales, layout.pack_scales(want.scale, cu, x.shape[2]))
    return bits, plan


def compare_nvfp4(bits, plan, x, cu, hadamard):
    import torch

    scales = torch.tensor(np.stack(nvfp4.head_scales(1.0, x.shape[1]), axis=1), device=bits.device)
    got = quantize.quantize_nvfp4(bits, plan, scales, hadamard)
    want = nvfp4.quantize_nvfp4(x, cu, hadamard=hadamard)
    tiles = int(layout.tile_offsets(cu)[-1])
    assert np.array_equal(got.payload[:, :tiles].cpu().numpy(), layout.pack_nvfp4(want.payload, cu))
    assert np.array_equal(got.scales[:, :tiles].cpu().numpy(), layout.pack_nvfp4_scales(want.scale, cu))


def background(shape):
    """Random bfloat16 values of about 1."""
    rng = np.random.default_rng(SEED)
    return rng.standard_normal(shape, dtype=np.float32).astype(bfloat16)


def test_every_bfloat16_value_in_every_channel(gpu):
    dim, values = 64, np.arange(1 << 16, dtype=np.uint16).view(bfloat16)
    x = background((len(values), dim, dim))
    x[:, np.arange(dim), np.arange(dim)] = values[:, None]  # head h has it in channel h
    cu = np.array([0, len(values)])
    bits, plan = compare(gpu, x, cu, 1)

    heads = 32  # the channels of a lane, two NVFP4 blocks
    part = bits[:, :heads].contiguous()
    plan = schedule.build_schedule(plan.cu_seqlens, len(values), heads, heads, True)
    compare_nvfp4(part, plan, x[:, :heads], cu, hadamard=False)


@pytest.mark.parametrize("finite", [True, False], ids=["finite values", "all values"])
def test_every_bfloat16_value_at_every_token_of_a_block(gpu, finite):
    values = np.arange(1 << 16, dtype=np.uint16).view(bfloat16)
    if finite:
        values = np.where(np.isfinite(values.astype(np.float32)), values, bfloat16(1))
    tokens, dim = 32 * len(values), 32
    x = background((tokens, 1, dim))
    token = np.arange(tokens)
    block, place = token // 32, token % 32
    x[token, 0, (place + block) % dim] = values[(block + 2048 * place) % len(values)]
    compare(gpu, x, np.array([0, tokens]), 32)


def test_a_hundred_million_random_elements(gpu, draw, to_numpy):
    import torch

    rng = np.random.default_rng(SEED)
    for part in range(4):
        lengths = rng.integers(0, 1000, 24)
        lengths[-1] += 12_208 - lengths.sum() if lengths.sum() < 12_208 else 0
        cu = np.concatenate([[0], np.cumsum(lengths)])
        x = to_numpy(draw((int(cu[-1]), 16, 128), torch.bfloat16, part))
        assert x.size >= 25_000_000
        for block in (1, 32):
            bits, plan = compare(gpu, x, cu, block)
        if part < 2:
            compare_nvfp4(bits, plan, x, cu, hadamard=part == 1)
