"""The schedule of a pack on the device: its tile table and its work items, from ``cu_seqlens`` without a host sync.

The lists are those of `flamia.reference.layout.tile_offsets` and `flamia.reference.schedule`, in buffers of an
upper bound that needs no ``cu_seqlens``; how much of each is in use, only the device knows (`DeviceSchedule.status`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia.kernels import structs
from flamia.kernels.launch import launch
from flamia.kernels.registry import SCHEDULE
from flamia.kernels.tensors import MAX_TOKENS, TILE, pointer

ERROR, NUM_TILES, NUM_FORWARD, NUM_BACKWARD, NUM_USED, LEGAL = range(6)
"""Entries of `DeviceSchedule.status`: the fault of ``cu_seqlens``; tiles; items of the forward and of the backward;
``cu_seqlens[-1]``; 1 without a fault, else 0."""

TICKETS = 8
"""First of the entries of `DeviceSchedule.status` that count what a kernel's CTAs have taken: two for each kernel."""

ANY_LENGTH = 2**63 - 1
"""What the device takes for no bound of a document's length."""

FAULTS = {
    1: "cu_seqlens[0] must be 0",
    2: "cu_seqlens must not decrease",
    4: "cu_seqlens[-1] must be at most the number of packed tokens",
    8: "no document may be longer than max_seqlen",
}
"""What each bit of the fault says."""


@dataclass(frozen=True)
class DeviceSchedule:
    """What every kernel of one attention call needs to know about its documents. All arrays are int32, on the device.

    :param cu_seqlens: as given.
    :param tiles: ``(max_tiles, 4)``: document, packed index of the first token, tokens, index within the document.
    :param tile_offsets: ``(n + 1,)``.
    :param forward: ``(max_items, 4)``: document, query head, first query tile, cost; longest first.
    :param backward: ``(max_items, 4)``: document, KV head, key tile, cost; None if not asked for. Note [Schedule] of
        `flamia.reference.schedule` says in which order.
    :param status: ``(16,)``, see `NUM_TILES` and the others. An illegal ``cu_seqlens`` makes every list empty.
    :param num_tokens: T.
    :param max_seqlen: tokens that a document has at most; None: T.
    """

    cu_seqlens: Any
    tiles: Any
    tile_offsets: Any
    forward: Any
    backward: Any
    status: Any
    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    causal: bool
    max_seqlen: int | None = None

    @property
    def max_tiles(self) -> int:
        """Tiles that the buffers have room for."""
        return int(self.tiles.shape[0])

    @property
    def longest(self) -> int:
        """Tiles that a document has at most."""
        length = self.num_tokens if self.max_seqlen is None else min(self.num_tokens, self.max_seqlen)
        return -(-length // TILE)

    def assert_legal(self) -> None:
        """Let the next call that waits for the device raise if ``cu_seqlens`` is illegal; one launch, no waiting."""
        import torch

        rule = f"cu_seqlens must start at 0, never decrease, and end at or before T = {self.num_tokens}"
        if self.max_seqlen is not None:
            rule += f"; max_seqlen must be at least the longest document of cu_seqlens, got {self.max_seqlen}"
        torch._assert_async(self.status[LEGAL], rule)

    def check(self) -> None:
        """Wait for the device and complain about an illegal ``cu_seqlens``.

        :raises ValueError: with the rule that it breaks.
        """
        fault = int(self.status[ERROR])
        if fault:
            rules = "; ".join(rule for bit, rule in FAULTS.items() if fault & bit)
            raise ValueError(f"{rules}: got cu_seqlens for {self.num_tokens} packed tokens that breaks this")


def max_tiles(num_tokens: int, num_documents: int) -> int:
    """Upper bound of the number of tiles, `flamia.reference.layout.max_tiles`."""
    return num_tokens // TILE + num_documents


def build_schedule(
    cu_seqlens: Any,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    causal: bool,
    backward: bool = True,
    max_seqlen: int | None = None,
) -> DeviceSchedule:
    """Build the schedule in one launch.

    :param cu_seqlens: int32 or int64 CUDA tensor ``(n + 1,)``.
    :param num_tokens: T, rows of the packed tensors.
    :param backward: whether to make the backward's items too.
    :param max_seqlen: an upper bound of the documents' lengths, >= 0, checked on the device like ``cu_seqlens``: a
        backward that stores tiles needs less memory for a pack of short documents, or fewer launches.
    :raises TypeError, ValueError: naming the argument; the content of ``cu_seqlens`` is checked on the device, see
        `DeviceSchedule.check`.
    """
    import torch

    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device.type != "cuda":
        raise ValueError(f"cu_seqlens must be on a CUDA device, got {cu_seqlens.device}")
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    num_tokens = _check_count("num_tokens", num_tokens)
    num_q_heads, num_kv_heads = _check_count("num_q_heads", num_q_heads), _check_count("num_kv_heads", num_kv_heads)
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"num_tokens must be 0..{MAX_TOKENS}, got {num_tokens}")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads or num_q_heads < 1:
        raise ValueError(
            f"num_q_heads must be a multiple of num_kv_heads, both at least 1, got {num_q_heads} and {num_kv_heads}"
        )
    if max_seqlen is not None:
        max_seqlen = _check_count("max_seqlen", max_seqlen)
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen must be at least 0, got {max_seqlen}")
    cu_seqlens = cu_seqlens.contiguous()
    documents = cu_seqlens.shape[0] - 1
    tiles = max_tiles(num_tokens, documents)
    forward_items = num_q_heads * (num_tokens // (2 * TILE) + documents)
    backward_items = num_kv_heads * tiles
    if max(forward_items, backward_items) > MAX_TOKENS:
        raise ValueError(f"num_tokens {num_tokens} and {num_q_heads} heads make more than {MAX_TOKENS} work items")

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int32, device=cu_seqlens.device)

    offsets_bytes = -(-4 * (documents + 1) // 16) * 16
    workspace_stride = offsets_bytes + 2 * 16 * tiles  # a forward unit takes at least one tile
    workspace = torch.empty(2 * workspace_stride, dtype=torch.uint8, device=cu_seqlens.device)
    schedule = DeviceSchedule(
        cu_seqlens=cu_seqlens,
        tiles=empty(tiles, 4),
        tile_offsets=empty(documents + 1),
        forward=empty(forward_items, 4),
        backward=empty(backward_items, 4) if backward else None,
        status=empty(16),
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        causal=bool(causal),
        max_seqlen=max_seqlen,
    )
    params = structs.fill(
        structs.SCHEDULE,
        {
            "cu_seqlens": pointer(cu_seqlens),
            "tiles": pointer(schedule.tiles),
            "tile_offsets": pointer(schedule.tile_offsets),
            "forward_items": pointer(schedule.forward),
            "backward_items": pointer(schedule.backward),
            "status": pointer(schedule.status),
            "workspace": pointer(workspace),
            "num_tokens": num_tokens,
            "max_length": ANY_LENGTH if max_seqlen is None else min(max_seqlen, ANY_LENGTH),
            "workspace_stride": workspace_stride,
            "num_documents": documents,
            "wide": cu_seqlens.dtype == torch.int64,
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "causal": schedule.causal,
            "key_bits": max(1, (2 * -(-num_tokens // TILE)).bit_length()),
        },
    )
    launch(SCHEDULE.unit(), "build_schedule", params, cu_seqlens.device, ctas=3 if backward else 2)
    return schedule


def _check_count(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
