"""Wrong arguments of the Blackwell backward: refused before a launch, by a message that names the argument.

Tiles of another call matter most: nothing on the device looks at their sizes, and NVFP4's are half as large.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flamia.conformance.simulator.host import simulated_device  # noqa: E402
from flamia.kernels import blackwell, blackwell_backward, quantize, schedule  # noqa: E402
from flamia.kernels.blackwell import BlackwellForward, attention_forward  # noqa: E402
from flamia.kernels.quantize import Nvfp4  # noqa: E402
from flamia.kernels.targets import SM_100A  # noqa: E402

TOKENS, DIM = 8, 64


@dataclass
class Calls:
    """Forwards of 8 tokens, causal, 2 query heads and a KV head of 64 channels, unless the name says otherwise."""

    usual: BlackwellForward
    nvfp4: BlackwellForward
    wide: BlackwellForward
    full: BlackwellForward
    many_heads: BlackwellForward
    more_documents: BlackwellForward

    @property
    def without_backward(self) -> schedule.DeviceSchedule:
        return replace(self.usual.schedule, backward=None)


def forward(
    dim: int = DIM, heads: tuple[int, int] = (2, 1), boundaries: tuple[int, ...] = (0, TOKENS), **options: Any
) -> BlackwellForward:
    q, k, v = (torch.ones(TOKENS, h, dim, dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1]))
    return attention_forward(q, k, v, torch.tensor(boundaries), **options)


@pytest.fixture(scope="module")
def made() -> Calls:
    """Their arrays have shapes and no content, which is what is checked: launches do nothing."""
    scales = Nvfp4(torch.ones(2, 2), torch.ones(1, 2))
    with simulated_device(SM_100A), pytest.MonkeyPatch.context() as patch:
        for module in (blackwell, quantize, schedule):
            patch.setattr(module, "launch", lambda *rest, **more: None)
        return Calls(
            usual=forward(),
            nvfp4=forward(recipe="nvfp4_fp8", nvfp4=scales),
            wide=forward(dim=128),
            full=forward(causal=False),
            many_heads=forward(heads=(2, 2)),
            more_documents=forward(boundaries=(0, 4, TOKENS)),
        )


@pytest.fixture
def calls(made: Calls) -> Iterator[Calls]:
    """A launch fails the test: every argument is to be checked before."""

    def refuse(unit: Any, entry: str, *rest: Any, **more: Any) -> None:
        pytest.fail(f"launched {entry}")

    # the device replaces launches too, so it is left last
    with simulated_device(SM_100A), pytest.MonkeyPatch.context() as patch:
        for module in (blackwell_backward, quantize):
            patch.setattr(module, "launch", refuse)
        yield made


TILES_OF_ANOTHER_CALL: dict[str, tuple[Callable[[Calls], Any], str]] = {
    "of the other recipe": (lambda c: c.nvfp4.inputs, "inputs must have q4 and k4 for the recipe nvfp4_fp8, exactly"),
    "of another head_dim": (lambda c: c.wide.inputs, r"inputs.q.payload must be .* \(2, 1, 8192\) .* \(2, 1, 16384\)"),
    "of full attention": (lambda c: c.full.inputs, "inputs.v1.payload must be a contiguous torch.uint8"),
    "of more KV heads": (lambda c: c.many_heads.inputs, r"inputs.k.payload must be .* \(1, 1, .* \(2, 1, 8192\)"),
    "of more documents": (lambda c: c.more_documents.inputs, r"inputs.q.payload must be .* got \(2, 2, 8192\)"),
    "k for q": (lambda c: replace(c.usual.inputs, q=c.usual.inputs.k), r"inputs.q.payload must be .* \(2, 1, 8192\)"),
    "no exponents": (
        lambda c: replace(c.usual.inputs, k=replace(c.usual.inputs.k, exponents=None)),
        "inputs.k.exponents must be a contiguous torch.float32 .* got None: the forward kept nothing",
    ),
    "not contiguous": (
        lambda c: replace(c.usual.inputs, v=replace(c.usual.inputs.v, scales=torch.empty(1, 1, 1024).byte()[..., ::2])),
        "inputs.v.scales must be a contiguous torch.uint8 .* with strides",
    ),
    "none": (lambda c: None, "inputs must be a QuantizedInputs, got NoneType"),
}


@pytest.mark.parametrize("what", TILES_OF_ANOTHER_CALL)
def test_tiles_of_another_call_are_refused(calls: Calls, what: str) -> None:
    inputs, words = TILES_OF_ANOTHER_CALL[what]
    with pytest.raises((TypeError, ValueError), match=words):
        differentiate(calls, inputs=inputs(calls))


REFUSED: dict[str, tuple[Any, str]] = {
    "schedule": (None, "schedule must be a DeviceSchedule, got NoneType"),
    "out": (torch.ones(TOKENS, DIM), r"out must have shape \(T, H, D\) with H >= 1, got \(8, 64\)"),
    "out, shorter": (torch.ones(7, 2, DIM), "out must have the 8 tokens of the schedule, got 7"),
    "out, other heads": (torch.ones(TOKENS, 4, DIM), "out must have 2 heads, got 4"),
    "out, head_dim 96": (torch.ones(TOKENS, 2, 96), r"out must have a head_dim of \(64, 128\) on Blackwell, got 96"),
    "dout": (torch.ones(TOKENS, 2, DIM), "dout must have dtype torch.bfloat16, got torch.float32"),
    "m": (torch.ones(2, 7), r"m must have shape \(2, 8\), got \(2, 7\)"),
    "l": (None, "l must be a float32 torch tensor, got NoneType"),
    "softmax_scale": (float("nan"), "softmax_scale must be from 0 to"),
    "recipe": ("fp8", "recipe must be one of"),
    "recipe, not the tiles'": ("nvfp4_fp8", "inputs must have q4 and k4 for the recipe nvfp4_fp8, exactly"),
    "score_factor": (float("nan"), "score_factor must be at least 0, got nan"),
    "score_factor, none": (None, "score_factor must be a number, got None"),
    "stored_bytes": (-1, "stored_bytes must be at least 0, got -1"),
    "stored_bytes, no integer": (2e9, "stored_bytes must be an integer, got 2000000000.0"),
    "exp2": ("fast", r"exp2 must be one of \('exact', 'hardware'\), got 'fast'"),
    "strict": ("yes", "strict must be a bool, got 'yes'"),
    "hooks": (2, "hooks must be a bool, got 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_by_name(calls: Calls, what: str) -> None:
    value, words = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=words):
        differentiate(calls, **{what.split(",")[0]: value})


def test_a_schedule_without_items_of_the_backward_is_refused(calls: Calls) -> None:
    with pytest.raises(ValueError, match="schedule must have the backward's items"):
        differentiate(calls, schedule=calls.without_backward)


def test_nothing_else_is_refused(calls: Calls) -> None:
    """The arguments that the other tests change reach the first launch."""
    with pytest.raises(pytest.fail.Exception, match="launched row_pass"):
        differentiate(calls)


def differentiate(calls: Calls, **changed: Any) -> Any:
    f = calls.usual
    right = {"dout": torch.ones_like(f.out), "out": f.out, "m": f.m, "l": f.l, "inputs": f.inputs}
    right |= {"schedule": f.schedule, "softmax_scale": 0.125}
    return blackwell_backward.attention_backward(**(right | changed))
