"""One instruction form applied to many operands, a lane each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flamia.conformance.simulator import simulate

WIDTH = {
    **{f"{k}{b}": b for k in "bus" for b in (8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "pred": 1},
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2"), 32),
    "f32x2": 64,
}


def apply(form: str, result: str, *operands: tuple[str, Sequence[int]], target: str = "sm_100a") -> list[int]:
    """The result of ``form`` for every index of the operands.

    :param form: an opcode, or text with ``$d`` and ``$a``, ``$b``, ...
    :param result: its type; operands likewise are a type and their bits.
    :returns: bits of the results, as unsigned integers; of a predicate 0 or 1.
    """
    count = len(operands[0][1])
    letters = "abcefg"[: len(operands)]
    text = form if "$" in form else f"{form} $d, {', '.join('$' + x for x in letters)};"
    for letter in ("d", *letters):
        text = text.replace(f"${letter}", f"%v{letter}")
    lines = [".reg .pred %p<4>;", ".reg .b32 %r<6>;", ".reg .b64 %rd<20>;", f".reg .{_register(result)} %vd;"]
    lines += ["mov.u32 %r1, %tid.x;", "mov.u32 %r2, %ctaid.x;", "mad.lo.u32 %r3, %r2, 128, %r1;"]
    lines += ["ld.param.u32 %r4, [count];", "setp.ge.u32 %p1, %r3, %r4;", "@%p1 ret;"]
    buffers = []
    for i, (letter, (kind, bits)) in enumerate(zip(letters, operands, strict=True)):
        assert len(bits) == count
        size = max(WIDTH[kind], 8) // 8
        buffers.append(np.array([int(b) % (1 << 8 * size) for b in bits], f"u{size}"))
        lines += [f".reg .{_register(kind)} %v{letter};", f"ld.param.u64 %rd{i}, [p{i}];"]
        lines += [f"mul.wide.u32 %rd10, %r3, {size};", f"add.u64 %rd{i}, %rd{i}, %rd10;"]
        if kind == "pred":
            lines += [f"ld.global.u8 %r5, [%rd{i}];", f"setp.ne.u32 %v{letter}, %r5, 0;"]
        else:
            lines += [f"ld.global.b{8 * size} %v{letter}, [%rd{i}];"]
    size = max(WIDTH[result], 8) // 8
    out = np.full(count, (1 << 8 * size) - 1, f"u{size}")
    lines += ["ld.param.u64 %rd11, [out];", f"mul.wide.u32 %rd10, %r3, {size};", "add.u64 %rd11, %rd11, %rd10;", text]
    if result == "pred":
        lines += ["selp.u32 %r5, 1, 0, %vd;", "st.global.u8 [%rd11], %r5;"]
    else:
        lines += [f"st.global.b{8 * size} [%rd11], %vd;"]
    parameters = ", ".join([*(f".param .u64 p{i}" for i in range(len(operands))), ".param .u64 out, .param .u32 count"])
    body = "\n".join(lines)
    ptx = f".version 9.0\n.target {target}\n.address_size 64\n.visible .entry k({parameters})\n{{\n{body}\nret;\n}}\n"
    simulate(ptx, "k", -(-count // 128), 128, [*buffers, out, count])
    return [int(v) for v in out]


def _register(kind: str) -> str:
    return "pred" if kind == "pred" else f"b{max(WIDTH[kind], 16)}"


def assert_bits(form: str, got: Sequence[int], expected: Sequence[int], *operands: Sequence[int]) -> None:
    """Equal; names the first operands that are not."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g != e:
            inputs = ", ".join(f"{int(o[i]):#x}" for o in operands)
            raise AssertionError(f"{form} of {inputs}: {g:#x}, expected {e:#x}")


def crossed(first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
    """Every pair."""
    return [a for a in first for _ in second], [b for _ in first for b in second]


def random_bits(width: int, count: int, seed: int) -> list[int]:
    """Random integers of ``width`` bits, half of them small."""
    rng = np.random.default_rng(seed)
    wide = [int.from_bytes(rng.bytes(width // 8), "little") for _ in range(count)]
    return [w >> int(rng.integers(0, width)) if i % 2 else w for i, w in enumerate(wide)]


def corners(width: int) -> list[int]:
    """Integers around the ends and the powers of two."""
    top = 1 << width
    near = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256]
    near += [top - n for n in (1, 2, 3, 8)] + [top // 2 + n for n in (-2, -1, 0, 1)] + [0x12345678, 0xDEADBEEF]
    return sorted({n % top for n in near})


def signed(value: int, width: int) -> int:
    """Two's complement."""
    value %= 1 << width
    return value - (1 << width) if value >> (width - 1) else value
