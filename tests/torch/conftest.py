"""Fixtures of the tests that need a GPU with certified kernels."""

import pytest


@pytest.fixture(scope="session")
def gpu():
    """A CUDA device that has a certified kernel for MXFP8; skips, with the reason, without one."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from flamia.dispatch import NoCertifiedKernel
    from flamia.pytorch.call import find_kernel

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        find_kernel("mxfp8", 128, torch.bfloat16, True, device.index)
    except NoCertifiedKernel as error:
        pytest.skip(str(error))
    return device


@pytest.fixture(scope="session")
def kernel(gpu):
    """Name of the kernel that serves MXFP8 on this GPU."""
    import torch

    from flamia.pytorch.call import find_kernel

    return find_kernel("mxfp8", 128, torch.bfloat16, True, gpu.index)


@pytest.fixture(scope="session")
def prediction(kernel):
    """The backend that predicts that kernel's bits on the CPU: the reference under the profile of its certificate."""
    from flamia import dispatch

    (profile,) = [c.identity.profile for k, c in dispatch.certified_kernels() if k.name == kernel]
    return f"reference:{profile}"
