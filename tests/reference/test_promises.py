"""The contract's promises (section 9), bit for bit: leak, pack, suffix, invariants, determinism, consistency, NaN."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flamia.reference import RECIPES, attention_backward, attention_forward
from tests.reference.cases import BF16, LENGTHS, assert_bitwise_equal, boundaries, first_difference, random_inputs, run

PROFILES = ("ideal", "blackwell", "hopper")
SAFE = ("mxfp8", "nvfp4_fp8")
COMBINATIONS = [(r, p) for r in (*SAFE, "bf16") for p in PROFILES]
EXAMPLES = {"ideal": 15, "blackwell": 15, "hopper": 10}


def few(profile: str):
    """Hypothesis settings: a bit-accurate profile is slower, so it gets fewer examples."""
    return settings(
        max_examples=EXAMPLES[profile],
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


lengths = st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4).filter(lambda x: 0 < sum(x) < 500)
groups = st.sampled_from((1, 3, 4))
specials = st.sampled_from((2.0**20, -(2.0**20), 2.0**-20, np.nan, np.inf))


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
def test_a_document_does_not_depend_on_its_pack(recipe: str, profile: str) -> None:
    """pack: neighbours, offset and padding change no bit, forward or backward; padding rows are cleared."""

    @few(profile)
    @given(lengths, groups, st.integers(0, 2**31), st.booleans())
    def check(sizes: list[int], group: int, seed: int, causal: bool) -> None:
        cu = boundaries(sizes)
        inputs = random_inputs(seed, int(cu[-1]) + 5, group, 1)
        for x in inputs:
            x[cu[-1] :] = np.nan
        packed, grads = run(inputs, cu, recipe=recipe, profile=profile, causal=causal)
        assert not packed.out[cu[-1] :].any() and not grads.dq[cu[-1] :].any() and not grads.dk[cu[-1] :].any()
        assert np.isneginf(packed.lse[:, cu[-1] :]).all()
        for start, stop in pairwise(cu):
            rows = slice(int(start), int(stop))
            alone, g = run([x[rows] for x in inputs], [0, stop - start], recipe=recipe, profile=profile, causal=causal)
            assert_bitwise_equal(
                out=(packed.out[rows], alone.out),
                lse=(packed.lse[:, rows], alone.lse),
                dq=(grads.dq[rows], g.dq),
                dk=(grads.dk[rows], g.dk),
                dv=(grads.dv[rows], g.dv),
            )

    check()


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
def test_no_future_token_moves_an_output(recipe: str, profile: str) -> None:
    """leak: whatever happens to tokens after t, out and LSE of the rows up to t keep their bits."""

    @few(profile)
    @given(st.sampled_from(LENGTHS[2:]), st.data(), groups, specials, st.integers(0, 2**31))
    def check(length: int, data: st.DataObject, group: int, special: float, seed: int) -> None:
        t = data.draw(st.integers(0, length - 2))
        inputs = random_inputs(seed, length, group, 1)
        before = attention_forward(*inputs[:3], [0, length], recipe=recipe, profile=profile)
        rng = np.random.default_rng(seed)
        for x in inputs[:3]:
            x[t + 1 :] = (rng.standard_normal(x[t + 1 :].shape) * special).astype(BF16)
        after = attention_forward(*inputs[:3], [0, length], recipe=recipe, profile=profile)
        assert_bitwise_equal(
            out=(before.out[: t + 1], after.out[: t + 1]), lse=(before.lse[:, : t + 1], after.lse[:, : t + 1])
        )

    check()


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
def test_prefix_gradients_do_not_depend_on_a_suffix_without_gradient(recipe: str, profile: str) -> None:
    """suffix: with dO = 0 after t the gradients of the tokens up to t are those of the prefix alone."""

    @few(profile)
    @given(st.sampled_from(LENGTHS[2:]), st.data(), groups, specials, st.integers(0, 2**31))
    def check(length: int, data: st.DataObject, group: int, special: float, seed: int) -> None:
        t = data.draw(st.integers(0, length - 2))
        inputs = random_inputs(seed, length, group, 1)
        prefix = [x[: t + 1].copy() for x in inputs]
        for x in inputs[:3]:
            x[t + 1 :] = (x[t + 1 :].astype(np.float32) * special).astype(BF16)
        inputs[3][t + 1 :] = 0
        _, whole = run(inputs, [0, length], recipe=recipe, profile=profile)
        _, alone = run(prefix, [0, t + 1], recipe=recipe, profile=profile)
        assert_bitwise_equal(
            dq=(whole.dq[: t + 1], alone.dq), dk=(whole.dk[: t + 1], alone.dk), dv=(whole.dv[: t + 1], alone.dv)
        )

    check()


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
@pytest.mark.parametrize("role", ["q", "k", "v", "dout"])
def test_a_nan_token_stays_with_those_who_see_it(recipe: str, profile: str, role: str) -> None:
    """A non-finite token makes NaN of exactly the rows that attend to it, and of the gradients that they reach."""
    length, bad = 140, 37
    inputs = random_inputs(3, length, 2, 1)
    inputs["q k v dout".split().index(role)][bad, 0, 5] = np.nan
    forward, grads = run(inputs, [0, length], recipe=recipe, profile=profile)
    token = np.arange(length)

    def lost(x: np.ndarray) -> np.ndarray:
        every, some = np.isnan(x.astype(np.float32)).all(axis=-1), np.isnan(x.astype(np.float32)).any(axis=-1)
        assert (every == some).all(), "a row is NaN in some channels only"
        return every

    past, present, future = token < bad, token == bad, token > bad
    none = np.zeros(length, bool)
    own = present if role in ("q", "dout") else present | future
    out_lost = none if role == "dout" else own
    for head in range(2):
        hit = role in ("k", "v") or head == 0
        assert (lost(forward.out)[:, head] == (out_lost & hit)).all()
        assert (lost(grads.dq)[:, head] == (own & hit)).all()
    reached = past | present | (future if role in ("k", "v") else none)
    assert (lost(grads.dk)[:, 0] == reached).all()
    assert (lost(grads.dv)[:, 0] == (none if role == "v" else reached)).all()


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
@pytest.mark.parametrize("role", ["q", "k", "v", "dout"])
def test_the_largest_numbers_stay_with_those_who_see_them(recipe: str, profile: str, role: str, dtype: type) -> None:
    """Rows and keys that do not see the token stay finite, and keep their bits past its 32 rows of dO / l."""
    length, token = 70, 0 if role == "dout" else 37
    inputs = random_inputs(3, length, 1, 1, dtype=dtype)
    inputs[0][0] = 0  # the first row sees itself alone, with the row sum 1
    index = "q k v dout".split().index(role)
    inputs[(1, 0, 3, 2)[index]][..., 5:7] = 0  # what the large channels are multiplied with
    ordinary, expected = run(inputs, [0, length], recipe=recipe, profile=profile)
    largest = float(np.finfo(np.float32).max if dtype is np.float32 else ml_dtypes.finfo(BF16).max)
    inputs[index][token, 0, 5:7] = largest, -largest
    forward, grads = run(inputs, [0, length], recipe=recipe, profile=profile)
    block, end = token // 32 * 32, token // 32 * 32 + 32
    unmoved = {"out": (forward.out[:token], ordinary.out[:token])}
    if role in ("q", "dout"):
        unseeing = [grads.dq[:token], grads.dq[token + 1 :], grads.dk[token + 1 :], grads.dv[token + 1 :]]
        unmoved |= {name: (getattr(grads, name)[end:], getattr(expected, name)[end:]) for name in ("dq", "dk", "dv")}
    else:
        unseeing = [grads.dq[:token]]
        unmoved["dq"] = grads.dq[:block], expected.dq[:block]
    assert all(np.isfinite(x.astype(np.float32)).all() for x in unseeing)
    assert_bitwise_equal(**unmoved)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_gradient_that_overflows_bfloat16_stays_with_those_who_see_it(profile: str) -> None:
    """NaN containment where dO' is finite in FP32, and its operand is not."""
    q, k, v, dout = (x.astype(np.float32) for x in random_inputs(11, 12, 1, 1))
    dout[5, 0, 3] = 3.4e38
    f = attention_forward(q, k, v, [0, 12], recipe="bf16", profile=profile)
    g = attention_backward(dout, dataclasses.replace(f, l=np.ones_like(f.l)))
    lost = [np.flatnonzero(np.isnan(x).any(axis=(1, 2))).tolist() for x in (g.dq, g.dk, g.dv)]
    assert lost == [[5], list(range(6)), list(range(6))]


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
@pytest.mark.parametrize(("lost", "sink"), [(5, 128), (130, 0)])
def test_a_nan_key_is_not_lost_beside_a_dominating_tile(recipe: str, profile: str, lost: int, sink: int) -> None:
    """A tile too far below the row's maximum contributes zero, but not for the rows that see its NaN."""
    q, k, v, dout = (np.zeros((160, 1, 64), np.float32) for _ in range(4))
    q[:, 0, 0], k[sink, 0, 0], k[lost, 0, 0] = 1, 400, np.nan
    v[:] = dout[:] = 1
    forward, grads = run([q, k, v, dout], [0, 160], recipe=recipe, profile=profile, softmax_scale=1.0)
    assert np.isnan(forward.out[lost:]).all() and np.isfinite(forward.out[:lost]).all()
    assert np.isnan(grads.dq[lost:]).all() and np.isfinite(grads.dq[:lost]).all()


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_v_of_ones_gives_ones(recipe: str, profile: str, causal: bool) -> None:
    """invariant: l is the sum of the P that multiplies V, so V = 1 gives exactly 1, also under an attention sink."""
    q, k, v, _ = random_inputs(5, 300, 4, 2)
    k[0] = q[0, ::2] * BF16(4)
    v[:] = 1
    forward = attention_forward(q, k, v, [0, 170, 300], recipe=recipe, profile=profile, causal=causal)
    assert (forward.out == 1).all()


@pytest.mark.parametrize(("recipe", "profile"), COMBINATIONS)
def test_heads_are_independent(recipe: str, profile: str) -> None:
    """invariant: permuting KV heads with their groups permutes the results."""
    inputs = random_inputs(6, 150, 6, 2)
    forward, grads = run(inputs, [0, 100, 150], recipe=recipe, profile=profile)
    order_kv, order_q = [1, 0], [3, 4, 5, 0, 1, 2]
    swapped = [inputs[i][:, order_q if i in (0, 3) else order_kv] for i in range(4)]
    forward2, grads2 = run(swapped, [0, 100, 150], recipe=recipe, profile=profile)
    assert_bitwise_equal(
        out=(forward.out[:, order_q], forward2.out),
        dq=(grads.dq[:, order_q], grads2.dq),
        dk=(grads.dk[:, order_kv], grads2.dk),
        dv=(grads.dv[:, order_kv], grads2.dv),
    )


@pytest.mark.parametrize("recipe", SAFE)
def test_runs_repeat(recipe: str) -> None:
    """determinism: the same bits every time."""
    inputs = random_inputs(7, 300, 4, 2)
    first, grads = run(inputs, [0, 300], recipe=recipe)
    for _ in range(5):
        again, g = run(inputs, [0, 300], recipe=recipe)
        assert_bitwise_equal(out=(first.out, again.out), dq=(grads.dq, g.dq), dk=(grads.dk, g.dk), dv=(grads.dv, g.dv))


@pytest.mark.parametrize("recipe", SAFE)
def test_backward_p_equals_forward_p(recipe: str) -> None:
    """consistency: wherever P is a normal E4M3 number in both passes, it has the same value in both."""
    from flamia.reference import attention_backward

    q, k, v, dout = random_inputs(8, 300, 4, 2)
    q = (q.astype(np.float32) * 3).astype(BF16)
    tops: dict[tuple[int, int], np.ndarray] = {}
    codes: dict[tuple[int, int], np.ndarray] = {}

    def keep(stage, document, heads, query_tile, key_tile, x):
        {"p": codes, "p_top": tops}[stage][query_tile, key_tile] = x.copy()

    forward = attention_forward(q, k, v, [0, 300], recipe=recipe, observer=keep)
    seen: dict[str, dict[tuple[int, int], np.ndarray]] = {"p": {}, "p_scale": {}}

    def look(stage, document, heads, query_tile, key_tile, x):
        if stage in seen:
            seen[stage][query_tile, key_tile] = x.copy()

    attention_backward(dout, forward, observer=look)
    compared = 0
    for (query_tile, key_tile), p in codes.items():
        rows = slice(query_tile * 128, min(query_tile * 128 + 128, 300))
        n = rows.stop - rows.start
        tile_top = tops[query_tile, key_tile][:, None, :n].astype(np.float64)
        p_forward = p[..., :n] * np.exp2(tile_top - 8 - forward.m[:, None, rows])
        scale = np.repeat(np.repeat(seen["p_scale"][query_tile, key_tile], 32, -1), 32, -2)[..., :n]
        back = seen["p"][query_tile, key_tile][..., :n]
        p_backward = back * np.exp2(scale.astype(np.float64) - 127)
        # 2^-6 itself may be a subnormal number that was rounded up
        normal = (p[..., :n] > 2.0**-6) & (back > 2.0**-6)
        compared += int(normal.sum())
        assert (p_forward[normal] == p_backward[normal]).all()
    assert compared > 100_000


@pytest.mark.parametrize("recipe", SAFE)
def test_dk_sums_to_rounding_level(recipe: str) -> None:
    """invariant: adding one vector to every key shifts all scores of a row alike, so the exact dK sums to zero."""
    inputs = random_inputs(9, 256, 1, 1, dtype=np.float32)
    _, grads = run(inputs, [0, 256], recipe=recipe)
    total = np.abs(grads.dk.astype(np.float64).sum(axis=0))
    assert (total < 0.03 * np.abs(grads.dk.astype(np.float64)).sum(axis=0)).all()


@pytest.mark.parametrize("name", ["cudnn_mxfp8", "tile_32x32", "tensor_fp8"])
def test_the_leak_test_catches_the_leaks_of_others(name: str) -> None:
    """The schemes of others do leak, and the comparison names where."""
    inputs = random_inputs(10, 96, 1, 1)
    before = attention_forward(*inputs[:3], [0, 96], recipe=name)
    for x in inputs[:3]:
        x[41:] = (x[41:].astype(np.float32) * 2.0**10).astype(BF16)
    after = attention_forward(*inputs[:3], [0, 96], recipe=name)
    text = first_difference("out", before.out[:41], after.out[:41])
    assert text is not None and text.startswith("out[")


def test_v32_in_the_diagonal_tile_would_leak() -> None:
    """The rule of section 5 is needed: without V1 in the diagonal tile the contract's recipe leaks."""
    faulty = dataclasses.replace(RECIPES["mxfp8"], name="faulty", diagonal_values=None)
    inputs = random_inputs(11, 96, 1, 1)
    before = attention_forward(*inputs[:3], [0, 96], recipe=faulty)
    inputs[2][41:] = BF16(2.0**12)
    after = attention_forward(*inputs[:3], [0, 96], recipe=faulty)
    assert first_difference("out", before.out[:41], after.out[:41]) is not None
