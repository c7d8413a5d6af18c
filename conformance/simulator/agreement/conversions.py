"""Conversions: to and from the narrow formats, the 16-bit formats and the integers."""

from __future__ import annotations

from flamia.conformance.simulator.agreement.elementwise import elementwise
from flamia.conformance.simulator.agreement.operands import F16_CORNERS, bits, every16, f32, pairs16

PAIR = {"f32": f32(2, 0, 4096), "f32.1": f32(2, 1, 4096)}
ONE = {"f32": f32(1, 0, 4096)}
NARROW = ("e4m3x2", "e5m2x2")


def _word(form: str, source: str = "$a, $b") -> str:
    """A conversion with a 16-bit result, widened to 32 bits."""
    return f"{{.reg .b16 t; {form} t, {source}; mov.b32 $d, {{t, t}};}}"


def _to_integer(kind: str) -> list[str]:
    modes = ("rni", "rzi", "rmi", "rpi", "rni.ftz", "rzi.sat")
    return [f"cvt.{mode}.{kind}.f32" for mode in modes]


def _narrow_integer(saturate: str, kind: str) -> str:
    """To fewer bits than a register has: the result is read back as the narrow type, sign or zero extended."""
    wide = "s32" if kind[0] == "s" else "u32"
    return f"{{.reg .{kind.replace('8', '16')} t; cvt{saturate}.{kind}.s32 t, $a; cvt.{wide}.{kind} $d, t;}}"


KERNELS = (
    elementwise(
        "f32_to_fp8",
        "conversions",
        PAIR,
        "u32",
        [_word(f"cvt.rn.satfinite{r}.{k}.f32") for k in NARROW for r in ("", ".relu")],
    ),
    elementwise(
        "f16_to_fp8",
        "conversions",
        {"u32": pairs16(F16_CORNERS, 2, 0, 4096)},
        "u32",
        [_word(f"cvt.rn.satfinite{r}.{k}.f16x2", "$a") for k in NARROW for r in ("", ".relu")],
    ),
    elementwise(
        "fp8_to_f16",
        "conversions",
        {"u16": every16},
        "u32",
        [f"cvt.rn{r}.f16x2.{k}" for k in NARROW for r in ("", ".relu")],
    ),
    elementwise(
        "f32_to_16_bit_pairs",
        "conversions",
        PAIR,
        "u32",
        [f"cvt.{m}{r}.{k}.f32" for k in ("f16x2", "bf16x2") for m in ("rn", "rz") for r in ("", ".relu")],
    ),
    elementwise(
        "f32_to_16_bit",
        "conversions",
        ONE,
        "u16",
        [
            "cvt.rn.f16.f32",
            "cvt.rz.f16.f32",
            "cvt.rm.f16.f32",
            "cvt.rp.f16.f32",
            "cvt.rn.ftz.f16.f32",
            "cvt.rn.sat.f16.f32",
            "cvt.rn.bf16.f32",
            "cvt.rz.bf16.f32",
            "cvt.rn.relu.bf16.f32",
        ],
    ),
    elementwise("16_bit_to_f32", "conversions", {"u16": every16}, "f32", ["cvt.f32.f16", "cvt.f32.bf16"]),
    elementwise("f32_to_s32", "conversions", ONE, "u32", [*_to_integer("s32"), *_to_integer("u32")]),
    elementwise("f32_to_s64", "conversions", ONE, "u64", [*_to_integer("s64"), *_to_integer("u64")]),
    elementwise(
        "integers_to_f32",
        "conversions",
        {"u32": bits(32, 1, 0, 4096)},
        "f32",
        [f"cvt.{m}.f32.{k}" for m in ("rn", "rz", "rm", "rp") for k in ("s32", "u32")],
    ),
    elementwise(
        "s64_to_f32",
        "conversions",
        {"u64": bits(64, 1, 0, 4096)},
        "f32",
        [f"cvt.{m}.f32.{k}" for m in ("rn", "rz", "rm", "rp") for k in ("s64", "u64")],
    ),
    elementwise(
        "f32_to_whole_f32",
        "conversions",
        ONE,
        "f32",
        [f"cvt.{m}.f32.f32" for m in ("rni", "rzi", "rmi", "rpi", "rni.ftz", "rmi.ftz", "rni.sat")],
    ),
    elementwise(
        "integers_to_integers",
        "conversions",
        {"u32": bits(32, 1, 0, 4096)},
        "u32",
        [_narrow_integer("", k) for k in ("s8", "u8", "s16", "u16")]
        + [_narrow_integer(".sat", k) for k in ("s8", "u8", "s16", "u16")]
        + ["cvt.sat.u32.s32", "cvt.sat.s32.u32"],
    ),
    elementwise(
        "integers_widened",
        "conversions",
        {"u32": bits(32, 1, 0, 1024)},
        "u64",
        ["cvt.u64.u32", "cvt.s64.s32", "cvt.sat.u64.s32"],
    ),
)
