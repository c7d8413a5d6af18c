"""Layout: how payloads and scales lie in memory, per document, in tiles that a kernel moves without looking
at them.

Note [Payload tile]
~~~~~~~~~~~~~~~~~~~
A document of ``L`` tokens owns ``ceil(L / 128)`` tiles. Row ``r`` of tile ``t`` is token ``128 t + r`` of the
document; rows past the end of the document are zero. A row is ``R`` bytes: ``R = D`` for one-byte elements
and ``R = D / 2`` for packed E2M1, always a multiple of 32.

The bytes are in the order in which the tensor core reads shared memory. A row is cut into *panels*, from the
left each as wide as the swizzle allows: as many of ``W = 128`` bytes as fit, then 64, then 32 (`panels`).
Panels follow one another, each of 128 rows, so panel ``p``, which starts at byte ``b_p`` of the row, starts
at byte ``128 b_p`` of the tile. Byte ``c`` (``0 <= c < W``) of row ``r`` in a panel lies at::

    swizzle_W(128 b_p + (r % 8) W + (r // 8) SBO + c)
    SBO = 8 W

where ``swizzle_W`` is its own inverse and acts on the address: bits 4..6 are exclusive-or'ed with bits 7..9
for ``W = 128``, bits 4..5 with bits 7..8 for ``W = 64``, bit 4 with bit 7 for ``W = 32`` (`swizzle`). It
moves pieces of 16 bytes and keeps each row's bytes within the row's own ``W`` bytes. A tile must start at a
multiple of 1024 bytes in shared memory, because the hardware applies the exclusive-or to the absolute
address.

Note [One payload, two majors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A contraction over channels (``Q K^T``, ``dO V^T``) reads the tile *K-major*: rows are tokens, and the
contracted index runs along the bytes. A contraction over tokens (``P V``, ``P^T dO``, ``dS K``, ``dS^T Q``)
reads the same bytes *MN-major*: the contracted index ``k`` is the token, and the byte ``n`` is the channel.
The hardware's formula for that is::

    swizzle_W((n % W) + (n // W) LBO + (k % 8) W + (k // 8) SBO)
    SBO = 8 W,  LBO = 128 W

With ``n = b_p + c``, ``k = r`` and panels of one width, ``b_p = W (n // W)`` and hence ``128 b_p = (n // W)
LBO``: both formulas name the same byte, so one copy in memory serves both products (`k_major_offset`,
`mn_major_offset`). Where the panels of a row differ in width, this holds panel by panel. 4-bit operands have
no MN-major form, and need none.

Note [Scale tile]
~~~~~~~~~~~~~~~~~
Scales are grouped in tiles of 128 rows x 4 blocks along the contraction, one byte each, 512 bytes. The scale
of row ``i`` and block ``j`` lies at (`scale_offset`)::

    (i % 32) * 16 + (i // 32) * 4 + j

Each of the 32 lines of 16 bytes thus becomes one lane of tensor memory. Beside every payload tile lie its
scale tiles, in one of two uses:

* *channels*: row ``i`` is the token, block ``j`` of tile ``u`` is the ``4 u + j``-th block of channels. A
  token-block scale has one byte per token, written once for each block of 32 channels. ``ceil(D / 128)``
  tiles; NVFP4 has blocks of 16 channels, hence ``D / 64`` tiles.
* *tokens*: row ``i`` of tile ``u`` is channel ``128 u + i``, block ``j`` is the ``j``-th block of 32 tokens
  of the payload tile: V32 and dO as operands of ``P V`` and ``P^T dO``. All channels hold the same byte.
  ``ceil(D / 128)`` tiles.

What a tile has beyond the document's tokens, beyond ``D`` channels or beyond the last block is byte 0. As
E8M0 that is 2**-127 and as UE4M3 0.0: both finite, so that they leave the payload's zeros zero, which NaN
(255) would not.

Sources: CuTe's canonical layouts and PTX ISA 9.0, "Shared memory matrix layout" and "Layout of scale_A and
scale_B", for the payload and tensor-memory forms; cuBLAS documentation, "Block scaling factors layouts", for
the 128x4 tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference.documents import BLOCK, TILE, validate_cu_seqlens

SCALE_TILE_BYTES = 512
"""Bytes of one scale tile: 128 rows x 4 blocks."""

PIECE = 16
"""Bytes that the swizzle moves as one."""

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]


# ---- addresses within one tile -----------------------------------------------------------------------------


def panels(row_bytes: int) -> list[tuple[int, int]]:
    """The panels of a row as pairs (first byte of the row, width ``W``): 128 as often as it fits, then 64,
    then 32.

    :raises ValueError: unless ``row_bytes`` is a positive multiple of 32.
    """
    if row_bytes <= 0 or row_bytes % 32:
        raise ValueError(f"row_bytes must be a positive multiple of 32, got {row_bytes}")
    found = []
    start = 0
    while start < row_bytes:
        width = next(w for w in (128, 64, 32) if start + w <= row_bytes)
        found.append((start, width))
        start += width
    return found


def swizzle(address: Any, width: int) -> Index:
    """Exclusive-or bits 4.. of a byte address with bits 7..: three bits for ``width`` 128, two for 64, one
    for 32."""
    plain: Index = np.asarray(address, np.int64)
    return plain ^ ((plain >> 3) & (width - PIECE))


def k_major_offset(row: Any, byte: Any, width: int) -> Index:
    """Offset in a panel of ``width`` bytes of byte ``byte < width`` of row ``row`` when the bytes of a row
    are contracted."""
    r, c = np.asarray(row, np.int64), np.asarray(byte, np.int64)
    stride = 8 * width
    return swizzle((r % 8) * width + (r // 8) * stride + c, width)


def mn_major_offset(byte: Any, row: Any, width: int) -> Index:
    """Offset of (channel byte, token row) in panels of ``width`` bytes when tokens are contracted; ``byte``
    may run over panels."""
    n, k = np.asarray(byte, np.int64), np.asarray(row, np.int64)
    stride, panel = 8 * width, TILE * width
    return swizzle((n % width) + (n // width) * panel + (k % 8) * width + (k // 8) * stride, width)


def payload_offset(row_bytes: int) -> Index:
    """Offset of every byte of a payload tile: shape ``(128, row_bytes)``, indexed by row and byte of the row.

    :raises ValueError: unless ``row_bytes`` is a positive multiple of 32.
    """
    rows = np.arange(TILE)[:, None]
    offsets = [TILE * start + k_major_offset(rows, np.arange(width), width) for start, width in panels(row_bytes)]
    return np.concatenate(offsets, axis=1)


def scale_offset(row: Any, block: Any) -> Index:
    """Offset in a scale tile of the byte of ``row < 128`` and ``block < 4``."""
    i, j = np.asarray(row, np.int64), np.asarray(block, np.int64)
    return (i % 32) * 16 + (i // 32) * 4 + j


# ---- tiles of a pack ---------------------------------------------------------------------------------------


def tile_offsets(cu_seqlens: Any) -> Index:
    """First tile of each document, then the number of tiles: the exclusive sum of ``ceil(length / 128)``,
    ``(n + 1,)``.

    :raises TypeError, ValueError: as `documents.validate_cu_seqlens`.
    """
    lengths = np.diff(validate_cu_seqlens(cu_seqlens, np.iinfo(np.int64).max))
    return np.concatenate([[0], np.cumsum(-(-lengths // TILE))]).astype(np.int64)


def max_tiles(num_tokens: int, num_documents: int) -> int:
    """An upper bound of the number of tiles that needs no ``cu_seqlens``: ``T // 128 + n``.

    Proof. ``ceil(L / 128) <= L // 128 + 1`` for every length, so the tiles number at most ``sum(L_i // 128) +
    n``; and ``sum(L_i // 128) <= sum(L_i) // 128 <= T // 128``, because the left side is an integer at most
    ``sum(L_i) / 128``. One document of one token attains it.
    """
    return num_tokens // TILE + num_documents


def token_slots(cu_seqlens: Any) -> tuple[Index, Index]:
    """Tile and row of every packed token that belongs to a document: two arrays of shape
    ``(cu_seqlens[-1],)``."""
    first = tile_offsets(cu_seqlens)
    cu = np.asarray(cu_seqlens, np.int64)
    lengths = np.diff(cu)
    position = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    return np.repeat(first[:-1], lengths) + position // TILE, position % TILE


# ---- payloads ----------------------------------------------------------------------------------------------


def pack_payload(payload: Bytes, cu_seqlens: Any) -> Bytes:
    """Lay one-byte element codes out in tiles.

    :param payload: uint8 ``(T, H, R)``, ``R`` a multiple of 32.
    :param cu_seqlens: integers ``(n + 1,)``; the rows past its last entry are dropped.
    :returns: uint8 ``(H, tiles, 128 R)``; tile ``t`` of document ``i`` is tile ``tile_offsets(cu_seqlens)[i]
        + t``.
    :raises TypeError, ValueError: for another dtype or shape, or an illegal ``cu_seqlens``.
    """
    payload = _require_bytes("payload", payload, 3)
    row_bytes = payload.shape[2]
    pieces, tiles = _payload_pieces(cu_seqlens, payload.shape[0], row_bytes)
    heads = payload.shape[1]
    packed = np.zeros((heads, tiles * TILE * row_bytes // PIECE, PIECE), np.uint8)
    packed[:, pieces] = _split(payload[: len(pieces)])
    return packed.reshape(heads, tiles, TILE * row_bytes)


def unpack_payload(packed: Bytes, cu_seqlens: Any, num_tokens: int) -> Bytes:
    """The inverse of `pack_payload`: uint8 ``(num_tokens, H, R)``, with zeros past the last document.

    :param packed: uint8 ``(H, tiles, 128 R)``; tiles beyond those of ``cu_seqlens`` are ignored.
    :raises TypeError, ValueError: for another dtype or shape, too few tiles, or an illegal ``cu_seqlens``.
    """
    packed = _require_bytes("packed", packed, 3)
    heads, row_bytes = packed.shape[0], packed.shape[2] // TILE
    pieces, tiles = _payload_pieces(cu_seqlens, num_tokens, row_bytes)
    _require_tiles("packed", packed, tiles, TILE * row_bytes)
    out = np.zeros((num_tokens, heads, row_bytes), np.uint8)
    found = packed.reshape(heads, packed.shape[1] * TILE * row_bytes // PIECE, PIECE)[:, pieces]
    out[: len(pieces)] = found.reshape(heads, len(pieces), row_bytes).transpose(1, 0, 2)
    return out


def pack_nvfp4(codes: Bytes, cu_seqlens: Any) -> Bytes:
    """Lay E2M1 codes, one per byte, out in tiles, two per byte: the even channel in the low nibble.

    :param codes: uint8 ``(T, H, D)``, values below 16, ``D`` a multiple of 64.
    :returns: uint8 ``(H, tiles, 64 D)``.
    :raises TypeError, ValueError: for another dtype, shape or value, or an illegal ``cu_seqlens``.
    """
    codes = _require_bytes("codes", codes, 3)
    if codes.shape[2] % 64:
        raise ValueError(f"codes must have a multiple of 64 channels, got shape {codes.shape}")
    if codes.size and codes.max() > 15:
        raise ValueError(f"codes must be below 16, got {codes.max()}")
    pairs = codes[..., 0::2] | np.left_shift(codes[..., 1::2], 4)
    return pack_payload(pairs.astype(np.uint8, copy=False), cu_seqlens)


def unpack_nvfp4(packed: Bytes, cu_seqlens: Any, num_tokens: int) -> Bytes:
    """The inverse of `pack_nvfp4`: uint8 ``(num_tokens, H, D)``, values below 16, with zeros past the last
    document."""
    pairs = unpack_payload(packed, cu_seqlens, num_tokens)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], 2 * pairs.shape[2])


# ---- scales ------------------------------------------------------------------------------------------------


def pack_scales(scale: Bytes, cu_seqlens: Any, head_dim: int, contraction: str = "channels") -> Bytes:
    """Lay token-block scales out in scale tiles. See Note [Scale tile].

    For ``contraction="tokens"`` the tokens of a block of 32 must share their byte, as `scaling.quantize_tokens`
    gives them.

    :param scale: E8M0 bytes, uint8 ``(T, H)``: the scale of each token.
    :param head_dim: ``D``, a multiple of 32.
    :param contraction: ``"channels"`` or ``"tokens"``.
    :returns: uint8 ``(H, tiles, 512 ceil(D / 128))``.
    :raises TypeError, ValueError: for another dtype, shape or contraction, an illegal ``cu_seqlens``, or
        bytes that differ within a block of 32 tokens when tokens are contracted.
    """
    scale = _require_bytes("scale", scale, 2)
    _require_head_dim(head_dim, 32)
    if contraction == "channels":
        return _pack_channel_scales(np.repeat(scale[:, :, None], head_dim // 32, axis=2), cu_seqlens)
    if contraction != "tokens":
        raise ValueError(f"contraction must be 'channels' or 'tokens', got {contraction!r}")
    tile, row, tiles = _slots(cu_seqlens, scale.shape[0])
    blocks = np.zeros((scale.shape[1], tiles, TILE // BLOCK), np.uint8)
    first = np.flatnonzero(row % BLOCK == 0)
    _require_one_byte_per_block(scale, scale[first], np.diff(first, append=len(row)))
    blocks[:, tile[first], row[first] // BLOCK] = scale[first].T
    scale_tiles = -(-head_dim // TILE)
    packed = np.zeros((scale.shape[1], tiles, scale_tiles, SCALE_TILE_BYTES), np.uint8)
    channel = np.arange(head_dim)
    offset = scale_offset(channel[:, None] % TILE, np.arange(TILE // BLOCK))
    packed[:, :, channel[:, None] // TILE, offset] = blocks[:, :, None, :]
    return packed.reshape(scale.shape[1], tiles, scale_tiles * SCALE_TILE_BYTES)


def unpack_scales(
    packed: Bytes, cu_seqlens: Any, head_dim: int, num_tokens: int, contraction: str = "channels"
) -> Bytes:
    """The inverse of `pack_scales`: the byte of each token, uint8 ``(num_tokens, H)``, with zeros past the
    last document.

    Reads one copy of each byte: that of the first block of channels, or of channel 0. For ``"tokens"`` every
    token gets the byte of its block.

    :raises TypeError, ValueError: for another dtype, shape or contraction, too few tiles, or an illegal
        ``cu_seqlens``.
    """
    packed = _require_bytes("packed", packed, 3)
    _require_head_dim(head_dim, 32)
    if contraction == "channels":
        copies = _unpack_channel_scales(packed, cu_seqlens, head_dim // 32, num_tokens)
        return np.ascontiguousarray(copies[:, :, 0])
    if contraction != "tokens":
        raise ValueError(f"contraction must be 'channels' or 'tokens', got {contraction!r}")
    tile, row, tiles = _slots(cu_seqlens, num_tokens)
    _require_tiles("packed", packed, tiles, SCALE_TILE_BYTES * -(-head_dim // TILE))
    out = np.zeros((num_tokens, packed.shape[0]), np.uint8)
    out[: len(tile)] = packed[:, tile, scale_offset(0, row // BLOCK)].T
    return out


def pack_nvfp4_scales(scales: Bytes, cu_seqlens: Any) -> Bytes:
    """Lay NVFP4's scales out in scale tiles, for the contraction over channels.

    :param scales: UE4M3 bytes, uint8 ``(T, H, D / 16)``.
    :returns: uint8 ``(H, tiles, 512 ceil(D / 64))``.
    :raises TypeError, ValueError: for another dtype or shape, or an illegal ``cu_seqlens``.
    """
    return _pack_channel_scales(_require_bytes("scales", scales, 3), cu_seqlens)


def unpack_nvfp4_scales(packed: Bytes, cu_seqlens: Any, head_dim: int, num_tokens: int) -> Bytes:
    """The inverse of `pack_nvfp4_scales`: uint8 ``(num_tokens, H, D / 16)``, with zeros past the last
    document."""
    _require_head_dim(head_dim, 64)
    return _unpack_channel_scales(_require_bytes("packed", packed, 3), cu_seqlens, head_dim // 16, num_tokens)


# ---- what they share ---------------------------------------------------------------------------------------


def _pack_channel_scales(scales: Bytes, cu_seqlens: Any) -> Bytes:
    total, heads, blocks = scales.shape
    tile, row, tiles = _slots(cu_seqlens, total)
    block = np.arange(blocks)
    scale_tiles = -(-blocks // 4)
    packed = np.zeros((heads, tiles, scale_tiles, SCALE_TILE_BYTES), np.uint8)
    offset = scale_offset(row[:, None], block % 4)
    packed[:, tile[:, None], block // 4, offset] = scales[: len(tile)].transpose(1, 0, 2)
    return packed.reshape(heads, tiles, scale_tiles * SCALE_TILE_BYTES)


def _unpack_channel_scales(packed: Bytes, cu_seqlens: Any, blocks: int, num_tokens: int) -> Bytes:
    tile, row, tiles = _slots(cu_seqlens, num_tokens)
    scale_tiles = -(-blocks // 4)
    _require_tiles("packed", packed, tiles, SCALE_TILE_BYTES * scale_tiles)
    block = np.arange(blocks)
    offset = block // 4 * SCALE_TILE_BYTES + scale_offset(row[:, None], block % 4)
    out = np.zeros((num_tokens, packed.shape[0], blocks), np.uint8)
    out[: len(tile)] = packed[:, tile[:, None], offset].transpose(1, 0, 2)
    return out


def _slots(cu_seqlens: Any, total: int) -> tuple[Index, Index, int]:
    """`token_slots` of a valid ``cu_seqlens``, and the number of tiles."""
    cu = validate_cu_seqlens(cu_seqlens, total)
    tile, row = token_slots(cu)
    return tile, row, int(tile_offsets(cu)[-1])


def _payload_pieces(cu_seqlens: Any, total: int, row_bytes: int) -> tuple[Index, int]:
    """Where each 16-byte piece of each token goes, counted in pieces, ``(cu_seqlens[-1], R / 16)``; the
    number of tiles.

    The swizzle keeps the low four bits of an address, so pieces move whole.
    """
    tile, row, tiles = _slots(cu_seqlens, total)
    offset = payload_offset(row_bytes)[:, ::PIECE] // PIECE
    return tile[:, None] * (TILE * row_bytes // PIECE) + offset[row], tiles


def _split(payload: Bytes) -> Bytes:
    """``(T, H, R)`` -> ``(H, T, R / 16, 16)``."""
    tokens, heads, row_bytes = payload.shape
    return payload.transpose(1, 0, 2).reshape(heads, tokens, row_bytes // PIECE, PIECE)


def _require_bytes(name: str, array: Any, ndim: int) -> Bytes:
    codes: Bytes = np.asarray(array)
    if codes.dtype != np.uint8:
        raise TypeError(f"{name} must be uint8, got {codes.dtype}")
    if codes.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {codes.shape}")
    return codes


def _require_one_byte_per_block(scale: Bytes, first: Bytes, lengths: Index) -> None:
    """``first``: the byte of each block's first token ``(blocks, H)``; ``lengths``: the block's tokens."""
    expected = np.repeat(first, lengths, axis=0)
    wrong = np.argwhere(scale[: len(expected)] != expected)
    if wrong.size:
        token, head = (int(i) for i in wrong[0])
        raise ValueError(
            f"scale must hold one byte per block of 32 tokens, got {scale[token, head]} at token {token} of "
            f"head {head} and {expected[token, head]} at the first token of its block"
        )


def _require_head_dim(head_dim: int, multiple: int) -> None:
    if head_dim <= 0 or head_dim % multiple:
        raise ValueError(f"head_dim must be a positive multiple of {multiple}, got {head_dim}")


def _require_tiles(name: str, packed: Bytes, tiles: int, tile_bytes: int) -> None:
    if packed.shape[1] < tiles or packed.shape[2] != tile_bytes:
        raise ValueError(f"{name} must have at least {tiles} tiles of {tile_bytes} bytes, got shape {packed.shape}")
