"""The study's tables."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from flamia.reference import Scaling
from flamia.study.leaks import CHANGES, OUTPUTS, Leaks
from flamia.study.run import Study

SHORT = {
    Scaling.NONE: "bf16",
    Scaling.TOKEN: "B=1",
    Scaling.TOKEN_BLOCK: "B=32",
    Scaling.NVFP4: "nvfp4",
    Scaling.CHANNELS_1X32: "32 ch",
    Scaling.TOKENS_1X32: "32 tok",
    Scaling.TILE_32X32: "32x32",
    Scaling.TENSOR: "all",
}
"""What shares a scale, in a word."""

GOOD, BAD = "green", "red"


def all_tables(study: Study) -> list[Table]:
    """Every table, in the order in which they are printed."""
    return [
        error_table(study),
        leak_table(study),
        first_leak_table(study),
        memory_table(study),
        consistency_table(study),
        long_context_table(study),
    ]


def _table(title: str, caption: str, *columns: str) -> Table:
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    return table


def error_table(study: Study) -> Table:
    """Errors of each output."""
    table = _table(
        "Error against float64",
        "Relative Frobenius error, geometric mean over the query heads (dK, dV: KV heads).",
        *("recipe", "O", "dQ", "dK", "dV"),
    )
    for errors in study.errors:
        table.add_row(errors.recipe, *(f"{value:.4f}" for value in errors.mean.values()))
    return table


def leak_table(study: Study) -> Table:
    """How many positions leak, how far and how much."""
    tokens = study.leaks[0].tokens if study.leaks else 0
    table = _table(
        "Leak test: tokens after t are replaced; does anything up to t move?",
        f"t: how many of the t leak if tokens are replaced by normal numbers of the same size, times 2^20, by NaN (one "
        f"head, {tokens} tokens, t takes every residue modulo 32). Change: of the worst row of out, over the RMS row. "
        "Distance: from rows of out that moved (without NaN) to the first replaced token. Pack: does replacing another "
        "document move any? Not finite: results of the unchanged tokens are not, so that nothing can be said.",
        *("recipe", *(f"t:\n{change}" for change in CHANGES)),
        *("\noutputs", "\nchange", "\ndistance", "\npack"),
    )
    for leaks in study.leaks:
        moved = [name for name in OUTPUTS if name in leaks.largest]
        table.add_row(
            leaks.recipe,
            *(_share(len(ts), len(leaks.positions)) for ts in leaks.leaking.values()),
            Text(" ".join(moved) or ("none" if leaks.testable else "not finite"), GOOD if leaks.safe else BAD),
            _change(leaks),
            "-" if leaks.nearest is None else f"{leaks.nearest}..{leaks.farthest}",
            Text("yes", BAD) if leaks.neighbours else Text("no", GOOD),
        )
    return table


def first_leak_table(study: Study) -> Table:
    """Where each leak was seen first."""
    table = _table(
        "First number that moved",
        r"Number: output\[document, token, head, channel]. Via: which of q, k, v moves that output, replaced alone.",
        *("recipe", "t", "replaced by", "number", "before", "after", "via"),
    )
    for leaks in study.leaks:
        first = leaks.first
        if first is None:
            table.add_row(leaks.recipe, Text("none" if leaks.testable else "-", GOOD if leaks.testable else ""))
            continue
        channel = "" if first.output == "lse" else f",{first.channel}"
        where = f"{first.output}[{first.document},{first.token},{first.head}{channel}]"
        through = " ".join(first.through)
        table.add_row(
            leaks.recipe, str(first.t), first.change, where, f"{first.before:.4g}", f"{first.after:.4g}", through
        )
    return table


def memory_table(study: Study) -> Table:
    """Bytes per token."""
    table = _table(
        "Kept for the backward, bytes per token",
        "All heads. Copies by what shares a scale: all channels of B tokens; 16 channels (nvfp4) or 32 of a token; 32 "
        "tokens of a channel; a tile; the tensor. Rows: m and l, or the LSE. Ratio: to bfloat16 flash attention (q, k, "
        "v, out, LSE).",
        *("recipe", "q, k", "v", "q", "k", "v", "out", "rows", "total", "ratio"),
    )
    for memory in study.memory:
        qk, v = ("\n".join(SHORT[s] for s in memory.copies[name]) for name in "qv")
        parts = (f"{value:,.0f}" for value in memory.parts.values())
        table.add_row(memory.recipe, qk, v, *parts, f"{memory.total:,.0f}", f"{memory.ratio:.2f}")
    return table


def consistency_table(study: Study) -> Table:
    """P in both passes, and the two sums that are zero in exact arithmetic."""
    tokens = study.consistency[0].tokens if study.consistency else 0
    table = _table(
        "Does the backward differentiate what the forward computed?",
        f"{tokens} tokens. Normal: above E4M3's smallest normal number in both passes. Mass: sum of |difference| of P, "
        "over the sum of P. Sums relative to the sums of magnitudes; exact attention has 0.",
        *("recipe", "equal P in\nboth passes", "of\nnormal P", "\nmass", "sum of\ndS rows", "sum of\ndK"),
    )
    for c in study.consistency:
        normal = c.share_equal_normal
        if normal is None:
            text = Text("-")
        else:
            text = Text(_percent(normal), GOOD if normal == 1 else BAD)
        share = "-" if c.share_equal is None else _percent(c.share_equal)
        row = (share, text, f"{c.difference:.1e}", f"{c.ds_rows:.1e}", f"{c.dk_sum:.1e}")
        table.add_row(c.recipe, *row)
    return table


def long_context_table(study: Study) -> Table:
    """Errors of O with an attention sink."""
    masses = next((x.masses for x in study.long_context), {})
    keys = study.long_context[0].keys if study.long_context else 0
    table = _table(
        f"Long context: one sink key and {keys:,} flat keys, error of O",
        "At a power of two the sink's P is exact. Between powers of two it is rounded to E4M3, where the maximum is an "
        "integer; where it is a real number, as with a constant scale, P is 1.",
        "recipe",
        *(f"sink {name}\nmass {mass:.2f}" for name, values in masses.items() for mass in values),
    )
    for x in study.long_context:
        table.add_row(x.recipe, *(f"{error:.4f}" for values in x.errors.values() for error in values))
    return table


def _share(leaking: int, tried: int) -> Text:
    return Text(f"{leaking}/{tried}", BAD if leaking else GOOD)


def _change(leaks: Leaks) -> str:
    if "out" not in leaks.largest:
        return "-"
    size = f"{leaks.largest['out']:.2g}" if leaks.largest["out"] > 1e-100 else ""
    return " ".join(filter(None, (size, "NaN" if leaks.lost.get("out") else "")))


def _percent(share: float) -> str:
    """Never 100 % unless it is."""
    return "100%" if share == 1 else f"{min(share, 0.9999):.2%}"
