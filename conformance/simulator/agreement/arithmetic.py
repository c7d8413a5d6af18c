"""FP32, 16-bit and integer arithmetic."""

from __future__ import annotations

from itertools import product

from flamia.conformance.simulator.agreement.case import Array, Draw
from flamia.conformance.simulator.agreement.elementwise import compare_forms, elementwise
from flamia.conformance.simulator.agreement.operands import (
    BF16_CORNERS,
    F16_CORNERS,
    bits,
    f32,
    pairs16,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")


def _f32(opcode: str, saturating: bool = True) -> list[str]:
    suffixes = ["", ".ftz", *([".sat", ".ftz.sat"] if saturating else [])]
    return [f"{opcode}.{r}{s}.f32" for r, s in product(ROUNDINGS, suffixes)]


ONE = {"f32": f32(1, 0, 4096)}
TWO = {"f32": f32(2, 0), "f32.1": f32(2, 1)}
THREE = TWO | {"f32.2": f32(3, 2)}
U32_TWO = {"u32": bits(32, 2, 0), "u32.1": bits(32, 2, 1)}
U32_THREE = U32_TWO | {"u32.2": bits(32, 3, 2)}
U64_TWO = {"u64": bits(64, 2, 0), "u64.1": bits(64, 2, 1)}


def _halves(corners: Array, operands: int) -> dict[str, Draw]:
    return {f"u32.{i}": pairs16(corners, operands, i) for i in range(operands)}


ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
MINMAX = [f"{o}{s}.f32" for o, s in product(("min", "max"), ("", ".ftz", ".NaN", ".ftz.NaN", ".NaN.xorsign.abs"))]

KERNELS = (
    elementwise("f32_add", "FP32", TWO, "f32", _f32("add")),
    elementwise("f32_sub", "FP32", TWO, "f32", _f32("sub")),
    elementwise("f32_mul", "FP32", TWO, "f32", _f32("mul")),
    elementwise("f32_fma", "FP32", THREE, "f32", _f32("fma")),
    elementwise("f32_div", "FP32", TWO, "f32", _f32("div", saturating=False)),
    elementwise("f32_rcp_sqrt", "FP32", ONE, "f32", [*_f32("rcp", False), *_f32("sqrt", False)]),
    elementwise("f32_min_max", "FP32", TWO, "f32", MINMAX),
    elementwise(
        "f32_signs",
        "FP32",
        TWO,
        "f32",
        ["abs.f32 $d, $a;", "abs.ftz.f32 $d, $a;", "neg.f32 $d, $a;", "neg.ftz.f32 $d, $a;", "copysign.f32"],
    ),
    elementwise(
        "f32_compare",
        "FP32",
        TWO,
        "u32",
        [*compare_forms(ORDERED + UNORDERED, "f32"), *compare_forms(("lt", "gtu", "eq", "nan"), "ftz.f32")],
    ),
    elementwise(
        "f16x2_arithmetic",
        "FP16 and BF16",
        _halves(F16_CORNERS, 3),
        "u32",
        [
            "add.rn.f16x2 $d, $a, $b;",
            "add.rn.ftz.sat.f16x2 $d, $a, $b;",
            "sub.rn.f16x2 $d, $a, $b;",
            "mul.rn.f16x2 $d, $a, $b;",
            "mul.rn.ftz.f16x2 $d, $a, $b;",
            "fma.rn.f16x2",
            "fma.rn.ftz.f16x2",
            "fma.rn.relu.f16x2",
            "min.f16x2 $d, $a, $b;",
            "max.NaN.f16x2 $d, $a, $b;",
            "neg.f16x2 $d, $a;",
            "abs.f16x2 $d, $a;",
        ],
    ),
    elementwise(
        "bf16x2_arithmetic",
        "FP16 and BF16",
        _halves(BF16_CORNERS, 3),
        "u32",
        [
            "add.rn.bf16x2 $d, $a, $b;",
            "sub.rn.bf16x2 $d, $a, $b;",
            "mul.rn.bf16x2 $d, $a, $b;",
            "fma.rn.bf16x2",
            "fma.rn.relu.bf16x2",
            "min.bf16x2 $d, $a, $b;",
            "max.bf16x2 $d, $a, $b;",
            "max.NaN.bf16x2 $d, $a, $b;",
            "neg.bf16x2 $d, $a;",
            "abs.bf16x2 $d, $a;",
        ],
    ),
    elementwise(
        "s32_arithmetic",
        "integers",
        U32_THREE,
        "u32",
        [
            "add.s32 $d, $a, $b;",
            "add.sat.s32 $d, $a, $b;",
            "sub.s32 $d, $a, $b;",
            "sub.sat.s32 $d, $a, $b;",
            "mul.lo.s32 $d, $a, $b;",
            "mul.hi.s32 $d, $a, $b;",
            "mul24.lo.s32 $d, $a, $b;",
            "mad.lo.s32",
            "mad.hi.s32",
            "min.s32 $d, $a, $b;",
            "max.s32 $d, $a, $b;",
            "abs.s32 $d, $a;",
            "neg.s32 $d, $a;",
            "sad.s32",
        ],
    ),
    elementwise(
        "u32_arithmetic",
        "integers",
        U32_THREE,
        "u32",
        [
            "add.u32 $d, $a, $b;",
            "mul.hi.u32 $d, $a, $b;",
            "mad.lo.u32",
            "mad.hi.u32",
            "min.u32 $d, $a, $b;",
            "max.u32 $d, $a, $b;",
            "sad.u32",
            "add.u16x2 $d, $a, $b;",
            "min.u16x2 $d, $a, $b;",
            "max.u16x2 $d, $a, $b;",
            "min.s16x2 $d, $a, $b;",
            "max.s16x2 $d, $a, $b;",
            "dp4a.u32.u32",
            "dp4a.s32.s32",
        ],
    ),
    elementwise(
        "integer_division",
        "integers",
        U32_TWO,
        "u32",
        [f"{{.reg .u32 t; max.u32 t, $b, 1; {o}.{t} $d, $a, t;}}" for o in ("div", "rem") for t in ("u32", "s32")],
    ),
    elementwise(
        "integer_compare", "integers", U32_TWO, "u32", [*compare_forms(ORDERED, "s32"), *compare_forms(ORDERED, "u32")]
    ),
    elementwise(
        "wide_arithmetic",
        "integers",
        U32_TWO,
        "u64",
        [
            "mul.wide.u32",
            "mul.wide.s32",
            "{.reg .s64 t; cvt.s64.s32 t, $b; mad.wide.s32 $d, $a, $b, t;}",
            "{.reg .u64 t; cvt.u64.u32 t, $a; mad.wide.u32 $d, $a, $b, t;}",
        ],
    ),
    elementwise(
        "u64_arithmetic",
        "integers",
        U64_TWO,
        "u64",
        [
            "add.u64",
            "sub.s64",
            "mul.lo.u64",
            "mul.hi.u64",
            "mul.hi.s64",
            "min.s64",
            "max.u64",
            "and.b64",
            "or.b64",
            "xor.b64",
            "not.b64 $d, $a;",
            "neg.s64 $d, $a;",
            "abs.s64 $d, $a;",
        ],
    ),
    elementwise(
        "approximations",
        "approximations",
        ONE,
        "f32",
        [
            "ex2.approx.f32",
            "ex2.approx.ftz.f32",
            "lg2.approx.f32",
            "rcp.approx.ftz.f32",
            "rsqrt.approx.f32",
            "sqrt.approx.f32",
            "div.approx.f32 $d, 0f3F800000, $a;",
        ],
        exact=False,
    ),
)
