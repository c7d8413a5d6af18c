"""Operations of a whole warp, with full and partial member masks, and divergent control flow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.agreement.case import Kernel, Output
from flamia.conformance.simulator.agreement.operands import words

THREADS = 256
KINDS = {"u32": np.uint32, "u64": np.uint64}


def _rows(name: str, family: str, rows: list[tuple[str, str]], inputs: Any, kind: str = "u32") -> Kernel:
    """Blocks of code that each set ``d`` from the thread's words ``a`` and ``b``, one row of the output each."""
    body = "\n".join(
        f"  {{ {kind} d = 0; {code}\n    D[{row} * {THREADS} + i] = d; }}" for row, (_, code) in enumerate(rows)
    )
    source = (
        f'extern "C" __global__ void __launch_bounds__({THREADS}) kernel(const u32* A, const u32* B, {kind}* D) {{\n'
        f"  int i = threadIdx.x; u32 lane = i & 31, a = A[i], b = B[i];\n{body}\n}}\n"
    )
    labels = tuple(label for label, _ in rows)
    output = Output("d", (len(rows), THREADS), KINDS[kind], labels)
    return Kernel(name, family, source, inputs, (output,), threads=THREADS)


def few(rng: np.random.Generator) -> NDArray[np.uint32]:
    """Words of few values, so that lanes match; the last warps all alike."""
    out = rng.integers(0, 4, THREADS, np.uint32) * np.uint32(0x10000001)
    out[-64:] = 7
    return out


INPUTS = {"a": words(THREADS), "b": words(THREADS)}
MATCHING = {"a": few, "b": words(THREADS)}


def _partial(code: str) -> str:
    """The code under a branch that only lanes 3, 4, 8..23 and 31 take; ``m`` is their mask."""
    return f"const u32 m = 0x80ffff18u; if (m >> lane & 1) {{ {code} }}"


def _full(code: str) -> str:
    return f"const u32 m = 0xffffffffu; {code}"


def _asm(text: str, *inputs: str) -> str:
    listed = ", ".join(f'"r"((u32)({x}))' for x in inputs)
    return f'asm volatile("{text}" : "=r"(d) : {listed});'


def _shuffle(mode: str, lanes: str, clamp: str) -> str:
    text = f"{{.reg .pred p; .reg .b32 t; shfl.sync.{mode}.b32 t|p, %1, %2, %3, %4; selp.b32 %0, t, 0xdead, p;}}"
    return _asm(text, "a", lanes, clamp, "m")


def _shuffles() -> list[tuple[str, str]]:
    rows = []
    for mode, clamp in (
        ("up", 0x0000),
        ("down", 0x1F),
        ("bfly", 0x1F),
        ("idx", 0x1F),
        ("up", 0x1800),
        ("down", 0x181F),
        ("bfly", 0x1C1F),
        ("idx", 0x101F),
        ("idx", 0x1818),
    ):
        for lanes in ("1u", "5u", "b & 31"):
            rows.append((f"shfl.{mode} {lanes} clamp 0x{clamp:x}", _full(_shuffle(mode, lanes, f"{clamp}u"))))
    rows.append(("shfl.idx among some lanes", _partial(_shuffle("idx", "lane < 8 ? 4u : 31u", "31u"))))
    return rows


def _votes() -> list[tuple[str, str]]:
    rows = []
    for wrap, which in ((_full, "all lanes"), (_partial, "some lanes")):
        for condition in ("%1 & 1", "lane < 40"):
            value = "a & 1" if condition == "%1 & 1" else "lane < 40"
            for mode in ("all", "any", "uni"):
                text = (
                    f"{{.reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.{mode}.pred q, p, %2; selp.b32 %0, 1, 0, q;}}"
                )
                rows.append((f"vote.{mode}, {which}, {value}", wrap(_asm(text, value, "m"))))
            text = "{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2;}"
            rows.append((f"vote.ballot, {which}, {value}", wrap(_asm(text, value, "m"))))
    return rows


def _matches() -> list[tuple[str, str]]:
    all_text = "{.reg .pred p; .reg .b32 t; match.all.sync.b32 t|p, %1, %2; selp.b32 %0, t, 0xdead, p;}"
    rows = []
    for wrap, which in ((_full, "all lanes"), (_partial, "some lanes")):
        rows.append((f"match.any, {which}", wrap(_asm("match.any.sync.b32 %0, %1, %2;", "a", "m"))))
        rows.append((f"match.all, {which}", wrap(_asm(all_text, "a", "m"))))
        wide = (
            'u64 w = (u64)a << 32 | (b & 1); asm volatile("match.any.sync.b64 %0, %1, %2;" : "=r"(d) : "l"(w), "r"(m));'
        )
        rows.append((f"match.any.b64, {which}", wrap(wide)))
    return rows


def _reductions() -> list[tuple[str, str]]:
    rows = []
    for wrap, which in ((_full, "all lanes"), (_partial, "some lanes")):
        for form in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"):
            rows.append((f"redux.{form}, {which}", wrap(_asm(f"redux.sync.{form} %0, %1, %2;", "a", "m"))))
    return rows


ELECT = "{.reg .pred p; .reg .b32 t; elect.sync t|p, %1; selp.b32 %0, 0x100, 0, p; or.b32 %0, %0, t;}"
LANES = [
    ("elect, all lanes", _full(_asm(ELECT, "m"))),
    ("elect, some lanes", _partial(_asm(ELECT, "m"))),
    *(
        (name, f'asm volatile("mov.u32 %0, %%{name};" : "=r"(d));')
        for name in ("laneid", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt")
    ),
    ("tid and ntid", "d = threadIdx.x + 1000 * blockDim.x + 100000 * gridDim.x;"),
    ("bar.warp.sync", "__shared__ u32 s[256]; s[i] = a; __syncwarp(); d = s[i ^ 9]; __syncwarp();"),
]

DIVERGENCE = [
    ("collatz", "u32 x = a & 0xffff | 1; while (x != 1) { x = x & 1 ? 3 * x + 1 : x >> 1; d += 1; }"),
    (
        "nested loops",
        "for (u32 y = 0; y < (a & 7); ++y) { for (u32 x = y; x < (b & 15); ++x) { if (x * y == 12) break;"
        " if ((x ^ y) & 1) continue; d = d * 33 + x + y; } }",
    ),
    (
        "early exit of some lanes",
        "u32 x = b; for (int k = 0; k < 100; ++k) { x = x * 1664525 + 1013904223;"
        " if ((x >> 24) == (a & 0xff)) { d = k; goto done1; } } d = x; done1:;",
    ),
    (
        "chain of conditions",
        "switch (a % 7) { case 0: d = b * 3; break; case 1: d = b >> (a & 3); case 2: d += 17; break;"
        " case 4: for (u32 k = 0; k < (b & 31); ++k) d ^= k * b; break; case 5: d = __popc(b); break;"
        " default: d = ~b; }",
    ),
    (
        "shuffle after divergence",
        "u32 x = a; if (lane & 1) { for (u32 k = 0; k < lane; ++k) x = x * 31 + k; } __syncwarp();"
        " d = __shfl_xor_sync(~0u, x, 3);",
    ),
    (
        "ballots in a loop",
        "u32 left = ~0u; u32 x = a & 63; while (true) { u32 w = __ballot_sync(~0u, x > 0); if (!w) break;"
        " d += __popc(w) * (lane + 1); if (x) x = x > 3 ? x - 3 : 0; } d += left;",
    ),
    (
        "a call per lane",
        "struct F { static __device__ __noinline__ u32 f(u32 x, u32 n) { u32 r = x; for (u32 k = 0; k < n; ++k)"
        " r = r * 5 + k; return r; } }; if (a & 2) d = F::f(a, b & 15); else d = F::f(b, a & 7) + 1;",
    ),
]

KERNELS = (
    _rows("shuffles", "warps", _shuffles(), INPUTS),
    _rows("votes", "warps", _votes(), INPUTS),
    _rows("matches", "warps", _matches(), MATCHING),
    _rows("reductions", "warps", _reductions(), INPUTS),
    _rows("lanes", "warps", LANES, INPUTS),
    _rows("divergence", "control flow", DIVERGENCE, INPUTS),
    Kernel("exits", "control flow", "", {"a": words(256)}, (Output("d", (5, 256), np.uint32),), threads=256),
)
