"""Operands that bring the behaviour of a tensor-core step to light.

*random*: normal, wide-ranged and sparse numbers, in chains of 1, 4 and 8 steps, with and without C. *alignment*: 1 +
2^-k - 1 in one step, for k = 1, 2, ...: the largest k that survives is F; for sums of groups, a small random group
between two large ones that cancel. *accumulator*: 1 in the first step, 2^-k in the second: the largest k that survives
is the accumulator's last bit. *zero products*: all-zero operands under the largest scale beside small numbers. *NaN
scales*: a scale byte of NaN in some rows, over numbers and over zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from ml_dtypes import bfloat16

from flamia.conformance.comparison import compare_bits
from flamia.conformance.levels.check import Outcome, failed
from flamia.conformance.probes.machines import F32, Bytes, Machine, Operands
from flamia.reference.formats import E2M1, E4M3, round_to

TILES = 256
"""Tiles of a random batch on a 64 x 8 machine; fewer on a larger one."""


def probes_of(machine: Machine) -> Iterator[tuple[str, Callable[[str], Outcome]]]:
    """Name and probe, for a device."""
    yield "random", partial(_random, machine)
    if machine.step.group == 1:
        yield "alignment", partial(_alignment, machine)
        yield "accumulator", partial(_accumulator, machine)
    else:
        yield "alignment", partial(_group_alignment, machine)
    if machine.step.scale_block:
        yield "zero_products", partial(_zero_products, machine)
        yield "nan_scales", partial(_nan_scales, machine)


def _random(machine: Machine, device: str) -> Outcome:
    rng = np.random.default_rng(0)
    compared = 0
    for kind in ("normal", "wide", "sparse"):
        for steps in (1, 4, 8):
            for with_c in (False, True) if machine.has_c else (False,):
                x = _draw(machine, rng, kind, steps, with_c)
                got, expected = _both(machine, x, device)
                label = f"{machine.name}, {kind}, {steps} steps{', with C' if with_c else ''}: D"
                found = compare_bits(label, got, expected)
                if found is not None:
                    return failed(found)
                compared += got.size
    return Outcome(numbers={"compared": float(compared)})


def _both(machine: Machine, x: Operands, device: str) -> tuple[F32, F32]:
    return machine.multiply(x, device), machine.expected(x)


def _draw(machine: Machine, rng: np.random.Generator, kind: str, steps: int, with_c: bool) -> Operands:
    step = machine.step
    k = steps * step.k
    tiles = max(2, TILES * 512 // (machine.rows * machine.columns))

    def values(rows: int) -> F32:
        x = rng.standard_normal((tiles, rows, k), np.float32)
        if kind != "normal":
            x *= np.exp2(rng.integers(-8, 8, x.shape)).astype(np.float32)
        if kind == "sparse":
            x *= rng.random(x.shape) < 0.5
        return on_grid(machine, x)

    def scales(rows: int) -> Bytes | None:
        if not step.scale_block:
            return None
        shape = (tiles, rows, k // step.scale_block)
        low, high = (0x20, 0x60) if step.group > 1 else (117, 138)
        return rng.integers(low, high, shape).astype(np.uint8)

    c = None
    if with_c:
        c = rng.standard_normal((tiles, machine.rows, machine.columns), np.float32) * np.float32(4)
        # on the grid of a short accumulator
        c = (c.view(np.uint32) & np.uint32(0xFFFFFFFF << (24 - step.accumulator_bits) & 0xFFFFFFFF)).view(np.float32)
    return Operands(values(machine.rows), values(machine.columns), c, scales(machine.rows), scales(machine.columns))


def on_grid(machine: Machine, x: F32) -> F32:
    """Round to the operand format of a machine."""
    if machine.step.group > 1:
        return round_to(x, E2M1)
    if machine.step.operand_emin == -6:
        return round_to(x, E4M3)
    return x.astype(bfloat16).astype(np.float32)


def _ones(machine: Machine, rows: int, k: int) -> Bytes | None:
    if not machine.step.scale_block:
        return None
    return np.full((1, rows, k // machine.step.scale_block), 127, np.uint8)


SHIFT = 6
"""Row r and column c hold the term 2^(14 - SHIFT - r - c) beside terms of 2^14; both factors suit E4M3."""


def _alignment(machine: Machine, device: str) -> Outcome:
    """2^14 + 2^(14 - shift) - 2^14 in one step."""
    a, b, shifts = _shifted(machine, 1, position=1)
    a[..., 2], b[..., 2] = -(2.0**7), 2.0**7
    return _directed(machine, a, b, shifts, 0.0, "fraction_bits", machine.step.fraction_bits, device)


def _accumulator(machine: Machine, device: str) -> Outcome:
    """2^14 in the first step, 2^(14 - shift) in the second."""
    a, b, shifts = _shifted(machine, 2, position=machine.step.k)
    last = min(machine.step.accumulator_bits - 1, machine.step.fraction_bits)
    return _directed(machine, a, b, shifts, 2.0**14, "accumulator_fraction_bits", last, device)


def _shifted(machine: Machine, steps: int, position: int) -> tuple[F32, F32, np.ndarray]:
    """Operands with 2^14 first and the shifted term at ``position``; the shift of each output, 0 where it has none."""
    a = np.zeros((1, machine.rows, steps * machine.step.k), np.float32)
    b = np.zeros((1, machine.columns, steps * machine.step.k), np.float32)
    row, column = np.arange(18), np.arange(machine.columns) % 8
    a[..., 0], b[..., 0] = 2.0**7, 2.0**7
    a[0, row, position], b[0, :, position] = np.exp2(8.0 - row), np.exp2(-1.0 * column)
    shifts = np.zeros((machine.rows, machine.columns), np.int64)
    shifts[row] = SHIFT + row[:, None] + column
    return a, b, shifts


def _directed(
    machine: Machine, a: F32, b: F32, shifts: np.ndarray, base: float, name: str, model: int, device: str
) -> Outcome:
    """Compare, and measure the largest shift whose term moved the result away from ``base``."""
    scales = (_ones(machine, rows, a.shape[2]) for rows in (machine.rows, machine.columns))
    got, expected = _both(machine, Operands(a, b, None, *scales), device)
    numbers = {name: float(shifts[(got[0] != base) & (shifts > 0)].max(initial=0)), "model": float(model)}
    found = compare_bits(f"{machine.name}, {name.replace('_', ' ')}: D", got, expected)
    if found is None:
        return Outcome(numbers=numbers)
    text = f"measured {numbers[name]:.0f}, model {model}; {found.message}"
    return Outcome("failed", text, found.coordinate, numbers)


def _group_alignment(machine: Machine, device: str) -> Outcome:
    """Groups of 2^16 and -2^16 around a group of small random numbers under small random scales.

    The lowest bits of the small group lie 36 places below the largest term, and F places survive. Reported is the F
    that fits.
    """
    step = machine.step
    rng = np.random.default_rng(3)
    shapes = [(2, rows, step.k) for rows in (machine.rows, machine.columns)]
    a, b = (round_to(rng.standard_normal(shape, np.float32), E2M1) for shape in shapes)
    scale_a, scale_b = (rng.integers(8, 24, (*shape[:2], step.k // step.group)).astype(np.uint8) for shape in shapes)
    for values, scale in ((a, scale_a), (b, scale_b)):
        for group in (0, 2):
            values[..., group * step.group : (group + 1) * step.group] = 0
            values[..., group * step.group] = 1
            scale[..., group] = 0x78  # 2^8
        values[..., 3 * step.group :] = 0
    a[..., 2 * step.group] = -1
    x = Operands(a, b, None, scale_a, scale_b)
    got, expected = _both(machine, x, device)
    fits = [
        bits
        for bits in range(step.fraction_bits - 4, step.fraction_bits + 5)
        if compare_bits("D", got, replace(machine, step=replace(step, fraction_bits=bits)).expected(x)) is None
    ]
    numbers = {"fraction_bits": float(min(fits, default=0)), "model": float(step.fraction_bits)}
    found = compare_bits(f"{machine.name}, fraction bits: D", got, expected)
    if found is None:
        return Outcome(numbers=numbers)
    return Outcome("failed", f"F that fit: {fits}, model {step.fraction_bits}; {found.message}", None, numbers)


def _zero_products(machine: Machine, device: str) -> Outcome:
    """Block 0 is zero under the largest finite scale; block 1 holds small numbers."""
    rng = np.random.default_rng(1)
    x = _draw(machine, rng, "normal", 2, False)
    assert x.scale_a is not None and x.scale_b is not None
    block = machine.step.scale_block
    largest = 0x7E if machine.step.group > 1 else 254
    x.a[:, : machine.rows // 2, :block] = 0
    x.b[:, : machine.columns // 2, :block] = 0
    x.scale_a[:, : machine.rows // 2, 0] = largest
    x.scale_b[:, : machine.columns // 2, 0] = largest
    got, expected = _both(machine, x, device)
    found = compare_bits(f"{machine.name}, zero products under the largest scale: D", got, expected)
    return Outcome() if found is None else failed(found)


def _nan_scales(machine: Machine, device: str) -> Outcome:
    rng = np.random.default_rng(2)
    x = _draw(machine, rng, "normal", 1, False)
    assert x.scale_a is not None
    x.scale_a[:, 3] = 0x7F if machine.step.group > 1 else 255
    x.scale_a[:, 5] = x.scale_a[:, 3]
    x.a[:, 5] = 0
    got, expected = _both(machine, x, device)
    found = compare_bits(f"{machine.name}, NaN scales in rows 3 and 5: D", got, expected)
    return Outcome() if found is None else failed(found)
