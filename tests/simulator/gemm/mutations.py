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
RACE = ("MissingTensorWait", "MissingTensorFence", "TensorRace", "TmemInFlight", "TmemUnwritten")
"""What an access to tensor memory out of order is called, by how far the other one has come."""


@dataclass(frozen=True)
class Mutation:
    """One planted fault.

    :param change: pairs of texts: what is in the source, once, and what takes its place.
    :param found: kinds of faults, or `WRONG_BYTES`; each seed must give one of them, or pass.
    :param says: a word of the fault's message.
    :param always: every seed finds it; otherwise a few seeds do.
    :param strict: what is wrong is only that PTX does not promise an order.
    """

    name: str
    change: tuple[tuple[str, str], ...]
    found: tuple[str, ...]
    says: str = ""
    variant: Variant = K_MAJOR
    always: bool = True
    strict: bool = False

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


MUTATIONS = (
    # ---- waits and phases ----
    _mutation("products do not wait for their operands", "wait(full + 8 * s, phase);", "", "Unobserved"),
    _mutation("loads do not wait for a free stage", "wait(empty + 8 * s, phase ^ 1);", "", "MbarrierOverrun"),
    _mutation("D is read without waiting for the products", "wait(done, 0);", "", *RACE),
    _mutation("products do not wait for C", "wait(ready, 0);", "", *RACE),
    _mutation("a wait without its loop", "@p bra done;\\n\\t\"\n      \"bra again;\\n\\tdone:",
              "@p bra done;\\n\\tdone:", "Unobserved", "MbarrierOverrun", *RACE, always=False),
    _mutation("phase of a full stage swapped", "wait(full + 8 * s, phase);", "wait(full + 8 * s, phase ^ 1);",
              "Deadlock", "Unobserved"),
    _mutation("phase of a free stage swapped", "wait(empty + 8 * s, phase ^ 1);", "wait(empty + 8 * s, phase);",
              "Deadlock"),
    _mutation("phase of D swapped", "wait(done, 0);", "wait(done, 1);", *RACE),
    _mutation("D is never committed", "commit(done);", "", "Deadlock"),
    _mutation("stages are never freed", "commit(empty + 8 * s);", "", "Deadlock"),
    Mutation("D is committed before its products", (("      commit(done);\n", ""), (
             "if (SFB_ROUTE == 2) copy_scales(t", "commit(done);\n      if (SFB_ROUTE == 2) copy_scales(t")), RACE),
    # ---- bytes and counts ----
    _mutation("16 bytes too many expected", "(bar, LOADED);", "(bar, LOADED + 16);", "ExpectTxMismatch",
              says="16 bytes less"),
    _mutation("16 bytes too few expected", "(bar, LOADED);", "(bar, LOADED - 16);", "ExpectTxMismatch",
              says="16 bytes more"),
    _mutation("half a tile of B loaded", "B + i * TILE, TILE, bar", "B + i * TILE, TILE / 2, bar",
              "ExpectTxMismatch", says="8192 bytes less"),
    _mutation("a count of 96 for 128 arrivals", "init(ready, 128);", "init(ready, 96);", *RACE),
    _mutation("a count of 129 for 128 arrivals", "init(ready, 128);", "init(ready, 129);", "Deadlock"),
    _mutation("barriers used before they are there", "  before_sync();\n  __syncthreads();\n  after_sync();\n  const",
              "  const", "UnwrittenRead"),
    _mutation("a tile too many", "i < tiles", "i <= tiles", "OutOfBounds"),
    _mutation("a load 8 bytes off", "load(at, A", "load(at + 8, A", "Misaligned"),
    # ---- fences ----
    _mutation("D leaves without a proxy fence", "    fence_async_proxy();\n    asm", "    asm", "MissingProxyFence"),
    _mutation("the scale table without a proxy fence", "0x01010101u;\n      fence_async_proxy();", "0x01010101u;",
              "MissingProxyFence", variant=TABLE),
    _mutation("no fence after the wait for D", "wait(done, 0);\n    after_sync();", "wait(done, 0);",
              "MissingTensorFence", says="after_thread_sync is missing"),
    _mutation("no fence after the wait for C", "wait(full + 8 * s, phase);\n        after_sync();",
              "wait(full + 8 * s, phase);", "MissingTensorFence", says="after_thread_sync is missing"),
    _mutation("no fence before the arrival for C", "    before_sync();\n    arrive(ready);", "    arrive(ready);",
              "MissingTensorFence", says="before_thread_sync is missing"),
    _mutation("no wait for the stores of C", "    wait_st();\n", "", "MissingTensorWait", says="wait::st is missing"),
    _mutation("no wait for the loads of D", "      wait_ld();\n", "", "RegisterInFlight", says="tcgen05.ld"),
    _mutation("a CTA ends before D has left", "      store_wait();\n", "", "UnterminatedCopy", always=False),
    # ---- matrix descriptors ----
    _mutation("stride offset of an operand halved", "STRIDE_OFFSET = 1024", "STRIDE_OFFSET = 512", WRONG_BYTES),
    _mutation("stride offset of the scales doubled", "SCALE_STRIDE = 128", "SCALE_STRIDE = 256", "Unobserved"),
    _mutation("64-byte swizzle", "SWIZZLE_128 = 2ull << 61", "SWIZZLE_128 = 4ull << 61", WRONG_BYTES),
    _mutation("no version in the descriptor", "VERSION = 1ull << 46", "VERSION = 0", "BadDescriptor", says="0b001"),
    _mutation("K steps of 64 bytes", "B_STEP = B_MN ? 32 * 128 : 32", "B_STEP = B_MN ? 32 * 128 : 64", "BadDescriptor"),
    _mutation("K steps of K-major for MN-major", "B_STEP = B_MN ? 32 * 128 : 32", "B_STEP = 32", WRONG_BYTES,
              variant=B_MN),
    _mutation("a stage that does not begin where its swizzle does", "STAGE = 2 * TILE + 2 * SF_TILE;",
              "STAGE = 2 * TILE + 2 * SF_TILE + 16;", "BadDescriptor"),
    # ---- instruction descriptor ----
    _mutation("scale id of A stays 0", "step << 29 |", "0 |", WRONG_BYTES),
    _mutation("scale id of B stays 0", "(SFB_ROUTE == 0 ? step : 0) << 4", "0", WRONG_BYTES),
    _mutation("scale ids of NVFP4 step", "NVF4 ? 0 : step << 29", "step << 29", "IllegalScaleId", variant=NVFP4),
    _mutation("N of 64", "128u >> 3 << 17", "64u >> 3 << 17", WRONG_BYTES),
    _mutation("M of 64", "128u >> 4 << 24", "64u >> 4 << 24", "IllegalShape", says="M of kind::mxf8f6f4"),
    _mutation("E5M2 for A", ": 1u << 23;", ": 1u << 23 | 1u << 7;", WRONG_BYTES),
    _mutation("scales of UE4M3 for MXFP8", ": 1u << 23;", ": 0;", "BadDescriptor", says="UE8M0"),
    _mutation("majors forgotten", "SHAPE | MAJORS;", "SHAPE;", "Unobserved", WRONG_BYTES, variant=B_MN),
    _mutation("MN-major NVFP4", "MAJORS = A_MN << 15 | B_MN << 16", "MAJORS = 1u << 16", "IllegalMajorness",
              says="must be K-major", variant=NVFP4),
    _mutation("bit 31 set", "SHAPE | MAJORS;", "SHAPE | MAJORS | 1u << 31;", "NotSimulated", says="bit 31"),
    _mutation("C is not accumulated", "+ column, 1);", "+ column, step > 0);", WRONG_BYTES),
    # ---- tensor memory ----
    _mutation("scales inside D", "SCALE_COLUMN = 128", "SCALE_COLUMN = 64", "Unpromised", strict=True),
    _mutation("D outside its columns", "COLUMNS = 256", "COLUMNS = 64", "TmemNotAllocated"),
    _mutation("200 columns", "COLUMNS = 256", "COLUMNS = 200", "TmemAllocation", says="power of two"),
    _mutation("B's scales in one quadrant", "      st4(mine", "      if (warp == 0) st4(mine", "TmemUnwritten",
              variant=B_MN),
    _mutation("B's scales differ between the quadrants", "sfb_column(0), w[0]", "sfb_column(0), w[0] ^ warp",
              "ScaleNotReplicated", variant=B_MN),
    _mutation("the quadrant of another warp", "(warp << 21)", "((warp ^ 1) << 21)", "TmemRange", says="must name lane"),
    _mutation("deallocated too early", "    __syncwarp();\n  } else if (warp == 5) {",
              "    __syncwarp();\n    dealloc(t, COLUMNS);\n  } else if (warp == 5) {", "TmemNotAllocated", *RACE),
    _mutation("never deallocated", "    dealloc(t, COLUMNS);\n", "", "TmemLeak"),
    _mutation("one scale table for both stages", "SCALE_COLUMN + 32 * stage; }\nDEVICE u32 sfb",
              "SCALE_COLUMN; }\nDEVICE u32 sfb", "Unpromised", strict=True),
)  # fmt: skip
