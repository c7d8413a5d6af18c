"""Runs of the Blackwell backward on the simulator beside the reference."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.comparison import compare_bits
from flamia.conformance.simulator.attention_backward import OWNERS, Build, Operands, Outcome, run_backward
from flamia.reference.backward import Gradients, attention_backward
from flamia.reference.documents import iter_documents
from flamia.reference.formats import E4M3, decode
from flamia.reference.forward import attention_forward


def draw(
    lengths: tuple[int, ...], heads: tuple[int, int], dim: int, seed: int = 0, dtype: Any = bfloat16
) -> dict[str, Any]:
    """Normal q, k, v and dout of packed documents; sizes of v's tokens span more than E4M3 does: V1 is not V32."""
    rng = np.random.default_rng(seed)
    total, (hq, hkv) = sum(lengths), heads
    q, k, v, dout = (rng.standard_normal((total, h, dim), np.float32).astype(dtype) for h in (hq, hkv, hkv, hq))
    v = (v.astype(np.float32) * np.exp2(rng.integers(-16, 1, (total, 1, 1)))).astype(dtype)
    return {"q": q, "k": k, "v": v, "dout": dout, "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)])}


def damage(inputs: dict[str, Any]) -> dict[str, Any]:
    """Lost tokens of every tensor, tokens of zeros, and queries without a gradient."""
    out = {name: x.copy() for name, x in inputs.items()}
    out["q"][70, 0, 3] = np.nan
    out["k"][133, 0, 3] = np.nan
    out["v"][37, 0, 5] = np.inf
    out["dout"][150, 0, 1] = np.inf
    out["dout"][[2, 140], 0] = 0
    out["dout"][32:64, 0] = 0
    out["q"][[5, 90], 0] = 0
    out["k"][[6, 100], 0] = 0
    out["v"][64:96, 0] = 0
    return out


class Expected:
    """The reference's gradients, with every tile of P and X."""

    def __init__(
        self, inputs: dict[str, Any], recipe: Any = "mxfp8", causal: bool = True, softmax_scale: float | None = None
    ) -> None:
        given = {name: x for name, x in inputs.items() if name != "dout"}
        self.forward = attention_forward(
            **given, recipe=recipe, causal=causal, softmax_scale=softmax_scale, profile="blackwell"
        )
        self.tiles: list[tuple[str, Any, slice, int, int, Any]] = []
        self.gradients: Gradients = attention_backward(
            inputs["dout"], self.forward, observer=lambda *tile: self.tiles.append(tile)
        )
        self.operands = Operands.of(self.forward, inputs["dout"])

    def mismatch(self, got: Outcome, owners: tuple[str, ...] = OWNERS) -> str | None:
        """The first coordinate that differs, bit for bit; None for none."""
        for owner in owners:
            for name in ("dv", "dk") if owner == "keys" else ("dq",):
                found = compare_bits(name, getattr(got, name), getattr(self.gradients, name))
                if found is not None:
                    return self.tile_mismatch(got, owner) or found.message
            if (message := self.tile_mismatch(got, owner)) is not None:
                return message
        return None

    def tile_mismatch(self, got: Outcome, owner: str) -> str | None:
        """The same of the tiles of P and X that a kernel with hooks gave: values, and scales of tiles that have any."""
        if owner not in got.tiles:
            return None  # one without hooks, or `STORED`
        first = np.cumsum([0, *(d.tiles for d in iter_documents(self.forward.cu_seqlens))])
        number = {d.index: i for i, d in enumerate(iter_documents(self.forward.cu_seqlens))}
        names = {"p": "p", "p_scale": "p_scale", "ds": "x", "ds_scale": "x_scale"}
        for stage, document, heads, query_tile, key_tile, array in self.tiles:
            if stage not in names:
                continue
            keys = owner == "keys"
            own, other = (key_tile, query_tile) if keys else (query_tile, key_tile)
            streamed = other - (key_tile if keys and self.forward.causal else 0)
            tile = getattr(got.tiles[owner], names[stage])[heads, first[number[document.index]] + own, streamed]
            tile = tile if keys else tile.swapaxes(1, 2)
            if stage.endswith("scale"):
                codes = self._codes(stage[:-6], document, heads, query_tile, key_tile)
                used = codes.reshape(-1, 4, 32, 4, 32).any(axis=(2, 4))
                found = compare_bits(stage, np.where(used, tile, 0), np.where(used, array, 0).astype(np.uint8))
            else:
                found = compare_bits(stage, decode(tile, E4M3) + np.float32(0), array + np.float32(0))
            if found is not None:
                return (
                    f"{owner}: document {document.index}, query tile {query_tile}, key tile {key_tile}: {found.message}"
                )
        return None

    def _codes(self, stage: str, document: Any, heads: slice, query_tile: int, key_tile: int) -> Any:
        return next(
            array
            for s, d, h, i, j, array in self.tiles
            if (s, d.index, h, i, j) == (stage, document.index, heads, query_tile, key_tile)
        )


@lru_cache(maxsize=32)
def expected(
    recipe: str,
    dim: int,
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    causal: bool = True,
    seed: int = 0,
    damaged: bool = False,
) -> Expected:
    """The reference for normal inputs, `damage` done to them or not."""
    inputs = draw(lengths, heads, dim, seed)
    return Expected(damage(inputs) if damaged else inputs, recipe, causal)


def run(
    build: Build,
    lengths: tuple[int, ...] = (160, 33),
    heads: tuple[int, int] = (2, 1),
    causal: bool = True,
    draws: int = 0,
    owners: tuple[str, ...] = OWNERS,
    damaged: bool = False,
    **options: Any,
) -> tuple[Outcome, str | None]:
    """Run normal inputs; also the first coordinate that differs."""
    reference = expected(build.recipe, build.dim, lengths, heads, causal, draws, damaged)
    got = run_backward(build, reference.operands, owners=owners, **options)
    return got, reference.mismatch(got, owners)


def check(build: Build, *arguments: Any, **options: Any) -> Outcome:
    """`run`, and demand that nothing differs."""
    got, wrong = run(build, *arguments, **options)
    assert wrong is None, wrong
    return got
