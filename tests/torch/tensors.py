"""Inputs and bit comparisons that the tests of the PyTorch operators share."""

import numpy as np
import torch

from flamia.conformance.certificates import Certificate, Identity
from flamia.conformance.results import LEVELS, SUITE_VERSION

LENGTHS = [0, 1, 31, 129, 0, 40]
CU = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
TOTAL = int(CU[-1]) + 5  # five rows of padding

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def random_qkv(total=TOTAL, heads=(4, 2), dim=32, dtype=torch.bfloat16, seed=0, grad=True):
    """Leaves q, k and v, and dout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    if grad:
        for x in (q, k, v):
            x.requires_grad_()
    return q, k, v, dout


def assert_same_bits(actual, expected, name=""):
    """Equal shape, dtype and bits; names the first coordinate that differs."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (name, actual.shape, expected.shape)
    differ = bits(actual) != bits(expected)
    if differ.any():
        where = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(f"{name} differs first at {where}: {actual[where].item()} != {expected[where].item()}")


def saved_bytes(run):
    """Bytes of the distinct storages that autograd saves while ``run`` runs."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    return sum(storages.values()), result


def certified(name):
    """A certificate of every level for a kernel that does not exist."""
    identity = Identity(name, "mxfp8", "hopper", "0" * 64, "NVIDIA H200", "9.0", "NVRTC 13.0")
    return Certificate(identity, SUITE_VERSION, tuple(LEVELS), "full", 1, "2025-01-01T00:00:00+00:00", {})


def bits(x):
    x = x.detach().contiguous()
    return x.view(_BITS.get(x.dtype, x.dtype))
