"""The quantization kernels on a GPU against the NumPy reference, byte for byte."""

import numpy as np
import pytest

from flamia.kernels import epilogue, quantize, schedule
from flamia.reference import layout, nvfp4, scaling
from flamia.reference.documents import TILE

LENGTHS = {
    "one token": ([1], 0),
    "whole tiles": ([256, 128], 0),
    "ragged": ([127, 1, 0, 128, 300, 0, 0, 33, 31, 32, 5], 7),
    "all padding": ([0, 0], 3),
    "no rows": ([], 0),
}
"""Lengths of documents, and padding rows after them."""

DTYPES = ("bfloat16", "float16", "float32")


def boundaries(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def make_schedule(gpu, lengths, padding, heads=(4, 2), causal=True):
    import torch

    cu = boundaries(lengths)
    return cu, schedule.build_schedule(torch.tensor(cu, device=gpu), int(cu[-1]) + padding, *heads, causal)


def expect_tokens(x, cu, block):
    """What the reference says of a tensor: payload, channel scales, token scales, exponents, in tiles."""
    quantized = scaling.quantize_tokens(x, cu, block)
    dim = x.shape[2]
    payload = layout.pack_payload(quantized.payload, cu)
    scales = layout.pack_scales(quantized.scale, cu, dim)
    token_scales = layout.pack_scales(quantized.scale, cu, dim, "tokens") if block == 32 else None
    exponents = quantized.scale.astype(np.float32) - 127
    exponents[quantized.scale == 255] = np.nan
    exponents[(quantized.payload & 0x7F == 0).all(axis=-1) & (quantized.scale != 255)] = -8
    tile, row = layout.token_slots(cu)
    by_tile = np.full((x.shape[1], payload.shape[1], TILE), -8, np.float32)
    by_tile[:, tile, row] = exponents[: cu[-1]].T
    return payload, scales, token_scales, by_tile


def expect_nvfp4(x, cu, head_scale, hadamard):
    quantized = nvfp4.quantize_nvfp4(x, cu, head_scale, hadamard)
    return layout.pack_nvfp4(quantized.payload, cu), layout.pack_nvfp4_scales(quantized.scale, cu)


def assert_bytes(name, got, expected):
    """Equal bits in the tiles that are in use; names the first difference. NaN of float32 equals any NaN."""
    if got.dtype == np.float32:
        got, expected = (np.where(np.isnan(a), np.float32(np.nan), a).view(np.uint32) for a in (got, expected))
    got = got[:, : expected.shape[1]]
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    wrong = np.argwhere(got != expected)
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {got.size} differ, first at (head, tile, offset) {at}: "
            f"{got[at]:#x}, expected {expected[at]:#x}"
        )


def assert_tokens(name, tiles, x, cu, block, to_numpy):
    payload, scales, token_scales, exponents = expect_tokens(to_numpy(x), cu, block)
    assert_bytes(f"{name} payload", to_numpy(tiles.payload), payload)
    assert_bytes(f"{name} scales", to_numpy(tiles.scales), scales)
    if block == 32:
        assert_bytes(f"{name} token_scales", to_numpy(tiles.token_scales), token_scales)
    if tiles.exponents is not None:
        assert_bytes(f"{name} exponents", to_numpy(tiles.exponents), exponents)


def nvfp4_scales(gpu, heads, value=1.0):
    import torch

    return torch.tensor(np.stack(nvfp4.head_scales(value, heads), axis=1), device=gpu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("documents", LENGTHS)
def test_quick_qkv(poisoned, to_numpy, draw, documents, dim, dtype):
    import torch

    lengths, padding = LENGTHS[documents]
    cu, plan = make_schedule(poisoned, lengths, padding)
    kind = getattr(torch, dtype)
    q, k, v = (draw((plan.num_tokens, heads, dim), kind, i) for i, heads in enumerate((4, 2, 2)))
    four = quantize.Nvfp4(nvfp4_scales(poisoned, 4), nvfp4_scales(poisoned, 2, 0.37), hadamard=dim == 128)
    out = torch.full((plan.num_tokens, 4, dim), 7.0, dtype=kind, device=poisoned)
    lse = torch.full((4, plan.num_tokens), 7.0, device=poisoned)
    got = quantize.quantize_qkv(q, k, v, plan, nvfp4=four, out=out, rows=[(lse, float("-inf"))])
    plan.check()
    assert_tokens("q", got.q, q, cu, 1, to_numpy)
    assert_tokens("k", got.k, k, cu, 1, to_numpy)
    assert_tokens("v", got.v, v, cu, 32, to_numpy)
    assert_tokens("v1", got.v1, v, cu, 1, to_numpy)
    for name, tiles, x, scale in (("q4", got.q4, q, 1.0), ("k4", got.k4, k, 0.37)):
        payload, scales = expect_nvfp4(to_numpy(x), cu, scale, dim == 128)
        assert_bytes(f"{name} payload", to_numpy(tiles.payload), payload)
        assert_bytes(f"{name} scales", to_numpy(tiles.scales), scales)
    used = int(cu[-1])
    assert (to_numpy(out)[:used] == 7).all() and (to_numpy(out)[used:] == 0).all()
    assert (to_numpy(lse)[:, :used] == 7).all() and (to_numpy(lse)[:, used:] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 96, 160, 192, 224, 256])
def test_other_head_dims(poisoned, to_numpy, draw, dim, dtype):
    import torch

    cu, plan = make_schedule(poisoned, *LENGTHS["ragged"], causal=False)
    q, k, v = (draw((plan.num_tokens, h, dim), getattr(torch, dtype), 3 + i) for i, h in enumerate((4, 2, 2)))
    got = quantize.quantize_qkv(q, k, v, plan)
    assert_tokens("q", got.q, q, cu, 1, to_numpy)
    assert_tokens("v", got.v, v, cu, 32, to_numpy)
    assert got.v1 is None
    if dim % 64 == 0:
        for hadamard in (False, True):
            four = quantize.quantize_nvfp4(q, plan, nvfp4_scales(poisoned, 4), hadamard)
            payload, scales = expect_nvfp4(to_numpy(q), cu, 1.0, hadamard)
            assert_bytes("payload", to_numpy(four.payload), payload)
            assert_bytes("scales", to_numpy(four.scales), scales)


HEAD_SCALES = [1.0, 0.37, 2.0**-63, 2.0**-66, 2.0**-127, 1e-40, 3e-39, 2.0**60, 2.0**70, 2.0**127, 3e38]
"""Constants of as many heads: ordinary ones, and those beyond which an element's factor is no ordinary number."""


@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_quick_nvfp4(poisoned, to_numpy, draw, dim, dtype, hadamard):
    import torch

    heads = len(HEAD_SCALES)
    cu, plan = make_schedule(poisoned, *LENGTHS["ragged"], heads=(heads, 1))
    x = draw((plan.num_tokens, heads, dim), getattr(torch, dtype), 17)
    x[40:48] = 0  # tokens of zeros between others
    scales = torch.cat([nvfp4_scales(poisoned, 1, h) for h in HEAD_SCALES])
    got = quantize.quantize_nvfp4(x, plan, scales, hadamard)
    for head, h in enumerate(HEAD_SCALES):
        payload, bytes_ = expect_nvfp4(to_numpy(x[:, head : head + 1]), cu, h, hadamard)
        assert_bytes(f"payload under {h}", to_numpy(got.payload[head : head + 1]), payload)
        assert_bytes(f"scales under {h}", to_numpy(got.scales[head : head + 1]), bytes_)


def strided(x, form):
    """``x`` with other strides, or at an address that is no multiple of 16 bytes."""
    import torch

    tokens, heads, dim = x.shape
    if form == "head-major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if form == "part of packed qkv":
        return torch.cat([x, x + 1, x], dim=1)[:, heads : 2 * heads]
    if form == "odd token stride":
        wide = torch.zeros((tokens, heads * dim + 1), dtype=x.dtype, device=x.device)
        wide[:, : heads * dim] = x.reshape(tokens, -1)
        return wide[:, : heads * dim].view(tokens, heads, dim)
    if form == "odd start":
        flat = torch.zeros(x.numel() + 3, dtype=x.dtype, device=x.device)
        flat[3:] = x.reshape(-1)
        return flat[3:].view(x.shape)
    assert form == "every head the same"
    return x[:, :1].expand(tokens, heads, dim)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "form", ["head-major", "part of packed qkv", "odd token stride", "odd start", "every head the same"]
)
def test_quick_strides(poisoned, to_numpy, draw, form, dtype):
    import torch

    cu, plan = make_schedule(poisoned, *LENGTHS["ragged"])
    x = strided(draw((plan.num_tokens, 4, 128), getattr(torch, dtype), 11), form)
    for block in (1, 32):
        assert_tokens(form, quantize.quantize_tokens(x, plan, block), x, cu, block, to_numpy)


def test_offsets_beyond_32_bits(poisoned, to_numpy, draw):
    import torch

    few = draw((200, 2, 64), torch.bfloat16, 5)
    token_stride = 2**31 // 150 // 64 * 64
    base = torch.empty(200 * token_stride, dtype=torch.bfloat16, device=poisoned)
    x = base.as_strided((200, 2, 64), (token_stride, 64, 1))
    x.copy_(few)
    # empty documents make buffers of many tiles, so that the second head's tiles lie beyond 2^32 bytes
    lengths = [0] * 600_000 + [200]
    cu, plan = make_schedule(poisoned, lengths, 0, heads=(2, 2))
    got = quantize.quantize_tokens(x, plan, 32)
    assert got.payload.stride(0) > 2**32
    payload, scales, _, _ = expect_tokens(to_numpy(x.contiguous()), cu, 32)
    assert_bytes("payload", to_numpy(got.payload[:, :2]), payload)
    assert_bytes("scales", to_numpy(got.scales[:, :2]), scales)


def test_decoding_gives_the_values_of_the_reference(poisoned, to_numpy, draw):
    import torch

    cu, plan = make_schedule(poisoned, *LENGTHS["ragged"])
    x = draw((plan.num_tokens, 4, 128), torch.bfloat16, 9)
    for block in (1, 32):
        got = to_numpy(epilogue.decode_tiles(quantize.quantize_tokens(x, plan, block), plan))
        expected = scaling.dequantize_tokens(scaling.quantize_tokens(to_numpy(x), cu, block))
        np.testing.assert_array_equal(got, expected)
    four = quantize.quantize_nvfp4(x, plan, nvfp4_scales(poisoned, 4, 0.11))
    expected = nvfp4.decode_nvfp4(nvfp4.quantize_nvfp4(to_numpy(x), cu, 0.11))
    np.testing.assert_array_equal(to_numpy(epilogue.decode_tiles(four, plan)), expected)


def test_wrong_tensors_are_refused(gpu):
    import torch

    _, plan = make_schedule(gpu, [128], 0)

    def tokens(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, device=gpu)

    q, k = tokens(128, 4, 64), tokens(128, 2, 64)
    for error, words, call in [
        (TypeError, "q must be a torch tensor of", lambda: quantize.quantize_qkv(q.double(), k, k, plan)),
        (ValueError, "q must have 4 heads, got 2", lambda: quantize.quantize_qkv(k, k, k, plan)),
        (ValueError, "v must have 2 heads, got 4", lambda: quantize.quantize_qkv(q, k, q, plan)),
        (TypeError, "k must have dtype torch.bfloat16", lambda: quantize.quantize_qkv(q, k.half(), k, plan)),
        (ValueError, "q must have the 128 tokens", lambda: quantize.quantize_qkv(q[:5], k[:5], k[:5], plan)),
        (ValueError, "x must have adjacent channels", lambda: quantize.quantize_tokens(tokens(128, 64, 4).mT, plan, 1)),
        (ValueError, "x must be on a CUDA device", lambda: quantize.quantize_tokens(q.cpu(), plan, 1)),
        (ValueError, "multiple of 32 up to 256, got 48", lambda: quantize.quantize_tokens(tokens(128, 1, 48), plan, 1)),
        (ValueError, "block must be 1 or 32 tokens, got 16", lambda: quantize.quantize_tokens(q, plan, 16)),
    ]:
        with pytest.raises(error, match=words):
            call()
