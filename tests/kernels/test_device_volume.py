"""The Hopper forward and backward on a GPU against the reference: 10^9 elements, byte for byte.

``FLAMIA_THOROUGH=1 pytest -s tests/kernels/test_device_volume.py`` takes all cores; ``FLAMIA_VOLUME`` is the number of
elements, ``FLAMIA_SEED`` the first seed. Without a GPU, the machinery of the comparison is tested.
"""

import os
import time
from functools import cache

import numpy as np
import pytest

from tests.kernels import volume
from tests.kernels.volume import KINDS, OUTPUTS, Case

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"
VOLUME = int(float(os.environ.get("FLAMIA_VOLUME", "1e9")))
SEED = int(os.environ.get("FLAMIA_SEED", "0"))


def upload(x, device):
    """A torch tensor of the same bits."""
    import torch

    if x.dtype == volume.TYPES["bfloat16"]:
        return torch.from_numpy(x.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(x).to(device)


def run_hopper(case, x, device, to_numpy):
    """The kernels' results: the backward reads what the forward left."""
    from flamia.kernels import hopper, hopper_backward
    from flamia.kernels.tensors import check_softmax_scale

    q, k, v, dout, cu = (upload(x[name], device) for name in ("q", "k", "v", "dout", "cu_seqlens"))
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    options |= {"max_seqlen": max(case.lengths)} if case.bounded else {}
    f = hopper.attention_forward(q, k, v, cu, **options)
    scale = check_softmax_scale(case.softmax_scale, case.dim)
    memory = {"stored_bytes": 1} if case.one_head else {}
    g = hopper_backward.attention_backward(dout, f.out, f.m, f.l, f.inputs, f.schedule, scale, **memory)
    f.schedule.check()
    return {name: to_numpy(a) for name, a in zip(OUTPUTS, (f.out, g.dq, g.dk, g.dv), strict=True)}


@pytest.mark.skipif(not THOROUGH, reason="takes all cores for minutes: FLAMIA_THOROUGH=1")
def test_every_byte_of_a_billion(poisoned, to_numpy):
    import torch

    from flamia.kernels.build import build_all
    from flamia.kernels.registry import find_units
    from flamia.kernels.targets import target_for

    if torch.cuda.get_device_capability(poisoned) != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    list(build_all(find_units(), [target_for((9, 0))]))  # on all cores, before the workers take them
    start = time.perf_counter()
    found = volume.compare(lambda case, x: run_hopper(case, x, poisoned, to_numpy), VOLUME, first=SEED)
    seconds = time.perf_counter() - start
    listed = ", ".join(f"{n:,} of {name}" for name, n in found.elements.items())
    cases = ", ".join(f"{n} {kind}" for kind, n in found.cases.items())
    print(f"\n{found.total:,} elements compared in {seconds:.0f} s ({listed}); cases: {cases}")
    assert not found.differences, "\n".join(found.differences)
    assert found.total >= VOLUME and min(found.elements.values()) > 0


# ---- the comparison itself, without a GPU ----------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Cases are computed here, once each."""
    monkeypatch.setattr(volume, "computed", lambda seeds, tokens: (known(seed, tokens) for seed in seeds))


@cache
def known(seed, tokens=1):
    return volume.compute(seed, tokens)


def itself(case, x):
    """The reference as the kernel."""
    assert set(x) == {"q", "k", "v", "dout", "cu_seqlens"}
    return {name: a.copy() for name, a in known(case.seed)[2].items()}


def test_the_reference_is_equal_to_itself_in_every_kind(here):
    kinds, kind_of = set(KINDS), {seed: Case.of(seed, 1).kind for seed in range(60)}
    for seed in sorted(kind_of, key=lambda seed: Case.of(seed, 1).elements):
        if kind_of[seed] in kinds:
            kinds.remove(kind_of[seed])
            found = volume.compare(itself, 1, first=seed, tokens=1)
            assert not found.differences and found.total == Case.of(seed, 1).elements
    assert not kinds


@pytest.mark.parametrize("output", OUTPUTS)
def test_one_changed_bit_is_found_where_it_is(here, output):
    changed = []

    def planted(case, x):
        got = itself(case, x)
        if case.seed == 41:
            at = tuple(int(i) for i in np.argwhere(np.isfinite(got[output].astype(np.float32)))[-1])
            got[output].view(f"u{got[output].itemsize}")[at] ^= 1
            changed.append(list(at))
        return got

    found = volume.compare(planted, 2 * Case.of(41, 1).elements, first=41, tokens=1)
    assert len(found.differences) == 1 and sum(found.cases.values()) > 1
    assert found.differences[0].startswith(f"seed 41: {output}{changed[0]} is ")
    assert "is right; 1 of" in found.differences[0]


def test_it_stops_after_some_differences_and_names_wrong_shapes(here):
    def wrong(case, x):
        return itself(case, x) | {"dq": np.zeros(3, np.float32)}

    found = volume.compare(wrong, 10_000_000, first=41, tokens=1, most=2)
    assert len(found.differences) == 2 and "dq is float32 (3,) where" in found.differences[0]


def test_cases_are_those_of_their_seed_and_cover_what_the_kernels_take():
    cases = [Case.of(seed) for seed in range(300)]
    assert cases == [Case.of(seed) for seed in range(300)]
    assert {c.kind for c in cases} == set(KINDS) and {c.dtype for c in cases} == set(volume.TYPES)
    assert {(c.dim, c.kv_heads) for c in cases} == {(d, n) for d in (64, 128) for n in (2, 4, 8)}
    assert all({getattr(c, name) for c in cases} == {True, False} for name in ("causal", "one_head", "bounded"))
    lengths = {n for c in cases for n in c.lengths}
    assert {0, 1, 127, 128, 129, 255, 256, 257, 300} <= lengths and max(lengths) <= 300
    a, b = (Case.of(3).draw() for _ in range(2))
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_the_pool_gives_what_one_process_computes():
    """Two workers, which are started anew and know nothing but the seed."""
    threads = os.environ.get("OMP_NUM_THREADS")
    done = volume.computed(range(3), workers=2, tokens=1)
    found = {case.seed: (case, inputs, want) for case, inputs, want in done}
    assert set(found) == {0, 1, 2} and os.environ.get("OMP_NUM_THREADS") == threads
    for seed, (case, inputs, want) in found.items():
        same, mine, expected = known(seed)
        assert same == case and volume.first_difference(case, want, expected) is None
        assert all(mine[name].tobytes() == inputs[name].tobytes() for name in mine)
