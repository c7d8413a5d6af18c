"""The example GEMM: one tile of 128 x 128, its operands packed as the kernel expects them, and the product.

The packing is that of `flamia.reference.layout`, the product `flamia.reference.tensorcore.mma` with MXF8F6F4 or
MXF4NVF4: nothing of the simulator takes part in what is expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.case import Case, Data
from flamia.kernels.targets import SM_100A
from flamia.reference.formats import E2M1, E4M3, decode, encode
from flamia.reference.layout import payload_offset, scale_offset
from flamia.reference.tensorcore import MXF4NVF4, MXF8F6F4, mma

SOURCE = Path(__file__).with_name("gemm.cu")
ROWS = 128
ROLES = {"C and D": (0, 1, 2, 3), "load": (4,), "multiply": (5,)}
SHARED_BYTES = {False: 2 * (2 * 16384 + 2 * 512) + 1024 + 65536, True: 2 * (2 * 16384 + 2 * 2048) + 1024 + 65536}
"""Whether NVFP4 -> dynamic shared memory."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Variant:
    """What the source is compiled for.

    :param a_mn: A's tiles hold the contracted index along their rows. :param b_mn: likewise.
    :param nvfp4: E2M1 elements with UE4M3 scales of 16; otherwise E4M3 with E8M0 scales of 32.
    :param sfb_route: how B's scales reach tensor memory: ``tiles``, ``registers`` or ``table``.
    :param tiles: K in tiles of 128 bytes.
    """

    a_mn: bool = False
    b_mn: bool = False
    nvfp4: bool = False
    sfb_route: str = "tiles"
    tiles: int = 4

    @property
    def name(self) -> str:
        """For example ``gemm[a k, b mn, table]``."""
        majors = f"a {'mn' if self.a_mn else 'k'}, b {'mn' if self.b_mn else 'k'}"
        return f"gemm[{majors}, {'nvfp4' if self.nvfp4 else self.sfb_route}]"

    @property
    def options(self) -> tuple[str, ...]:
        """Macros."""
        route = ("tiles", "registers", "table").index(self.sfb_route)
        values = {"A_MN": self.a_mn, "B_MN": self.b_mn, "NVF4": self.nvfp4, "SFB_ROUTE": route}
        return tuple(f"--define-macro={k}={int(v)}" for k, v in values.items())


VARIANTS = (
    Variant(),
    Variant(b_mn=True, sfb_route="registers"),
    Variant(a_mn=True, sfb_route="table"),
    Variant(a_mn=True, b_mn=True),
    Variant(nvfp4=True),
)
"""The variants that are shown and tested."""


def gemm_case(variant: Variant = VARIANTS[0], source: str | None = None) -> Case:
    """The case of a variant; ``source`` replaces the kernel's text."""
    return Case(
        name=variant.name,
        summary="block-scaled 128 x 128 product on tcgen05, warp-specialised, two stages",
        source=SOURCE.read_text(encoding="utf-8") if source is None else source,
        entry="gemm",
        target=SM_100A,
        draw=lambda seed: draw(variant, seed),
        block=192,
        shared_bytes=SHARED_BYTES[variant.nvfp4],
        options=variant.options,
        roles=ROLES,
    )


def draw(variant: Variant, seed: int) -> Data:
    """Random operands, C, an unwritten D, and the product."""
    rng = np.random.default_rng(seed)
    per_token = variant.sfb_route != "tiles"
    a, sfa, a_tiles, sfa_tiles = _operand(rng, variant, variant.a_mn, per_token=False)
    b, sfb, b_tiles, sfb_tiles = _operand(rng, variant, variant.b_mn, per_token)
    c = rng.standard_normal((ROWS, ROWS), np.float32)
    step = MXF4NVF4 if variant.nvfp4 else MXF8F6F4
    d = np.full((ROWS, ROWS), np.nan, np.float32)
    arguments: list[Any] = [a_tiles, sfa_tiles, b_tiles, sfb_tiles, c, d, np.int32(variant.tiles)]
    return Data(arguments, {"D": (d, mma(a, b, c, step, scale_a=sfa, scale_b=sfb))})


def _operand(
    rng: np.random.Generator, variant: Variant, mn_major: bool, per_token: bool
) -> tuple[NDArray[np.float32], Bytes, Bytes, Bytes]:
    """Values (128, K), scales (128, blocks), and both as the kernel takes them."""
    per_byte, block = (2, 16) if variant.nvfp4 else (1, 32)
    k = 128 * per_byte * variant.tiles
    fmt = E2M1 if variant.nvfp4 else E4M3
    codes = encode(rng.standard_normal((ROWS, k), np.float32) * np.float32(2), fmt)
    low, high = (0x28, 0x50) if variant.nvfp4 else (120, 135)
    scale = rng.integers(low, high, (ROWS, k // block)).astype(np.uint8)
    if per_token:
        scale = np.ascontiguousarray(np.broadcast_to(scale[:, :1], scale.shape))
    payload = codes[:, ::2] | codes[:, 1::2] << 4 if variant.nvfp4 else codes
    tiles = np.zeros((variant.tiles, 128 * 128), np.uint8)
    offset = payload_offset(128)
    for t in range(variant.tiles):
        part = payload[:, 128 * t : 128 * t + 128]
        tiles[t, offset] = part.T if mn_major else part
    table = np.ascontiguousarray(scale[:, 0]) if per_token else _scale_tiles(scale, variant.tiles)
    return decode(codes, fmt), scale, tiles, table


def _scale_tiles(scale: Bytes, tiles: int) -> Bytes:
    """Blocks of 512 bytes: 128 rows x 4 scales each, the blocks of a tile of K one after another."""
    row, column = np.indices((ROWS, 4))
    groups = scale.reshape(ROWS, -1, 4).swapaxes(0, 1)
    out = np.zeros((groups.shape[0], 512), np.uint8)
    out[:, scale_offset(row, column)] = groups
    return out.reshape(tiles, -1)
