"""Operations on bits: permutes, three-input logic, shifts and fields."""

from __future__ import annotations

import numpy as np

from flamia.conformance.simulator.agreement.case import Draw
from flamia.conformance.simulator.agreement.elementwise import elementwise
from flamia.conformance.simulator.agreement.operands import bits, counts, words

FAMILY = "bits"
N = 4096
WORDS = {"u32": words(N), "u32.1": words(N), "u32.2": words(N)}
COUNTED = {"u32": words(N), "u32.1": words(N), "u32.2": counts(N)}
PRMT = ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
TABLES = (0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x01, 0x6A, 0x3C, 0xD8, 0x1B, 0x00, 0xFF)


def up_to_255(size: int) -> Draw:
    """Positions and lengths up to 255. PTX says that only these eight bits count; what ptxas makes of the 64-bit forms
    looks at all 32 of the position."""
    return lambda rng: counts(size)(rng) & np.uint32(255)


KERNELS = (
    elementwise("prmt", FAMILY, WORDS, "u32", [f"prmt.b32{m}" for m in PRMT]),
    elementwise("lop3", FAMILY, WORDS, "u32", [f"lop3.b32 $d, $a, $b, $c, {t};" for t in TABLES]),
    elementwise(
        "logic",
        FAMILY,
        WORDS,
        "u32",
        [
            "and.b32 $d, $a, $b;",
            "or.b32 $d, $a, $b;",
            "xor.b32 $d, $a, $b;",
            "not.b32 $d, $a;",
            "cnot.b32 $d, $a;",
            "{.reg .pred p, q; setp.lt.and.s32 p, $a, $b, 1; setp.gt.xor.u32 q, $a, $c, p; selp.b32 $d, $a, $b, q;}",
            "slct.b32.s32",
        ],
    ),
    elementwise("funnel_shifts", FAMILY, COUNTED, "u32", [f"shf.{d}.{m}.b32" for d in "lr" for m in ("wrap", "clamp")]),
    elementwise("shifts", FAMILY, {"u32": words(N), "u32.1": counts(N)}, "u32", ["shl.b32", "shr.u32", "shr.s32"]),
    elementwise(
        "wide_shifts",
        FAMILY,
        {"u64": lambda rng: words(2 * N)(rng).view("u8"), "u32": counts(N)},
        "u64",
        ["shl.b64", "shr.u64", "shr.s64"],
    ),
    elementwise(
        "fields",
        FAMILY,
        {"u32": words(N), "u32.1": counts(N), "u32.2": counts(N)},
        "u32",
        [
            "bfe.u32",
            "bfe.s32",
            "bfi.b32 $d, $a, $c, $b, $c;",
            "bfi.b32 $d, 0x12345678, $a, $b, $c;",
            "bmsk.clamp.b32 $d, $b, $c;",
            "bmsk.wrap.b32 $d, $b, $c;",
            "szext.clamp.s32 $d, $a, $b;",
        ],
    ),
    elementwise(
        "wide_fields",
        FAMILY,
        {"u64": lambda rng: words(2 * N)(rng).view("u8"), "u32": up_to_255(N), "u32.1": up_to_255(N)},
        "u64",
        ["bfe.u64", "bfe.s64", "bfi.b64 $d, 0x123456789ABCDEF0, $a, $b, $c;"],
    ),
    elementwise(
        "counting",
        FAMILY,
        {"u32": bits(32, 1, 0, N)},
        "u32",
        ["popc.b32", "clz.b32", "brev.b32", "bfind.u32", "bfind.s32", "bfind.shiftamt.u32"],
    ),
    elementwise("wide_counting", FAMILY, {"u64": bits(64, 1, 0, N)}, "u32", ["popc.b64", "clz.b64", "bfind.u64"]),
)
