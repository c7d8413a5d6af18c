"""The suite's target `cuda` where there is no GPU."""

import sys
import types

import pytest

from flamia.conformance import TargetUnavailableError, resolve_target

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_without_a_gpu_it_says_so_in_one_sentence(device):
    with pytest.raises(TargetUnavailableError) as caught:
        resolve_target("cuda", device=device)
    assert str(caught.value) == "the CUDA kernels cannot run here: PyTorch finds no CUDA device"


def test_another_gpu_is_answered_with_what_is_supported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    with pytest.raises(TargetUnavailableError, match=r"compute_capability 8\.9 has no FLAMIA kernels; supported"):
        resolve_target("cuda")
    with pytest.raises(TargetUnavailableError, match=r"the Hopper kernels need compute capability 9\.0, got \(8, 9\)"):
        resolve_target("hopper")


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for target in ("cuda", "hopper", "torch-sdpa"):
        with pytest.raises(TargetUnavailableError, match=r"cannot run on 'cuda:2': PyTorch finds CUDA devices 0 to 1"):
            resolve_target(target, device="cuda:2")


@pytest.mark.parametrize(
    ("device", "found"), [(None, "cuda:1"), ("cpu", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0")]
)
def test_the_kernels_run_on_the_current_gpu_or_the_named_one(monkeypatch, device, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    assert [resolve_target(target, device=device).device for target in ("cuda", "hopper")] == [found] * 2
