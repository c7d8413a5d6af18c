"""What the study measures, on inputs small enough to know the answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flamia.reference import PROFILES, RECIPES, attention_backward
from flamia.study import consistency, dynamic_range, errors, leaks, long_context, memory, sample
from flamia.study.run import CONSTANT_P

IDEAL = PROFILES["ideal"]


@pytest.fixture(scope="module")
def small() -> sample.Sample:
    """34 tokens of short documents and the first 66 of a long one, one KV head."""
    data = sample.load().first_tokens(100)
    cut = {name: getattr(data, name)[:, : 1 if name in "kv" else 3] for name in sample.TENSORS}
    return dataclasses.replace(data, **cut)


def test_errors_are_zero_for_the_exact_result(small: sample.Sample) -> None:
    oracle = errors.exact_attention(small)
    result, gradients = errors.run_recipe(small, RECIPES["bf16"], IDEAL)
    exact = dataclasses.replace(result, out=oracle.out)
    same = dataclasses.replace(gradients, dq=oracle.dq, dk=oracle.dk, dv=2 * oracle.dv)
    measured = errors.measure_errors(RECIPES["bf16"], exact, same, oracle)
    assert measured.mean == {"o": 0, "dq": 0, "dk": 0, "dv": pytest.approx(1)}
    assert measured.by_token.shape == (3, 100)


def test_errors_rank_the_formats(small: sample.Sample) -> None:
    oracle = errors.exact_attention(small)
    mean = {
        name: errors.measure_errors(RECIPES[name], *errors.run_recipe(small, RECIPES[name], IDEAL), oracle).mean
        for name in ("bf16", "mxfp8", "nvfp4_fp8")
    }
    for output in errors.OUTPUTS:
        assert 0 < 5 * mean["bf16"][output] < mean["mxfp8"][output] < mean["nvfp4_fp8"][output] < 0.3


def test_leaking_positions_take_every_residue() -> None:
    for tokens in (33, 64, 66, 95, 160, 1000):
        ts = leaks.positions(tokens)
        assert {t % 32 for t in ts} == set(range(32)) and 0 <= min(ts) and max(ts) <= tokens - 2
    assert leaks.positions(5) == [0, 1, 2, 3] and leaks.positions(1) == [] == leaks.positions(0)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_fp8", "bf16"])
def test_the_contract_does_not_leak(small: sample.Sample, name: str) -> None:
    found = leaks.leak_test(small, RECIPES[name], IDEAL)
    assert found.safe and found.first is None and not found.largest and found.share == 0
    assert len(found.positions) == 32 and not found.lost_map.any()
    assert (np.nan_to_num(found.map) == 0).all()


@pytest.mark.parametrize(
    ("name", "changes", "through"),
    [
        ("cudnn_mxfp8", ["2^20", "NaN"], ["v"]),
        ("tile_32x32", ["2^20", "NaN"], None),
        ("tensor_fp8", ["same size", "2^20", "NaN"], None),
    ],
)
def test_the_schemes_of_others_leak_and_the_test_says_where(small, name, changes, through) -> None:
    found = leaks.leak_test(small, RECIPES[name], IDEAL)
    assert [change for change, ts in found.leaking.items() if ts] == changes
    first = found.first
    assert first is not None and first.output == "out" and first.document == 2 and first.token <= first.t
    assert first.before != first.after and (through is None or first.through == through)
    assert found.nearest == 1 and found.largest["out"] > 0.1
    assert found.map[0, 0] > 0 or found.lost_map[0, 0]
    # a scale per 32 tokens cannot leak across the block's end; a scale per tensor can
    assert (31 in found.leaking["2^20"]) == (name == "tensor_fp8")
    assert bool(found.neighbours) == (name == "tensor_fp8")


def test_v32_in_the_diagonal_tile_is_found_to_leak(small: sample.Sample) -> None:
    faulty = dataclasses.replace(RECIPES["mxfp8"], name="faulty", diagonal_values=None)
    found = leaks.leak_test(small, faulty, IDEAL)
    assert found.leaking["2^20"] and found.first is not None and found.first.through == ["v"]
    assert "lse" not in found.largest


def test_memory_counts_bytes() -> None:
    found = memory.measure_memory(RECIPES["mxfp8"], 4, 1, 128)
    assert found.parts == {"q": 4 * 129, "k": 129, "v": 129 + 128 + 1 / 32, "out": 1024, "rows": 32}
    assert found.baseline == 2 * 128 * (4 + 1 + 1 + 4) + 16
    assert memory.measure_memory(RECIPES["bf16"], 4, 1, 128).ratio == pytest.approx(1, abs=0.01)
    cudnn = memory.measure_memory(RECIPES["cudnn_mxfp8"], 4, 1, 128)
    assert [len(cudnn.copies[name]) for name in "qkv"] == [2, 2, 1] and cudnn.total > found.total
    assert cudnn.parts["rows"] == 16  # an LSE is enough where the backward normalises P


def test_consistency_tells_one_p_from_two(small: sample.Sample) -> None:
    contract = consistency.measure_consistency(small, RECIPES["mxfp8"], IDEAL)
    assert contract.share_equal_normal == 1 and contract.compared_normal > 5000
    assert contract.difference < 1e-4 < contract.ds_rows < 3e-3 and contract.dk_sum < 0.01
    cudnn = consistency.measure_consistency(small, RECIPES["cudnn_mxfp8"], IDEAL)
    assert cudnn.share_equal < 0.1 and cudnn.difference > 0.01 and cudnn.ds_rows > 5 * contract.ds_rows
    bf16 = consistency.measure_consistency(small, RECIPES["bf16"], IDEAL)
    assert bf16.share_equal == 1 and bf16.share_equal_normal is None


def test_consistency_sees_a_backward_that_uses_another_p(small: sample.Sample, monkeypatch) -> None:
    def other(dout, forward, **options):
        return attention_backward(
            dout, dataclasses.replace(forward, softmax_scale=forward.softmax_scale * 1.02), **options
        )

    monkeypatch.setattr(consistency, "attention_backward", other)
    assert consistency.measure_consistency(small, RECIPES["mxfp8"], IDEAL).share_equal_normal < 0.9


def test_long_context_shows_what_a_constant_scale_loses() -> None:
    contract, constant = long_context.measure_long_context([RECIPES["mxfp8"], CONSTANT_P], IDEAL, rows=4)
    assert contract.keys == 131_072
    assert contract.masses["at 2^n"] == pytest.approx([0.44, 0.76], abs=0.01)
    assert contract.masses["between"] == pytest.approx([0.44, 0.76], abs=0.01)
    assert max(contract.errors["at 2^n"]) <= 0.003
    assert constant.errors["at 2^n"][1] > 0.2


def test_dynamic_range_of_known_exponents() -> None:
    x = np.zeros((64, 1, 32), np.float32)
    x[:, 0, 3] = 448 * 2.0 ** np.repeat([0, -5], 32)
    x[1] /= 8
    x[2] = 0
    given = {"q": x, "k": x, "v": x, "dout": x}
    found = dynamic_range.measure_dynamic_range(sample.from_arrays(given, "x"))[0]
    assert found.tensor == "q" and len(found.exponents) == 63
    assert sorted(set(found.exponents)) == [-5, -3, 0] and np.bincount(found.below_block).tolist() == [62, 0, 0, 1]


def test_what_cannot_be_tested_is_not_called_safe() -> None:
    small = sample.load().first_tokens(40)
    large = {name: getattr(small, name).astype(np.float32) * np.float32(1e37) for name in "qkv"}
    huge = dataclasses.replace(small, **large, dout=small.dout.astype(np.float32))
    found = leaks.leak_test(huge, RECIPES["cudnn_mxfp8"], IDEAL)
    assert not found.testable and not found.safe
    still = dataclasses.replace(small, dout=np.zeros_like(small.dout))
    assert consistency.measure_consistency(still, RECIPES["mxfp8"], IDEAL).share_equal is None
