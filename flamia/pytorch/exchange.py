"""Tensors as NumPy arrays and back, without a copy where the dtype has one on both sides.

NumPy has no bfloat16 of its own and PyTorch does not know ml_dtypes, so bfloat16 travels as the uint16 that both can
view. The reference has no float16: such a tensor is widened to float32, which is exact, and results are rounded to
float16 once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from torch import Tensor


def to_numpy(x: Tensor) -> NDArray[Any]:
    """The values of ``x`` as an array with the same strides; a view of its memory but for float16 and other devices."""
    x = x.detach().cpu()
    array: NDArray[Any]
    if x.dtype == torch.bfloat16:
        array = x.view(torch.uint16).numpy().view(bfloat16)
    else:
        array = (x.float() if x.dtype == torch.float16 else x).numpy()
    return array


def to_torch(x: NDArray[Any], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """A tensor on the memory of ``x``; copied only where ``dtype`` or ``device`` ask for another one."""
    if x.dtype == bfloat16:
        tensor = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(x)
    if not x.size:  # from_numpy makes all of its strides 0, also that of the channels
        tensor = tensor.new_empty(x.shape)
    return tensor.to(device=device, dtype=dtype)
