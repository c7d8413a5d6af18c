"""The leak test: tokens after t are changed, and whatever moves in the rows up to t has leaked.

Note [Leak test]
~~~~~~~~~~~~~~~~
Causal attention of one document. For a position t, q, k and v of all tokens after t are replaced, and dO of those
tokens is zero before and after the change. Then out, LSE and dQ of the tokens up to t, and dK and dV of the tokens up
to t, are functions of the tokens up to t alone, and must keep their bits. t takes every residue modulo 32, because
scale blocks of 32 tokens hide a leak where a block ends at t. The replacements: normal numbers of the tensor's own
size, normal numbers times 2^20, and NaN.

The same for *neighbours*: all tokens of another document of the pack are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.reference import Profile, Recipe, attention_backward, attention_forward
from flamia.reference.parallel import one_blas_thread, worker_count
from flamia.study.sample import TENSORS, Sample

OUTPUTS = ("out", "lse", "dq", "dk", "dv")
CHANGES = {"same size": 1.0, "2^20": 2.0**20, "NaN": np.nan}
"""What a replaced token is: standard normal numbers times the tensor's standard deviation times this."""
MAX_TOKENS = 160
RESIDUES = 32

Results = dict[str, NDArray[Any]]
"""By output: ``(tokens, heads, channels)``; LSE has one channel."""


@dataclass(frozen=True)
class Movement:
    """What moved in one output after one change.

    :param size: float64 ``(tokens,)``: norm of the change of a row over the root mean square of row norms of the
        unchanged document; inf where a number turned into NaN or back; 0 where no bit moved.
    :param first: ``(token, head, channel)``, the first that moved.
    :param before: its value.
    :param after: its value after the change.
    """

    size: NDArray[np.float64]
    first: tuple[int, int, int]
    before: float
    after: float


@dataclass(frozen=True)
class FirstLeak:
    """The first leak found: after which position what was changed, and which number moved from what to what."""

    t: int
    change: str
    output: str
    document: int
    token: int
    head: int
    channel: int
    before: float
    after: float
    through: list[str]
    """Which of q, k and v moves this output when it alone is changed."""


@dataclass
class Leaks:
    """The leak test of one recipe.

    :param positions: every t that was tried.
    :param leaking: by change: those of them after which something moved.
    :param largest: by output: the largest finite `Movement.size`; absent if no bit ever moved.
    :param lost: by output: the number of positions after which a row became NaN.
    :param nearest: the smallest distance from a row of out that a finite replacement moved to the first changed token;
        None without such a leak.
    :param farthest: the largest.
    :param neighbours: outputs that moved when another document was changed.
    :param map: float64 ``(positions, tokens)``: `Movement.size` of out, largest over the finite replacements; NaN after
        t.
    :param lost_map: bool ``(positions, tokens)``: rows of out that a NaN turned into NaN.
    """

    recipe: str
    tokens: int
    positions: list[int]
    testable: bool
    leaking: dict[str, list[int]] = field(default_factory=lambda: {change: [] for change in CHANGES})
    largest: dict[str, float] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    nearest: int | None = None
    farthest: int | None = None
    first: FirstLeak | None = None
    neighbours: list[str] = field(default_factory=list)
    map: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    lost_map: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))

    @property
    def share(self) -> float:
        """Of positions that leak under some change."""
        some = {t for ts in self.leaking.values() for t in ts}
        return len(some) / len(self.positions) if self.positions else 0.0

    @property
    def safe(self) -> bool:
        """No bit moved, neither after a later token's change nor after a neighbour's, and all could have."""
        return self.testable and not any(self.leaking.values()) and not self.neighbours


def positions(tokens: int) -> list[int]:
    """32 positions, one for each residue modulo 32, spread over a document; all but the last token if it is short."""
    step = (tokens - 2) // (RESIDUES - 1)
    step -= 1 - step % 2  # odd, so that its multiples take every residue
    return [i * step for i in range(RESIDUES)] if step > 0 else list(range(max(0, tokens - 1)))


class Subject:
    """One document of one query head under one recipe, ready to be changed."""

    def __init__(self, sample: Sample, recipe: Recipe, profile: Profile, seed: int) -> None:
        self.document, rows = sample.longest_document()
        rows = slice(rows.start, min(rows.stop, rows.start + MAX_TOKENS))
        self.recipe, self.profile = recipe, profile
        self.x = {name: getattr(sample, name)[rows, :1] for name in TENSORS}
        self.tokens = rows.stop - rows.start
        rng = np.random.default_rng(seed)
        self.noise = {
            name: rng.standard_normal(x.shape, np.float32) * (x.astype(np.float64).std() or 1.0)
            for name, x in self.x.items()
        }
        self.forward = attention_forward(*self._qkv(self.x), [0, self.tokens], recipe=recipe, profile=profile)
        whole = self._results(self.forward, self.x["dout"], self.tokens)
        self.finite = all(np.isfinite(x.astype(np.float32)).all() for x in whole.values())
        self.row_size = {name: _row_norms(x.astype(np.float64)) for name, x in whole.items()}
        self.row_size = {name: np.sqrt(np.mean(x**2)) for name, x in self.row_size.items()}

    def moved(self, t: int, change: str, roles: str = "qkv") -> dict[str, Movement]:
        """Change the tokens after t; what moved up to t, by output."""
        kept = t + 1
        changed = dict(self.x)
        for name in roles:
            changed[name] = x = self.x[name].copy()
            x[kept:] = self.replacement(name, change)[kept:]
        dout = self.x["dout"].copy()
        dout[kept:] = 0
        after = attention_forward(*self._qkv(changed), [0, self.tokens], recipe=self.recipe, profile=self.profile)
        return self._compare(self._results(self.forward, dout, kept), self._results(after, dout, kept))

    def moved_by_neighbour(self, change: str) -> dict[str, Movement]:
        """Change a neighbour document (a copy of this one); what moved here, by output."""
        cu = [0, self.tokens, 2 * self.tokens]
        results = []
        for second in (self.x, {name: self.replacement(name, change) for name in self.x}):
            pack = {name: np.concatenate([x, second[name]]) for name, x in self.x.items()}
            forward = attention_forward(*self._qkv(pack), cu, recipe=self.recipe, profile=self.profile)
            results.append(self._results(forward, pack["dout"], self.tokens))
        return self._compare(*results)

    def replacement(self, name: str, change: str) -> NDArray[Any]:
        """Other values for all tokens of a tensor."""
        with np.errstate(over="ignore"):
            other: NDArray[Any] = (self.noise[name] * np.float32(CHANGES[change])).astype(self.x[name].dtype)
        return other

    def _compare(self, before: Results, after: Results) -> dict[str, Movement]:
        """The outputs whose bits differ; one NaN is like another."""
        found = {}
        for name, a in before.items():
            b = after[name]
            x, y = a.astype(np.float64), b.astype(np.float64)
            nan_x, nan_y = np.isnan(x), np.isnan(y)
            bits = np.dtype(f"u{a.dtype.itemsize}")
            differs = (np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)) & ~(nan_x & nan_y)
            if not differs.any():
                continue
            size = _row_norms(np.where(differs, np.where(nan_x | nan_y, np.inf, x - y), 0)) / self.row_size[name]
            # a bit may move without the value (the sign of a zero): it still counts
            size = np.where(differs.any(axis=(1, 2)), np.maximum(size, np.finfo(np.float64).tiny), 0.0)
            token, head, channel = (int(i) for i in np.argwhere(differs)[0])
            at = token, head, channel
            found[name] = Movement(size, at, float(x[at]), float(y[at]))
        return found

    def _qkv(self, x: Results) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return x["q"], x["k"], x["v"]

    def _results(self, forward: Any, dout: NDArray[Any], kept: int) -> Results:
        g = attention_backward(dout, forward)
        every = {"out": forward.out, "lse": forward.lse.T[..., None], "dq": g.dq, "dk": g.dk, "dv": g.dv}
        return {name: x[:kept] for name, x in every.items()}


def _row_norms(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Norm over heads and channels: ``(tokens, heads, channels)`` to ``(tokens,)``."""
    norms: NDArray[np.float64] = np.sqrt((x**2).sum(axis=(1, 2)))
    return norms


def leak_test(
    sample: Sample, recipe: Recipe, profile: Profile, seed: int = 0, advance: Callable[[], None] = lambda: None
) -> Leaks:
    """Note [Leak test] for one recipe, on the first query head and the first 160 tokens of the longest document.

    :param advance: called once per position.
    """
    subject = Subject(sample, recipe, profile, seed)
    result = Leaks(recipe.name, subject.tokens, positions(subject.tokens), subject.finite)
    result.map = np.full((len(result.positions), subject.tokens), np.nan)
    result.lost_map = np.zeros(result.map.shape, bool)
    for row, (t, by_change) in enumerate(_every_position(subject, result.positions)):
        result.map[row, : t + 1] = 0
        for change, outputs in by_change.items():
            _take_in(result, subject, row, t, change, outputs)
        advance()
    moved = {name for change in CHANGES for name in subject.moved_by_neighbour(change)}
    result.neighbours = [name for name in OUTPUTS if name in moved]
    return result


def _every_position(subject: Subject, ts: list[int]) -> Iterator[tuple[int, dict[str, dict[str, Movement]]]]:
    """``(t, movements by change)`` in order; the work is spread over the cores."""
    # Held here because the engine would set and restore it at each of many concurrent small calls, and BLAS threads
    # that were just woken spin: ten times slower.
    with one_blas_thread(), ThreadPoolExecutor(worker_count()) as pool:
        yield from pool.map(lambda t: (t, {change: subject.moved(t, change) for change in CHANGES}), ts)


def _take_in(result: Leaks, subject: Subject, row: int, t: int, change: str, outputs: dict[str, Movement]) -> None:
    """Add what one change moved to the result."""
    if outputs:
        result.leaking[change].append(t)
    for name, movement in outputs.items():
        finite = movement.size[np.isfinite(movement.size)]
        result.largest[name] = max(result.largest.get(name, 0.0), float(finite.max(initial=0)))
        result.lost[name] = result.lost.get(name, 0) + int(np.isinf(movement.size).any())
    if outputs and result.first is None:
        name = next(n for n in OUTPUTS if n in outputs)
        m = outputs[name]
        through = [role for role in "qkv" if name in subject.moved(t, change, role)]
        result.first = FirstLeak(t, change, name, subject.document, *m.first, m.before, m.after, through)
    if "out" in outputs:
        size = outputs["out"].size
        if np.isnan(CHANGES[change]):
            result.lost_map[row, : t + 1] |= np.isinf(size)
            return
        result.map[row, : t + 1] = np.maximum(result.map[row, : t + 1], size)
        rows = np.flatnonzero(size)
        near, far = t + 1 - int(rows[-1]), t + 1 - int(rows[0])
        result.nearest = near if result.nearest is None else min(result.nearest, near)
        result.farthest = far if result.farthest is None else max(result.farthest, far)
