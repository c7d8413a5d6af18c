"""Attention of the reference against the oracle: accuracy, shapes, and the corners of the contract."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flamia.reference import RECIPES, attention_backward, attention_forward, attention_oracle
from flamia.reference.forward import quantize_inputs
from flamia.reference.recipes import Scaling
from tests.reference.cases import BF16, assert_bitwise_equal, random_inputs, relative_error, run

# Errors of O, dQ, dK, dV that 4 significant bits (E4M3), 2 (E2M1) and 8 (bfloat16) give on normal numbers, with room
# for the seed: the elements' rounding alone is 2.5 %, 9 % and 0.2 % per operand.
LIMITS = {"mxfp8": 0.09, "nvfp4_fp8": 0.2, "bf16": 0.009, "cudnn_mxfp8": 0.11, "tile_32x32": 0.09, "tensor_fp8": 0.11}


def errors(inputs, cu, causal=True, **options):
    """Relative errors of out, dq, dk, dv."""
    forward, grads = run(inputs, cu, causal=causal, **options)
    exact = attention_oracle(*inputs[:3], cu, inputs[3], causal=causal, softmax_scale=options.get("softmax_scale"))
    pairs = ((forward.out, exact.out), (grads.dq, exact.dq), (grads.dk, exact.dk), (grads.dv, exact.dv))
    return [relative_error(a, b) for a, b in pairs]


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("causal", [True, False])
def test_every_recipe_is_as_accurate_as_its_elements(name: str, causal: bool) -> None:
    inputs = random_inputs(0, 400, 6, 2, dim=128)
    assert max(errors(inputs, [0, 0, 150, 151, 390], causal, recipe=name)) < LIMITS[name]


@pytest.mark.parametrize("profile", ["blackwell", "hopper"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_fp8", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_bit_accurate_profiles_stay_close_to_ideal(name: str, profile: str, causal: bool) -> None:
    inputs = random_inputs(1, 200, 2, 1, dim=64)
    cu = [0, 150, 200]
    machine, ideal = (errors(inputs, cu, causal, recipe=name, profile=p) for p in (profile, "ideal"))
    # a 13-bit accumulator adds at most 2^-13 of the largest score per step, seen through exp2
    assert np.allclose(machine, ideal, rtol=0.15, atol=2e-3)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_head_dims_and_float32_input(dim: int) -> None:
    inputs = random_inputs(2, 140, 2, 1, dim=dim, dtype=np.float32)
    forward, grads = run(inputs, [0, 140])
    assert forward.out.dtype == grads.dq.dtype == grads.dk.dtype == grads.dv.dtype == np.float32
    assert max(errors(inputs, [0, 140])) < LIMITS["mxfp8"]


def test_lse_is_the_natural_logarithm_of_the_row_sum() -> None:
    inputs = random_inputs(3, 300, 4, 2)
    forward, _ = run(inputs, [0, 290])
    exact = attention_oracle(*inputs[:3], [0, 290])
    assert np.isneginf(forward.lse[:, 290:]).all() and np.isneginf(exact.lse[:, 290:]).all()
    assert np.abs(forward.lse[:, :290] - exact.lse[:, :290]).max() < 0.25  # four scores in E4M3, one rounding of P
    m, l = forward.m[:, :290].astype(np.float64), forward.l[:, :290].astype(np.float64)  # noqa: E741
    np.testing.assert_array_equal(forward.lse[:, :290], (np.log(2) * (m + np.log2(l))).astype(np.float32))
    assert (forward.m[:, :290] == np.rint(forward.m[:, :290])).all()


@pytest.mark.parametrize("role", [0, 1])
def test_a_projection_that_starts_at_zero_receives_its_gradient(role: int) -> None:
    """All-zero q or k tokens have no exponent of their own; see Note [Folded exponents]."""
    inputs = random_inputs(4, 200, 2, 1)
    inputs[role][:] = 0
    _, grads = run(inputs, [0, 200])
    exact = attention_oracle(*inputs[:3], [0, 200], inputs[3])
    name = ("dq", "dk")[role]
    assert relative_error(getattr(grads, name), getattr(exact, name)) < LIMITS["mxfp8"]


def test_rising_logits_rescale_exactly_and_distant_tiles_contribute_nothing() -> None:
    """Scores that rise by hundreds of octaves from tile to tile: earlier tiles end at factor 0, without NaN."""
    q, k, v, dout = random_inputs(5, 384, 1, 1, dtype=np.float32)
    k *= np.repeat(np.float32([1, 300, 90000]), 128)[:, None, None]
    forward, grads = run([q, k, v, dout], [0, 384])
    exact = attention_oracle(q, k, v, [0, 384])
    assert np.isfinite(forward.out).all() and np.isfinite(grads.dq).all()
    assert relative_error(forward.out, exact.out) < 0.25  # a one-hot softmax can switch keys under rounding


@pytest.mark.parametrize("scale", [0.0, 2.0**-40, 30.0])
def test_softmax_scale(scale: float) -> None:
    inputs = random_inputs(6, 150, 1, 1, dtype=np.float32)
    forward, grads = run(inputs, [0, 150], softmax_scale=scale)
    exact = attention_oracle(*inputs[:3], [0, 150], softmax_scale=scale)
    assert np.isfinite(forward.out).all() and np.isfinite(grads.dk).all()
    if scale < 1:
        assert relative_error(forward.out, exact.out) < 0.04
    if scale == 0:
        assert not grads.dq.any() and not grads.dk.any()


@pytest.mark.parametrize("exponent", [-60, 60])
def test_powers_of_two_pass_through(exponent: int) -> None:
    """Scaling v or dout by a power of two scales their results by it, bit for bit: scales are powers of two."""
    q, k, v, dout = random_inputs(7, 200, 2, 1, dtype=np.float32)
    factor = np.float32(2.0**exponent)
    forward, grads = run([q, k, v, dout], [0, 200])
    scaled, by_v = run([q, k, v * factor, dout], [0, 200])
    _, by_dout = run([q, k, v, dout * factor], [0, 200])
    assert_bitwise_equal(
        out=(scaled.out, forward.out * factor),
        dq=(by_v.dq, grads.dq * factor),
        dv=(by_v.dv, grads.dv),
        dq_dout=(by_dout.dq, grads.dq * factor),
        dk_dout=(by_dout.dk, grads.dk * factor),
        dv_dout=(by_dout.dv, grads.dv * factor),
    )


def test_outputs_of_scores_beyond_float32_are_nan_in_their_rows() -> None:
    q, k, v, _ = random_inputs(8, 40, 1, 1, dtype=np.float32)
    q[20] = np.abs(q[20]) * np.float32(2.0**100)
    k[:] = np.abs(k) * np.float32(2.0**40)
    out = attention_forward(q, k, v, [0, 40]).out
    assert np.isnan(out[20]).all() and np.isfinite(np.delete(out, 20, axis=0)).all()


def test_equal_roles_share_one_copy() -> None:
    """The contract keeps one copy of q and k, and two of v."""
    from flamia.reference.arguments import check_forward

    q, k, v, _ = random_inputs(9, 64, 2, 1)

    def operands(recipe):
        return quantize_inputs(check_forward(q, k, v, [0, 64], recipe, True, None, "ideal"))

    contract = operands("mxfp8")
    assert contract["q"] is contract["q_tokens"] and contract["k"] is contract["k_tokens"]
    assert {role: o.scaling for role, o in contract.items() if role.startswith("v")} == {
        "v": Scaling.TOKEN_BLOCK,
        "v1": Scaling.TOKEN,
    }
    assert operands("nvfp4_fp8")["q"] is not operands("nvfp4_fp8")["q_tokens"]


def test_a_recipe_is_derived_with_replace() -> None:
    inputs = random_inputs(10, 100, 1, 1)
    for name in ("mxfp8", "cudnn_mxfp8"):
        floor = dataclasses.replace(RECIPES[name], name="floor", scale_rule="floor")
        found, rceil = errors(inputs, [0, 100], recipe=floor), errors(inputs, [0, 100], recipe=name)
        assert max(found) < 0.15
        assert all(a != b for a, b in zip(found, rceil, strict=True)), "FLOOR clips what RCEIL does not"
    constant = dataclasses.replace(RECIPES["mxfp8"], p_scale="constant")
    assert max(errors(inputs, [0, 100], recipe=constant)) < LIMITS["cudnn_mxfp8"]


NONSENSE = [
    {"p_scale": "tiles"},
    {"normalize": "p"},
    {"ds_probability": "exact"},
    {"gradient_qk": Scaling.NVFP4},
    {"dout_channels": Scaling.NVFP4},
    {"diagonal_values": Scaling.TENSOR},
    {"p_exponent": 9},
    {"p_exponent": True},
    {"p_backward_exponent": 8.0},
    {"scores": "token"},
    {"values": None},
    {"dout_tokens": 32},
    {"hadamard": 1},
]


@pytest.mark.parametrize("change", NONSENSE, ids=lambda c: next(iter(c)))
def test_a_recipe_without_meaning_is_refused(change: dict) -> None:
    with pytest.raises((ValueError, TypeError), match=f"Recipe.{next(iter(change))}"):
        dataclasses.replace(RECIPES["mxfp8"], **change)


def test_an_observer_may_keep_and_change_what_it_receives() -> None:
    inputs = random_inputs(11, 60, 2, 1)
    kept = []

    def observe(stage, document, heads, query_tile, key_tile, x) -> None:
        kept.append((x, x.copy()))

    def spoil(stage, document, heads, query_tile, key_tile, x) -> None:
        x[...] = 0

    q, k, v, dout = inputs
    results = []
    for observer in (observe, spoil):
        f = attention_forward(q, k, v, [0, 60], observer=observer)
        g = attention_backward(dout, f, observer=observer)
        results.append([f.out, g.dq, g.dk, g.dv])
    assert all((a == b).all() for a, b in kept)
    assert all((a == b).all() for a, b in zip(*results, strict=True))


FIELDS = ("scores", "gradient_qk", "values", "diagonal_values", "gradient_values", "dout_channels", "dout_tokens")


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("field", FIELDS)
def test_every_derived_recipe_is_sane_or_refused(name: str, field: str) -> None:
    """Whatever scaling one operand is given, the result is attention to FP4 accuracy, or an error says why not."""
    inputs = random_inputs(11, 70, 2, 1)
    for scaling in (None, *Scaling) if getattr(RECIPES[name], field) is None else Scaling:
        for profile in ("ideal", "blackwell", "hopper"):
            try:
                recipe = dataclasses.replace(RECIPES[name], name="derived", **{field: scaling})
                found = errors(inputs, [0, 33, 70], recipe=recipe, profile=profile)
            except ValueError as error:
                assert "study-only" in str(error) or f"Recipe.{field}" in str(error)
            else:
                assert max(found) < 0.25, (scaling, profile)


def test_an_empty_pack() -> None:
    empty = [np.zeros((0, heads, 64), BF16) for heads in (2, 1, 1, 2)]
    forward, grads = run(empty, [0])
    assert forward.out.shape == (0, 2, 64) and grads.dk.shape == (0, 1, 64)
