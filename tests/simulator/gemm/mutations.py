"""Faults planted in the example GEMM: each is a change of its text, and what must be found."""

from __future__ import annotations

from dataclasses import dataclass

from flamia.conformance.simulator.case import Case
from flamia.conformance.simulator.examples.gemm import SOURCE, Variant, gemm_case

K_MAJOR = Variant()
B_MN = Variant(b_mn=True, sfb_route="registers")
TABLE = Variant(a_mn=True, sfb_route="table")
NVFP4 = Variant(nvfp4=True)

WRONG_BYTES = "wrong bytes"


@dataclass(frozen=True)
class Mutation:
    """One planted fault.

    :param change: pairs of texts: what is in the source, once, and what takes its place.
    :param found: kinds of faults, or `WRONG_BYTES`; each seed must give one of them, or pass.
    :param says: a word of the fault's message.
    :param always: every seed must find it; otherwise one seed of a few must.
    """

    name: str
    change: tuple[tuple[str, str], ...]
    found: tuple[str, ...]
    says: str = ""
    variant: Variant = K_MAJOR
    always: bool = True

    def case(self) -> Case:
        """The GEMM with the fault.

        :raises ValueError: if a text is not there exactly once.
        """
        source = SOURCE.read_text(encoding="utf-8")
        for old, new in self.change:
            if source.count(old) != 1:
                raise ValueError(f"mutation {self.name}: {old!r} is {source.count(old)} times in the source, not once")
            source = source.replace(old, new)
        return gemm_case(self.variant, source)


def _mutation(name: str, old: str, new: str, *found: str, **rest: object) -> Mutation:
    return Mutation(name, ((old, new),), found, **rest)  # type: ignore[arg-type]


MMA_LOOP = "for (u32 step = 0; step < 4; ++step) {"
MULTIPLY_WAITS = "wait(full + 8 * s, phase);\n        for"

MUTATIONS = (
    # ---- waits and phases ----
    _mutation("products do not wait for their operands", MULTIPLY_WAITS, "for"),
    _mutation("loads do not wait for a free stage", "wait(empty + 8 * s, phase ^ 1);", ""),
    _mutation("D is read without waiting for the products", "wait(done, 0);", ""),
    _mutation("products do not wait for C", "wait(ready, 0);", ""),
    _mutation("phase of a full stage swapped", "wait(full + 8 * s, phase);", "wait(full + 8 * s, phase ^ 1);"),
    _mutation("phase of a free stage swapped", "wait(empty + 8 * s, phase ^ 1);", "wait(empty + 8 * s, phase);"),
    _mutation("phase of D swapped", "wait(done, 0);", "wait(done, 1);"),
    _mutation("D is never committed", "commit(done);", ""),
    _mutation("stages are never freed", "commit(empty + 8 * s);", ""),
    _mutation("D is committed before its products", "const u32 s = k % STAGES, phase = k / STAGES & 1, at = smem + s * STAGE;\n"
              "        wait", "const u32 s = k % STAGES, phase = k / STAGES & 1, at = smem + s * STAGE;\n"
              "        if (k + 1 == tiles) commit(done);\n        wait"),
    # ---- bytes and counts ----
    _mutation("16 bytes too many expected", "arrive_expect(bar, LOADED);", "arrive_expect(bar, LOADED + 16);"),
    _mutation("16 bytes too few expected", "arrive_expect(bar, LOADED);", "arrive_expect(bar, LOADED - 16);"),
    _mutation("half a tile of B loaded", "load(at + TILE, B + k * TILE, TILE, bar);",
              "load(at + TILE, B + k * TILE, TILE / 2, bar);"),
    _mutation("a count of 127 for 128 arrivals", "init(ready, 128);", "init(ready, 127);"),
    _mutation("a count of 129 for 128 arrivals", "init(ready, 128);", "init(ready, 129);"),
    _mutation("barriers used before they are there", "  before_sync();\n  __syncthreads();\n  after_sync();\n  const u32 t",
              "  const u32 t"),
    _mutation("a tile too many", "for (u32 k = 0; k < tiles; ++k) {\n        const u32 s = k % STAGES, phase = k / STAGES & 1, "
              "at = smem + s * STAGE, bar", "for (u32 k = 0; k <= tiles; ++k) {\n        const u32 s = k % STAGES, "
              "phase = k / STAGES & 1, at = smem + s * STAGE, bar"),
    _mutation("a load of 8 bytes off", "load(at, A + k * TILE, TILE, bar);", "load(at + 8, A + k * TILE, TILE, bar);"),
    # ---- fences ----
    _mutation("D leaves without a proxy fence", "    fence_async_proxy();\n    asm", "    asm"),
    _mutation("the scale table without a proxy fence", "0x01010101u;\n      fence_async_proxy();", "0x01010101u;",
              variant=TABLE),
    _mutation("no fence after the wait for D", "wait(done, 0);\n    after_sync();", "wait(done, 0);"),
    _mutation("no fence after the wait for C", "wait(ready, 0);\n      after_sync();", "wait(ready, 0);"),
    _mutation("no fence before the arrival for C", "    before_sync();\n    arrive(ready);", "    arrive(ready);"),
    _mutation("no wait for the stores of C", "    wait_st();\n", ""),
    _mutation("no wait for the loads of D", "      wait_ld();\n", ""),
    _mutation("a CTA ends before D has left", "      store_wait();\n", ""),
    # ---- descriptors ----
    _mutation("stride offset of an operand halved", "STRIDE_OFFSET = 1024", "STRIDE_OFFSET = 512"),
    _mutation("stride offset of the scales doubled", "SCALE_STRIDE = 128", "SCALE_STRIDE = 256"),
    _mutation("64-byte swizzle", "SWIZZLE_128 = 2ull << 61", "SWIZZLE_128 = 4ull << 61"),
    _mutation("no version in the descriptor", "VERSION = 1ull << 46", "VERSION = 0"),
    _mutation("K steps of 64 bytes", "B_STEP = B_MN ? 32 * 128 : 32", "B_STEP = B_MN ? 32 * 128 : 64"),
    _mutation("K steps of K-major for MN-major", "B_STEP = B_MN ? 32 * 128 : 32", "B_STEP = 32", variant=B_MN),
    _mutation("operands 16 bytes past the swizzle's start", "STAGE = 2 * TILE + 2 * SF_TILE;", "STAGE = 2 * TILE + 2 * SF_TILE + 16;"),
    # ---- instruction descriptor ----
    _mutation("scale id of A stays 0", "step << 29 |", "0 |"),
    _mutation("scale id of B stays 0", "(SFB_ROUTE == 0 ? step : 0) << 4", "0"),
    _mutation("N of 64", "128u >> 3 << 17", "64u >> 3 << 17"),
    _mutation("M of 64", "128u >> 4 << 24", "64u >> 4 << 24"),
    _mutation("E5M2 for A", ": 1u << 23;", ": 1u << 23 | 1u << 7;"),
    _mutation("scales of UE4M3 for MXFP8", ": 1u << 23;", ": 0;"),
    _mutation("majors forgotten", "IDESC = TYPES | SHAPE | MAJORS", "IDESC = TYPES | SHAPE", variant=B_MN),
    _mutation("MN-major NVFP4", "MAJORS = A_MN << 15 | B_MN << 16", "MAJORS = 1u << 16", variant=NVFP4),
    _mutation("reserved bit 31 set", "IDESC = TYPES | SHAPE | MAJORS", "IDESC = TYPES | SHAPE | MAJORS | 1u << 31"),
    # ---- tensor memory ----
    _mutation("scales inside D", "SCALE_COLUMN = 128", "SCALE_COLUMN = 64"),
    _mutation("D outside its columns", "COLUMNS = 256, D_COLUMN = 0", "COLUMNS = 64, D_COLUMN = 0"),
    _mutation("100 columns", "COLUMNS = 256", "COLUMNS = 200"),
    _mutation("B's scales in one quadrant", "st4(mine + sfb_column(0), w[0], w[1], w[2], w[3]);",
              "if (warp == 0) st4(mine + sfb_column(0), w[0], w[1], w[2], w[3]);", variant=B_MN),
    _mutation("the quadrant of another warp", "mine = t + (warp << 21)", "mine = t + ((warp ^ 1) << 21)"),
    _mutation("deallocated too early", "    __syncwarp();\n  } else if (warp == 5) {",
              "    __syncwarp();\n    dealloc(t, COLUMNS);\n  } else if (warp == 5) {"),
    _mutation("never deallocated", "    dealloc(t, COLUMNS);\n", ""),
    _mutation("C is not accumulated", "t + sfb_column(s) + column, 1);", "t + sfb_column(s) + column, step > 0);"),
    _mutation("one scale table for both stages", "SCALE_COLUMN + 32 * stage; }\nDEVICE u32 sfb", "SCALE_COLUMN; }\nDEVICE u32 sfb"),
)  # fmt: skip
