"""How the types of PTX are held in NumPy: a register of a warp is a row of 32 lanes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Row: TypeAlias = Any
"""One register of a warp: an array of 32 lanes (of a type that NumPy's annotations cannot follow through views)."""

LANES = 32

REGISTERS = 65536
"""Of a multiprocessor, 32 bits each."""

FULL: NDArray[np.bool_] = np.ones(LANES, np.bool_)
"""The mask of a warp all of whose lanes are active. Compared by identity: whoever makes a mask of 32 true lanes uses
this object (`as_mask`), so that the common case costs nothing."""
FULL.setflags(write=False)

NO_LANES = bytes(LANES)
ALL_LANES = FULL.tobytes()

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"{k}{bits}": np.dtype(f"u{bits // 8}") for k in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # NumPy has none: bits
    "f32": np.dtype(np.float32),
    "tf32": np.dtype(np.uint32),
    "f64": np.dtype(np.float64),
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2", "e4m3x4", "e5m2x4", "e2m1x4"), np.dtype(np.uint32)),
    **dict.fromkeys(("e4m3x2", "e5m2x2", "ue8m0x2"), np.dtype(np.uint16)),
    "e2m1x2": np.dtype(np.uint8),
    "f32x2": np.dtype(np.uint64),
}
"""NumPy type of a lane by the name of a PTX type; ``b128`` alone is two words, of shape (32, 2)."""

SIGNED = frozenset({"s8", "s16", "s32", "s64"})
INTEGERS = frozenset(f"{k}{bits}" for k in "usb" for bits in (8, 16, 32, 64))


def width_of(name: str) -> int:
    """Bytes of a lane of that type; predicates take one."""
    return 16 if name == "b128" else int(np.dtype(DTYPES[name]).itemsize)


def as_mask(lanes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """``lanes``, or `FULL` itself if every lane is true."""
    return FULL if lanes.tobytes() == ALL_LANES else lanes


def lanes_of(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    """Numbers of the true lanes."""
    return tuple(int(i) for i in np.flatnonzero(mask))


def mask_word(mask: NDArray[np.bool_]) -> int:
    """The mask as an integer, bit i for lane i."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


def word_mask(word: int) -> NDArray[np.bool_]:
    """The inverse of `mask_word`."""
    bits = np.unpackbits(np.array([word & 0xFFFFFFFF], np.uint32).view(np.uint8), bitorder="little")
    return as_mask(bits.astype(np.bool_))
