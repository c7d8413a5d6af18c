"""Kernels that apply single instructions to every element, each form into a row of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flamia.conformance.simulator.agreement.case import Draw, Kernel, Output

TYPES: dict[str, tuple[str, str, Any]] = {
    "u16": ("u16", "h", np.uint16),
    "u32": ("u32", "r", np.uint32),
    "u64": ("u64", "l", np.uint64),
    "f32": ("float", "f", np.float32),
}
"""Name -> C++ type, constraint of inline PTX, NumPy type."""


def compare_forms(opcodes: Sequence[str], kind: str) -> tuple[str, ...]:
    """``setp`` forms of a type, each turned into 0 or 1."""
    return tuple(f"{{.reg .pred p; setp.{o}.{kind} p, $a, $b; selp.b32 $d, 1, 0, p;}}" for o in opcodes)


def elementwise(
    name: str, family: str, operands: dict[str, Draw], result: str, forms: Sequence[str], *, exact: bool = True
) -> Kernel:
    """A kernel with one row of its output per form.

    :param operands: type -> draw for each operand, in order; a type that occurs twice is spelled ``u32.1``.
    :param forms: an opcode (``add.rn.f32``), whose operands follow in order, or PTX text with ``$d``, ``$a``, ``$b``,
        ``$c`` for the result and the operands.
    """
    letters = "abc"[: len(operands)]
    kinds = [key.partition(".")[0] for key in operands]
    inputs = dict(zip(letters, operands.values(), strict=True))
    n = next(iter(operands.values()))(np.random.default_rng(0)).size
    c_type, constraint, dtype = TYPES[result]
    lines = []
    for row, form in enumerate(forms):
        text = form if "$" in form else f"{form} $d, {', '.join('$' + x for x in letters)};"
        used = [x for x in letters if f"${x}" in text]
        for place, letter in enumerate(["d", *used]):
            text = text.replace(f"${letter}", f"%{place}")
        sources = ", ".join(f'"{TYPES[kinds[letters.index(x)]][1]}"({x})' for x in used)
        lines.append(f'  asm volatile("{text}" : "={constraint}"(d) : {sources}); D[{row}L * {n} + i] = d;')
    parameters = ", ".join(f"const {TYPES[k][0]}* {x.upper()}" for x, k in zip(letters, kinds, strict=True))
    loads = " ".join(f"{TYPES[k][0]} {x} = {x.upper()}[i];" for x, k in zip(letters, kinds, strict=True))
    source = "\n".join(
        [
            f'extern "C" __global__ void __launch_bounds__(128) kernel({parameters}, {c_type}* D) {{',
            f"  int i = blockIdx.x * 128 + threadIdx.x; if (i >= {n}) return;",
            f"  {loads} {c_type} d;",
            *lines,
            "}",
        ]
    )
    output = Output("d", (len(forms), n), dtype, tuple(forms))
    return Kernel(name, family, source, inputs, (output,), blocks=-(-n // 128), exact=exact)
