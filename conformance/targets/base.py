"""The interface of a target."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.reference.recipes import Recipe

PROMISES = {
    "leak": "tokens after t move no bit of out and LSE up to t (finite values)",
    "containment": "a NaN or Inf in a token reaches exactly the rows that attend to it, a huge number no others",
    "pack": "a document's bits do not depend on its neighbours, its offset or padding",
    "suffix": "with dO = 0 after t, gradients up to t do not depend on what follows t",
    "prefix": "a document cut after t gives the bits of its first t tokens, forward and (dO = 0 after t) backward",
    "edges": "empty documents, one-token documents and padding rows: cleared, finite, and no exception",
    "ones": "V = 1 gives exactly 1",
    "heads": "permuting KV heads with their groups permutes the results, bit for bit",
    "shift": "the sum of dK over a document stays at rounding level",
    "determinism": "the same bits in every run",
    "strides": "views with other strides give the bits of their contiguous copies",
    "consistency": "the backward's P is the forward's P, bit for bit, where both are normal numbers",
    "zero_scale": "softmax_scale = 0 gives a uniform P, and dQ = dK = 0",
    "validation": "malformed arguments raise",
    "graph": "a replayed CUDA graph gives the bits of a fresh call",
}
"""What level 4 can check, by name. A target claims all of them or says which."""


class TargetUnavailableError(RuntimeError):
    """A built-in target whose package or device is missing; the message says what to install."""


class Target:
    """Something that computes attention. Subclasses implement `run`; everything else has a default.

    :param name: for people.
    :param recipe: whose bits it promises, or whose error sets the budget.
    :param profile: the machine profile of the same.
    :param bits: whether it promises the bits of `flamia.reference` under recipe and profile: without it, levels 1 to 3
        are not applicable.
    :param levels: those that it can be asked about; in the others its checks are not applicable.
    :param promises: the level-4 checks it claims to hold, keys of `PROMISES`; others are not applicable.
    :param lse: whether results have LSE. :param backward: whether it has gradients. :param stages: whether it returns
        intermediate results.
    :param dtypes: of q, k, v and dO that it takes.
    """

    name: str = "target"
    recipe: Recipe | str = "bf16"
    profile: str = "ideal"
    bits: bool = False
    levels: frozenset[int] = frozenset(range(6))
    promises: frozenset[str] = frozenset(PROMISES)
    lse: bool = True
    backward: bool = True
    stages: bool = False
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def require_device(self) -> None:
        """Find the device of all calls. Before, a target has no more than a name, sources and what it is held to.

        :raises TargetUnavailableError: if there is none, in one sentence that says what is missing.
        """

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call.

        :param backward: compute gradients too; only asked of a target that has them.
        :param stages: return intermediate results too; likewise.
        :raises Exception: whatever the implementation raises.
        """
        raise NotImplementedError

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """Schedules and memory offsets for documents of any size, without tensors (see `stages`); None: not offered."""
        return None

    def replay(self, first: Inputs, second: Inputs) -> Results | None:
        """Capture a CUDA graph on ``first``, replay it on the contents of ``second``; None: not offered.

        Both have the same shapes and cu_seqlens.
        """
        return None

    def is_alive(self) -> bool:
        """Whether the device still answers after a call that raised."""
        return True

    def environment(self) -> dict[str, str]:
        """Versions and machine, by name."""
        return {
            "python": platform.python_version(),
            "platform": f"{sys.platform} {platform.machine()}",
            **package_versions("numpy", "ml_dtypes"),
        }


def package_versions(*names: str) -> dict[str, str]:
    """Versions of installed packages by name; absent packages are left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_recipe(recipe: Recipe | str) -> str:
    """Name of a recipe."""
    return recipe if isinstance(recipe, str) else recipe.name


def require_promises(names: Any) -> frozenset[str]:
    """Promises by name.

    :raises ValueError: for an unknown one.
    """
    chosen = frozenset([names] if isinstance(names, str) else names)
    unknown = sorted(chosen - set(PROMISES))
    if unknown:
        raise ValueError(f"promises must be some of {sorted(PROMISES)}, got {unknown}")
    return chosen
