"""A two-layer Llama trains on the Blackwell kernels as on the reference: the same bits of its weights after each step.

The kernels are those that `flamia.attention` would launch, forward and backward, on the simulator. A small pack by
default; both recipes, both chips and documents of more than a tile with ``FLAMIA_THOROUGH=1``.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from flamia import dispatch  # noqa: E402
from flamia.conformance.certificates import Certificate, Identity, write_certificate  # noqa: E402
from flamia.conformance.results import LEVELS, SUITE_VERSION  # noqa: E402
from flamia.conformance.simulator.host import simulated_device  # noqa: E402
from flamia.kernels import blackwell_backward as blackwell_backward  # noqa: E402  # its launches are replaced, too
from flamia.kernels.targets import SM_100A, SM_103A, Target  # noqa: E402
from flamia.pytorch import blackwell  # noqa: E402
from flamia.reference.recipes import get_recipe  # noqa: E402

THOROUGH = os.environ.get("FLAMIA_THOROUGH", "") == "1"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_llama.py"
STEPS = 3

CASES: dict[str, tuple[str, Target, int, tuple[int, ...]]] = {"mxfp8": ("mxfp8", SM_100A, 64, (37, 20))}
THOROUGH_CASES = {
    f"{recipe} d{dim} {chip.name}": (recipe, chip, dim, (130, 33))
    for recipe in ("mxfp8", "nvfp4_fp8")
    for chip in (SM_100A, SM_103A)
    for dim in (64, 128)
}


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example that pretrains a Llama."""
    spec = importlib.util.spec_from_file_location("pretrain_llama_on_blackwell", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Simulated:
    """A row of the table whose kernels run on the simulator, each launch of a call under another random timing."""

    def __init__(self, recipe: str, chip: Target, folder: Path) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.seeds = itertools.count()
        self.chip = chip
        identity = Identity("simulated", recipe, "blackwell", "0" * 64, "simulated", "10.0", "NVRTC")
        write_certificate(
            Certificate(identity, SUITE_VERSION, tuple(LEVELS), "full", 1, "2025-01-01T00:00:00+00:00", {}), folder
        )
        self.row = dispatch.AttentionKernel(
            "simulated",
            identity,
            chip.compute_capability,
            (recipe,),
            (64, 128),
            ("bfloat16",),
            self._simulate("forward"),
            self._simulate("backward"),
            blackwell.empty_saved,
            checks_documents=True,
        )
        dispatch.register(self.row, [folder])

    def _simulate(self, name: str) -> Callable[..., Any]:
        function = getattr(blackwell, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            with simulated_device(self.chip, seed=next(self.seeds)):
                return function(*arguments)

        return call


def train(example: Any, recipe: str, dim: int, lengths: tuple[int, ...], step: Callable[[Any], None]) -> None:
    """Three steps of Adam on one pack; ``step`` sees the model after each."""
    torch.manual_seed(0)
    model = example.Llama(
        2, width=64, heads=2, kv_heads=1, head_dim=dim, attend=example.choose_attention(recipe, "cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.randint(example.VOCABULARY, (STEPS, len(positions)), generator=torch.Generator().manual_seed(1))
    for batch in ids:
        optimizer.zero_grad()
        logits = model(batch, positions, cu_seqlens)
        torch.nn.functional.cross_entropy(logits, batch.roll(-1)).backward()
        optimizer.step()
        step(model)


@pytest.mark.parametrize("case", CASES | (THOROUGH_CASES if THOROUGH else {}))
def test_weights_after_each_step_are_those_of_the_reference(
    case: str, example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, chip, dim, lengths = (CASES | THOROUGH_CASES)[case]
    expected: list[dict[str, Any]] = []

    def keep(model: Any) -> None:
        expected.append({name: x.detach().clone() for name, x in model.named_parameters()})

    monkeypatch.setattr("flamia.pytorch.call.choose_implementation", lambda *_: "reference:blackwell")
    train(example, recipe, dim, lengths, keep)
    assert all(not torch.equal(x, y) for x, y in zip(expected[0].values(), expected[2].values(), strict=True))

    simulated = Simulated(recipe, chip, tmp_path)
    done = itertools.count()

    def compare(model: Any) -> None:
        step = next(done)
        for name, x in model.named_parameters():
            assert torch.equal(x, expected[step][name]), f"{name} differs after step {step + 1}"

    monkeypatch.setattr("flamia.pytorch.call.choose_implementation", lambda *_: simulated.row.name)
    try:
        train(example, recipe, dim, lengths, compare)
    finally:
        dispatch.unregister(simulated.row.name)
    assert simulated.calls == {"forward": 2 * STEPS, "backward": 2 * STEPS}


def test_what_is_saved_has_the_traced_shapes() -> None:
    heads, cu = (2, 1), torch.tensor([0, 20, 30])
    for name in ("mxfp8", "nvfp4_fp8") if THOROUGH else ("nvfp4_fp8",):
        for causal in (True, False):
            q, k, v = (torch.ones(33, h, 64).bfloat16() for h in (heads[0], heads[1], heads[1]))
            recipe = get_recipe(name)
            with simulated_device(SM_100A):
                *_, saved = blackwell.forward(q, k, v, cu, recipe, causal, 0.125, None, True)
                if causal:
                    assert blackwell.forward(q, k, v, cu, recipe, causal, 0.125, None, False)[-1] == []
            traced = blackwell.empty_saved(q, k, v, cu, recipe, causal)
            assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in traced]
