"""A recipe as one string, because operators take strings and no Python objects."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache

import numpy as np

from flamia.reference.recipes import RECIPES, Recipe, Scaling, get_recipe

# Fields are read one by one, not by repr(recipe): torch.compile can trace this.
FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))


def encode_recipe(recipe: Recipe | str) -> str:
    """A name stays itself, a `Recipe` becomes ``field=value`` lines.

    :raises ValueError, TypeError: as `flamia.reference.recipes.get_recipe`.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe must be a flamia.Recipe or one of {sorted(RECIPES)}, got {recipe!r}")
        return recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a flamia.Recipe or a name, got {type(recipe).__name__}")
    return "\n".join([_field(name, getattr(recipe, name)) for name in FIELDS])


def _field(name: str, value: object) -> str:
    if isinstance(value, Scaling):
        return f"{name}=Scaling.{value.name}"
    if isinstance(value, float | np.floating):
        value = float(value)  # NumPy's floats print themselves with their type
    return f"{name}={value!r}"


@cache
def decode_recipe(text: str) -> Recipe:
    """The inverse of `encode_recipe`."""
    if "=" not in text:
        return get_recipe(text)
    values: dict[str, object] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        kind, _, member = value.partition(".")
        values[name] = Scaling[member] if kind == "Scaling" else ast.literal_eval(value)
    return Recipe(**values)  # type: ignore[arg-type]
