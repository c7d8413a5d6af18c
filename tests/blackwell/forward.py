"""Runs of the Blackwell forward on the simulator beside the reference."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.comparison import compare_bits
from flamia.conformance.simulator.attention import Attention, Build, Operands, run_forward
from flamia.reference.documents import TILE, iter_documents
from flamia.reference.formats import E4M3, encode
from flamia.reference.forward import Forward, attention_forward

DTYPES = {"bfloat16": bfloat16, "float32": np.float32}


def draw(
    lengths: tuple[int, ...], heads: tuple[int, int], dim: int, seed: int = 0, dtype: Any = bfloat16
) -> dict[str, Any]:
    """Normal q, k, v of packed documents."""
    rng = np.random.default_rng(seed)
    total, (hq, hkv) = sum(lengths), heads
    q, k, v = (rng.standard_normal((total, h, dim), np.float32).astype(dtype) for h in (hq, hkv, hkv))
    return {"q": q, "k": k, "v": v, "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}


class Expected:
    """The reference's results, with every tile of P."""

    def __init__(self, inputs: dict[str, Any], recipe: Any, causal: bool, softmax_scale: float | None) -> None:
        self.tiles: list[tuple[str, Any, slice, int, int, Any]] = []
        self.result: Forward = attention_forward(
            **inputs,
            recipe=recipe,
            causal=causal,
            softmax_scale=softmax_scale,
            profile="blackwell",
            observer=lambda *tile: self.tiles.append(tile),
        )

    def mismatch(self, got: Attention) -> str | None:
        """The first coordinate that differs, bit for bit; None for none."""
        r = self.result
        for name in ("out", "m", "l", "lse"):
            found = compare_bits(name, getattr(got, name), getattr(r, name))
            if found is not None:
                return found.message
        return None if got.p is None else self._tiles_mismatch(got)

    def _tiles_mismatch(self, got: Attention) -> str | None:
        assert got.p is not None and got.p_top is not None
        first = dict(
            zip((d.index for d in iter_documents(self.result.cu_seqlens)), _first_tiles(self.result), strict=True)
        )
        for stage, document, heads, query_tile, key_tile, array in self.tiles:
            rows = min(TILE, document.length - query_tile * TILE)
            at = (heads, first[document.index] + query_tile, key_tile)
            if stage == "p":
                found = compare_bits("p", got.p[at][:, :rows], encode(array, E4M3).swapaxes(1, 2)[:, :rows])
            else:
                found = compare_bits("p_top", got.p_top[at][:, :rows], array[:, :rows])
            if found is not None:
                return f"document {document.index}, query tile {query_tile}, key tile {key_tile}: {found.message}"
        return None


def _first_tiles(result: Forward) -> list[int]:
    tiles = [d.tiles for d in iter_documents(result.cu_seqlens)]
    return [sum(tiles[:i]) for i in range(len(tiles))]


def grow(inputs: dict[str, Any]) -> dict[str, Any]:
    """Scores that grow from key tile to key tile by some ten octaves, so that maxima run and O is rescaled."""
    position = np.arange(len(inputs["k"])) // TILE
    factor = (1 + 24 * position).astype(np.float32)[:, None, None]
    return {**inputs, "q": np.abs(inputs["q"]), "k": (np.abs(inputs["k"]) * factor / 8).astype(inputs["k"].dtype)}


@lru_cache(maxsize=32)
def _expected(
    recipe: str,
    dim: int,
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    causal: bool,
    seed: int,
    growing: bool,
    dtype: str,
) -> tuple[Expected, Operands]:
    inputs = draw(lengths, heads, dim, seed, DTYPES[dtype])
    if growing:
        inputs = grow(inputs)
    return Expected(inputs, recipe, causal, None), Operands.of(**inputs, recipe=recipe, causal=causal)


def run(
    build: Build,
    lengths: tuple[int, ...] = (160, 33),
    heads: tuple[int, int] = (2, 1),
    causal: bool = True,
    draws: int = 0,
    growing: bool = False,
    dtype: str = "bfloat16",
    **options: Any,
) -> tuple[Attention, str | None]:
    """Run normal inputs: what came out, and the first coordinate that differs from the reference.

    :param draws: seed of the inputs. :param growing: see `grow`. :param options: of `run_forward`.
    """
    expected, operands = _expected(build.recipe, build.dim, lengths, heads, causal, draws, growing, dtype)
    got = run_forward(build, operands, **options)
    return got, expected.mismatch(got)


def check(build: Build, *args: Any, **options: Any) -> Attention:
    """`run`, which must give the reference's bits."""
    got, wrong = run(build, *args, **options)
    assert wrong is None, wrong
    return got
