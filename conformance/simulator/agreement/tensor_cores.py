"""wgmma: chains of one warpgroup, over sources, layouts, majors, sizes and formats.

The images of A and B in shared memory are random words, copied from global memory as they are: a wrong idea of a
descriptor or of a swizzle multiplies other numbers and shows. Accumulators are compared register by register.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from numpy.typing import NDArray

from flamia.conformance.simulator.agreement.case import Draw, Kernel, Output

TILES = 2
LAYOUT_CODES = {16: 0, 128: 1, 64: 2, 32: 3}
"""Bytes of a swizzle, 16 for none -> bits 62-63 of the descriptor."""
DTYPES: dict[str, Any] = {"bf16": bfloat16, "f16": np.float16, "e4m3": float8_e4m3fn, "e5m2": float8_e5m2}
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}


@dataclass(frozen=True)
class Operand:
    """One operand in shared memory.

    :param rows: M or N. :param kind: element format. :param width: bytes of the swizzle, 16 for none.
    :param mn_major: the contracted index runs over the rows of the swizzle, not along its bytes.
    """

    rows: int
    kind: str
    width: int
    mn_major: bool = False

    @property
    def steps(self) -> int:
        """K steps that an image holds: the bytes of one swizzle row, or 64 contracted rows."""
        return 4 if self.mn_major else max(1, self.width // 32)

    @property
    def image(self) -> int:
        """Bytes of the image."""
        return self.rows * BYTES[self.kind] * 64 if self.mn_major else self.rows * 32 * self.steps

    @property
    def leading(self) -> int:
        """Leading-dimension byte offset."""
        if self.mn_major:  # atoms of `width` bytes along MN follow one another after 64 contracted rows
            return 128 if self.width == 16 else 64 * self.width
        return 128

    @property
    def stride(self) -> int:
        """Stride-dimension byte offset."""
        if self.mn_major:  # without a swizzle, the roles of the two offsets are exchanged
            return 1024 if self.width == 16 else 8 * self.width
        return 256 if self.width == 16 else 8 * self.width

    @property
    def advance(self) -> int:
        """Bytes from one K step to the next."""
        if self.mn_major:
            return 256 if self.width == 16 else 16 * self.width
        return 32

    @property
    def constant(self) -> int:
        """The descriptor without its address."""
        return self.leading >> 4 << 16 | self.stride >> 4 << 32 | LAYOUT_CODES[self.width] << 62


def values(kind: str, words: int, spread: str) -> Draw:
    """Random operands as 32-bit words: ``wide`` over 16 binades, half of them zero if ``sparse``; ``special`` with
    infinities and NaN in a few places."""

    def draw(rng: np.random.Generator) -> NDArray[np.uint32]:
        count = words * 4 // BYTES[kind]
        x = rng.standard_normal(count, np.float32)
        if spread != "normal":
            x *= np.exp2(rng.integers(-7, 6, count)).astype(np.float32)
        if spread == "sparse":
            x *= rng.random(count) < 0.5
        if spread == "special":
            x[rng.integers(0, count, 3)] = np.nan
            x[rng.integers(0, count, 3)] = np.inf
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(DTYPES[kind]).view(np.uint32)

    return draw


def accumulators(count: int, significant_bits: int) -> Draw:
    """Random C, cut to so many significant bits."""

    def draw(rng: np.random.Generator) -> NDArray[np.float32]:
        bits = (rng.standard_normal(count, np.float32) * np.float32(4)).view(np.uint32)
        return (bits & np.uint32(0xFFFFFFFF << (24 - significant_bits) & 0xFFFFFFFF)).view(np.float32)

    return draw


SOURCE = """\
extern "C" __global__ void __launch_bounds__(128) kernel(const u32* A, const u32* B, const float* C, float* D) {{
  extern __shared__ __align__(1024) u32 s[];
  int i = threadIdx.x; long tile = blockIdx.x; u32 at = shared_address(s);
  float d[{registers}];
  for (int r = 0; r < {registers}; ++r) d[r] = C[(tile * {registers} + r) * 128 + i];
  for (int chunk = 0; chunk < {chunks}; ++chunk) {{
    __syncthreads();
    const u32* a = A + (tile * {chunks} + chunk) * {a_words}; const u32* b = B + (tile * {chunks} + chunk) * {b_words};
    {copy_a}for (int k = i; k < {b_words}; k += 128) s[{b_start} + k] = b[k];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    u64 da = 0x{a_constant:x}ull | (at & 0x3ffff) >> 4, db = 0x{b_constant:x}ull | ((at + {b_bytes}) & 0x3ffff) >> 4;
    {load_a}asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{steps}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : {outputs} :: "memory");
  }}
  for (int r = 0; r < {registers}; ++r) D[(tile * {registers} + r) * 128 + i] = d[r];
}}
"""


def chain(
    name: str,
    a: Operand,
    b: Operand,
    *,
    chunks: int = 1,
    from_registers: bool = False,
    spread: str = "wide",
    negate: tuple[int, int] = (1, 1),
    c_bits: int = 24,
) -> Kernel:
    """``chunks`` images in turn, each multiplied in its K steps into the same accumulators."""
    registers = b.rows // 2
    steps = min(a.steps, b.steps)
    narrow = BYTES[a.kind] == 1
    accumulators_text = "{" + ",".join(f"%{r}" for r in range(registers)) + "}"
    outputs = ", ".join(f'"+f"(d[{r}])' for r in range(registers))
    opcode = f"wgmma.mma_async.sync.aligned.m64n{b.rows}k{32 if narrow else 16}.f32.{a.kind}.{b.kind}"
    lines = []
    for step in range(steps):
        last = f'"l"(db + {step * b.advance >> 4})'
        if from_registers:
            left = "{" + ",".join(f"%{registers + r}" for r in range(4)) + "}"
            inputs = ", ".join(f'"r"(f[{step}][{r}])' for r in range(4)) + f", {last}"
            right = f"%{registers + 4}"
        else:
            left, right = f"%{registers}", f"%{registers + 1}"
            inputs = f'"l"(da + {step * a.advance >> 4}), {last}'
        tail = f"p, {negate[0]}, {negate[1]}"
        if not narrow:
            tail += f", {int(b.mn_major)}" if from_registers else f", {int(a.mn_major)}, {int(b.mn_major)}"
        text = f"{{.reg .pred p; setp.ne.u32 p, 1, 0; {opcode} {accumulators_text}, {left}, {right}, {tail};}}"
        lines.append(f'    asm volatile("{text}" : {outputs} : {inputs} : "memory");')
    a_words = steps * 512 if from_registers else a.image // 4
    b_start = 0 if from_registers else -(-a.image // 1024) * 256
    source = SOURCE.format(
        registers=registers,
        chunks=chunks,
        a_words=a_words,
        b_words=b.image // 4,
        b_start=b_start,
        b_bytes=4 * b_start,
        copy_a="" if from_registers else f"for (int k = i; k < {a_words}; k += 128) s[k] = a[k];\n    ",
        load_a=f"u32 f[{steps}][4]; for (int t = 0; t < {steps}; ++t) for (int r = 0; r < 4; ++r) "
        "f[t][r] = a[(t * 4 + r) * 128 + i];\n    "
        if from_registers
        else "",
        a_constant=a.constant,
        b_constant=b.constant,
        steps="\n".join(lines),
        outputs=outputs,
    )
    count = TILES * registers * 128
    inputs_drawn = {
        "a": values(a.kind, TILES * chunks * a_words, spread),
        "b": values(b.kind, TILES * chunks * b.image // 4, spread),
        "c": accumulators(count, c_bits),
    }
    output = Output("d", (TILES, registers, 128), np.float32)
    shared = 4 * b_start + b.image
    return Kernel(name, "wgmma", source, inputs_drawn, (output,), blocks=TILES, shared_bytes=shared)


def bf16(n: int, width: int, mn: bool = False) -> Operand:
    return Operand(n, "bf16", width, mn)


def e4m3(n: int, width: int) -> Operand:
    return Operand(n, "e4m3", width)


KERNELS = (
    chain("bf16_ss_n8", bf16(64, 16), bf16(8, 16), chunks=4),
    chain("bf16_ss_n16_swizzle32", bf16(64, 32), bf16(16, 32), chunks=2),
    chain("bf16_ss_n64_swizzle64", bf16(64, 64), bf16(64, 64), chunks=2, spread="sparse"),
    chain("bf16_ss_n128_swizzle128", bf16(64, 128), bf16(128, 128), chunks=4),
    chain("bf16_ss_n256_swizzle128", bf16(64, 128), bf16(256, 128), spread="normal"),
    chain("bf16_ss_mixed_swizzles", bf16(64, 128), bf16(64, 64)),
    chain("bf16_ss_a_mn_major", bf16(64, 128, True), bf16(64, 128), chunks=2),
    chain("bf16_ss_b_mn_major", bf16(64, 128), bf16(128, 128, True), chunks=2),
    chain("bf16_ss_both_mn_major", bf16(64, 64, True), bf16(64, 32, True), chunks=2),
    chain("bf16_ss_mn_major_no_swizzle", bf16(64, 16, True), bf16(64, 16, True), chunks=2),
    chain("bf16_rs_n64", bf16(64, 128), bf16(64, 128), chunks=4, from_registers=True),
    chain("bf16_rs_b_mn_major", bf16(64, 128), bf16(128, 128, True), chunks=2, from_registers=True),
    chain("bf16_negated", bf16(64, 128), bf16(32, 128), negate=(-1, 1)),
    chain("bf16_nan_and_infinity", bf16(64, 128), bf16(64, 128), chunks=2, spread="special"),
    chain("f16_ss_n32", Operand(64, "f16", 128), Operand(32, "f16", 128), chunks=2),
    chain("e4m3_ss_n8", e4m3(64, 16), e4m3(8, 16), chunks=8, c_bits=14),
    chain("e4m3_ss_n16_swizzle32", e4m3(64, 32), e4m3(16, 32), chunks=4, c_bits=14),
    chain("e4m3_ss_n64_swizzle64", e4m3(64, 64), e4m3(64, 64), chunks=4, spread="sparse", c_bits=14),
    chain("e4m3_ss_n128_swizzle128", e4m3(64, 128), e4m3(128, 128), chunks=4, c_bits=14),
    chain("e4m3_ss_n256_swizzle128", e4m3(64, 128), e4m3(256, 128), spread="normal", c_bits=14),
    chain("e4m3_rs_n64", e4m3(64, 128), e4m3(64, 128), chunks=4, from_registers=True, c_bits=14),
    chain("e4m3_rs_n128", e4m3(64, 64), e4m3(128, 64), chunks=2, from_registers=True, c_bits=14),
    chain("e5m2_by_e4m3", Operand(64, "e5m2", 128), e4m3(64, 128), chunks=2, c_bits=14),
    chain("e4m3_nan", e4m3(64, 128), e4m3(64, 128), chunks=2, spread="special", c_bits=14),
    chain("e4m3_c_of_24_bits", e4m3(64, 128), e4m3(64, 128)),
)
