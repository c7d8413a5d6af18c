"""All measurements of the study on one input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia import __version__
from flamia.reference import RECIPES, Profile, Recipe
from flamia.reference.recipes import MXFP8
from flamia.study.consistency import Consistency, measure_consistency
from flamia.study.dynamic_range import DynamicRange, measure_dynamic_range
from flamia.study.errors import Errors, exact_attention, measure_errors, run_recipe
from flamia.study.leaks import Leaks, leak_test, positions
from flamia.study.long_context import FLAT_KEYS, LongContext, measure_long_context
from flamia.study.memory import Memory, measure_memory
from flamia.study.sample import Sample

CONSTANT_P = dataclasses.replace(MXFP8, name="mxfp8, constant P scale", p_scale="constant")
"""What the long-context measurement compares the contract with."""

Progress = Callable[[str, int], Callable[[], None]]
"""``progress(description, steps)`` returns what is called after each step."""


@dataclass(frozen=True)
class Study:
    """Everything that was measured; one entry per recipe, in the same order, unless said otherwise.

    :param dynamic_range: one per tensor.
    :param long_context: the contract with its own and with a constant P scale.
    """

    sample: Sample
    profile: str
    seed: int
    recipes: list[Recipe]
    errors: list[Errors]
    leaks: list[Leaks]
    memory: list[Memory]
    consistency: list[Consistency]
    dynamic_range: list[DynamicRange]
    long_context: list[LongContext]


def recipes_for(profile: Profile) -> list[Recipe]:
    """The named recipes that a profile can run."""
    return [r for r in RECIPES.values() if profile.exact or not r.study_only]


def run_study(
    sample: Sample,
    recipes: list[Recipe],
    profile: Profile,
    *,
    seed: int = 0,
    flat_keys: int | None = None,
    progress: Progress = lambda description, steps: lambda: None,
) -> Study:
    """Measure every recipe.

    :param seed: of the leak test's replacements and the long-context inputs.
    :param flat_keys: of the long context; default: `long_context.FLAT_KEYS`, and 1/64 of it in a bit-accurate
        profile, which is slower by as much.
    """
    step = progress("errors against float64", 1 + len(recipes))
    oracle = exact_attention(sample)
    step()
    errors = []
    for recipe in recipes:
        errors.append(measure_errors(recipe, *run_recipe(sample, recipe, profile), oracle))
        step()

    _, longest = sample.longest_document()
    step = progress("leak test", len(recipes) * len(positions(longest.stop - longest.start)))
    leaks = [leak_test(sample, recipe, profile, seed, step) for recipe in recipes]

    step = progress("consistency", len(recipes))
    consistency = []
    for recipe in recipes:
        consistency.append(measure_consistency(sample, recipe, profile))
        step()

    if flat_keys is None:
        flat_keys = FLAT_KEYS if profile.exact else FLAT_KEYS // 64
    step = progress("long context", 1)
    contestants = [MXFP8, CONSTANT_P] if profile.exact else [MXFP8]
    long_context = measure_long_context(contestants, profile, flat_keys=flat_keys, seed=seed)
    step()

    memory = [measure_memory(recipe, *sample.head_counts, sample.q.shape[2]) for recipe in recipes]
    return Study(
        sample,
        profile.name,
        seed,
        recipes,
        errors,
        leaks,
        memory,
        consistency,
        measure_dynamic_range(sample),
        long_context,
    )


def as_json(study: Study) -> dict[str, Any]:
    """Plain data; numbers that are not finite become null."""
    s = study.sample
    by_recipe = {}
    for recipe, e, leak, m, c in zip(
        study.recipes, study.errors, study.leaks, study.memory, study.consistency, strict=True
    ):
        by_recipe[recipe.name] = {
            "summary": recipe.summary,
            "errors": {"geometric_mean": e.mean, "per_head": e.per_head},
            "leaks": {
                "safe": leak.safe,
                "testable": leak.testable,
                "tokens": leak.tokens,
                "positions": leak.positions,
                "share": leak.share,
                "leaking": leak.leaking,
                "largest": leak.largest,
                "lost": leak.lost,
                "nearest": leak.nearest,
                "farthest": leak.farthest,
                "neighbours": leak.neighbours,
                "first": None if leak.first is None else dataclasses.asdict(leak.first),
            },
            "memory": {
                "bytes_per_token": m.total,
                "parts": m.parts,
                "copies": {name: [x.name for x in kept] for name, kept in m.copies.items()},
                "flash_attention_bytes_per_token": m.baseline,
                "ratio": m.ratio,
            },
            "consistency": {
                **{k: v for k, v in dataclasses.asdict(c).items() if k != "recipe"},
                "share_equal": c.share_equal,
                "share_equal_normal": c.share_equal_normal,
            },
        }
    q_heads, kv_heads = s.head_counts
    plain = {
        "flamia": __version__,
        "input": {
            "source": s.source,
            "tokens": int(s.cu_seqlens[-1]),
            "documents": s.lengths,
            "query_heads": q_heads,
            "kv_heads": kv_heads,
            "head_dim": s.q.shape[2],
            "dtype": s.q.dtype.name,
            "random_dout": s.random_dout,
        },
        "profile": study.profile,
        "seed": study.seed,
        "recipes": by_recipe,
        "long_context": [dataclasses.asdict(x) for x in study.long_context],
        "dynamic_range": {
            x.tensor: {"exponents": _counts(x.exponents), "octaves_below_block": _counts(x.below_block)}
            for x in study.dynamic_range
        },
    }
    clean: dict[str, Any] = _finite(plain)
    return clean


def _counts(x: np.ndarray[Any, Any]) -> dict[str, int]:
    values, counts = np.unique(x, return_counts=True)
    return {str(int(v)): int(n) for v, n in zip(values, counts, strict=True)}


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
