"""``flamia study``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_TOKENS = 2048
"""Of a longer input so many tokens are taken unless more are asked for: the time grows with their square."""


def study(
    input: Annotated[
        list[Path] | None,
        typer.Option(
            help="An .npz file with q (T, Hq, D), k and v (T, Hkv, D), and optionally dout and cu_seqlens; bfloat16 "
            "(or its bits as uint16), float16 or float32. Repeat it to join layers of the same tokens. "
            "Default: the package's sample of real activations."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="A recipe to measure; repeat for several. Default: every named one.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="How products are summed: ideal (float64), or the bits of blackwell or hopper (slow).")
    ] = "ideal",
    tokens: Annotated[
        int | None, typer.Option(help=f"Take the first so many tokens. Default: all, at most {DEFAULT_TOKENS}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of replaced tokens, long-context inputs and a missing dout.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the plots and study.json.")] = Path("study"),
) -> None:
    """Measure recipes on real activations: errors, leaks, memory, consistency, long contexts.

    Prints tables, and writes plots and study.json. Without options it takes less than a minute.
    """
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flamia.reference.arguments import check_forward
    from flamia.reference.profiles import get_profile
    from flamia.reference.recipes import RECIPES, get_recipe
    from flamia.study import plots, report, run, sample

    start = time.perf_counter()
    try:
        machine = get_profile(profile)
        recipes = [get_recipe(name) for name in dict.fromkeys(recipe)] if recipe else run.recipes_for(machine)
        for r in recipes:
            if r not in run.recipes_for(machine):
                raise ValueError(f"recipe {r.name!r} is study-only: profile must be 'ideal', got {machine.name!r}")
        data = sample.join([sample.load(path, seed) for path in input]) if input else sample.load()
        data = data.first_tokens(min(DEFAULT_TOKENS, int(data.cu_seqlens[-1])) if tokens is None else tokens)
        q, k, v = (x[:0] for x in data.qkv)
        for r in recipes:
            check_forward(q, k, v, [0], r, True, None, machine)
        out.mkdir(parents=True, exist_ok=True)
        (out / "study.json").touch()
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error

    console = Console()
    q_heads, kv_heads = data.head_counts
    console.print(
        f"[bold]{escape(data.source)}[/]: {data.cu_seqlens[-1]} tokens in {len(data.lengths)} documents "
        f"({', '.join(map(str, data.lengths))}), {q_heads} query heads, {kv_heads} KV heads, "
        f"head_dim {data.q.shape[2]}, {data.q.dtype.name}; profile {machine.name}, seed {seed}."
    )
    if data.random_dout:
        console.print("There is no dout in it: dO is standard normal here, so dQ, dK and dV are those of noise.")
    skipped = [] if recipe else [name for name in RECIPES if name not in {r.name for r in recipes}]
    if skipped:
        console.print(f"Profile {machine.name} cannot run the study-only recipes {', '.join(skipped)}.")

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:

        def progress(description: str, steps: int) -> Callable[[], None]:
            task = bars.add_task(description, total=steps)
            return lambda: bars.advance(task)

        with np.errstate(all="ignore"):  # what is not finite is reported as such
            result = run.run_study(data, recipes, machine, seed=seed, progress=progress)
        step = progress("plots", 1)
        written = plots.draw_all(result, out)
        step()
    text = json.dumps(run.as_json(result), indent=1, allow_nan=False)
    (out / "study.json").write_text(text + "\n", encoding="utf-8")
    console.print()
    for table in report.all_tables(result):
        console.print(table)
        console.print()
    names = ", ".join(path.name for path in [*written, out / "study.json"])
    console.print(f"Written to {out}/: {names}. {time.perf_counter() - start:.0f} s.")
