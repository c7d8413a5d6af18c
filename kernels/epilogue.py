"""Epilogue helpers: gradients from FP32 tiles, and tokens back from quantized tiles."""

from __future__ import annotations

from typing import Any

from flamia.kernels import structs
from flamia.kernels.launch import launch
from flamia.kernels.quantize import Nvfp4Tiles, TokenTiles
from flamia.kernels.registry import DECODE, EPILOGUE
from flamia.kernels.schedule import DeviceSchedule
from flamia.kernels.tensors import TILE, check_tokens, padding_struct, pointer, tokens_struct


def reduce_heads(partial: Any, out: Any, schedule: DeviceSchedule, exponents: Any = None) -> None:
    """``out[t, h] = round(2^-e (partial[h g] + ... + partial[h g + g - 1]))``; padding rows of ``out`` become 0.

    The sum over the g heads of a group is in FP32 in ascending order; e is the row's exponent, 0 without exponents.

    :param partial: float32 ``(g H, max_tiles, 128, D)``, contiguous.
    :param out: ``(T, H, D)`` bfloat16, float16 or float32, any token and head stride.
    :param exponents: float32 ``(H, max_tiles, 128)``, `TokenTiles.exponents`.
    :raises TypeError, ValueError: naming the argument.
    """
    element = check_tokens("out", out)
    heads, dim = out.shape[1], out.shape[2]
    shape = (schedule.max_tiles, TILE, dim)
    if out.shape[0] != schedule.num_tokens:
        raise ValueError(f"out must have the {schedule.num_tokens} tokens of the schedule, got {out.shape[0]}")
    _check_float32("partial", partial, out.device)
    if tuple(partial.shape[1:]) != shape or not partial.shape[0] or partial.shape[0] % heads:
        raise ValueError(f"partial must have shape (g * {heads}, *{shape}), got {tuple(partial.shape)}")
    if exponents is not None:
        _check_float32("exponents", exponents, out.device)
        if tuple(exponents.shape) != (heads, schedule.max_tiles, TILE):
            raise ValueError(f"exponents must have shape {(heads, *shape[:2])}, got {tuple(exponents.shape)}")
    params = structs.fill(
        structs.EPILOGUE,
        {
            "partial": pointer(partial),
            "exponents": pointer(exponents),
            "out": tokens_struct(out),
            "padding": padding_struct(schedule.num_tokens, (out,)),
            "tiles": pointer(schedule.tiles),
            "status": pointer(schedule.status),
            "max_tiles": schedule.max_tiles,
            "heads": heads,
            "group": partial.shape[0] // heads,
            "head_dim": dim,
        },
    )
    launch(EPILOGUE.unit(element=element), "reduce_heads", params, out.device)


def _check_float32(name: str, x: Any, device: Any) -> None:
    if str(getattr(x, "dtype", None)) != "torch.float32" or not hasattr(x, "data_ptr"):
        raise TypeError(f"{name} must be a float32 torch tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


def decode_tiles(tiles: TokenTiles | Nvfp4Tiles, schedule: DeviceSchedule) -> Any:
    """Decode payload and scale tiles to float32 ``(T, H, D)``, zeros past the last document. For debugging.

    :raises ValueError: if the tiles are of another schedule.
    """
    import torch

    if tiles.payload.shape[1] != schedule.max_tiles:
        raise ValueError(f"tiles must be {schedule.max_tiles}, as in the schedule, got {tiles.payload.shape[1]}")

    nvfp4 = isinstance(tiles, Nvfp4Tiles)
    heads = tiles.payload.shape[0]
    dim = tiles.payload.shape[2] // (TILE // 2 if nvfp4 else TILE)
    out = torch.zeros((schedule.num_tokens, heads, dim), dtype=torch.float32, device=tiles.payload.device)
    params = structs.fill(
        structs.DECODE,
        {
            "payload": pointer(tiles.payload),
            "scales": pointer(tiles.scales),
            "head_scales": pointer(tiles.head_scales) if isinstance(tiles, Nvfp4Tiles) else 0,
            "out": tokens_struct(out),
            "tiles": pointer(schedule.tiles),
            "status": pointer(schedule.status),
            "max_tiles": schedule.max_tiles,
            "heads": heads,
            "head_dim": dim,
        },
    )
    entry = "decode_nvfp4" if nvfp4 else "decode_tokens"
    launch(DECODE.unit(), entry, params, out.device)
    return out
