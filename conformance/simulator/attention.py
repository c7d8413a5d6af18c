"""The Blackwell forward on the simulator: from q, k, v to out, m, l and the tiles of P, without a GPU or PyTorch.

Operands and work items are the reference's, laid out as the kernels read them, so that a test sees the forward kernel
and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.simulator.case import Data, compile_ptx
from flamia.conformance.simulator.machine.devicememory import DeviceMemory
from flamia.conformance.simulator.machine.launch import Report, simulate
from flamia.kernels import structs
from flamia.kernels.registry import BLACKWELL_FORWARD, SOURCES
from flamia.kernels.targets import SM_100A, SM_103A, Target
from flamia.reference import layout
from flamia.reference.arguments import Arguments, check_forward
from flamia.reference.documents import TILE
from flamia.reference.forward import attention_forward, quantize_inputs
from flamia.reference.operands import Operand
from flamia.reference.recipes import Scaling
from flamia.reference.schedule import forward_schedule

ENTRY = "attention_forward"
CHIPS = (SM_100A, SM_103A)
ELEMENTS = {np.dtype(bfloat16): 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2}
"""Codes of the output's dtype."""
STATUS_ENTRIES, NUM_FORWARD, TICKET = 16, 2, 8

ROLES = {
    "softmax 0": (0, 1, 2, 3),
    "softmax 1": (4, 5, 6, 7),
    "epilogue": (8, 9, 10, 11),
    "load": (12,),
    "multiply": (13,),
}
"""Warps of the kernel's roles."""


@dataclass(frozen=True)
class Build:
    """What the kernel is compiled for; `text` replaces files of the source, by their name in ``#include``.

    :param hooks: whether P and m_t of every tile leave for global memory.
    """

    recipe: str = "mxfp8"
    dim: int = 128
    target: Target = SM_100A
    strict: int = 0
    hooks: int = 1
    exp2: str = "exact"
    text: tuple[tuple[str, str], ...] = ()

    @property
    def ptx(self) -> str:
        """PTX of the build."""
        unit = BLACKWELL_FORWARD.unit(
            recipe=self.recipe, dim=self.dim, strict=self.strict, hooks=self.hooks, exp2=self.exp2
        )
        changed = dict(self.text)
        headers = tuple((name, changed.get(name, text)) for name, text in unit.headers().items())
        source = changed.get(unit.kernel.source, unit.source())
        return compile_ptx(unit.kernel.source, source, headers, self.target, unit.defines)


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Text of every file of the kernel by its name."""
    unit = BLACKWELL_FORWARD.units[0]
    return {unit.kernel.source: (SOURCES / unit.kernel.source).read_text(encoding="utf-8"), **unit.headers()}


@dataclass(frozen=True)
class Attention:
    """What came out of a launch.

    :param out: ``(T, Hq, D)``; rows that the kernel did not write are 0.
    :param lse: float32 ``(Hq, T)``; ``m`` and ``l`` likewise, with the values of padding rows where nothing is written.
    :param p: uint8 ``(Hq, tiles, key tiles, 128 queries, 128 keys)``; with hooks.
    :param p_top: float32 ``(Hq, tiles, key tiles, 128)``.
    """

    out: NDArray[Any]
    lse: NDArray[np.float32]
    m: NDArray[np.float32]
    l: NDArray[np.float32]  # noqa: E741
    report: Report
    p: NDArray[np.uint8] | None = None
    p_top: NDArray[np.float32] | None = None


@dataclass
class Operands:
    """The kernel's input arrays for a call, packed once."""

    arguments: Arguments
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    factor: float = 1.0

    @staticmethod
    def of(q: Any, k: Any, v: Any, cu_seqlens: Any, recipe: Any, causal: bool, softmax_scale: Any = None) -> Operands:
        """Quantize by the reference and lay out."""
        a = check_forward(q, k, v, cu_seqlens, recipe, causal, softmax_scale, "blackwell")
        found = quantize_inputs(a)
        cu, dim = a.cu_seqlens, q.shape[2]
        arrays: dict[str, NDArray[Any]] = {}
        for role in ("q", "k", "v", "v1"):
            if role in found:
                arrays[role], arrays[f"{role}_scales"] = _pack(found[role], cu, dim)
        lengths = np.diff(cu)
        tiles = -(-lengths // TILE)
        document = np.repeat(np.arange(len(tiles)), tiles)
        offsets = layout.tile_offsets(cu)
        index = np.arange(len(document)) - offsets[:-1][document]
        start = cu[:-1][document] + TILE * index
        rows = np.minimum(cu[1:][document] - start, TILE)
        arrays["tiles"] = np.stack([document, start, rows, index], axis=1).astype(np.int32).reshape(-1, 4)
        arrays["tile_offsets"] = offsets.astype(np.int32)
        work = forward_schedule(cu, q.shape[1], causal)
        arrays["items"] = np.stack([work.document, work.head, work.tile, work.cost], axis=1).astype(np.int32)
        status = np.zeros(STATUS_ENTRIES, np.int32)
        status[NUM_FORWARD] = len(work)
        arrays["status"] = status
        factor = np.float32(found["q"].factor * found["k"].factor)
        return Operands(a, arrays, float(factor))


def _pack(operand: Operand, cu: NDArray[np.int64], dim: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    scale = operand.scale
    assert scale is not None
    if operand.scaling is Scaling.NVFP4:
        return layout.pack_nvfp4(operand.payload, cu), layout.pack_nvfp4_scales(scale, cu)
    contraction = "tokens" if operand.scaling is Scaling.TOKEN_BLOCK else "channels"
    return layout.pack_payload(operand.payload, cu), layout.pack_scales(scale, cu, dim, contraction)


def run_forward(build: Build, operands: Operands, *, ctas: int = 1, seed: int = 0, **options: Any) -> Attention:
    """Launch the kernel.

    :param ctas: persistent CTAs.
    :param options: of `simulate`.
    :raises Fault: for a rule of PTX that the kernel breaks.
    """
    a, arrays = operands.arguments, operands.arrays
    total, hq, dim = a.q.shape
    tiles = max(len(arrays["tiles"]), 1)
    memory = DeviceMemory()
    address = {
        name: memory.allocate(np.ascontiguousarray(x), name, read_only=name != "status") if x.size else 0
        for name, x in arrays.items()
    }
    out = np.zeros((total, hq, dim), a.q.dtype)
    rows = {name: np.full((hq, total), value, np.float32) for name, value in INACTIVE.items()}
    address["out"] = memory.allocate(out.view(np.uint8), "out") if out.size else 0
    for name, x in rows.items():
        address[name] = memory.allocate(x, name) if x.size else 0
    stage_keys = int((-(-np.diff(a.cu_seqlens) // TILE)).max(initial=1))
    stages = (hq, tiles, stage_keys, TILE)
    p, top = np.zeros((*stages, TILE), np.uint8), np.zeros(stages, np.float32)
    if build.hooks:
        address["stage_p"], address["stage_top"] = memory.allocate(p, "stage_p"), memory.allocate(top, "stage_top")
    params = np.zeros((), structs.BLACKWELL_FORWARD)
    address["ticket"] = address["status"] + 4 * TICKET
    for name, value in {**address, **_numbers(a, operands.factor, tiles, out, stage_keys)}.items():
        params[name] = value
    report = simulate(
        build.ptx,
        ENTRY,
        ctas,
        512,
        [params.tobytes()],
        shared_bytes=shared_bytes(build),
        seed=seed,
        memory=memory,
        **options,
    )
    return Attention(out, **rows, report=report, p=p if build.hooks else None, p_top=top if build.hooks else None)


INACTIVE = {"lse": -np.inf, "m": -np.inf, "l": 0.0}
"""What padding rows hold."""


def _numbers(a: Arguments, factor: float, tiles: int, out: NDArray[Any], stage_keys: int) -> dict[str, Any]:
    c = float(a.softmax_constant)
    usual = 2.0**-100 <= c <= 2.0**100 and factor == 1.0
    return {
        "max_tiles": tiles,
        "num_tokens": out.shape[0],
        "out_token_stride": out.strides[0],
        "out_head_stride": out.strides[1],
        "c": c,
        "inverse_c": 1 / c if usual else 0.0,
        "score_factor": factor,
        "usual": usual,
        "group": a.q.shape[1] // a.k.shape[1],
        "causal": a.causal,
        "element": ELEMENTS[out.dtype],
        "stage_keys": stage_keys,
    }


def shared_bytes(build: Build) -> int:
    """Dynamic shared memory that the build's source asks for."""
    found = [line for line in build.ptx.splitlines() if f" {ENTRY}_shared_bytes" in line]
    return int(found[0].split("=")[1].strip(" ;"))


@dataclass(frozen=True)
class ForwardCase:
    """The kernel on two documents with grouped heads, for ``flamia simulate``."""

    build: Build
    name: str
    summary: str = "attention forward of documents of 130 and 33 tokens, two query heads of one KV head"
    lengths: tuple[int, ...] = (130, 33)
    heads: tuple[int, int] = (2, 1)

    @property
    def target(self) -> Target:
        """For which it is compiled."""
        return self.build.target

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Warps by role."""
        return ROLES

    def draw(self, seed: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """q, k, v and cu_seqlens; and what out, m and l must be."""
        rng = np.random.default_rng(seed)
        total, (hq, hkv) = sum(self.lengths), self.heads
        q, k, v = (rng.standard_normal((total, h, self.build.dim), np.float32).astype(bfloat16) for h in (hq, hkv, hkv))
        boundaries = np.concatenate([[0], np.cumsum(self.lengths)])
        inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens": boundaries}
        expected = attention_forward(**inputs, recipe=self.build.recipe, profile="blackwell")
        return inputs, {"out": expected.out, "m": expected.m, "l": expected.l}

    def simulate(self, seed: int = 0, **options: Any) -> tuple[Report, Data]:
        """Run once.

        :raises Fault: for a rule of PTX that the kernel breaks.
        """
        inputs, expected = self.draw(seed)
        operands = Operands.of(**inputs, recipe=self.build.recipe, causal=True)
        got = run_forward(self.build, operands, seed=seed, **options)
        return got.report, Data([], {name: (getattr(got, name), x) for name, x in expected.items()})


def forward_cases() -> dict[str, ForwardCase]:
    """By recipe, head_dim and target."""
    builds = [Build(recipe, dim, target) for recipe in ("mxfp8", "nvfp4_fp8") for dim in (128, 64) for target in CHIPS]
    names = [f"{b.recipe}_{b.dim}_{b.target.name}" for b in builds]
    return {name: ForwardCase(build, name) for name, build in zip(names, builds, strict=True)}


__all__ = ["Attention", "Build", "ForwardCase", "Operands", "forward_cases", "run_forward", "sources"]
