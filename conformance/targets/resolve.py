"""From what a user names to a `Target`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flamia.conformance.targets.base import Target, TargetUnavailableError, require_promises
from flamia.conformance.targets.callables import CallableTarget
from flamia.conformance.targets.reference import ReferenceTarget
from flamia.reference.recipes import Recipe, get_recipe

__all__ = ["BUILT_IN", "TargetUnavailableError", "build_target", "resolve_target"]


def _module_target(module: str, option: str = "") -> Callable[[str], Target]:
    def make(device: str) -> Target:
        if find_spec("torch") is None:
            raise TargetUnavailableError("PyTorch is not installed: pip install torch")
        found: Target = import_module(f"flamia.conformance.targets.{module}").make_target(option, device)
        return found

    return make


BUILT_IN: dict[str, tuple[str, Callable[[str], Target] | None]] = {
    "reference": ("flamia.reference under --recipe and --profile", None),
    "cuda": ("the quantization kernels of flamia.kernels on a GPU: level 1", _module_target("cuda")),
    "hopper": ("attention of flamia.kernels on compute capability 9.0 (H100, H200)", _module_target("hopper")),
    "blackwell": (
        "attention of flamia.kernels on compute capability 10.0 and 10.3 (B200, B300)",
        _module_target("blackwell"),
    ),
    **{
        f"simulator:{chip}": (f"the kernels for {chip} on the simulator: no GPU", _module_target("simulator", chip))
        for chip in ("sm_100a", "sm_103a")
    },
    "torch-sdpa": ("PyTorch's scaled_dot_product_attention, document by document", _module_target("torch_attention")),
    **{
        f"torch-sdpa-{backend}": (f"the same with the {backend} backend", _module_target("torch_attention", backend))
        for backend in ("math", "flash", "efficient", "cudnn")
    },
    "torch-varlen": ("PyTorch's varlen_attn (CUDA)", _module_target("torch_attention", "varlen")),
    "torch-flex": ("PyTorch's FlexAttention with a document mask", _module_target("torch_attention", "flex")),
    "flash-attn": ("flash_attn_varlen_func of the flash-attn package", _module_target("vendors", "flash-attn")),
    "transformer-engine": ("DotProductAttention of TransformerEngine", _module_target("vendors", "transformer-engine")),
    "cudnn": ("cuDNN through its Python frontend, document by document", _module_target("vendors", "cudnn")),
}
"""Name -> what it is, and how to make it for a device."""


def resolve_target(target: Any, **options: Any) -> Target:
    """The target of `runner.run`, ready to be called.

    :param options: of `build_target`, which says what it raises.
    :raises TargetUnavailableError: also if its device is missing.
    """
    found = build_target(target, **options)
    found.require_device()
    return found


def build_target(
    target: Any,
    *,
    recipe: Recipe | str | None = None,
    profile: str | None = None,
    device: str | None = None,
    promises: Iterable[str] | None = None,
) -> Target:
    """The same, whether its device is here or not: see `Target.require_device`.

    :raises ValueError: for a name that is neither built in nor importable, or a device that the target does not run on.
    :raises TargetUnavailableError: for a built-in one that is not installed.
    """
    place = "cpu" if device is None else device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", place):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {place!r}")
    if target == "reference":
        found: Target = ReferenceTarget(recipe or "mxfp8", profile or "ideal")
    elif isinstance(target, Target):
        found = target
    elif isinstance(target, str):
        make = BUILT_IN[target][1] if target in BUILT_IN else None
        found = make(place) if make is not None else CallableTarget(import_object(target), target, place)
    else:
        found = CallableTarget(target, device=place)
    if place != "cpu" and found.device == "cpu":
        raise ValueError(f"device must be 'cpu' for target {found.name!r}, which runs on the CPU, got {place!r}")
    if recipe is not None and target != "reference":
        found.recipe = get_recipe(recipe)
    if profile is not None:
        found.profile = profile
    if promises is not None:
        found.promises = require_promises(promises)
    return found


def import_object(path: str) -> Any:
    """The attribute of ``package.module:attribute``; the current folder is searched too.

    :raises ValueError: naming what is missing.
    """
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError(f"target must be one of {sorted(BUILT_IN)} or package.module:attribute, got {path!r}")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"target must be importable, got {path!r}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    return found
