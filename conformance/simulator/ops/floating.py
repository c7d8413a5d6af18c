"""FP32 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def flush(a: NDArray[Any]) -> NDArray[Any]:
    """Subnormal float32 as zeros of their sign (``.ftz``)."""
    bits = np.ascontiguousarray(a).view(np.uint32)
    small = (bits & np.uint32(0x7F800000)) == 0
    return np.where(small, bits & np.uint32(0x80000000), bits).view(np.float32)
