"""Fixtures of the kernel tests: a cache of their own, and a GPU where there is one."""

import os

import pytest

from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc
from flamia.kernels.targets import target_for


@pytest.fixture(scope="session")
def nvrtc():
    """NVRTC; skips without it."""
    try:
        return load_nvrtc()
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cold_cache(tmp_path_factory):
    """An empty cache for the whole session, so that the session compiles everything once."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("FLAMIA_CACHE_DIR")
    os.environ["FLAMIA_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["FLAMIA_CACHE_DIR"]
    else:
        os.environ["FLAMIA_CACHE_DIR"] = before


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache for one test."""
    monkeypatch.setenv("FLAMIA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def gpu(nvrtc):
    """A `torch.device` that has kernels; skips, with the reason, without one."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        target_for(torch.cuda.get_device_capability())
    except ValueError as error:
        pytest.skip(str(error))
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def poisoned(gpu):
    """PyTorch fills every new tensor with NaN or the largest integer, so that bytes that a kernel forgets show."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield gpu
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def to_numpy():
    """From a torch tensor to NumPy, bfloat16 included."""

    def convert(x):
        import torch
        from ml_dtypes import bfloat16

        x = x.detach().cpu()
        return x.view(torch.int16).numpy().view(bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    return convert


@pytest.fixture(scope="session")
def draw(gpu):
    """Random ``(T, H, D)`` tensors on the GPU with everything that is special about floating point."""
    import torch

    def make(shape, dtype, seed, specials=True):
        generator = torch.Generator(device=gpu).manual_seed(seed)
        tokens, heads, _ = shape
        x = torch.randn(shape, generator=generator, device=gpu)
        rough = torch.randint(-30, 12, (tokens, heads, 1), generator=generator, device=gpu)
        x = (x * torch.exp2(rough.float())).to(dtype)
        if not specials or not tokens:
            return x
        tiny = torch.finfo(dtype).smallest_normal
        kinds = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), tiny, -tiny / 4, torch.finfo(dtype).max, 448.0]
        where = torch.rand(shape, generator=generator, device=gpu)
        which = torch.randint(0, len(kinds), shape, generator=generator, device=gpu)
        values = torch.tensor(kinds, dtype=torch.float64, device=gpu).to(dtype)[which]
        x = torch.where(where < 0.3 / shape[2], values, x)
        kind = torch.rand((tokens, heads, 1), generator=generator, device=gpu)
        small = x * torch.tensor(tiny, dtype=torch.float64, device=gpu).to(dtype)
        x = torch.where(kind < 0.05, torch.zeros_like(x), x)
        x = torch.where((kind >= 0.05) & (kind < 0.1), small, x)
        return torch.where((kind >= 0.1) & (kind < 0.15), -torch.zeros_like(x), x)

    return make
