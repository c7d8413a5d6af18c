"""FLAMIA: training attention on block-scaled FP8 and FP4 tensor cores, causally safe, and with a backward that
differentiates what the forward computed.

Importing this package costs next to nothing: NumPy, the reference and everything heavier are imported at the
first use of a name below (PEP 562).

=================================  ====================================================================
``flamia.attention``               attention for PyTorch models; its call needs the extra ``torch``
``flamia.flash_attn_varlen_func``  the same under FlashAttention's signature
``flamia.integrations``            Hugging Face: ``flamia.integrations.transformers.register()``
``flamia.reference``               the executable specification (NumPy and ml_dtypes only)
``flamia.recipes``                 the recipes as frozen dataclass literals, ``flamia.recipes.MXFP8``
``flamia.Recipe``                  their class; derive a new recipe with ``dataclasses.replace``
=================================  ====================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flamia import integrations, reference
    from flamia.api import attention
    from flamia.reference import recipes
    from flamia.reference.recipes import Recipe
    from flamia.varlen import flash_attn_varlen_func

__version__ = "0.1.0"
__all__ = [
    "Recipe",
    "__version__",
    "attention",
    "flash_attn_varlen_func",
    "integrations",
    "recipes",
    "reference",
]

# Name -> (module, attribute of that module, or None for the module itself).
_LAZY: dict[str, tuple[str, str | None]] = {
    "attention": ("flamia.api", "attention"),
    "flash_attn_varlen_func": ("flamia.varlen", "flash_attn_varlen_func"),
    "integrations": ("flamia.integrations", None),
    "reference": ("flamia.reference", None),
    "recipes": ("flamia.reference.recipes", None),
    "Recipe": ("flamia.reference.recipes", "Recipe"),
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name when that name is first used, and keep it."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flamia' has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
