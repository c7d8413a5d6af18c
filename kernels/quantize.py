"""Quantized operands on the device: q, k, v and dout / l as payload and scale tiles.

What the kernels write is what `flamia.reference.scaling`, `.nvfp4` and `.backward.row_pass` compute, laid out by
`flamia.reference.layout`, byte for byte; only the first ``status[NUM_TILES]`` of the ``max_tiles`` tiles are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flamia.kernels import structs
from flamia.kernels.launch import launch
from flamia.kernels.registry import QUANTIZE, ROW_PASS
from flamia.kernels.schedule import DeviceSchedule
from flamia.kernels.tensors import (
    TILE,
    check_cleared,
    check_rows,
    check_tokens,
    padding_struct,
    pointer,
    tokens_struct,
)

SCALE_TILE_BYTES = 512


@dataclass(frozen=True)
class TokenTiles:
    """A tensor in token-block scaling: ``payload * 2^(scale - 127)``. uint8 tensors on the device.

    :param payload: ``(H, max_tiles, 128 D)``, E4M3; None where the values are elsewhere, unscaled or wide.
    :param scales: ``(H, max_tiles, 512 ceil(D / 128))``, E8M0, for contractions over channels; None where no kernel
        reads them.
    :param token_scales: as ``scales``, for contractions over tokens; None for token blocks of 1, and where no kernel
        reads them.
    :param exponents: float32 ``(H, max_tiles, 128)``, what is folded into dS, or on Hopper multiplies
        (``DocumentOperand.exponents`` of the reference); None where no kernel reads it.
    """

    payload: Any
    scales: Any
    token_scales: Any = None
    exponents: Any = None


@dataclass(frozen=True)
class Nvfp4Tiles:
    """A tensor in NVFP4. uint8 tensors on the device.

    :param payload: ``(H, max_tiles, 64 D)``, two E2M1 codes per byte.
    :param scales: ``(H, max_tiles, 8 D)``, UE4M3.
    :param head_scales: float32 ``(H, 2)``: S_enc and S_dec of the reference.
    """

    payload: Any
    scales: Any
    head_scales: Any


@dataclass(frozen=True)
class Nvfp4:
    """How q and k are quantized to NVFP4.

    :param q_scales: float32 CUDA tensor ``(Hq, 2)``: S_enc and S_dec, see `flamia.reference.nvfp4.head_scales`.
    :param k_scales: ``(Hkv, 2)``.
    :param hadamard: rotate the channels first.
    """

    q_scales: Any
    k_scales: Any
    hadamard: bool = False


@dataclass(frozen=True)
class QuantizedInputs:
    """The operands of an attention call.

    :param v: token blocks of 32; on Hopper of 1, with exponents.
    :param v1: the same values in token blocks of 1, for diagonal tiles; None if not causal, and on Hopper.
    :param q4: q in NVFP4, None without it; ``k4`` likewise.
    """

    q: TokenTiles
    k: TokenTiles
    v: TokenTiles
    v1: TokenTiles | None = None
    q4: Nvfp4Tiles | None = None
    k4: Nvfp4Tiles | None = None


@dataclass(frozen=True)
class KeyOperands:
    """What the Hopper forward reads of k and v beside their tiles: notes of ``hopper/factors.cuh`` and ``tiles.cuh``.

    :param factors: float32 ``(Hkv, max_tiles, 132)``, Note [Factor tile].
    :param v: uint8 ``(Hkv, max_tiles, 256 D)``, Note [Wide tile]: V1, decoded.
    """

    factors: Any
    v: Any


@dataclass(frozen=True)
class RowPass:
    """Result of the backward's row pre-pass.

    :param dout: dO' in token blocks of 32; of an unscaled recipe only scales, of which ``448 * 2^(scale - 127)``
        bounds a block.
    :param delta: float32 ``(H, max_tiles, 128)``; 0 in inactive rows and past the document.
    :param top: as ``delta``: m; +inf in inactive rows and past the document, NaN in lost rows.
    """

    dout: TokenTiles
    delta: Any
    top: Any


def quantize_qkv(
    q: Any,
    k: Any,
    v: Any,
    schedule: DeviceSchedule,
    *,
    nvfp4: Nvfp4 | None = None,
    keys: KeyOperands | None = None,
    saves: bool = True,
    out: Any = None,
    rows: Sequence[tuple[Any, float]] = (),
) -> QuantizedInputs:
    """Quantize q, k and v in one launch; v in token blocks of 32, and of 1 too if the schedule is causal.

    With ``keys``, on Hopper, v in token blocks of 1 alone: Note [Own exponents] of `flamia.reference.profiles`. There
    causal attention leaves halves of tiles without a token unwritten: Note [Halves with tokens] of
    ``quantize/wide.cuh``.

    :param q: ``(T, Hq, D)`` bfloat16, float16 or float32 CUDA tensor, any token and head stride.
    :param k: ``(T, Hkv, D)``, dtype and device of q; ``v`` likewise.
    :param nvfp4: also quantize q and k to NVFP4; D must be a multiple of 64.
    :param keys: where what the Hopper forward reads beside goes.
    :param saves: False, with ``keys``, to leave out what the forward does not read: codes of v and exponents of k and
        v, which the backward reads, and scales, which the conformance suite looks at.
    :param out: the attention's output ``(T, Hq, D)``, whose padding rows this launch clears; may be None.
    :param rows: up to three pairs of a float32 ``(Hq, T)`` output, or None, and the value of its padding entries.
    :raises TypeError, ValueError: naming the argument.
    """
    element = check_tokens("q", q, schedule.num_q_heads)
    check_tokens("k", k, schedule.num_kv_heads, like=q)
    check_tokens("v", v, schedule.num_kv_heads, like=q)
    _check_schedule("q", q, schedule)
    if nvfp4 is not None and not isinstance(nvfp4, Nvfp4):
        raise TypeError(f"nvfp4 must be an Nvfp4 or None, got {type(nvfp4).__name__}")
    if nvfp4 is not None and keys is not None:
        raise ValueError("keys must be None with nvfp4: one launch writes either")
    if keys is None and not saves:
        raise ValueError("saves must be True without keys: Hopper alone can do with less")
    if nvfp4 is not None and q.shape[2] % 64:
        raise ValueError(f"q must have a head_dim that is a multiple of 64 for NVFP4, got {q.shape[2]}")
    check_cleared("out", out, schedule.num_tokens, q.device)
    for i, (x, _) in enumerate(rows):
        if x is not None:
            check_rows(f"rows[{i}]", x, schedule.num_q_heads, schedule.num_tokens, q.device)
    tiles = schedule.max_tiles
    tokens = [
        _token_tiles(q, tiles, scaled=saves, folded=True),
        _token_tiles(k, tiles, scaled=saves, folded=saves),
    ]
    q4 = None if nvfp4 is None else _nvfp4_tiles(q, tiles, "nvfp4.q_scales", nvfp4.q_scales)
    k4 = None if nvfp4 is None else _nvfp4_tiles(k, tiles, "nvfp4.k_scales", nvfp4.k_scales)
    hadamard = nvfp4 is not None and nvfp4.hadamard
    jobs = [_job(q, one=tokens[0], four=q4, hadamard=hadamard), _job(k, one=tokens[1], four=k4, hadamard=hadamard)]
    if keys is None:
        of_v = _token_tiles(v, tiles, blocks=True)
        v1 = _token_tiles(v, tiles) if schedule.causal else None
        jobs.append(_job(v, one=v1, block=of_v))
    else:
        of_v, v1 = _token_tiles(v, tiles, scaled=saves, folded=saves, coded=saves), None
        jobs.append(_job(v, one=of_v) | {"factors": pointer(keys.factors), "wide": pointer(keys.v)})
        jobs[1] |= {"factors": pointer(keys.factors)}
    _launch_quantize(element, q, jobs, schedule, padding_struct(schedule.num_tokens, (out,), tuple(rows)))
    return QuantizedInputs(tokens[0], tokens[1], of_v, v1, q4, k4)


def quantize_tokens(x: Any, schedule: DeviceSchedule, block: int) -> TokenTiles:
    """Quantize one tensor in token blocks of 1 or 32.

    :param x: ``(T, H, D)`` CUDA tensor.
    :raises TypeError, ValueError: naming the argument.
    """
    element = check_tokens("x", x)
    _check_schedule("x", x, schedule)
    if block not in (1, 32):
        raise ValueError(f"block must be 1 or 32 tokens, got {block!r}")
    out = _token_tiles(x, schedule.max_tiles, folded=block == 1, blocks=block == 32)
    job = _job(x, one=out) if block == 1 else _job(x, block=out)
    _launch_quantize(element, x, [job], schedule, padding_struct(schedule.num_tokens, ()))
    return out


def quantize_values(v: Any, schedule: DeviceSchedule) -> tuple[TokenTiles, TokenTiles]:
    """Quantize one tensor in token blocks of 32 and of 1, reading it once: V32 and V1.

    :param v: ``(T, H, D)`` CUDA tensor.
    :raises TypeError, ValueError: naming the argument.
    """
    element = check_tokens("v", v)
    _check_schedule("v", v, schedule)
    v32, v1 = _token_tiles(v, schedule.max_tiles, blocks=True), _token_tiles(v, schedule.max_tiles)
    _launch_quantize(element, v, [_job(v, one=v1, block=v32)], schedule, padding_struct(schedule.num_tokens, ()))
    return v32, v1


def quantize_nvfp4(x: Any, schedule: DeviceSchedule, head_scales: Any, hadamard: bool = False) -> Nvfp4Tiles:
    """Quantize one tensor to NVFP4.

    :param x: ``(T, H, D)`` CUDA tensor, D a multiple of 64.
    :param head_scales: float32 CUDA tensor ``(H, 2)``, S_enc and S_dec.
    :raises TypeError, ValueError: naming the argument.
    """
    element = check_tokens("x", x)
    _check_schedule("x", x, schedule)
    if x.shape[2] % 64:
        raise ValueError(f"x must have a head_dim that is a multiple of 64 for NVFP4, got {x.shape[2]}")
    out = _nvfp4_tiles(x, schedule.max_tiles, "head_scales", head_scales)
    job = _job(x, four=out, hadamard=hadamard)
    _launch_quantize(element, x, [job], schedule, padding_struct(schedule.num_tokens, ()))
    return out


def row_pass(
    dout: Any,
    out: Any,
    row_sum: Any,
    row_max: Any,
    schedule: DeviceSchedule,
    *,
    gradients: Sequence[Any] = (),
    wide: Any = None,
    scaled: bool = True,
) -> RowPass:
    """The backward's row pre-pass in one launch.

    :param dout: ``(T, Hq, D)``, dtype of out. One without adjacent channels, as the gradient of a sum is, is copied.
    :param out: the forward's output.
    :param row_sum: l, float32 ``(Hq, T)``; ``row_max``: m, likewise.
    :param gradients: up to three outputs ``(T, H, D)``, or None, whose padding rows this launch clears.
    :param wide: on Hopper, where the values of dO' go, uint8 ``(Hq, max_tiles, 256 D)``: Note [Wide tile] of
        ``hopper/tiles.cuh``. Neither there nor in the payload are halves of tiles without a token written: Note [Halves
        with tokens] of ``quantize/wide.cuh``.
    :param scaled: False for an unscaled recipe, whose dO' goes to ``wide`` alone, rounded to bfloat16.
    :raises TypeError, ValueError: naming the argument.
    """
    import torch

    heads = schedule.num_q_heads
    element = check_tokens("out", out, heads)
    if hasattr(dout, "contiguous") and dout.ndim == 3 and dout.stride(2) != 1:
        dout = dout.contiguous()
    check_tokens("dout", dout, heads, like=out)
    if wide is None and not scaled:
        raise ValueError("wide must be a tensor without scaled: dO' goes nowhere else")
    _check_schedule("out", out, schedule)
    for name, x in (("row_sum", row_sum), ("row_max", row_max)):
        check_rows(name, x, heads, schedule.num_tokens, out.device)
    for i, x in enumerate(gradients):
        check_cleared(f"gradients[{i}]", x, schedule.num_tokens, out.device)
    tiles = _token_tiles(dout, schedule.max_tiles, blocks=True, coded=scaled)
    delta = torch.empty((heads, schedule.max_tiles, TILE), dtype=torch.float32, device=out.device)
    top = torch.empty_like(delta)
    params = structs.fill(
        structs.ROW_PASS,
        {
            "dout": tokens_struct(dout),
            "out": tokens_struct(out),
            "row_sum": pointer(row_sum),
            "row_sum_stride": row_sum.stride(0),
            "row_max": pointer(row_max),
            "row_max_stride": row_max.stride(0),
            "payload": pointer(tiles.payload),
            "scales": pointer(tiles.scales),
            "token_scales": pointer(tiles.token_scales),
            "delta": pointer(delta),
            "top": pointer(top),
            "wide": pointer(wide),
            "padding": padding_struct(schedule.num_tokens, tuple(gradients)),
            "tiles": pointer(schedule.tiles),
            "status": pointer(schedule.status),
            "max_tiles": schedule.max_tiles,
            "heads": heads,
        },
    )
    unit = ROW_PASS.unit(element=element, dim=out.shape[2])
    entry = "row_pass" if wide is None else "row_pass_wide" if scaled else "row_pass_unscaled"
    launch(unit, entry, params, out.device, at_most=_count_units(schedule, heads))
    return RowPass(tiles, delta, top)


def _check_schedule(name: str, x: Any, schedule: DeviceSchedule) -> None:
    if x.shape[0] != schedule.num_tokens:
        raise ValueError(f"{name} must have the {schedule.num_tokens} tokens of the schedule, got {x.shape[0]}")
    if x.device != schedule.status.device:
        raise ValueError(f"{name} must be on {schedule.status.device} with the schedule, got {x.device}")


def _bytes(x: Any, *shape: int) -> Any:
    import torch

    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _token_tiles(
    x: Any, tiles: int, *, folded: bool = False, blocks: bool = False, coded: bool = True, scaled: bool = True
) -> TokenTiles:
    import torch

    heads, dim = x.shape[1], x.shape[2]
    scale_bytes = SCALE_TILE_BYTES * -(-dim // 128)
    return TokenTiles(
        payload=_bytes(x, heads, tiles, TILE * dim) if coded else None,
        scales=_bytes(x, heads, tiles, scale_bytes) if scaled else None,
        token_scales=_bytes(x, heads, tiles, scale_bytes) if blocks and coded else None,
        exponents=torch.empty((heads, tiles, TILE), dtype=torch.float32, device=x.device) if folded else None,
    )


def _nvfp4_tiles(x: Any, tiles: int, name: str, head_scales: Any) -> Nvfp4Tiles:
    """:param name: of the argument ``head_scales``."""
    heads, dim = x.shape[1], x.shape[2]
    if str(getattr(head_scales, "dtype", None)) != "torch.float32" or not hasattr(head_scales, "data_ptr"):
        got = getattr(head_scales, "dtype", type(head_scales).__name__)
        raise TypeError(f"{name} must be a float32 torch tensor, got {got}")
    if tuple(head_scales.shape) != (heads, 2):
        raise ValueError(f"{name} must have shape {(heads, 2)}, got {tuple(head_scales.shape)}")
    if head_scales.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {head_scales.device}")
    payload, scales = _bytes(x, heads, tiles, TILE * dim // 2), _bytes(x, heads, tiles, 8 * dim)
    return Nvfp4Tiles(payload, scales, head_scales.contiguous())


def _job(
    x: Any,
    *,
    one: TokenTiles | None = None,
    block: TokenTiles | None = None,
    four: Nvfp4Tiles | None = None,
    hadamard: bool = False,
) -> dict[str, Any]:
    job: dict[str, Any] = {"source": tokens_struct(x), "heads": x.shape[1], "hadamard": hadamard}
    if one is not None:
        job |= {"payload": pointer(one.payload), "scales": pointer(one.scales), "exponents": pointer(one.exponents)}
    if block is not None:
        job |= {
            "block_payload": pointer(block.payload),
            "block_scales": pointer(block.scales),
            "block_token_scales": pointer(block.token_scales),
        }
    if four is not None:
        job |= {
            "nvfp4_payload": pointer(four.payload),
            "nvfp4_scales": pointer(four.scales),
            "nvfp4_head_scales": pointer(four.head_scales),
        }
    return job


def _launch_quantize(element: str, x: Any, jobs: list[dict[str, Any]], schedule: DeviceSchedule, padding: Any) -> None:
    heads = sum(job["heads"] for job in jobs)
    params = structs.fill(
        structs.QUANTIZE,
        {
            "jobs": jobs,
            "padding": padding,
            "tiles": pointer(schedule.tiles),
            "status": pointer(schedule.status),
            "max_tiles": schedule.max_tiles,
            "total_heads": heads,
            "halves": schedule.causal,
        },
    )
    unit = QUANTIZE.unit(element=element, dim=x.shape[2])
    entry = "quantize"
    if any("nvfp4_payload" in job for job in jobs):
        entry = "quantize_nvfp4"
    elif any("factors" in job for job in jobs):
        entry = "quantize_wide"
    launch(unit, entry, params, x.device, at_most=_count_units(schedule, heads))


def _count_units(schedule: DeviceSchedule, heads: int) -> int:
    """The most tiles that a launch over ``heads`` can have."""
    units = schedule.max_tiles * heads
    if units >= 2**31:
        raise ValueError(f"{schedule.max_tiles} tiles of {heads} heads are more than 2**31 - 1: split the call")
    return units
