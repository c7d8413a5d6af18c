"""The Hopper forward against the NumPy reference, bit for bit: on a GPU, and one small call on the simulator."""

from dataclasses import dataclass

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.kernels import targets
from flamia.reference.forward import attention_forward
from flamia.reference.operands import BFLOAT16_LARGEST

RAGGED = (300, 129, 1, 0, 33, 128, 31, 127, 32, 5)
NAN = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Case:
    """One call: lengths of its documents, query and KV heads, and what is special about its values.

    :param spread: tokens are multiplied by powers of two with exponents from this range.
    :param lost: tokens of q, k and v each that get a NaN or an infinity.
    :param largest: elements of v that are bfloat16's largest number.
    """

    name: str
    lengths: tuple[int, ...] = RAGGED
    heads: tuple[int, int] = (2, 1)
    dim: int = 128
    causal: bool = True
    recipe: str = "mxfp8"
    dtype: str = "bfloat16"
    scale: float | None = None
    spread: tuple[int, int] = (0, 0)
    lost: int = 0
    zeros: int = 0
    largest: int = 0

    def draw(self):
        """q, k, v and cu_seqlens; 7 rows of padding, which hold NaN."""
        rng = np.random.default_rng(sum(self.name.encode()))
        cu = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        found = []
        for heads in (self.heads[0], self.heads[1], self.heads[1]):
            x = rng.standard_normal((int(cu[-1]) + 7, heads, self.dim), np.float32)
            x *= np.exp2(rng.integers(self.spread[0], self.spread[1] + 1, (*x.shape[:2], 1))).astype(np.float32)
            for _ in range(self.lost):
                x[tuple(rng.integers(0, n) for n in x.shape)] = NAN[rng.integers(3)]
            x[rng.integers(0, len(x), self.zeros)] = 0
            x[int(cu[-1]) :] = np.nan
            found.append(x.astype(bfloat16 if self.dtype == "bfloat16" else self.dtype))
        found[2][rng.integers(0, int(cu[-1]), self.largest), 0, 3] = BFLOAT16_LARGEST
        return (*found, cu)


CASES = (
    Case("causal", heads=(4, 2)),
    Case("full", causal=False),
    Case("causal_64", dim=64, heads=(4, 1)),
    Case("full_64", dim=64, causal=False),
    Case("odd_heads", lengths=(300, 40, 129, 60), heads=(3, 3), lost=40),
    Case("odd_heads_full", lengths=(60, 200, 180), heads=(3, 1), dim=64, causal=False, lost=2),
    Case("float32", dtype="float32", lengths=(200, 40)),
    Case("float16", dtype="float16", lengths=(200, 40)),
    Case("lost_tokens", lost=4),
    Case("lost_tokens_full", lost=4, causal=False, dim=64),
    Case("rough", spread=(-12, 6), lengths=(300, 200)),
    Case("large_scores", spread=(2, 3), lengths=(700,)),
    Case("extreme", spread=(-120, 100), zeros=5, lengths=(300, 200)),
    Case("extreme_full", spread=(-120, 100), zeros=5, lengths=(300, 200), causal=False, dim=64),
    Case("saturated", largest=5, lengths=(300, 40)),
    Case("no_scale", scale=0.0, lengths=(150,), dim=64),
    Case("tiny_scale", scale=2.0**-100, lengths=(150,), dim=64),
    Case("many_tiles", lengths=(1500,)),
    Case("unscaled", recipe="bf16"),
    Case("unscaled_full", recipe="bf16", causal=False, dim=64, lost=4),
    Case("unscaled_extreme", recipe="bf16", spread=(-120, 100), zeros=5, lengths=(300, 200)),
)


def tensors(case, device):
    """The arguments as torch tensors."""
    import torch

    *values, cu = case.draw()

    def convert(x):
        if x.dtype == bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(x).to(device)

    return [convert(x) for x in values], torch.from_numpy(cu).to(device)


def expect(case):
    """What the reference says; float16 is widened first and rounded last, as `flamia.attention` does."""
    q, k, v, cu = case.draw()
    kind = q.dtype
    if kind == np.float16:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
    found = attention_forward(
        q, k, v, cu, recipe=case.recipe, causal=case.causal, softmax_scale=case.scale, profile="hopper"
    )
    return {"m": found.m, "l": found.l, "out": found.out.astype(kind), "lse": found.lse}


def assert_bits(case, got, expected, to_numpy):
    """Equal bits, one NaN like another; names the first difference, m and l before out."""
    for name, want in expected.items():
        have = to_numpy(getattr(got, name))
        assert have.shape == want.shape and have.dtype == want.dtype, f"{name}: {have.dtype} {have.shape}"
        a, b = (
            np.where(np.isnan(x.astype(np.float32)), np.float32(np.nan), x.astype(np.float32)) for x in (have, want)
        )
        wrong = np.argwhere(a.view(np.uint32) != b.view(np.uint32))
        if wrong.size:
            at = tuple(int(i) for i in wrong[0])
            pytest.fail(f"{case.name}: {name}{list(at)} is {a[at]}, expected {b[at]}; {len(wrong)} of {a.size} differ")


@pytest.fixture
def hopper(poisoned):
    """The kernels' Python module on a GPU of compute capability 9.0; skips, with the reason, on another."""
    import torch

    from flamia.kernels import hopper as module

    if torch.cuda.get_device_capability(poisoned) != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    return module


def run(hopper, case, device):
    (q, k, v), cu = tensors(case, device)
    return hopper.attention_forward(q, k, v, cu, recipe=case.recipe, causal=case.causal, softmax_scale=case.scale)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_bit_is_the_references(hopper, gpu, to_numpy, case):
    assert_bits(case, run(hopper, case, gpu), expect(case), to_numpy)


def test_a_hundred_runs_give_the_same_bits_beside_other_work(hopper, gpu):
    import torch

    case = CASES[0]
    first = run(hopper, case, gpu)
    noise, other = torch.randn(2048, 2048, device=gpu), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise = noise @ noise / 64
        again = run(hopper, case, gpu)
        for name in ("out", "lse", "m", "l"):
            a, b = (getattr(x, name).view(torch.int16) for x in (first, again))
            assert torch.equal(a, b), name


def test_any_strides_give_the_same_bits(hopper, gpu, to_numpy):
    import torch

    case = CASES[0]
    (q, k, v), cu = tensors(case, gpu)

    def spread(x):
        wide = torch.full((x.shape[0], 2 * x.shape[1], x.shape[2] + 8), torch.nan, dtype=x.dtype, device=gpu)
        view = wide[:, ::2, : x.shape[2]]
        view.copy_(x)
        return view

    got = hopper.attention_forward(spread(q), spread(k), spread(v), cu)
    assert_bits(case, got, expect(case), to_numpy)


def test_wrong_arguments_are_named(hopper, gpu):
    import torch

    q, cu = torch.zeros(10, 2, 96, dtype=torch.bfloat16, device=gpu), torch.tensor([0, 10], device=gpu)
    with pytest.raises(ValueError, match=r"q must have a head_dim of \(64, 128\) on Hopper, got 96"):
        hopper.attention_forward(q, q, q, cu)
    q = q[:, :, :64]
    with pytest.raises(ValueError, match=r"recipe must be one of \('mxfp8', 'bf16'\) on Hopper, got 'nvfp4_fp8'"):
        hopper.attention_forward(q, q, q, cu, recipe="nvfp4_fp8")
    with pytest.raises(ValueError, match="softmax_scale must be from 0 to"):
        hopper.attention_forward(q, q, q, cu, softmax_scale=-1.0)


def to_numpy_here(x):
    import torch

    return x.view(torch.int16).numpy().view(bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


@pytest.mark.parametrize("lengths", [(40, 0, 3), (0,)], ids=["tokens", "no_tokens"])
def test_a_small_call_on_the_simulator(nvrtc, lengths):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from flamia.conformance.simulator.host import simulated_device
    from flamia.kernels import hopper as module

    case = Case("simulated", lengths=lengths, heads=(1, 1), dim=64, lost=1)
    with simulated_device(targets.SM_90A) as (device, _):
        got = run(module, case, device)
    assert_bits(case, got, expect(case), to_numpy_here)
