"""Other libraries' ways to call attention. Each module is imported at its first use:
``flamia.integrations.transformers``."""

from importlib import import_module
from typing import Any

__all__ = ["transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
