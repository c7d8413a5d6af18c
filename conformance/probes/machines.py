"""The chips' matrix products as functions, to be held against `flamia.reference.tensorcore`.

Hopper's are chains of single wgmma instructions (``wgmma.cu``). Blackwell's are PyTorch's block-scaled products of one
128 x 128 tile, which cuBLAS computes as one ascending chain of tcgen05.mma; they have no C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.probes.device import launch
from flamia.reference import layout, tensorcore
from flamia.reference.formats import E2M1, E4M3, encode

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Operands:
    """One batch of products.

    :param a: float32 ``(tiles, M, K)`` on the grid of the operand format.
    :param b: float32 ``(tiles, N, K)``.
    :param c: float32 ``(tiles, M, N)`` or None.
    :param scale_a: bytes ``(tiles, M, K // scale_block)`` if the step has scales.
    :param scale_b: likewise.
    """

    a: F32
    b: F32
    c: F32 | None = None
    scale_a: Bytes | None = None
    scale_b: Bytes | None = None


@dataclass(frozen=True)
class Machine:
    """One instruction of a chip.

    :param step: the model.
    :param rows: M of one tile. :param columns: N.
    :param has_c: whether C can be given.
    :param multiply: what the chip computes, float32 ``(tiles, M, N)``.
    """

    name: str
    step: tensorcore.MmaStep
    rows: int
    columns: int
    has_c: bool
    multiply: Callable[[Operands, str], F32]

    def expected(self, x: Operands) -> F32:
        """What the model computes."""
        return tensorcore.mma(x.a, x.b, x.c, self.step, scale_a=x.scale_a, scale_b=x.scale_b)


def machines_of(capability: tuple[int, int]) -> list[Machine]:
    """The machines of a chip by compute capability."""
    if capability[0] == 9:
        return [
            Machine("wgmma_bf16", tensorcore.WGMMA_BF16, 64, 8, True, _wgmma("wgmma_bf16")),
            Machine("wgmma_e4m3", tensorcore.WGMMA_E4M3, 64, 8, True, _wgmma("wgmma_e4m3")),
        ]
    if capability[0] == 10:
        return [
            Machine("tcgen05_mxf8f6f4", tensorcore.MXF8F6F4, 128, 128, False, _scaled_e4m3),
            Machine("tcgen05_mxf4nvf4", tensorcore.MXF4NVF4, 128, 128, False, _scaled_e2m1),
            Machine("tcgen05_f16", tensorcore.TCGEN05_F16, 128, 128, False, _bf16),
        ]
    return []


def _wgmma(entry: str) -> Callable[[Operands, str], F32]:
    def multiply(x: Operands, device: str) -> F32:
        def rows(values: F32) -> Bytes:
            """``(tiles, R, K)`` to bytes ``(tiles, steps, R, 32)``."""
            raw = values.astype(bfloat16).view(np.uint8) if entry == "wgmma_bf16" else encode(values, E4M3)
            pieces = raw.reshape(*values.shape[:2], -1, 32).swapaxes(1, 2)
            return np.ascontiguousarray(pieces)

        a, b = rows(x.a), rows(x.b)
        c = np.zeros((len(a), 64, 8), np.float32) if x.c is None else np.ascontiguousarray(x.c)
        out = np.zeros_like(c)
        launch("wgmma.cu", entry, device, len(a), 128, [a, b, c, out, np.int32(a.shape[1])])
        return out

    return multiply


def _scaled_e4m3(x: Operands, device: str) -> F32:
    import torch

    def codes(values: F32) -> Any:
        return torch.from_numpy(encode(values, E4M3)).to(device).view(torch.float8_e4m3fn)

    return _scaled(x, device, codes, "float8_e8m0fnu")


def _scaled_e2m1(x: Operands, device: str) -> F32:
    import torch

    def codes(values: F32) -> Any:
        code = encode(values, E2M1)
        pairs = (code[..., 0::2] | code[..., 1::2] << 4).astype(np.uint8)
        return torch.from_numpy(pairs).to(device).view(torch.float4_e2m1fn_x2)

    return _scaled(x, device, codes, "float8_e4m3fn")


def _scaled(x: Operands, device: str, codes: Callable[[F32], Any], scale_dtype: str) -> F32:
    import torch

    def scales(bytes_: Bytes) -> Any:
        tiled = np.zeros(layout.SCALE_TILE_BYTES * -(-bytes_.shape[1] // 4), np.uint8)
        block = np.arange(bytes_.shape[1])
        offset = layout.scale_offset(np.arange(128)[:, None], block % 4) + layout.SCALE_TILE_BYTES * (block // 4)
        tiled[offset] = bytes_
        return torch.from_numpy(tiled).to(device).view(getattr(torch, scale_dtype))

    assert x.scale_a is not None and x.scale_b is not None
    out = np.zeros((len(x.a), 128, 128), np.float32)
    for i in range(len(x.a)):
        product = torch._scaled_mm(
            codes(x.a[i]),
            codes(x.b[i]).t(),
            scale_a=scales(x.scale_a[i]),
            scale_b=scales(x.scale_b[i]),
            out_dtype=torch.float32,
        )
        out[i] = product.cpu().numpy()
    return out


def _bf16(x: Operands, device: str) -> F32:
    import torch

    from flamia.conformance.targets.tensors import to_torch

    a, b = (to_torch(y.astype(bfloat16), device) for y in (x.a, x.b))
    product: F32 = torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32).cpu().numpy()
    return product
