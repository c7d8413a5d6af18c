"""The study's figures, as PNG files. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.study.dynamic_range import NORMAL_OCTAVES
from flamia.study.leaks import MAX_TOKENS, Leaks
from flamia.study.run import Study

COLORS = ("#0072B2", "#56B4E9", "#999999", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#F0E442")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; in the order of recipes."""
TENSOR_LABELS = {"q": "Q", "k": "K", "v": "V", "dout": "dO"}
OUTPUT_LABELS = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw_all(study: Study, folder: Path) -> list[Path]:
    """Write every figure into ``folder``; returns the files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figures = {
        "errors.png": draw_errors,
        "leaks.png": draw_leaks,
        "position.png": draw_position,
        "dynamic_range.png": draw_dynamic_range,
    }
    written = []
    with plt.rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw(study, plt)
            figure.savefig(folder / name)
            plt.close(figure)
            written.append(folder / name)
    return written


def draw_errors(study: Study, plt: Any) -> Any:
    """Bars: geometric mean over heads; whiskers: best and worst head."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    width = 0.84 / len(study.errors)
    for i, (errors, color) in enumerate(zip(study.errors, _colors(study), strict=True)):
        means = np.array(list(errors.mean.values()))
        low, high = np.array(list(errors.spread.values())).T
        finite = np.isfinite(high)  # an error of something that is exactly zero is infinite: no bar
        means, low, high = (np.where(finite, x, np.nan) for x in (means, low, high))
        x = np.arange(len(means)) + (i - (len(study.errors) - 1) / 2) * width
        axes.bar(x, means, width * 0.92, color=color, label=errors.recipe)
        whiskers = np.maximum((means - low, high - means), 0)  # a mean of equal heads may be off by one rounding
        axes.errorbar(x, means, whiskers, fmt="none", ecolor="#333333", elinewidth=0.8, capsize=1.5)
        for at, mean, top in zip(x[finite], means[finite], high[finite], strict=True):
            text = f"{mean:.3f}".removeprefix("0")
            axes.annotate(
                text, (at, top), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=6, rotation=90
            )
    axes.set_xticks(range(len(OUTPUT_LABELS)), OUTPUT_LABELS.values())
    axes.set_ylabel("relative Frobenius error")
    axes.set_title("Error against float64 (bars: geometric mean over heads; whiskers: best and worst head)", loc="left")
    axes.margins(y=0.14)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(ncols=len(study.errors), loc="outside lower center", columnspacing=1.2, handlelength=1.2)
    return figure


def draw_leaks(study: Study, plt: Any) -> Any:
    """One panel per recipe: which rows of out move when the tokens from some position on are replaced."""
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.patches import Patch

    columns = min(3, len(study.leaks))
    rows = -(-len(study.leaks) // columns)
    size = (1.6 + 2.4 * columns, 1.1 + 2.4 * rows)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    smallest = 1e-4
    norm = LogNorm(smallest, 1)
    image = None
    for axes, leaks in zip(grid.flat, study.leaks, strict=False):
        edges_t = _edges(np.array(leaks.positions) + 1.0)
        edges_x = np.arange(leaks.tokens + 1) - 0.5
        if len(leaks.positions):
            hidden = np.isnan(leaks.map)
            _layer(axes, edges_x, edges_t, hidden, ListedColormap(["#E4E4E4"]))
            _layer(axes, edges_x, edges_t, leaks.lost_map & ~hidden, ListedColormap(["#F6D5B8"]))
            moved = np.ma.masked_where(hidden | (leaks.map == 0), np.maximum(leaks.map, smallest))
            image = axes.pcolormesh(edges_x, edges_t, moved, norm=norm, cmap="viridis_r")
        axes.set_title(f"{leaks.recipe}: {_verdict(leaks)}", loc="left")
        ticks = np.arange(0, MAX_TOKENS + 1, 32)
        axes.set(xticks=ticks, yticks=ticks, xlim=(-0.5, leaks.tokens - 0.5), ylim=(leaks.tokens, 0))
    for axes in grid.flat[len(study.leaks) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("token whose output is looked at")
    for axes in grid[:, 0]:
        axes.set_ylabel("first replaced token")
    figure.suptitle("Leak test: what replaced tokens do to the output of earlier ones", x=0.01, ha="left", fontsize=11)
    if image is not None:
        bar = figure.colorbar(image, ax=grid, shrink=0.8, extend="both", pad=0.02)
        bar.set_label("change of a row of O over the RMS row")
    meaning = {"#FFFFFF": "no bit moves", "#F6D5B8": "only a NaN comes through", "#E4E4E4": "after the replaced token"}
    figure.legend(
        handles=[Patch(facecolor=color, edgecolor="#BBBBBB", label=text) for color, text in meaning.items()],
        loc="outside lower center",
        ncols=3,
    )
    return figure


def draw_position(study: Study, plt: Any) -> Any:
    """Error of O against the position in the longest document."""
    index, rows = study.sample.longest_document()
    tokens = rows.stop - rows.start
    width = max(1, min(16, tokens // 8))
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for i, (errors, color) in enumerate(zip(study.errors, _colors(study), strict=True)):
        position, curve = _binned(errors.by_token[:, rows], width)
        look = {"marker": "osD^vXP*"[i % 8], "markersize": 5, "linewidth": 1.1}
        axes.plot(position, curve, color=color, label=errors.recipe, markerfacecolor="none", zorder=10 - i, **look)
    axes.set_yscale("log")
    axes.set_xlabel(f"position in document {index}, in bins of {width} tokens")
    axes.set_ylabel("relative error of rows of O")
    axes.set_title("Error against position (geometric mean over heads and the bin's tokens)", loc="left")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.set_xlim(0, tokens)
    figure.legend(loc="outside right center")
    return figure


def draw_dynamic_range(study: Study, plt: Any) -> Any:
    """Exponents of tokens, and how far they lie below their block's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.4), layout="constrained")
    for i, (x, color) in enumerate(zip(study.dynamic_range, ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True)):
        offset = (i - 1.5) * 0.2
        for axes, values in ((left, x.exponents), (right, x.below_block)):
            at, counts = np.unique(values, return_counts=True)
            axes.bar(at + offset, 100 * counts / max(1, len(values)), 0.2, color=color, label=TENSOR_LABELS[x.tensor])
    left.set_xlabel("scale exponent of a token (B=1)")
    left.set_ylabel("share of tokens and heads, %")
    left.set_title("Dynamic range of the operands", loc="left")
    right.set_xlabel("octaves below the maximum of its block of 32")
    right.set_title("What a token block (B=32) has to span", loc="left")
    right.axvline(NORMAL_OCTAVES, color="#333333", linewidth=1, linestyle="--")
    right.annotate(
        "from here on E4M3\nis subnormal",
        (NORMAL_OCTAVES, 0.97),
        (-4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=8,
        ha="right",
        va="top",
    )
    right.set_xlim(-0.6, NORMAL_OCTAVES + 1)
    right.legend(loc="center")
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _colors(study: Study) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(study.recipes))]


def _verdict(leaks: Leaks) -> str:
    if leaks.safe:
        return "no leak"
    if not any(leaks.leaking.values()):
        return "leaks between documents" if leaks.neighbours else "not testable"
    return "leaks" if leaks.nearest is not None else "leaks NaN"


def _layer(axes: Any, edges_x: NDArray[Any], edges_y: NDArray[Any], mask: NDArray[Any], cmap: Any) -> None:
    """One colour where the mask is True."""
    axes.pcolormesh(edges_x, edges_y, np.ma.masked_where(~mask, np.ones(mask.shape)), cmap=cmap)


def _edges(centers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Borders of cells around ascending centers."""
    if len(centers) < 2:
        return np.concatenate([centers - 0.5, centers + 0.5])
    middle = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([[2 * centers[0] - middle[0]], middle, [2 * centers[-1] - middle[-1]]])


def _binned(by_token: NDArray[np.float64], width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Centers of bins of ``width`` tokens, and the geometric mean of what is not 0 in each."""
    centers, means = [], []
    for first in range(0, by_token.shape[1], width):
        part = by_token[:, first : first + width]
        part = part[part > 0]
        if part.size:
            centers.append(first + min(width, by_token.shape[1] - first) / 2)
            means.append(np.exp(np.log(part).mean()))
    return np.array(centers), np.array(means)
