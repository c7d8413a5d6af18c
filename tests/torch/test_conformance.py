"""PyTorch's attention on the CPU, and callables of torch tensors, through the suite."""

import numpy as np
import pytest

from flamia.conformance import CASES, run
from flamia.conformance.targets import PROMISES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

tensors = pytest.importorskip("flamia.conformance.targets.tensors")


def test_sdpa_passes_what_it_promises() -> None:
    few = ["leak/transformer*", "strides/sliced_qkv", "strides/expanded_dout", "heads/group_of_3"]
    report = run("torch-sdpa", cases=["documents/*_edges", "documents/empty_*", "documents/padding", *few])
    assert [f"{r.name}: {r.message}" for r in report.failures()] == []
    assert [report.level_status(level) for level in range(6)] == ["not_applicable"] * 4 + ["passed"] * 2


def test_sdpa_lets_nan_through() -> None:
    """What PyTorch masks it multiplies by zero; the suite names the row that a later NaN reaches."""
    report = run("torch-sdpa", levels=[4], cases=["extremes/nan_in_v"], promises=PROMISES)
    (result,) = report.results
    assert result.status == "failed" and "document 1, tile 0, row 0" in result.message


def leaky(q, k, v, cu_seqlens, *, causal, softmax_scale):
    """Attention with a one-line leak: every value is scaled by the largest of its document."""
    pieces = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        a, b, c = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        if stop > start:
            c = c * (1 + 1e-3 * c.abs().max())
            out = torch.nn.functional.scaled_dot_product_attention(
                a, b, c, is_causal=causal, scale=softmax_scale, enable_gqa=True
            )
            pieces.append(out[0].transpose(0, 1))
    return torch.cat([*pieces, q.new_zeros((q.shape[0] - int(cu_seqlens[-1]), *q.shape[1:]))])


def test_a_one_line_leak_is_caught() -> None:
    report = run(leaky, levels=[4], cases=["leak/every_residue"], promises=["leak"])
    (found,) = [r for r in report.results if r.check == "leak"]
    assert found.status == "failed" and found.numbers["smallest_distance"] == 1


@pytest.mark.parametrize("name", ["strides/expanded_dout", "strides/sliced_qkv", "strides/transposed_heads"])
def test_tensors_keep_values_and_strides(name: str) -> None:
    inputs = CASES[name].inputs()
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        y = tensors.to_torch(x)
        assert y.stride() == tuple(s // x.dtype.itemsize for s in x.strides)
        np.testing.assert_array_equal(tensors.to_numpy(y).view(np.uint16), np.ascontiguousarray(x).view(np.uint16))


def test_elements_between_those_of_a_view_are_nan() -> None:
    x = np.ones((4, 8), np.float32)[:, :4]
    y = tensors.to_torch(x)
    assert torch.isnan(torch.as_strided(y, (3, 4), (8, 1), 4)).all()


def test_a_kernel_that_cannot_be_captured_has_failed_and_is_not_inapplicable(monkeypatch: pytest.MonkeyPatch) -> None:
    from flamia.conformance.targets import kernels

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(kernels, "replay_graph", refuse)
    target = kernels.KernelTarget.__new__(kernels.KernelTarget)
    target.device = "cpu"
    inputs = CASES["arguments/graph"].inputs()
    with pytest.raises(AssertionError, match="cannot be captured in a CUDA graph: operation not permitted"):
        target.replay(inputs, inputs)
