"""The device's schedule against the NumPy twin, item for item."""

import numpy as np
import pytest

from flamia.kernels import schedule as device
from flamia.reference import layout
from flamia.reference import schedule as twin

PACKS = {
    "no documents": [],
    "one token": [1],
    "empty documents": [0] * 1000,
    "every small length": list(range(0, 1400, 7)),
    "a long one and many short ones": [30_000] + [32] * 1000,
    "short ones around a long one": [32] * 700 + [30_000] + [32] * 300,
    "100,000 empty documents": [0] * 50_000 + [77] + [0] * 50_000 + [300],
    "many documents of one tile": [128] * 5000,
    "one long document": [1_000_000],
    "equal costs": [128 * n for n in (3, 7, 11, 3, 1, 5, 7, 2, 4, 6, 3)] * 3,
}


def build(gpu, lengths, heads, causal, wide=True, padding=0):
    import torch

    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64 if wide else np.int32)
    return cu, device.build_schedule(torch.tensor(cu, device=gpu), int(cu[-1]) + padding, *heads, causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=["shared", "own"])
@pytest.mark.parametrize("pack", PACKS)
def test_quick_schedule_is_the_twins(poisoned, to_numpy, pack, heads, causal):
    cu, plan = build(poisoned, PACKS[pack], heads, causal, wide=len(pack) % 2 == 0, padding=3)
    status = to_numpy(plan.status)
    offsets = layout.tile_offsets(cu)
    np.testing.assert_array_equal(to_numpy(plan.tile_offsets), offsets)
    assert status[device.ERROR] == 0
    assert status[device.NUM_TILES] == offsets[-1]
    assert status[device.NUM_USED] == cu[-1]

    document = np.repeat(np.arange(len(cu) - 1), np.diff(offsets))
    index = np.arange(offsets[-1]) - offsets[document]
    start = cu[document] + 128 * index
    rows = np.minimum(128, cu[document + 1] - start) if len(document) else start
    expected = np.stack([document, start, rows, index], axis=1)
    np.testing.assert_array_equal(to_numpy(plan.tiles)[: offsets[-1]], expected)

    for items, count, want in (
        (plan.forward, device.NUM_FORWARD, twin.forward_schedule(cu, heads[0], causal)),
        (plan.backward, device.NUM_BACKWARD, twin.backward_schedule(cu, heads[1], heads[0] // heads[1], causal)),
    ):
        assert status[count] == len(want)
        assert items.shape[0] >= len(want)
        columns = np.stack([want.document, want.head, want.tile, want.cost], axis=1)
        np.testing.assert_array_equal(to_numpy(items)[: len(want)], columns)


def test_random_packs(poisoned, to_numpy):
    rng = np.random.default_rng(0)
    for trial in range(40):
        count = int(rng.integers(0, 3000))
        lengths = rng.integers(0, int(rng.choice([2, 200, 3000])), count)
        heads = (int(rng.choice([1, 3, 8])), 1)
        causal = bool(trial % 2)
        cu, plan = build(poisoned, lengths, heads, causal, wide=bool(rng.integers(2)))
        forward = twin.forward_schedule(cu, heads[0], causal)
        backward = twin.backward_schedule(cu, 1, heads[0], causal)
        for items, want in ((plan.forward, forward), (plan.backward, backward)):
            columns = np.stack([want.document, want.head, want.tile, want.cost], axis=1)
            np.testing.assert_array_equal(to_numpy(items)[: len(want)], columns)


@pytest.mark.parametrize(
    ("cu", "rule"),
    [
        ([1, 5], "cu_seqlens[0] must be 0"),
        ([0, 7, 5, 20], "cu_seqlens must not decrease"),
        ([0, 7, 101], "cu_seqlens[-1] must be at most"),
        ([-1], "cu_seqlens[0] must be 0"),
        ([0, -5, 20], "cu_seqlens must not decrease"),
        ([0] * 3000 + [-1] + [0] * 3000, "cu_seqlens must not decrease"),
        ([0, 2**40], "cu_seqlens[-1] must be at most"),
    ],
)
def test_quick_illegal_cu_seqlens_empty_every_list(poisoned, to_numpy, cu, rule):
    import torch

    plan = device.build_schedule(torch.tensor(cu, device=poisoned), 100, 2, 1, True)
    assert to_numpy(plan.status)[1:5].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError) as caught:
        plan.check()
    assert rule in str(caught.value)


def test_wrong_arguments_are_refused(gpu):
    import torch

    cu = torch.tensor([0, 5], device=gpu)
    for error, words, call in [
        (TypeError, "cu_seqlens must be int32 or int64", lambda: device.build_schedule(cu.float(), 5, 1, 1, True)),
        (ValueError, "cu_seqlens must have shape", lambda: device.build_schedule(cu[None], 5, 1, 1, True)),
        (ValueError, "must be on a CUDA device", lambda: device.build_schedule(cu.cpu(), 5, 1, 1, True)),
        (ValueError, "num_q_heads must be a multiple", lambda: device.build_schedule(cu, 5, 3, 2, True)),
        (ValueError, "num_tokens must be 0", lambda: device.build_schedule(cu, -1, 1, 1, True)),
    ]:
        with pytest.raises(error, match=words):
            call()
