"""The backward's row pre-pass and the epilogue on a GPU against the NumPy reference, bit for bit."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.kernels import epilogue, quantize, schedule
from flamia.reference import formats, layout
from flamia.reference.backward import row_pass as twin
from flamia.reference.documents import TILE
from flamia.reference.forward import Forward
from flamia.reference.operands import BFLOAT16_LARGEST, exp2_of
from flamia.reference.profiles import get_profile
from flamia.reference.recipes import BF16, MXFP8, Scaling
from flamia.reference.scaling import quantize_tokens

LENGTHS, PADDING = [127, 1, 0, 128, 300, 0, 33, 31, 32, 5], 7


def make_plan(gpu, heads):
    import torch

    cu = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    return cu, schedule.build_schedule(torch.tensor(cu, device=gpu), int(cu[-1]) + PADDING, *heads, True)


def rows_to_tiles(x, cu, fill):
    """``(H, T)`` to ``(H, tiles, 128)``."""
    tile, row = layout.token_slots(cu)
    out = np.full((x.shape[0], int(layout.tile_offsets(cu)[-1]), TILE), fill, np.float32)
    out[:, tile, row] = x[:, : cu[-1]]
    return out


def same_bits(got, expected):
    got, expected = (np.where(np.isnan(a), np.float32(np.nan), a).view(np.uint32) for a in (got, expected))
    np.testing.assert_array_equal(got[:, : expected.shape[1]], expected)


def expect_wide(operand, cu):
    """Note [Wide tile] of ``hopper/tiles.cuh``: the values of dO' in bfloat16, finite."""
    if operand.scaling is Scaling.NONE:
        return layout.pack_payload(operand.payload.view(np.uint8), cu)
    scale = np.exp2(operand.scale.astype(np.float32) - 127)[..., None]
    values = np.clip(formats.decode_table(formats.E4M3)[operand.payload] * scale, -BFLOAT16_LARGEST, BFLOAT16_LARGEST)
    return layout.pack_payload(values.astype(bfloat16).view(np.uint8), cu)


def used_halves(cu, row_bytes):
    """Of the bytes of tiles ``(1, tiles, 128 row_bytes)``, those of halves with tokens: Note [Halves with tokens]."""
    lengths = -(-np.diff(cu) // (TILE // 2)) * (TILE // 2)
    whole = np.concatenate([[0], np.cumsum(lengths)])
    return layout.pack_payload(np.ones((int(whole[-1]), 1, row_bytes), np.uint8), whole) == 1


def check_tiles(got, expected, written):
    """Equal bytes where ``written``; nothing elsewhere, where the memory held no zeros before."""
    got, written = got[:, : expected.shape[1]], np.broadcast_to(written, expected.shape)
    np.testing.assert_array_equal(np.where(written, got, 0), np.where(written, expected, 0))
    assert (got[~written] != 0).all()


def check_row_pass(device, to_numpy, draw, dim, dtype, wide, recipe=MXFP8):
    """Everything that a launch writes, with wide tiles if ``wide``."""
    import torch

    heads = 3
    cu, plan = make_plan(device, (heads, 1))
    tokens, kind = plan.num_tokens, getattr(torch, dtype)
    dout, out = draw((tokens, heads, dim), kind, 1), draw((tokens, heads, dim), kind, 2)
    dout[int(cu[-2]) :] *= 2.0**-128  # a document whose values are subnormal in bfloat16
    generator = torch.Generator(device=device).manual_seed(3)
    row_sum = torch.exp2(6 * torch.rand((heads, tokens), generator=generator, device=device))
    row_max = torch.randint(-40, 40, (heads, tokens), generator=generator, device=device).float()
    for value in (float("nan"), float("inf"), 0.0):
        chosen = torch.rand((heads, tokens), generator=generator, device=device) < 0.02
        row_sum = torch.where(chosen, torch.full_like(row_sum, value), row_sum)
    dq, dk = (torch.full((tokens, h, dim), 7.0, dtype=kind, device=device) for h in (heads, 1))
    room = torch.empty((heads, plan.max_tiles, 2 * TILE * dim), dtype=torch.uint8, device=device) if wide else None
    scaled = recipe is MXFP8
    if dtype == "float32":
        dout[3] = 3.4e38  # finite, but not in bfloat16
    got = quantize.row_pass(dout, out, row_sum, row_max, plan, gradients=(dq, None, dk), wide=room, scaled=scaled)

    l, m = to_numpy(row_sum), to_numpy(row_max)  # noqa: E741
    forward = Forward(
        to_numpy(out), m, m, l, {}, cu, recipe, get_profile("blackwell"), True, 1.0, head_counts=(heads, 1)
    )
    want = twin(to_numpy(dout), forward)
    operand = want.dout["dout"]
    scales, contractions = operand.scale, {"channels": got.dout.scales, "tokens": got.dout.token_scales}
    if scaled:
        written = used_halves(cu, dim) if wide else True
        check_tiles(to_numpy(got.dout.payload), layout.pack_payload(operand.payload, cu), written)
    else:  # bounds, in the form of scales
        assert got.dout.payload is None and contractions.pop("tokens") is None
        scales = quantize_tokens(operand.payload.astype(np.float32), cu, 32).scale
    for contraction, tiles in contractions.items():
        packed = layout.pack_scales(scales, cu, dim, contraction)
        np.testing.assert_array_equal(to_numpy(tiles)[:, : packed.shape[1]], packed)
    same_bits(to_numpy(got.delta), rows_to_tiles(want.delta, cu, 0.0))
    same_bits(to_numpy(got.top), rows_to_tiles(want.top, cu, np.inf))
    if wide:
        check_tiles(to_numpy(room), expect_wide(operand, cu), used_halves(cu, 2 * dim))
    for gradient in (dq, dk):
        assert (to_numpy(gradient)[: cu[-1]] == 7).all() and (to_numpy(gradient)[cu[-1] :] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 224, 256])
def test_quick_row_pass(poisoned, to_numpy, draw, dim, dtype):
    check_row_pass(poisoned, to_numpy, draw, dim, dtype, wide=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("recipe", [MXFP8, BF16], ids=lambda r: r.name)
def test_quick_row_pass_with_wide_tiles(poisoned, to_numpy, draw, recipe, dim, dtype):
    import torch

    if torch.cuda.get_device_capability(poisoned) != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    check_row_pass(poisoned, to_numpy, draw, dim, dtype, True, recipe)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("folded", [False, True])
def test_quick_reduce_heads(poisoned, to_numpy, group, folded, dtype):
    import torch

    heads, dim = 2, 96
    cu, plan = make_plan(poisoned, (heads * group, heads))
    generator = torch.Generator(device=poisoned).manual_seed(4)
    partial = torch.randn((heads * group, plan.max_tiles, TILE, dim), generator=generator, device=poisoned)
    exponents = torch.randint(-127, 9, (heads, plan.max_tiles, TILE), generator=generator, device=poisoned).float()
    kind = getattr(torch, dtype)
    out = torch.full((plan.num_tokens, heads, dim), 7.0, dtype=kind, device=poisoned)
    epilogue.reduce_heads(partial, out, plan, exponents if folded else None)

    by_head = to_numpy(partial).reshape(heads, group, plan.max_tiles, TILE, dim)
    with np.errstate(over="ignore", invalid="ignore"):
        total = by_head[:, 0]
        for g in range(1, group):
            total = total + by_head[:, g]
        if folded:
            total = total * exp2_of(-to_numpy(exponents))[..., None]
        tile, row = layout.token_slots(cu)
        want = np.zeros((plan.num_tokens, heads, dim), bfloat16 if dtype == "bfloat16" else dtype)
        want[: cu[-1]] = total[:, tile, row].transpose(1, 0, 2).astype(want.dtype)
    np.testing.assert_array_equal(to_numpy(out).view(np.uint8), want.view(np.uint8))
