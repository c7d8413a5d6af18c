"""Very many output elements of a kernel against the reference: cases by seed, computed by a pool of processes.

A seed says everything about a case, so that a difference can be looked at again with `compute` alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

OUTPUTS = ("out", "dq", "dk", "dv")
TILE = 128
TYPES = {"bfloat16": np.dtype(bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
QUERY_HEADS = 8
TOKENS = 1100
"""Of a case, at least: two to four seconds of one core, so that the last ones keep few cores waiting."""

Arrays = dict[str, Any]
Kernel = Callable[["Case", Arrays], Arrays]
"""From q, k, v, dout and cu_seqlens to the `OUTPUTS`, arrays of NumPy."""


@dataclass(frozen=True)
class Case:
    """One call.

    :param kind: how its values are distributed: a name of `KINDS`.
    :param lengths: of its documents; ``padding`` rows follow them.
    :param bounded: whether the kernels are told how long the longest document is.
    :param one_head: whether the backward shall work on one KV head at a time, whatever memory there is.
    """

    seed: int
    kind: str
    lengths: tuple[int, ...]
    padding: int
    kv_heads: int
    dim: int
    causal: bool
    dtype: str
    softmax_scale: float | None
    bounded: bool
    one_head: bool

    @classmethod
    def of(cls, seed: int, tokens: int = TOKENS) -> Case:
        """The case of a seed, with at least so many tokens in documents."""
        rng = np.random.default_rng((seed, 0))
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(_draw_length(rng))
        return cls(
            seed,
            str(rng.choice(list(KINDS))),
            tuple(lengths),
            padding=int(rng.choice((0, 0, 5))),
            kv_heads=QUERY_HEADS // int(rng.choice((1, 2, 4), p=(0.8, 0.12, 0.08))),
            dim=int(rng.choice((128, 64), p=(0.9, 0.1))),
            causal=bool(rng.random() < 0.85),
            dtype=str(rng.choice(list(TYPES), p=(0.7, 0.15, 0.15))),
            softmax_scale=None if rng.random() < 0.9 else float(np.exp2(rng.uniform(-10, 1))),
            bounded=bool(rng.random() < 0.5),
            one_head=bool(rng.random() < 0.2),
        )

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths) + self.padding

    @property
    def elements(self) -> int:
        """Of all `OUTPUTS`."""
        return 2 * self.tokens * self.dim * (QUERY_HEADS + self.kv_heads)

    def draw(self) -> Arrays:
        """q, k, v, dout and cu_seqlens. Padding rows are NaN."""
        rng = np.random.default_rng((self.seed, 1))
        heads = {"q": QUERY_HEADS, "k": self.kv_heads, "v": self.kv_heads, "dout": QUERY_HEADS}
        with np.errstate(all="ignore"):
            x = KINDS[self.kind](self, rng, heads)
            for name in heads:
                x[name][sum(self.lengths) :] = np.nan
                x[name] = x[name].astype(TYPES[self.dtype])
        return x | {"cu_seqlens": np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)}


def _draw_length(rng: np.random.Generator) -> int:
    """Most documents nearly fill a tile, where the reference is fastest; others end where tiles begin, or anywhere."""
    kind = rng.random()
    if kind < 0.6:
        return int(rng.integers(TILE - 32, TILE + 1))
    if kind < 0.75:
        return int(TILE * rng.integers(1, 3) + rng.integers(-2, 3))
    if kind < 0.9:
        return int(rng.integers(1, 301))
    return int(rng.integers(0, 65))


# ---- distributions: float32 arrays by name ---------------------------------------------------------------------------


def _normal(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    return {name: rng.standard_normal((case.tokens, n, case.dim), np.float32) for name, n in heads.items()}


def _heavy_tails(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    """Student's t with two degrees of freedom: no variance."""
    x = _normal(case, rng, heads)
    return {name: a / np.sqrt(rng.standard_exponential(a.shape, np.float32)) for name, a in x.items()}


def _outlier_channels(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    """A few channels are up to 64 times as large as the others, in all tokens."""
    x = _normal(case, rng, heads)
    for a in x.values():
        where = rng.integers(0, case.dim, 4)
        a[..., where] *= np.exp2(rng.uniform(2, 6, (1, a.shape[1], 4))).astype(np.float32)
    return x


def _sinks(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    """All queries lean to one direction, in which the first key of each document is long and its value short."""
    x = _normal(case, rng, heads)
    direction = rng.standard_normal((case.kv_heads, case.dim), np.float32)
    x["q"] += np.repeat(direction, QUERY_HEADS // case.kv_heads, axis=0)
    first = np.cumsum((0, *case.lengths[:-1]))[np.array(case.lengths) > 0]
    x["k"][first] += np.float32(rng.uniform(0.2, 2)) * direction
    x["v"][first] *= np.float32(0.01)
    return x


def _sharp(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    """Large scores: each query sees few keys, and maxima grow from tile to tile."""
    x = _normal(case, rng, heads)
    for name in "qk":
        x[name] *= np.float32(rng.uniform(2, 6))
    return x


def _rough(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    """Tokens of very different sizes, rows without a gradient, and at times a NaN or an infinity."""
    x = _normal(case, rng, heads)
    reach = int(rng.choice((2, 8, 30)))
    for a in x.values():
        a *= np.exp2(rng.integers(-reach, reach // 2 + 1, (*a.shape[:2], 1))).astype(np.float32)
    x["dout"][rng.random(x["dout"].shape[:2]) < 0.3] = 0
    if rng.random() < 0.3:
        lost = x[str(rng.choice(list(heads)))]
        lost[tuple(rng.integers(0, n) for n in lost.shape)] = rng.choice((np.nan, np.inf, -np.inf))
    return x


@cache
def _sample() -> Arrays:
    from flamia.study.sample import load

    found = load()
    return {name: getattr(found, name).astype(np.float32) for name in ("q", "k", "v", "dout")}


def _real(case: Case, rng: np.random.Generator, heads: dict[str, int]) -> Arrays:
    """Stretches of tokens of the package's sample, its heads in any order."""
    sample, group = _sample(), QUERY_HEADS // case.kv_heads
    there, queries = len(sample["q"]), sample["q"].shape[1] // sample["k"].shape[1]
    at = np.concatenate([(rng.integers(there) + np.arange(n)) % there for n in (*case.lengths, case.padding)])
    keys = rng.integers(0, sample["k"].shape[1], case.kv_heads)
    of = {"k": keys, "q": np.repeat(keys, group) * queries + rng.integers(0, queries, QUERY_HEADS)}
    first = int(rng.integers(0, 128 // case.dim)) * case.dim
    names = {"q": "q", "k": "k", "v": "k", "dout": "q"}
    return {name: sample[name][at][:, of[names[name]], first : first + case.dim] for name in heads}


KINDS = {f.__name__[1:]: f for f in (_normal, _heavy_tails, _outlier_channels, _sinks, _sharp, _rough, _real)}


# ---- the reference ---------------------------------------------------------------------------------------------------


def expect(case: Case, x: Arrays) -> Arrays:
    """The reference's results. It has no float16: such tensors are widened, and out is rounded before delta."""
    from flamia.reference.backward import attention_backward
    from flamia.reference.forward import attention_forward

    kind = x["q"].dtype
    q, k, v, dout = (a.astype(np.float32) if kind == np.float16 else a for a in (x[n] for n in ("q", "k", "v", "dout")))
    with np.errstate(all="ignore"):
        f = attention_forward(
            q, k, v, x["cu_seqlens"], causal=case.causal, softmax_scale=case.softmax_scale, profile="hopper"
        )
        f = dataclasses.replace(f, out=f.out.astype(kind).astype(q.dtype))
        g = attention_backward(dout, f)
        return {n: a.astype(kind) for n, a in zip(OUTPUTS, (f.out, g.dq, g.dk, g.dv), strict=True)}


def compute(seed: int, tokens: int = TOKENS) -> tuple[Case, Arrays, Arrays]:
    """A worker's task: the case, its inputs, and what the reference makes of them."""
    case = Case.of(seed, tokens)
    inputs = case.draw()
    return case, inputs, expect(case, inputs)


def _stay_on_one_core(cores: list[int], counter: Any) -> None:
    """The reference takes all cores that it may use: in a worker, one."""
    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def computed(
    seeds: Iterable[int], workers: int | None = None, tokens: int = TOKENS
) -> Iterator[tuple[Case, Arrays, Arrays]]:
    """`compute` of every seed, as they are done; a few at a time, so that none wait in memory.

    :param workers: processes; default: the cores that this one may use.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0] * (os.cpu_count() or 1)
    count, context, left = workers or len(cores), get_context("spawn"), iter(seeds)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers' BLAS; they start when they get work
    try:
        start = (cores, context.Value("i", 0))
        with ProcessPoolExecutor(count, context, _stay_on_one_core, start) as pool:
            running = {pool.submit(compute, seed, tokens) for seed in islice(left, 2 * count)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(compute, seed, tokens) for seed in islice(left, len(done))}
                for future in done:
                    yield future.result()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


# ---- the comparison --------------------------------------------------------------------------------------------------


def first_difference(case: Case, got: Arrays, want: Arrays) -> str | None:
    """None, or a sentence with the first byte that differs in any of `OUTPUTS`; one NaN is like another."""
    for name in OUTPUTS:
        a, b = got[name], want[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"seed {case.seed}: {name} is {a.dtype} {a.shape} where {b.dtype} {b.shape} is right: {case}"
        bits = np.dtype(f"u{a.itemsize}")
        different = a.view(bits) != b.view(bits)
        if different.any():
            different &= ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            x, y = (f"{z[at]} ({int(z.view(bits)[at]):#0{2 * z.itemsize + 2}x})" for z in (a, b))
            count = int(different.sum())
            return f"seed {case.seed}: {name}{list(at)} is {x} where {y} is right; {count} of {a.size} differ: {case}"
    return None


@dataclass
class Volume:
    """What was compared: elements by name of output, cases by kind, and the first differences."""

    elements: dict[str, int]
    cases: dict[str, int]
    differences: list[str]

    @property
    def total(self) -> int:
        """Elements of all outputs."""
        return sum(self.elements.values())


def compare(kernel: Kernel, elements: int, *, first: int = 0, tokens: int = TOKENS, most: int = 5) -> Volume:
    """Run a kernel and the reference on cases of seeds ``first``, ``first + 1``, ... until there are enough elements.

    :param most: differing cases, after which no further one is looked at.
    """
    seeds, total = [], 0
    while total < elements:
        seeds.append(first + len(seeds))
        total += Case.of(seeds[-1], tokens).elements
    found = Volume(dict.fromkeys(OUTPUTS, 0), dict.fromkeys(KINDS, 0), [])
    for case, inputs, want in computed(seeds, tokens=tokens):
        difference = first_difference(case, kernel(case, inputs), want)
        found.cases[case.kind] += 1
        for name in OUTPUTS:
            found.elements[name] += want[name].size
        if difference:
            found.differences.append(difference)
            if len(found.differences) == most:
                break
    return found
