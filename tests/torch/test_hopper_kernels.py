"""The Hopper kernels as `flamia.dispatch` would call them, on the simulator."""

from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from flamia.conformance.calls import Inputs  # noqa: E402
from flamia.conformance.simulator import host  # noqa: E402
from flamia.conformance.targets.hopper import KERNELS, HopperTarget  # noqa: E402
from flamia.kernels import hopper as kernels  # noqa: E402
from flamia.kernels import hopper_backward as hopper_backward  # noqa: E402  # its launches are replaced, too
from flamia.kernels import targets  # noqa: E402
from flamia.kernels.build import build  # noqa: E402
from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc  # noqa: E402
from flamia.pytorch import hopper  # noqa: E402
from flamia.pytorch.exchange import to_numpy  # noqa: E402
from flamia.reference import attention_backward, attention_forward  # noqa: E402
from flamia.reference.recipes import BF16, MXFP8  # noqa: E402


def draw(tokens, heads):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, h, 64, generator=generator).bfloat16() for h in (heads[0], heads[1], heads[1], heads[0])
    ]


@pytest.fixture
def compiler():
    try:
        return load_nvrtc()
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("recipe", [MXFP8, BF16], ids=lambda r: r.name)
def test_forward_and_backward_give_the_references_bits(monkeypatch, recipe, compiler):
    q, k, v, dout = draw(45, (2, 1))
    cu, scale, causal = torch.tensor([0, 40, 43], dtype=torch.int32), 0.125, True
    traced = hopper.empty_saved(q, k, v, cu, recipe, causal)
    properties = SimpleNamespace(multi_processor_count=2)  # as many as the simulated device has
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    built, told, quantize_qkv = [], [], kernels.quantize_qkv
    monkeypatch.setattr(
        kernels, "quantize_qkv", lambda *rest, **named: (told.append(named["saves"]), quantize_qkv(*rest, **named))[1]
    )
    monkeypatch.setattr(host, "build", lambda unit, target: (built.append(unit.kernel), build(unit, target))[1])
    with host.simulated_device(targets.SM_90A):
        out, lse, m, l, saved = hopper.forward(q, k, v, cu, recipe, causal, scale, 40, True)  # noqa: E741
        alone = hopper.forward(q, k, v, cu, recipe, causal, scale, 40, False)
        gradients = hopper.backward(dout, out, m, l, cu, saved, 1, recipe, causal, scale, 40)
    assert set(built) == set(KERNELS[recipe.name]), "a certificate must name every source that is launched"
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in traced]
    assert alone[4] == [] and told == ([True, False] if recipe is MXFP8 else [])
    expected = attention_forward(
        *(to_numpy(x) for x in (q, k, v)),
        cu.numpy(),
        recipe=recipe,
        causal=causal,
        softmax_scale=scale,
        profile="hopper",
    )
    wanted = attention_backward(to_numpy(dout), expected)
    pairs = [(out, expected.out), (lse, expected.lse), (m, expected.m), (l, expected.l)]
    pairs += list(zip(alone[:4], (expected.out, expected.lse, expected.m, expected.l), strict=True))
    pairs += list(zip(gradients, (wanted.dq, wanted.dk, wanted.dv), strict=True))
    for got, want in pairs:
        np.testing.assert_array_equal(to_numpy(got).astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("name", ["out", "lse", "m", "l"])
@pytest.mark.parametrize("passes", [{"backward": True}, {"stages": True}], ids=["backward", "stages"])
def test_the_suite_compares_a_forward_that_saves_with_one_that_does_not(monkeypatch, compiler, passes, name):
    target = HopperTarget("cpu")
    attend, told = target.attend, []

    def spoil(*rest, saves=True):
        told.append(saves)
        got = attend(*rest, saves=saves)
        if not saves:
            getattr(got, name)[0, 0] += 1
        return got

    monkeypatch.setattr(target, "attend", spoil)
    x = np.random.default_rng(0).standard_normal((3, 1, 64)).astype(bfloat16)
    with (
        host.simulated_device(targets.SM_90A),
        pytest.raises(AssertionError, match=f"leaving out what is saved changes bits: {name}"),
    ):
        target.run(Inputs(x, x, x, x, np.array([0, 3])), **passes)
    assert told == [False, True]


def test_the_suite_runs_a_forward_that_has_one_form_once(monkeypatch, compiler):
    target = HopperTarget("cpu")
    target.recipe = BF16
    attend, told = target.attend, []
    monkeypatch.setattr(target, "attend", lambda *rest, saves=True: (told.append(saves), attend(*rest, saves=saves))[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    x = np.random.default_rng(0).standard_normal((3, 1, 64)).astype(bfloat16)
    with host.simulated_device(targets.SM_90A):
        got = target.run(Inputs(x, x, x, x, np.array([0, 3])), backward=True, stages=True)
    expected = attention_forward(x, x, x, np.array([0, 3]), recipe=BF16, profile="hopper")
    np.testing.assert_array_equal(got.out, expected.out)
    np.testing.assert_array_equal(got.dv, attention_backward(x, expected).dv)
    assert told == [False] and got.arrays is not None and "q.payload_tiles" in got.arrays
