"""Faults of what lies where: payload and scale tiles, and the schedule."""

from __future__ import annotations

from flamia.conformance.self_test.copies import Edit
from flamia.conformance.self_test.fault import Fault, bits

FAULTS = (
    Fault(
        "scale-bytes-swapped",
        "Within a line of a scale tile, block and row group change places.",
        kills=(bits(1, "documents/tile_edges"),),
        edits=(Edit("layout", "return (i % 32) * 16 + (i // 32) * 4 + j", "return (i % 32) * 16 + j * 4 + (i // 32)"),),
    ),
    Fault(
        "swizzle-off-by-one-row",
        "The exclusive-or takes its bits from the next row's address.",
        kills=(bits(1, "documents/tile_edges"),),
        edits=(
            Edit(
                "layout",
                "return plain ^ ((plain >> 3) & (width - PIECE))",
                "return plain ^ ((plain + width >> 3) & (width - PIECE))",
            ),
        ),
    ),
    Fault(
        "stale-rows-in-the-last-tile",
        "Payload rows past the end of a document are not zero but whatever was there.",
        kills=(bits(1, "documents/odd_lengths"),),
        edits=(
            Edit(
                "layout",
                "packed = np.zeros((heads, tiles * TILE * row_bytes // PIECE, PIECE), np.uint8)",
                "packed = np.full((heads, tiles * TILE * row_bytes // PIECE, PIECE), 0x7F, np.uint8)",
            ),
        ),
        bug_class="padding",
    ),
    Fault(
        "nan-scales-in-the-last-tile",
        "Scale bytes past the end of a document are 255, so that 0 x NaN reaches the tile's results.",
        kills=(bits(1, "documents/odd_lengths"),),
        edits=(
            Edit(
                "layout",
                "packed = np.zeros((heads, tiles, scale_tiles, SCALE_TILE_BYTES), np.uint8) offset",
                "packed = np.full((heads, tiles, scale_tiles, SCALE_TILE_BYTES), 255, np.uint8)\noffset",
            ),
        ),
        bug_class="padding",
    ),
    Fault(
        "nibbles-swapped",
        "The even channel of a pair of E2M1 codes is in the high nibble.",
        kills=(bits(1, "documents/block_edges", "nvfp4_fp8"),),
        edits=(
            Edit(
                "layout",
                "codes[..., 0::2] | np.left_shift(codes[..., 1::2], 4)",
                "codes[..., 1::2] | np.left_shift(codes[..., 0::2], 4)",
            ),
        ),
    ),
    Fault(
        "empty-documents-own-a-tile",
        "Each document is given at least one tile, which shifts the tiles of all that follow an empty one.",
        kills=(bits(1, "documents/empty_middle"),),
        edits=(Edit("layout", "np.cumsum(-(-lengths // TILE))", "np.cumsum(np.maximum(-(-lengths // TILE), 1))"),),
        bug_class="empty-documents",
    ),
    Fault(
        "schedule-loses-the-odd-tile",
        "The second query tile of a pair is left out where it is the document's last.",
        kills=(bits(1, "documents/tile_edges"),),
        edits=(Edit("schedule", "second = first + 1 < n", "second = first + 2 < n"),),
    ),
    Fault(
        "schedule-of-another-order",
        "Items of equal key are taken in descending order of documents.",
        kills=(bits(1, "documents/block_edges"),),
        edits=(
            Edit(
                "schedule",
                'order = np.argsort(-key, kind="stable")',
                "order = np.lexsort((-document, -key))",
            ),
        ),
    ),
)
