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
