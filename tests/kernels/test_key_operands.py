"""What the quantizer writes for the Hopper forward beside the tiles of k and v, on the simulator, byte for byte."""

import itertools

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.kernels import targets
from flamia.reference import formats, layout, scaling
from flamia.reference.documents import TILE
from flamia.reference.operands import BFLOAT16_LARGEST

LENGTHS = (40, 0, 300)
HEADS, DIM = 2, 64


def draw(rng):
    """Tokens of very different magnitudes; a lost one, one of zeros, the largest, and padding rows that hold NaN."""
    x = rng.standard_normal((sum(LENGTHS) + 3, HEADS, DIM), np.float32)
    x *= np.exp2(rng.integers(-9, 9, x.shape[:2]))[..., None].astype(np.float32)
    x[17, 0, 5], x[150, 1], x[sum(LENGTHS) :] = np.inf, 0, np.nan
    x[60, 1, 3:5] = BFLOAT16_LARGEST, -BFLOAT16_LARGEST
    return x.astype(bfloat16)


def wide_tiles(values, cu):
    """Note [Wide tile]."""
    assert (values.astype(bfloat16).astype(np.float32) == values).all(), "decoded values are exact in bfloat16"
    return layout.pack_payload(values.astype(bfloat16).view(np.uint8), cu)


def by_tile(values, cu, rest):
    """``(T, H)`` numbers as ``(H, tiles, 128)``, ``rest`` past the documents."""
    tile, row = layout.token_slots(cu)
    out = np.full((HEADS, int(layout.tile_offsets(cu)[-1]), TILE), rest, np.float32)
    out[:, tile, row] = values[: int(cu[-1])].T
    return out


@pytest.fixture(scope="module")
def written(request):
    """k, v, cu_seqlens and, by whether the schedule is causal and whether a backward is wanted, what was written."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    request.getfixturevalue("nvrtc")
    from flamia.conformance.simulator.host import simulated_device
    from flamia.kernels import hopper, quantize, schedule

    rng = np.random.default_rng(8)
    k, v = draw(rng), draw(rng)
    cu = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    found = {}
    for causal, saves in itertools.product((True, False), repeat=2):
        with simulated_device(targets.SM_90A):
            tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (k, k, v)]
            plan = schedule.build_schedule(torch.from_numpy(cu), len(k), HEADS, HEADS, causal)
            keys = hopper.key_operands(tensors[2], plan, "mxfp8")
            found[causal, saves] = keys, quantize.quantize_qkv(*tensors, plan, keys=keys, saves=saves)
    return k, v, cu, found


def in_use(payload, causal):
    """Tiles in use, by halves; of a causal call 0 where nothing is written: Note [Halves with tokens]."""
    tiles = sum(-(-n // TILE) for n in LENGTHS)
    halves = payload.numpy()[:, :tiles].reshape(HEADS, tiles, 2, -1).copy()
    if causal:
        halves[:, [0, 3], 1] = 0
    return halves


@pytest.mark.parametrize("causal", [True, False])
def test_what_a_backward_alone_reads_can_be_left_out(written, causal):
    (keys, full), (keys_alone, alone) = (written[3][causal, saves] for saves in (True, False))
    assert full.v.payload is not None and full.k.exponents is not None and full.q.scales is not None
    cu = written[2]
    for x, given in (("q", written[0]), ("k", written[0]), ("v", written[1])):
        scales = layout.pack_scales(scaling.quantize_tokens(given, cu, 1).scale, cu, DIM)
        np.testing.assert_array_equal(getattr(full, x).scales.numpy()[:, : scales.shape[1]], scales, err_msg=x)
    left = [getattr(alone, x) for x in "qkv"]
    assert [x.scales for x in left] == [None] * 3
    assert [x.exponents is None for x in left] == [False, True, True]
    assert [x.payload is None for x in left] == [False, False, True]
    pairs = [(full.q.payload, alone.q.payload), (full.k.payload, alone.k.payload), (keys.v, keys_alone.v)]
    for i, (a, b) in enumerate(pairs):
        np.testing.assert_array_equal(in_use(a, causal), in_use(b, causal), err_msg=("q", "k", "v")[i])
    for a, b in ((full.q.exponents, alone.q.exponents), (keys.factors, keys_alone.factors)):
        np.testing.assert_array_equal(a.numpy()[:, :4].view(np.int32), b.numpy()[:, :4].view(np.int32))


@pytest.mark.parametrize(("causal", "saves"), [(True, True), (False, False)])
def test_factors(written, causal, saves):
    k, v, cu, found = written
    of_k, of_v = scaling.quantize_tokens(k, cu, 1), scaling.quantize_tokens(v, cu, 1)
    exponents = of_k.scale.astype(np.float32) - 127
    exponents[(of_k.payload & 0x7F == 0).all(axis=-1)] = -8
    exponents[of_k.scale == 255] = np.nan
    expected = by_tile(exponents, cu, np.nan)
    got = found[causal, saves][0].factors.numpy()[:, : expected.shape[1]]
    key = np.arange(TILE)
    word = key // 16 * 16 + key // 2 % 4 * 4 + key // 8 % 2 * 2 + key % 2
    np.testing.assert_array_equal(got[..., word], np.exp2(expected))
    words = got[..., TILE:].view(np.int32)
    for column, tiles in ((0, of_k), (1, of_v)):
        lost = by_tile((tiles.scale == 255).astype(np.float32), cu, 0) > 0
        first = np.where(lost.any(axis=-1), lost.argmax(axis=-1), TILE)
        np.testing.assert_array_equal(words[..., column], first)
    np.testing.assert_array_equal(got[..., TILE + 2], np.nanmax(expected, axis=-1))
    np.testing.assert_array_equal(words[..., 3], (np.abs(expected) > 60).any(axis=-1))


@pytest.mark.parametrize(("causal", "saves"), [(True, False), (False, True)])
def test_decoded_values(written, causal, saves):
    _, v, cu, found = written
    quantized = scaling.quantize_tokens(v, cu, 1)
    codes, lost = formats.decode(quantized.payload, formats.E4M3), quantized.scale == 255
    exponent = np.where(lost, 0, scaling.exponent_of(quantized.scale)).astype(np.float32)
    values = np.where(lost[..., None], 0, codes.astype(np.float64) * np.exp2(exponent)[..., None])
    assert lost.any() and values.max() == 2.0**128 and values.min() == -(2.0**128)
    expected = wide_tiles(np.clip(values, -BFLOAT16_LARGEST, BFLOAT16_LARGEST).astype(np.float32), cu)
    halves = expected.reshape(HEADS, -1, 2, TILE * DIM)
    if causal:
        halves[:, [0, 3], 1] = 0
    np.testing.assert_array_equal(in_use(found[causal, saves][0].v, causal).reshape(halves.shape), halves)


def test_keys_come_without_nvfp4_and_saves_may_be_false_with_keys_alone(written):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from flamia.conformance.simulator.host import simulated_device
    from flamia.kernels import quantize, schedule

    with simulated_device(targets.SM_90A):
        x = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
        plan = schedule.build_schedule(torch.tensor([0, 3]), 3, 1, 1, True)
        with pytest.raises(ValueError, match="keys must be None with nvfp4"):
            quantize.quantize_qkv(x, x, x, plan, nvfp4=quantize.Nvfp4(None, None), keys=written[3][True, True][0])
        with pytest.raises(ValueError, match="saves must be True without keys"):
            quantize.quantize_qkv(x, x, x, plan, saves=False)
