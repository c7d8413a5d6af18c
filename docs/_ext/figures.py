"""Figures drawn from the code itself, into ``docs/_generated``, before the pages are read."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from flamia.reference import layout

COLORS = plt.get_cmap("tab10")


def draw_grid(axes: Any, labels: np.ndarray, colors: np.ndarray, xlabel: str, ylabel: str, title: str) -> None:
    """One labelled, coloured cell per entry."""
    axes.imshow(COLORS(colors % 10), aspect="auto", alpha=0.55)
    for (y, x), text in np.ndenumerate(labels):
        axes.text(x, y, text, ha="center", va="center", fontsize=7)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xticks=range(labels.shape[1]), yticks=range(labels.shape[0]))
    axes.tick_params(length=0, labelsize=7)


def payload_tile(path: Path, row_bytes: int) -> None:
    """The first 1024 bytes of a tile: which row and which 16 channels each 16-byte piece holds."""
    pieces = layout.payload_offset(row_bytes)[:, :: layout.PIECE] // layout.PIECE
    row, piece = np.indices(pieces.shape)
    in_memory = np.argsort(pieces, axis=None)[:64].reshape(8, 8)
    rows, columns = row.ravel()[in_memory], piece.ravel()[in_memory]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    labels = np.array([f"r{r}\nc{16 * c}..{16 * c + 15}" for r, c in zip(rows.flat, columns.flat, strict=True)])
    draw_grid(
        axes,
        labels.reshape(8, 8),
        columns,
        "16-byte piece of the line",
        "line of 128 bytes",
        f"Payload tile, {row_bytes} bytes per row, its first 1024 bytes (r: token row, c: bytes of that row)",
    )
    axes.title.set_fontsize(8)
    figure.savefig(path)
    plt.close(figure)


def scale_tile(path: Path) -> None:
    """All 512 bytes of a scale tile: which row and block each byte belongs to."""
    row, block = np.indices((128, 4))
    order = np.argsort(layout.scale_offset(row, block), axis=None).reshape(32, 16)
    rows, blocks = row.ravel()[order], block.ravel()[order]
    figure, axes = plt.subplots(figsize=(7.2, 7.2), layout="constrained")
    labels = np.array([f"{i},{j}" for i, j in zip(rows.flat, blocks.flat, strict=True)]).reshape(32, 16)
    draw_grid(
        axes,
        labels,
        rows // 32,
        "byte of the line",
        "line of 16 bytes: one lane of tensor memory",
        "Scale tile: row, block of each of its 512 bytes",
    )
    axes.title.set_fontsize(8)
    figure.savefig(path)
    plt.close(figure)


def draw_all(app: Any) -> None:
    """Write every figure that a page shows."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "flamia", "svg.fonttype": "none", "savefig.transparent": False}):
        payload_tile(folder / "payload_tile_128.svg", 128)
        payload_tile(folder / "payload_tile_64.svg", 64)
        scale_tile(folder / "scale_tile.svg")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", draw_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
