"""The registry of cases and the list of bug classes that they must cover."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import getdoc

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Inputs
from flamia.reference.profiles import get_profile

SIZES = ("quick", "full", "stress")
"""Size classes; each includes the ones before it. Quick takes less than a minute on a CPU."""

BUG_CLASSES = {
    "future-leak": "a later token moves an earlier output through a scale that they share",
    "stale-maximum": "P saturates under a maximum that lags behind the scores",
    "sink-underflow": "P underflows beside an attention sink",
    "zero-blocks": "all-zero and tiny blocks: division by amax = 0, log2 of 0, subnormal scales",
    "e8m0-extremes": "E8M0 codes 0 and 254: scale arithmetic that wraps, or treats code 0 as zero",
    "e8m0-nan": "E8M0's NaN (byte 255) taken for a number: 2^128, or lost",
    "floor-clipping": "FLOOR scales clip values between 448 and 512 times a power of two",
    "unsaturated-cast": "a cast to or from E4M3 that gives NaN or Inf where it should saturate",
    "empty-documents": "empty documents, in the forward and the backward",
    "padding": "rows past cu_seqlens[-1]: not cleared, or read",
    "masked-rows": "rows that see no key, or whose visible scores are all extremely low",
    "lse-overflow": "exp(-lse) overflows for LSE below -88.7",
    "causal-alignment": "the causal mask aligned to the wrong corner",
    "one-token": "documents of one token",
    "malformed-cu-seqlens": "malformed cu_seqlens accepted",
    "gqa-mapping": "query heads mapped to the wrong KV head",
    "offsets": "byte or element offsets past 2^31",
    "expanded-dout": "dO with zero strides (expanded), as the gradient of a sum is",
    "lse-base": "LSE in the wrong base or layout",
    "head-dim": "unsupported head dims that run but are wrong",
    "permuted-mask": "the mask applied by a column in permuted (fragment) order",
    "graph-replay": "stale output under CUDA graph replay",
    "nondeterminism": "results that differ from run to run",
    "tie-bias": "biased rounding at ties",
    "backward-p": "the backward's P is not the forward's P",
    "joined-documents": "padding or tiles that join neighbouring documents",
}
"""Bug class -> what goes wrong. Every one of them was reported in public against some attention implementation."""


@dataclass(frozen=True)
class Variant:
    """The same call with some later tokens changed: rows up to the cuts must keep their bits.

    :param label: what was changed.
    :param cuts: int64 ``(documents,)``: the last position of each document that must not move; -1: none.
    :param single: which token after the cut was changed, 1 for the next; 0: any of them.
    """

    label: str
    inputs: Inputs
    cuts: NDArray[np.int64]
    single: int = 0


@dataclass(frozen=True)
class PlanRequest:
    """Documents of any size, for which offsets and schedules are asked without tensors."""

    cu_seqlens: NDArray[np.int64]
    heads: tuple[int, int]
    head_dim: int
    causal: bool


Build = Callable[[np.random.Generator], Inputs]
Vary = Callable[[Inputs], list[Variant]]


@dataclass(frozen=True)
class Case:
    """A named generator of inputs.

    :param name: ``group/name``.
    :param build: ``build(rng) -> Inputs``; the same generator state gives the same bytes.
    :param size: the smallest size class that includes it.
    :param classes: keys of `BUG_CLASSES` that it covers.
    :param levels: levels that use it.
    :param promises: level-4 checks that use it, see `levels.promises`.
    :param tiny: small enough for a bit-accurate profile in the quick class.
    :param may_refuse: the target may refuse it: Note [Refusals] of `levels.check`.
    :param vary: the variants of the leak check; None: `levels.leak` makes them.
    :param plan: a request of level 1 in place of inputs.
    """

    name: str
    build: Build
    size: str
    classes: tuple[str, ...]
    levels: tuple[int, ...]
    promises: tuple[str, ...]
    tiny: bool
    may_refuse: bool
    doc: str
    vary: Vary | None = None
    plan: PlanRequest | None = None

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.splitlines()[0]

    def inputs(self, seed: int = 0) -> Inputs:
        """The inputs for one seed; the case's name is part of the seed."""
        return self.build(np.random.default_rng([zlib.crc32(self.name.encode()), seed]))


CASES: dict[str, Case] = {}
"""Every case by name."""


def case(
    name: str,
    *,
    size: str = "quick",
    classes: Iterable[str] = (),
    levels: Iterable[int] = (1, 2, 3, 5),
    promises: Iterable[str] = (),
    tiny: bool = False,
    may_refuse: bool = False,
    vary: Vary | None = None,
    plan: PlanRequest | None = None,
) -> Callable[[Build], Build]:
    """Register a generator under a name; level 4 is added where promises are given."""

    def register(build: Build) -> Build:
        unknown = set(classes) - set(BUG_CLASSES)
        doc = getdoc(build)
        if name in CASES or unknown or size not in SIZES or not doc:
            raise ValueError(
                f"case {name!r} must be new and have a docstring, a size of {SIZES}, known classes: {size}, {unknown}"
            )
        used = tuple(sorted({*levels, *((4,) if promises else ())}))
        given = (size, tuple(classes), used, tuple(promises), tiny, may_refuse, doc, vary, plan)
        CASES[name] = Case(name, build, *given)
        return build

    return register


def select_cases(patterns: Iterable[str] | None = None, size: str = "quick", profile: str = "ideal") -> list[Case]:
    """Cases of a size class whose names match one of the patterns (``documents/*``).

    :param profile: under a bit-accurate one, the reference is so slow that only tiny cases are quick.
    :raises ValueError: for an unknown size, or a pattern that matches no case at all.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {SIZES}, got {size!r}")
    wanted = None if patterns is None else list(patterns)
    for pattern in wanted or ():
        if not fnmatch.filter(CASES, pattern):
            raise ValueError(f"cases must name cases or patterns of them, got {pattern!r}; see `flamia conform --list`")
    tiny = size == "quick" and not get_profile(profile).exact
    included = SIZES[: SIZES.index(size) + 1]
    return [
        c
        for c in CASES.values()
        if c.size in included
        and (c.tiny or not tiny)
        and (wanted is None or any(fnmatch.fnmatchcase(c.name, p) for p in wanted))
    ]


def find_larger_sizes(patterns: Iterable[str], size: str, profile: str) -> dict[str, str]:
    """Patterns that match no case of a size class, each with the smallest class in which it does."""
    missed = [p for p in patterns if not select_cases([p], size, profile)]
    return {p: next(larger for larger in SIZES if select_cases([p], larger, profile)) for p in missed}
