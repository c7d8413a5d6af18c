"""The Blackwell backward on the simulator: from dout and a forward of the reference to dq, dk, dv, tiles of P and X.

Operands, the row pre-pass and work items are the reference's, laid out as the kernels read them, so that a test sees
the two backward kernels and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.simulator.case import compile_ptx
from flamia.conformance.simulator.machine.devicememory import DeviceMemory, Uninitialised
from flamia.conformance.simulator.machine.launch import Report, simulate
from flamia.kernels import structs
from flamia.kernels.registry import BLACKWELL_BACKWARD, BLACKWELL_DQ, SOURCES
from flamia.kernels.stored import count_pairs
from flamia.kernels.targets import SM_100A, Target
from flamia.reference import layout
from flamia.reference.arguments import softmax_constant
from flamia.reference.backward import row_pass
from flamia.reference.documents import TILE
from flamia.reference.forward import Forward
from flamia.reference.operands import Operand
from flamia.reference.recipes import Scaling
from flamia.reference.schedule import backward_schedule, forward_schedule

OWNERS = ("keys", "queries")
"""The kernels of ``backward.cu``, by what a CTA owns."""
STORED = "stored"
"""The kernel of ``dq.cu``: dQ from the tiles of X that the owner of keys stored."""
ENTRIES = {"keys": "attention_backward", "queries": "attention_backward", STORED: "attention_dq"}
ELEMENTS = {np.dtype(bfloat16): 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2}
"""Codes of the gradients' dtype."""
THREADS = {"keys": 384, "queries": 384, STORED: 256}
X_TILE_BYTES, X_SCALE_BYTES = TILE * TILE, 16
STATUS_ENTRIES, NUM_FORWARD, NUM_BACKWARD, TICKET = 16, 2, 3, 10
USUAL = {"c": (2.0**-60, 2.0**60), "softmax_scale": (2.0**-10, 2.0**10)}
"""Constants for which Note [Fast tiles] of ``backward_numbers.cuh`` holds."""

ROLES = {
    "left half": (0, 1, 2, 3),
    "right half": (4, 5, 6, 7),
    "load": (8,),
    "multiply": (9,),
    "columns": (10, 11),
}
"""Warps of the kernels' roles."""


@dataclass(frozen=True)
class Build:
    """What the kernels are compiled for; ``text`` replaces files of the source, by their name in ``#include``.

    :param hooks: whether P and X of every tile leave for global memory.
    """

    recipe: str = "mxfp8"
    dim: int = 128
    target: Target = SM_100A
    strict: int = 0
    hooks: int = 1
    exp2: str = "exact"
    text: tuple[tuple[str, str], ...] = ()

    def ptx(self, owner: str) -> str:
        """PTX of one of the kernels."""
        if owner == STORED:
            unit = BLACKWELL_DQ.unit(dim=self.dim)
        else:
            unit = BLACKWELL_BACKWARD.unit(
                owner=owner, recipe=self.recipe, dim=self.dim, strict=self.strict, hooks=self.hooks, exp2=self.exp2
            )
        changed = dict(self.text)
        headers = tuple((name, changed.get(name, text)) for name, text in unit.headers().items())
        source = changed.get(unit.kernel.source, unit.source())
        return compile_ptx(unit.kernel.source, source, headers, self.target, unit.defines)

    def shared_bytes(self, owner: str) -> int:
        """Dynamic shared memory that a kernel's source asks for."""
        found = [line for line in self.ptx(owner).splitlines() if f" {ENTRIES[owner]}_shared_bytes" in line]
        return int(found[0].split("=")[1].strip(" ;"))


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Text of every file of the kernels by its name."""
    out: dict[str, str] = {}
    for unit in (BLACKWELL_BACKWARD.units[0], BLACKWELL_DQ.units[0]):
        out |= {unit.kernel.source: (SOURCES / unit.kernel.source).read_text(encoding="utf-8"), **unit.headers()}
    return out


@dataclass(frozen=True)
class Tiles:
    """Codes and scale bytes of every tile that a kernel computed, rows first: the owner's tokens.

    :param p: uint8 ``(Hq, tiles, streamed tiles, 128, 128)``; the tiles that stream by are counted from the first one
        that the owner meets.
    :param p_scale: uint8 ``(Hq, tiles, streamed tiles, 4, 4)``.
    """

    p: NDArray[np.uint8]
    p_scale: NDArray[np.uint8]
    x: NDArray[np.uint8]
    x_scale: NDArray[np.uint8]


@dataclass
class Outcome:
    """What came out of the launches that were asked for; gradients of others are zeros."""

    dq: NDArray[Any]
    dk: NDArray[Any]
    dv: NDArray[Any]
    reports: dict[str, Report] = field(default_factory=dict)
    tiles: dict[str, Tiles] = field(default_factory=dict)


@dataclass
class Operands:
    """The kernels' input arrays for a call, packed once."""

    forward: Forward
    arrays: dict[str, NDArray[Any]]
    factor: float

    @staticmethod
    def of(forward: Forward, dout: Any) -> Operands:
        """The row pre-pass of the reference, and everything laid out."""
        cu, dim = forward.cu_seqlens, forward.out.shape[2]
        found, rows = forward.operands, row_pass(dout, forward)
        arrays: dict[str, NDArray[Any]] = {}
        for role in ("q", "k", "v", "v1"):
            if role in found:
                arrays[role], arrays[f"{role}_scales"] = pack_operand(found[role], cu, dim)
        for role in ("q", "k"):
            tokens = found[f"{role}_tokens"]
            if tokens is not found[role]:
                arrays[f"{role}_tokens"] = layout.pack_payload(tokens.payload, cu)
            arrays[f"{role}_exponents"] = _exponents(tokens, cu)
        dout_operand = rows.dout["dout"]
        arrays["dout"], arrays["dout_scales"] = pack_operand(dout_operand, cu, dim)
        assert dout_operand.scale is not None
        arrays["dout_token_scales"] = layout.pack_scales(dout_operand.scale, cu, dim, "tokens")
        arrays["delta"], arrays["top"] = _tiled(rows.delta, cu, 0.0), _tiled(rows.top, cu, np.inf)
        arrays |= _schedule(forward)
        return Operands(forward, arrays, float(np.float32(found["q"].factor * found["k"].factor)))


def pack_operand(operand: Operand, cu: NDArray[np.int64], dim: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Payload tiles, and scale tiles for the contraction over channels."""
    assert operand.scale is not None
    if operand.scaling is Scaling.NVFP4:
        return layout.pack_nvfp4(operand.payload, cu), layout.pack_nvfp4_scales(operand.scale, cu)
    return layout.pack_payload(operand.payload, cu), layout.pack_scales(operand.scale, cu, dim)


def _tiled(x: NDArray[np.float32], cu: NDArray[np.int64], fill: float) -> NDArray[np.float32]:
    """``(H, T)`` as ``(H, tiles, 128)``."""
    tile, row = layout.token_slots(cu)
    out = np.full((x.shape[0], int(layout.tile_offsets(cu)[-1]), TILE), fill, np.float32)
    out[:, tile, row] = x[:, : len(tile)]
    return out


def _exponents(operand: Operand, cu: NDArray[np.int64]) -> NDArray[np.float32]:
    """Exponents to fold, ``(H, tiles, 128)``; past a document, that of a token of zeros."""
    from flamia.reference.documents import iter_documents

    heads = operand.payload.shape[1]
    parts = [operand.document(d, slice(0, heads)).exponents.reshape(heads, -1, TILE) for d in iter_documents(cu)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((heads, 0, TILE), np.float32)


def _schedule(f: Forward) -> dict[str, NDArray[Any]]:
    cu, (hq, hkv) = f.cu_seqlens, f.head_counts
    tiles = -(-np.diff(cu) // TILE)
    document = np.repeat(np.arange(len(tiles)), tiles)
    offsets = layout.tile_offsets(cu)
    index = np.arange(len(document)) - offsets[:-1][document]
    start = cu[:-1][document] + TILE * index
    rows = np.minimum(cu[1:][document] - start, TILE)
    out = {
        "tiles": np.stack([document, start, rows, index], axis=1).astype(np.int32).reshape(-1, 4),
        "tile_offsets": offsets.astype(np.int32),
    }
    status = np.zeros(STATUS_ENTRIES, np.int32)
    lists = {
        "keys": (NUM_BACKWARD, backward_schedule(cu, hkv, hq // hkv, f.causal)),
        "queries": (NUM_FORWARD, forward_schedule(cu, hq, f.causal)),
    }
    for owner, (entry, work) in lists.items():
        out[f"{owner}_items"] = np.stack([work.document, work.head, work.tile, work.cost], axis=1).astype(np.int32)
        status[entry] = len(work)
    return out | {"status": status}


def run_backward(
    build: Build,
    operands: Operands,
    *,
    owners: tuple[str, ...] = OWNERS,
    ctas: int = 1,
    heads_at_once: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Outcome:
    """Launch kernels.

    :param owners: of `OWNERS`, or ``("keys", STORED)``, where the first keeps X for the second.
    :param ctas: persistent CTAs.
    :param heads_at_once: KV heads of one launch of each kernel; default: all.
    :param options: of `simulate`.
    :raises Fault: for a rule of PTX that a kernel breaks.
    """
    f, arrays = operands.forward, operands.arrays
    (hq, hkv), (total, _, dim), dtype = f.head_counts, f.out.shape, f.out.dtype
    memory = DeviceMemory()
    address = {
        name: memory.allocate(np.ascontiguousarray(x), name, read_only=name != "status") if x.size else 0
        for name, x in arrays.items()
    }
    for role in ("q", "k"):
        address.setdefault(f"{role}_tokens", address[role])
    out = {"dq": np.zeros((total, hq, dim), dtype)}
    out |= {name: np.zeros((total, hkv, dim), dtype) for name in ("dk", "dv")}
    result = Outcome(out["dq"], out["dk"], out["dv"])
    for name, x in out.items():
        address[name] = memory.allocate(x.view(np.uint8), name) if x.size else 0
    tiles = max(len(arrays["tiles"]), 1)
    streamed = int((-(-np.diff(f.cu_seqlens) // TILE)).max(initial=1))
    pairs = count_pairs(total, len(f.cu_seqlens) - 1, streamed, f.causal)
    at_once = heads_at_once or hkv
    stored = hq // hkv * min(at_once, hkv) * pairs if STORED in owners else 0
    for name, size in (("x", X_TILE_BYTES), ("x_scales", X_SCALE_BYTES)):
        address[name] = memory.allocate(Uninitialised(stored * size), name) if stored else 0
    totals = np.zeros(ctas * 2 * dim * TILE, np.float32)
    address["totals"] = memory.allocate(totals, "totals") if hq > hkv else 0
    stages: dict[str, dict[str, int]] = {}
    for owner in owners if build.hooks else ():
        if owner != STORED:
            shapes = (hq, tiles, streamed)
            made = Tiles(*(np.zeros((*shapes, n, n), np.uint8) for n in (TILE, 4, TILE, 4)))
            names = ("p", "p_scale", "x", "x_scale")
            stages[owner] = {f"stage_{n}": memory.allocate(getattr(made, n), f"{owner} {n}") for n in names}
            result.tiles[owner] = made
    common: dict[str, Any] = {name: address.get(name, 0) for name in structs.BLACKWELL_BACKWARD.names or ()}
    common |= _numbers(f, operands.factor, tiles, streamed)
    for first, owner in product(range(0, hkv, at_once), owners):
        keys = owner == "keys"
        fields = common | stages.get(owner, {})
        fields |= {
            "first": _gradient(address, out, "dv" if keys else "dq"),
            "second": _gradient(address, out, "dk") if keys else {},
            "items": address["keys_items" if keys else "queries_items"],
            "num_items": NUM_BACKWARD if keys else NUM_FORWARD,
            "ticket": address["status"] + 4 * TICKET,
            "pairs": pairs,
            "first_head": first,
            "last_head": min(first + at_once, hkv),
        }
        result.reports[owner] = simulate(
            build.ptx(owner),
            ENTRIES[owner],
            ctas,
            THREADS[owner],
            [structs.fill(structs.BLACKWELL_BACKWARD, fields).tobytes()],
            shared_bytes=build.shared_bytes(owner),
            seed=seed,
            memory=memory,
            **options,
        )
    return result


def _gradient(address: dict[str, int], out: dict[str, NDArray[Any]], name: str) -> dict[str, int]:
    return {"data": address[name], "token_stride": out[name].strides[0], "head_stride": out[name].strides[1]}


def _numbers(f: Forward, factor: float, tiles: int, streamed: int) -> dict[str, Any]:
    c = float(softmax_constant(f.softmax_scale))
    numbers = {"c": c, "softmax_scale": float(np.float32(f.softmax_scale))}
    usual = factor == 1.0 and all(low <= numbers[name] <= high for name, (low, high) in USUAL.items())
    return numbers | {
        "largest_score": 2.0**20 / c if usual else 0.0,
        "score_factor": factor,
        "usual": usual,
        "max_tiles": tiles,
        "group": f.head_counts[0] // f.head_counts[1],
        "causal": f.causal,
        "element": ELEMENTS[f.out.dtype],
        "stage_tiles": streamed,
        "longest": streamed,
    }
