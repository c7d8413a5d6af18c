"""Matrix multiply-accumulate as tensor cores do it, bit for bit.

Note [Tensor-core step]
~~~~~~~~~~~~~~~~~~~~~~~
A tensor core computes ``D = A B^T + C`` in *steps* of k contracted elements; a longer contraction is the ascending
chain of steps, each taking the previous result as its C. A step is one fused operation on the k products and C:

1. Every term is an exact significand times a power of two. The exponent of a product is the *sum of its operands'
   exponents*; its significand lies in [1, 4) and is not renormalised. A subnormal operand has the exponent of its
   format's smallest normal number and a significand below 1; so has a subnormal C (-126).
2. E is the largest exponent of the nonzero terms.
3. Every term is truncated toward zero to a multiple of the *quantum* ``2^(E - F)``: F fractional bits relative to E.
4. The truncated terms are added exactly.
5. The sum is normalised and rounded toward zero to the significand of the accumulator (24 bits, or 14 where FP8
   accumulates short), in the exponent range of FP32: subnormals below 2^-126, Inf from 2^128.

Block scales enter in two ways:

* **E8M0**, one per 32 elements (``group == 1``): the exponents of both scales add to the exponent of each product.
* **UE4M3**, one per 16 elements (``group == 16``): the 16 products of a group are summed *exactly*; that sum times both
  scale significands is one term, and its exponent is the sum of the scale exponents alone.

NaN and infinities follow IEEE 754: a NaN operand, scale or C, ``0 * Inf`` and ``Inf - Inf`` give the NaN 0x7FFFFFFF.

Sources: the operations T-FDPA, ST-FDPA and GST-FDPA of MMA-Sim (arXiv 2511.10909); F = 25 and 13 also from Khattak and
Mikaitis (arXiv 2512.07004). The two wgmma rows have been compared with an H200 (with C at its accumulator's precision);
the tcgen05 rows rest on MMA-Sim.

*Open probes*, where the sources are silent or differ, and what is assumed: a zero product is neutral however large its
scales are, and so is a zero C; a group is zero if all its products or a scale are zero, but counts if its products
merely cancel; a NaN scale makes its row NaN even over zeros; overflow gives Inf and does not saturate; a sum of exactly
zero is +0 and a negative sum that underflows is -0; the sign bit of a UE4M3 byte is ignored; ``cta_group::2`` changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]

BLOCK_OUTPUTS = 1 << 14
"""Outputs computed at a time, so that the float64 temporaries stay in the L2 cache."""
BLOCK_PAIRS = 1 << 10
"""Outputs summed product by product at a time."""

_NAN_BITS = np.uint32(0x7FFFFFFF)
_RELATIVE_MIN = 2.0**-126  # twice its eighth power is a normal float64
_NARROW_EMIN = -14  # formats up to E5M2 and FP16: all powers of two in a product are within 2^-48..2^48


@dataclass(frozen=True)
class MmaStep:
    """One fused tensor-core step; see Note [Tensor-core step].

    :param name: the instruction.
    :param k: contracted elements per step, fewer than 256.
    :param fraction_bits: F, the fractional bits of a term that are kept, relative to the largest exponent.
    :param accumulator_bits: significant bits of the result, the leading one included.
    :param scale_block: elements per scale: ``k``, or 0 for no scales, if ``group == 1``.
    :param group: products summed exactly before alignment. 1: scales are E8M0. Otherwise a divisor of ``k``, equal to
        ``scale_block``, and scales are UE4M3.
    :param operand_emin: exponent of the operand format's smallest normal number; of no effect if ``group > 1``.
    """

    name: str
    k: int
    fraction_bits: int
    accumulator_bits: int
    scale_block: int = 0
    group: int = 1
    operand_emin: int = -126

    def __post_init__(self) -> None:
        allowed = (0, self.k) if self.group == 1 else (self.group,)
        if self.scale_block not in allowed or self.k % self.group:
            raise ValueError(f"scale_block must be one of {allowed} for k={self.k}, group={self.group}: {self}")


MXF8F6F4 = MmaStep("tcgen05.mma kind::mxf8f6f4", 32, 25, 24, scale_block=32, operand_emin=-6)
"""Blackwell, E4M3 operands with E8M0 block scales."""
MXF4NVF4 = MmaStep("tcgen05.mma kind::mxf4nvf4", 64, 35, 24, scale_block=16, group=16, operand_emin=0)
"""Blackwell, E2M1 operands with UE4M3 block scales (NVFP4)."""
TCGEN05_F16 = MmaStep("tcgen05.mma kind::f16", 16, 25, 24, operand_emin=-126)
"""Blackwell, bfloat16 operands."""
WGMMA_BF16 = MmaStep("wgmma bf16", 16, 25, 24, operand_emin=-126)
"""Hopper, bfloat16 operands."""
WGMMA_E4M3 = MmaStep("wgmma e4m3", 32, 13, 14, operand_emin=-6)
"""Hopper, E4M3 operands; the accumulator keeps 14 significant bits (E8M13)."""

STEPS = (MXF8F6F4, MXF4NVF4, TCGEN05_F16, WGMMA_BF16, WGMMA_E4M3)
"""Every step of the contract."""


def mma(
    a: F32, b: F32, acc: F32 | None, step: MmaStep, scale_a: Bytes | None = None, scale_b: Bytes | None = None
) -> F32:
    """``A B^T + acc`` as an ascending chain of steps; see Note [Tensor-core step].

    Swapping ``a`` and ``b`` transposes the result and changes no bit.

    :param a: float32 ``(..., M, K)``: element values on the grid of the operand format (decoded codes, not multiplied
        by their scales); NaN and Inf are allowed. ``K`` is a multiple of ``step.k``.
    :param b: float32 ``(..., N, K)``, likewise.
    :param acc: float32 ``(..., M, N)``, or None for zero.
    :param scale_a: uint8 ``(..., M, K // step.scale_block)``: E8M0 bytes if ``step.group == 1``, else UE4M3. To be
        given exactly if the step has scales.
    :param scale_b: uint8 ``(..., N, K // step.scale_block)``.
    :returns: float32 ``(..., M, N)``. Leading dimensions are broadcast together.
    :raises TypeError: for a wrong dtype. :raises ValueError: for shapes that do not fit, missing or needless scales, or
        values that no narrow format has where the step takes one.
    """
    _check("a", a, np.float32)
    _check("b", b, np.float32)
    (rows, length), columns = a.shape[-2:], b.shape[-2]
    if b.shape[-1] != length or length % step.k:
        raise ValueError(
            f"the last dimensions of a and b must be equal and a multiple of {step.k} for {step.name}, "
            f"got a {a.shape} and b {b.shape}"
        )
    _check_scale("scale_a", scale_a, rows, length, step)
    _check_scale("scale_b", scale_b, columns, length, step)
    if acc is not None:
        _check("acc", acc, np.float32)
        if acc.shape[-2:] != (rows, columns):
            raise ValueError(f"acc must have shape (..., {rows}, {columns}), got {acc.shape}")
    arrays = {"a": a, "b": b, "acc": acc, "scale_a": scale_a, "scale_b": scale_b}
    lead = {name: x.shape[:-2] for name, x in arrays.items() if x is not None}
    try:
        batch = np.broadcast_shapes(*lead.values())
    except ValueError:
        raise ValueError(f"leading dimensions must broadcast together, got {lead}") from None

    out = np.zeros((*batch, rows, columns), np.float32)
    if acc is not None:
        out[...] = acc
    if out.size == 0 or length == 0:
        return out
    a, b, result = _flatten(a, batch), _flatten(b, batch), out.reshape(-1, rows, columns)
    scale_a = None if scale_a is None else _flatten(scale_a, batch)
    scale_b = None if scale_b is None else _flatten(scale_b, batch)

    block_rows = max(1, min(rows, BLOCK_OUTPUTS // columns, 4 * BLOCK_OUTPUTS // max(length, 1)))
    block_batch = max(1, BLOCK_OUTPUTS // (block_rows * max(columns, length // 4)))
    for first in range(0, result.shape[0], block_batch):
        some = slice(first, first + block_batch)
        y = _prepare("b", b[some], None if scale_b is None else scale_b[some], step)
        for row in range(0, rows, block_rows):
            here = slice(row, row + block_rows)
            x = _prepare("a", a[some, here], None if scale_a is None else scale_a[some, here], step)
            block = result[some, here]
            for index in range(length // step.k):
                block = _accumulate(x.select(index, step), y.select(index, step), block, step)
            result[some, here] = block
    out.view(np.uint32)[np.isnan(out)] = _NAN_BITS
    return out


@dataclass(frozen=True)
class _Operand:
    """Rows of one operand, decomposed: ``B`` batches, ``R`` rows, ``S`` units of alignment (steps, or groups).

    :param values: ``(B, R, K)``, multiplied by their scales; 0 in place of NaN and Inf.
    :param raw: the same with NaN and Inf; None if there are none.
    :param unit: ``(B, R, S)``; powers of two that the exponents of elements are relative to: of a group, the 2^exponent
        of its scale; of a step, 2^exponent of its scale times, in wide formats, its largest element.
    :param large, large_8: ``(B, R, K)``; 2^exponent of an element over its unit, and its eighth power; 0 for zeros. Not
        used for groups, nor are the rest.
    :param fine: ``(B, R, S)``; reciprocals of powers of two that the lowest bits of elements are relative to.
    :param low_8: ``(B, R, K)``; eighth power of 1 / (lowest bit of an element) over ``fine``; 0 for zeros.
    :param spread: smallest nonzero relative power in ``large`` and ``low``, or 1 for narrow formats.
    """

    values: F64
    raw: F64 | None
    unit: F64
    large: F64
    large_8: F64
    fine: F64
    low_8: F64
    spread: float

    def select(self, index: int, step: MmaStep) -> _Operand:
        """The part that step number ``index`` of a chain reads."""
        k = slice(index * step.k, (index + 1) * step.k)
        units = 1 if step.group == 1 else step.k // step.group
        s = slice(index * units, (index + 1) * units)
        return _Operand(
            self.values[..., k],
            None if self.raw is None else self.raw[..., k],
            self.unit[..., s],
            self.large[..., k],
            self.large_8[..., k],
            self.fine[..., s],
            self.low_8[..., k],
            self.spread,
        )


def _prepare(name: str, x: F32, scale: Bytes | None, step: MmaStep) -> _Operand:
    values = x.astype(np.float64)
    exponent = np.ones(1)
    if scale is not None:
        factor, exponent = _decode_e8m0(scale) if step.group == 1 else _decode_ue4m3(scale)
        by_scale = values.reshape(*scale.shape, step.scale_block)
        by_scale *= factor[..., None]
    raw = None
    if not (finite := np.isfinite(values)).all():
        raw = values
        values, x = np.where(finite, values, 0), np.where(finite, x, np.float32(0))
    if step.group > 1:
        return _Operand(values, raw, exponent, values, values, exponent, values, 1.0)

    units = (*x.shape[:-1], x.shape[-1] // step.k)
    large, low = _exponent_and_lowest_bit(x, step.operand_emin)
    unit, fine, spread = np.ones(units), np.ones(units), 1.0
    if step.operand_emin >= _NARROW_EMIN:
        if large.max() > 2.0**15 or low.max() > 2.0**24:
            worst = np.argmax(large if large.max() > 2.0**15 else low)
            raise ValueError(f"{name} must hold values of the operand format of {step.name}, got {x.flat[worst]}")
    else:  # relative to the largest of each step, or to the smallest there is if all are 0
        large, low = large.reshape(*units, step.k), low.reshape(*units, step.k)
        np.maximum(large.max(axis=-1), unit * 2.0**-126, out=unit)
        np.maximum(low.max(axis=-1), fine * 2.0**-127, out=fine)
        large *= np.reciprocal(unit)[..., None]
        low *= np.reciprocal(fine)[..., None]
        spread = float(min(y.min(initial=1, where=y > 0) for y in (large, low)))
        large, low = large.reshape(x.shape), low.reshape(x.shape)
    if scale is not None:
        exponent = np.where(np.isfinite(exponent), exponent, 1)
        unit *= exponent
        fine /= exponent
    return _Operand(values, raw, unit, large, _eighth_power(large), fine, _eighth_power(low), spread)


def _exponent_and_lowest_bit(x: F32, emin: int) -> tuple[F64, F64]:
    """``2^exponent``, and the reciprocal of the lowest set bit, of each finite element; 0 for zeros."""
    bits = x.view(np.int32)
    binade = np.maximum((bits & 0x7F800000).view(np.float32), np.float32(2.0**-126)).astype(np.float64)
    significand = bits & 0x7FFFFF | 0x800000
    lowest = (significand & -significand).astype(np.float64)
    lowest *= binade
    low = np.reciprocal(lowest, out=lowest)
    low *= 2.0**23
    exponent = np.maximum(binade, 2.0**emin, out=binade)
    if (zero := x == 0).any():
        exponent[zero] = low[zero] = 0
    return exponent, low


def _decode_e8m0(scale: Bytes) -> tuple[F64, F64]:
    """Value and 2^exponent of E8M0 bytes, the same number ``2^(byte - 127)``; 255 is NaN."""
    table = np.exp2(np.arange(256.0) - 127)
    table[255] = np.nan
    value: F64 = table[scale]
    return value, value


def _decode_ue4m3(scale: Bytes) -> tuple[F64, F64]:
    """Value and 2^exponent of UE4M3 bytes; the sign bit is ignored, 127 is NaN."""
    code = scale & 0x7F
    exponent = np.exp2(np.maximum(code >> 3, 1) - 7.0)
    value = ((code & 7) / 8.0 + (code >= 8)) * exponent
    return np.where(code == 0x7F, np.nan, value), exponent


def _accumulate(x: _Operand, y: _Operand, acc: F32, step: MmaStep) -> F32:
    """One step on one block: operands ``(B, M, k)`` and ``(B, N, k)``, accumulator ``(B, M, N)``."""
    if x.raw is not None or y.raw is not None or not np.isfinite(acc).all():
        return _accumulate_non_finite(x, y, acc, step)
    term = acc.astype(np.float64)
    binade = np.maximum((acc.view(np.int32) & 0x7F800000).view(np.float32), np.float32(2.0**-126))
    if (zero := acc == 0).any():
        binade[zero] = 0
    quantum = binade.astype(np.float64)
    quantum *= 2.0**-step.fraction_bits
    total = (_sum_products if step.group == 1 else _sum_groups)(x, y, quantum, step)
    term *= _reciprocal(quantum)
    total += np.trunc(term, out=term)
    total += 0.0  # +0 also where a BLAS sums -0 to -0
    total *= quantum
    return _round_toward_zero(total, step.accumulator_bits)


def _sum_products(x: _Operand, y: _Operand, quantum: F64, step: MmaStep) -> F64:
    """Raise ``quantum``, in place, to that of all terms; return the sum of the truncated products in units of it.

    Most outputs have no product with a bit below the quantum. Truncation does nothing there, all partial sums are
    integers below 2^53 in units of the lowest bit, and a float64 matrix product is exact, whatever its order. The other
    outputs are summed product by product.
    """
    narrow = x.spread * y.spread >= _RELATIVE_MIN
    if narrow:
        largest = _largest_product(x.large_8, y.large_8, narrow)
    else:
        largest = np.zeros_like(quantum)
        for k in range(step.k):
            np.maximum(largest, x.large[:, :, None, k] * y.large[:, None, :, k], out=largest)
    largest *= x.unit * 2.0**-step.fraction_bits
    largest *= y.unit.swapaxes(-1, -2)
    np.maximum(quantum, largest, out=quantum)
    per_quantum = _reciprocal(quantum)

    total: F64 = np.matmul(x.values, y.values.swapaxes(-1, -2))
    total *= per_quantum
    # No product has a bit below 1 / finest.
    finest = _largest_product(x.low_8, y.low_8, narrow)
    finest *= x.fine
    finest *= y.fine.swapaxes(-1, -2)
    truncated = np.flatnonzero(finest > per_quantum)
    a, b, rows, columns = x.values.reshape(-1, step.k), y.values.reshape(-1, step.k), *total.shape[1:]
    for start in range(0, truncated.size, BLOCK_PAIRS):
        outputs = truncated[start : start + BLOCK_PAIRS]
        row, column = np.divmod(outputs, columns)
        terms = a.take(row, axis=0)
        terms *= b.take(row // rows * columns + column, axis=0)
        terms *= per_quantum.reshape(-1, 1).take(outputs, axis=0)
        total.reshape(-1)[outputs] = np.trunc(terms, out=terms) @ np.ones(step.k)
    return total


def _sum_groups(x: _Operand, y: _Operand, quantum: F64, step: MmaStep) -> F64:
    """As `_sum_products`; each term is the exact sum of a group of products, aligned at the exponent of its scales."""
    terms = []
    for index in range(step.k // step.group):
        k, s = slice(index * step.group, (index + 1) * step.group), slice(index, index + 1)
        a, b = x.values[..., k], y.values[..., k].swapaxes(-1, -2)
        terms.append(np.matmul(a, b))
        exponent = x.unit[..., s] * 2.0**-step.fraction_bits * y.unit[..., s].swapaxes(-1, -2)
        exponent[np.matmul(np.abs(a), np.abs(b)) == 0] = 0
        np.maximum(quantum, exponent, out=quantum)
    per_quantum = _reciprocal(quantum)
    total = np.zeros_like(quantum)
    for term in terms:
        term *= per_quantum
        total += np.trunc(term, out=term)
    return total


def _largest_product(x_8: F64, y_8: F64, narrow: bool) -> F64:
    """``max_k x[m, k] y[n, k]`` of powers of two (or 0), given their eighth powers; ``(B, M, N)``.

    The sum of fewer than 256 eighth powers lies between the largest and 256 times it: the exponent of a matrix product
    of them, divided by 8 and floored, is the exponent sought. What is below 2^-126 counts as 2^-128, or as 0 if
    ``narrow`` says that nothing but 0 is.
    """
    total: F64 = np.matmul(2 * x_8, y_8.swapaxes(-1, -2))
    bits = total.view(np.int64)
    bits >>= 55  # the biased exponent of 2 (2^e)^8 is 8 (e + 128)
    bits += 1023 - 128
    bits <<= 52
    if narrow and total.min() < _RELATIVE_MIN:
        total[total < _RELATIVE_MIN] = 0
    return total


def _eighth_power(x: F64) -> F64:
    y = np.square(x)
    np.square(y, out=y)
    return np.square(y, out=y)


def _reciprocal(power: F64) -> F64:
    """Exact reciprocal of normal powers of two; 2^1023 for 0, where all that it multiplies is 0."""
    out: F64 = (np.int64(2046 << 52) - power.view(np.int64)).view(np.float64)
    return out


def _round_toward_zero(x: F64, significant_bits: int) -> F32:
    """Truncate to ``significant_bits`` in the exponent range of FP32; overwrites ``x``. Overflow gives Inf."""
    bits = x.view(np.int64)
    bits &= np.int64(-1 << (53 - significant_bits))
    if (subnormal := np.abs(x) < 2.0**-126).any():
        per_lowest_bit = 2.0 ** (125 + significant_bits)
        x[subnormal] = np.trunc(x[subnormal] * per_lowest_bit) / per_lowest_bit
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _accumulate_non_finite(x: _Operand, y: _Operand, acc: F32, step: MmaStep) -> F32:
    """`_accumulate` with NaN or Inf somewhere: where the IEEE 754 sum of the terms is not finite, it is the result."""
    a, b = (side.values if side.raw is None else side.raw for side in (x, y))
    finite_acc = np.where(np.isfinite(acc), acc, np.float32(0))
    result = _accumulate(replace(x, raw=None), replace(y, raw=None), finite_acc, step)
    with np.errstate(invalid="ignore", over="ignore"):
        # einsum multiplies and adds every term, where a BLAS may skip zeros
        special = np.einsum("bmk,bnk->bmn", a, b, optimize=False) + acc
        return np.where(np.isfinite(special), result, special.astype(np.float32))


def _flatten(x: NDArray[Any], batch: tuple[int, ...]) -> NDArray[Any]:
    return np.broadcast_to(x, batch + x.shape[-2:]).reshape(-1, *x.shape[-2:])


def _check(name: str, x: NDArray[Any], dtype: Any) -> None:
    if not isinstance(x, np.ndarray) or x.dtype != dtype:
        raise TypeError(f"{name} must be a {np.dtype(dtype)} array, got {getattr(x, 'dtype', type(x))}")
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {x.shape}")


def _check_scale(name: str, scale: Bytes | None, rows: int, length: int, step: MmaStep) -> None:
    if (scale is None) != (step.scale_block == 0):
        raise ValueError(f"{name} must be {'given' if step.scale_block else 'None'} for {step.name}")
    if scale is not None:
        _check(name, scale, np.uint8)
        if scale.shape[-2:] != (rows, length // step.scale_block):
            raise ValueError(f"{name} must have shape (..., {rows}, {length // step.scale_block}), got {scale.shape}")
