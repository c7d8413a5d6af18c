"""One matrix multiply-accumulate step on decoded bytes: bit-accurate, or fast.

Note [Two evaluations]
~~~~~~~~~~~~~~~~~~~~~~
*Accurate*: `flamia.reference.tensorcore`, with the step that belongs to the instruction. That module knows the steps of
the numerics contract; the others follow from it, by assumption, in these ways:

* ``f8f6f4`` is ``mxf8f6f4`` with scales of 1.
* Operands whose formats have different smallest normal exponents: the one with the larger is multiplied by the power
  of two that makes them equal, which changes no significand and no alignment, and the other side of the product is
  compensated (in the scale; without scales, in the accumulator).
* ``f16`` operands are aligned as bfloat16 ones are; subnormals have the exponent of their own smallest normal number.
* UE8M0 scales in ``mxf4`` and ``mxf4nvf4``: as UE4M3 ones, groups of 16 products summed exactly (``_groups_e8m0``).

*Fast*: products and sum in float64, rounded once to float32, to nearest. It differs from the accurate result in the
last bits, and saves most of its cost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.tensor.elements import (
    F32,
    Bytes,
    Element,
    decode_bytes,
    decode_e8m0,
    decode_ue4m3,
)
from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.instruction import Instruction
from flamia.reference.tensorcore import MXF4NVF4, MXF8F6F4, TCGEN05_F16, WGMMA_BF16, WGMMA_E4M3, MmaStep, mma

_NAN_BITS = np.uint32(0x7FFFFFFF)
_GROUP = 16
_GROUP_FRACTION_BITS = MXF4NVF4.fraction_bits


def evaluate(
    instruction: Instruction,
    a: Bytes,
    b: Bytes,
    acc: F32 | None,
    sfa: Bytes | None = None,
    sfb: Bytes | None = None,
    *,
    fast: bool = False,
) -> F32:
    """``D = A B^T (+ acc)`` of one ``tcgen05.mma``.

    :param a: uint8 ``(rows, 32)``, the rows of A that one CTA holds.
    :param b: uint8 ``(N, 32)``.
    :param acc: float32 ``(rows, N)``, or None for zero.
    :param sfa, sfb: uint8 ``(rows, scales)`` and ``(N, scales)``, given exactly for the block-scaled kinds.
    :returns: float32 ``(rows, N)``.
    """
    x = decode_bytes(a, instruction.a, instruction.padded)
    y = decode_bytes(b, instruction.b, instruction.padded)
    if instruction.negate_a:
        x = -x
    if instruction.negate_b:
        y = -y
    if fast:
        decode = decode_e8m0 if instruction.e8m0 else decode_ue4m3
        return _multiply(x, y, acc, None if sfa is None else decode(sfa), None if sfb is None else decode(sfb))
    if instruction.kind == "f16":
        return mma(x, y, acc, replace(TCGEN05_F16, operand_emin=max(instruction.a.emin, -126)))
    if instruction.kind in ("mxf4", "mxf4nvf4"):
        assert sfa is not None and sfb is not None
        if instruction.e8m0:
            return _groups_e8m0(x, y, acc, sfa, sfb)
        return mma(x, y, acc, MXF4NVF4, sfa, sfb)
    if sfa is None or sfb is None:
        sfa, sfb = np.full((len(a), 1), 127, np.uint8), np.full((len(b), 1), 127, np.uint8)
    x, y, emin, up_a, up_b = _equalise(x, y, instruction.a, instruction.b)
    return mma(x, y, acc, replace(MXF8F6F4, operand_emin=emin), _raise_scale(sfa, up_a), _raise_scale(sfb, up_b))


def evaluate_wgmma(
    element_a: Element,
    element_b: Element,
    a: Bytes,
    b: Bytes,
    acc: F32 | None,
    *,
    negate_a: bool = False,
    negate_b: bool = False,
    fast: bool = False,
) -> F32:
    """``D = A B^T (+ acc)`` of one ``wgmma.mma_async``.

    :param a: uint8 ``(64, 32)``. :param b: uint8 ``(N, 32)``. :param acc: float32 ``(64, N)``, or None for zero.
    """
    x, y = decode_bytes(a, element_a, padded=False), decode_bytes(b, element_b, padded=False)
    if negate_a:
        x = -x
    if negate_b:
        y = -y
    if fast:
        return _multiply(x, y, acc, None, None)
    if element_a.bits == 16:
        return mma(x, y, acc, replace(WGMMA_BF16, operand_emin=max(element_a.emin, -126)))
    x, y, emin, up_a, up_b = _equalise(x, y, element_a, element_b)
    step: MmaStep = replace(WGMMA_E4M3, operand_emin=emin)
    if not up_a + up_b:
        return mma(x, y, acc, step)
    power = np.float32(2.0 ** (up_a + up_b))
    return mma(x, y, None if acc is None else acc / power, step) * power


def _equalise(x: F32, y: F32, a: Element, b: Element) -> tuple[F32, F32, int, int, int]:
    """Both operands with one smallest normal exponent; how many powers of two were taken from each."""
    emin = min(a.emin, b.emin)
    up_a, up_b = a.emin - emin, b.emin - emin
    if up_a:
        x = x * np.float32(2.0**-up_a)
    if up_b:
        y = y * np.float32(2.0**-up_b)
    return x, y, emin, up_a, up_b


def _raise_scale(scale: Bytes, by: int) -> Bytes:
    if not by:
        return scale
    if (finite := scale[scale != 255]).size and int(finite.max()) + by > 254:
        raise Illegal("unsupported", f"UE8M0 scales above 2^{127 - by} with operands of two formats are not simulated")
    return np.where(scale == 255, scale, scale + np.uint8(by)).astype(np.uint8)


def _multiply(
    x: F32, y: F32, acc: F32 | None, scale_x: NDArray[np.float64] | None, scale_y: NDArray[np.float64] | None
) -> F32:
    left, right = x.astype(np.float64), y.astype(np.float64)
    for side, scale in ((left, scale_x), (right, scale_y)):
        if scale is not None:
            by_scale = side.reshape(*scale.shape, -1)
            by_scale *= scale[..., None]
    with np.errstate(invalid="ignore", over="ignore"):
        total = left @ right.T
        if acc is not None:
            total += acc
        return total.astype(np.float32)


def _groups_e8m0(x: F32, y: F32, acc: F32 | None, sfa: Bytes, sfb: Bytes) -> F32:
    """One step of 64 E2M1 products under UE8M0 scales; see Note [Two evaluations] and Note [Tensor-core step]."""
    groups = x.shape[1] // _GROUP
    scale_a = np.repeat(decode_e8m0(sfa), groups // sfa.shape[1], axis=1)
    scale_b = np.repeat(decode_e8m0(sfb), groups // sfb.shape[1], axis=1)
    shape = (len(x), len(y))
    start = np.zeros(shape) if acc is None else acc.astype(np.float64)
    scale_a, scale_b = np.nan_to_num(scale_a, nan=1.0), np.nan_to_num(scale_b, nan=1.0)
    finite = np.where(np.isfinite(start), start, 0)
    terms, largest = [finite], np.where(finite == 0, 0, np.exp2(np.maximum(np.frexp(finite)[1] - 1, -126)))
    for g in range(groups):
        k = slice(g * _GROUP, (g + 1) * _GROUP)
        a, b = x[:, k].astype(np.float64), y[:, k].astype(np.float64)
        power = scale_a[:, g, None] * scale_b[None, :, g]
        terms.append(a @ b.T * power)
        largest = np.maximum(largest, np.where(np.abs(a) @ np.abs(b).T > 0, power, 0))
    quantum = np.where(largest == 0, 1.0, largest) * 2.0**-_GROUP_FRACTION_BITS
    total = np.zeros(shape)
    for term in terms:
        total += np.trunc(term / quantum)
    out = np.where(np.isfinite(start), _truncate(total * quantum), start.astype(np.float32))
    out[(sfa == 255).any(axis=1)] = np.nan
    out[:, (sfb == 255).any(axis=1)] = np.nan
    out.view(np.uint32)[np.isnan(out)] = _NAN_BITS
    return out


def _truncate(x: NDArray[np.float64]) -> F32:
    """Round toward zero to binary32, overflow to infinity."""
    quantum = np.exp2(np.maximum(np.frexp(x)[1] - 24, -149))
    with np.errstate(over="ignore"):
        out: F32 = (np.trunc(x / quantum) * quantum + 0.0).astype(np.float32)
    return out
