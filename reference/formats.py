"""Number formats: FP8 and FP4 elements, and the 8-bit scales of their blocks.

Note [Formats]
~~~~~~~~~~~~~~
An *element* is sign, exponent field e and mantissa field m, with value ``(-1)^sign 2^(e - bias) (1 + m /
2^M)``, and ``2^(1 - bias) m / 2^M`` for e = 0 (subnormals). E4M3 and E5M2 are those of OFP8 v1.0, E2M1 that
of OCP MX v1.0. A *scale* has no sign: E8M0 (OCP MX v1.0) is a bare power of two with neither zero nor
subnormals, UE4M3 is E4M3 without its sign.

Encoding rounds to nearest, ties to the even code, and *saturates*: whatever lies beyond the largest finite
value, Inf included, becomes that value. Every NaN, of either sign, becomes one code: 0x7F in FP8 and +6 in
E2M1, which has no NaN (so the recipes put a NaN into the scale). A zero keeps its sign. This is PTX
``cvt.rn.satfinite``; library casts differ (ml_dtypes gives NaN or Inf on overflow and keeps the sign of a
NaN).

Note [Quantum]
~~~~~~~~~~~~~~
Near x the format's values are multiples of the *quantum* ``2^(max(floor(log2 |x|), emin) - M)``, emin = 1 -
bias. Adding ``2^23 * quantum`` to ``|x|`` in binary32 leaves a sum whose last place is one quantum, so that
this single IEEE addition *is* round to nearest even, subnormals included. The sum's mantissa then holds the
number of quanta and its exponent field the binade: added together they are the code. Subtracting the same
power again is exact and leaves the value. One rule gives `encode` and `round_to`; flushing binary32
subnormals to zero cannot change either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.reference.compiled import loops

CHUNK = 1 << 15
"""Elements handled at a time: four float32 arrays of this size stay in a 1 MB level-2 cache."""

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
EXPONENT = np.uint32(0x7F800000)
"""Fields of binary32. A magnitude above EXPONENT is a NaN, one equal to it is Inf."""


@dataclass(frozen=True)
class ElementFormat:
    """A signed element format. See Note [Formats].

    :param name: as in the OCP documents.
    :param bits: width of a code; codes are held one per uint8.
    :param exponent_bits: width of the exponent field.
    :param mantissa_bits: width M of the mantissa field.
    :param bias: of the exponent.
    :param max_finite: largest finite value, to which encoding saturates.
    :param min_normal: smallest normal value, ``2^(1 - bias)``.
    :param min_subnormal: smallest positive value, ``2^(1 - bias - M)``.
    :param nan_codes: codes that decode to NaN.
    :param inf_codes: codes of +Inf and -Inf; encoding never produces them.
    :param nan_encodes_to: the code that every NaN becomes.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: float
    min_normal: float
    min_subnormal: float
    nan_codes: tuple[int, ...]
    inf_codes: tuple[int, ...]
    nan_encodes_to: int

    @property
    def max_exponent(self) -> int:
        """``floor(log2(max_finite))``, the emax of OCP MX."""
        return int(np.frexp(self.max_finite)[1]) - 1


@dataclass(frozen=True)
class ScaleFormat:
    """An unsigned scale format. See Note [Formats].

    :param name: as in the OCP and PTX documents.
    :param bits: bits in use; scales are held one per uint8.
    :param exponent_bits: width of the exponent field.
    :param mantissa_bits: width of the mantissa field.
    :param bias: of the exponent.
    :param max_finite: largest finite value.
    :param min_positive: smallest positive value.
    :param has_zero: whether code 0 means zero.
    :param nan_code: the one code that means NaN.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: float
    min_positive: float
    has_zero: bool
    nan_code: int


E4M3 = ElementFormat(
    name="E4M3",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_finite=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
    nan_codes=(0x7F, 0xFF),
    inf_codes=(),
    nan_encodes_to=0x7F,
)

E5M2 = ElementFormat(
    name="E5M2",
    bits=8,
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max_finite=57344.0,
    min_normal=2.0**-14,
    min_subnormal=2.0**-16,
    nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
    inf_codes=(0x7C, 0xFC),
    nan_encodes_to=0x7F,
)

E2M1 = ElementFormat(
    name="E2M1",
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max_finite=6.0,
    min_normal=1.0,
    min_subnormal=0.5,
    nan_codes=(),
    inf_codes=(),
    nan_encodes_to=0x7,
)

E8M0 = ScaleFormat(
    name="E8M0",
    bits=8,
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max_finite=2.0**127,
    min_positive=2.0**-127,
    has_zero=False,
    nan_code=0xFF,
)

UE4M3 = ScaleFormat(
    name="UE4M3",
    bits=7,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_finite=448.0,
    min_positive=2.0**-9,
    has_zero=True,
    nan_code=0x7F,
)


def encode(x: NDArray[Any], fmt: ElementFormat, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Codes of ``x``: to nearest even, saturating, every NaN to ``fmt.nan_encodes_to``. See Note [Quantum].

    :param x: float32, bfloat16 or float16 of any shape.
    :param out: uint8 array of the same shape to write to.
    :returns: uint8, one code per element.
    :raises TypeError: for any other dtype. float64 and integers would be rounded twice, once to binary32 and
        once to the format, and come out wrong beside a tie.
    """
    values = as_float32(x, "x")
    codes = _check_out(out, np.uint8, values.shape)
    flat = codes.reshape(-1)
    lanes = _lanes(fmt)
    binade_shift, sign_shift = np.uint32(23 - fmt.mantissa_bits), np.uint32(32 - fmt.bits)
    sign_bit = np.uint32(1 << (fmt.bits - 1))
    for part, source in _chunks(values):
        bits = source.view(np.uint32)
        magnitude = bits & MAGNITUDE
        has_nan = bool(magnitude.max() > EXPONENT)
        np.minimum(magnitude, lanes.max_finite[: bits.size], out=magnitude)
        power = magnitude & EXPONENT
        np.maximum(power, lanes.min_normal[: bits.size], out=power)
        power += lanes.lift
        total = magnitude.view(np.float32)
        total += power.view(np.float32)
        np.right_shift(magnitude, binade_shift, out=power)
        power += magnitude  # only the low byte is meant
        target = flat[part]
        np.copyto(target, power, casting="unsafe")
        target -= lanes.origin
        np.right_shift(bits, sign_shift, out=power)
        power &= sign_bit
        target |= power.astype(np.uint8)
        if has_nan:
            target[np.isnan(source)] = fmt.nan_encodes_to
    return _deliver(codes, flat, out)


def round_to(x: NDArray[Any], fmt: ElementFormat, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The value of ``x`` in the format: ``decode(encode(x))``, except that NaN stays NaN in every format.

    A negative value that rounds to zero gives -0.0, as its code does. See Note [Quantum].

    :param x: float32, bfloat16 or float16 of any shape.
    :param out: float32 array of the same shape to write to; may be ``x`` itself.
    :returns: float32.
    :raises TypeError: for any other dtype, see `encode`.
    """
    values = as_float32(x, "x")
    rounded = _check_out(out, np.float32, values.shape)
    flat = rounded.reshape(-1)
    lanes = _lanes(fmt)
    limit = lanes.max_finite.view(np.float32)
    if (fast := loops()) is not None:
        numbers = np.ascontiguousarray(values).reshape(-1)
        quanta = np.float32(fmt.min_subnormal * 2.0**23)
        constants = (lanes.max_finite[0], np.uint32(23 - fmt.mantissa_bits), np.float32(fmt.min_normal), quanta)
        fast.round_to(numbers, numbers.view(np.uint32), flat, flat.view(np.uint32), constants)
        return _deliver(rounded, flat, out)
    with np.errstate(invalid="ignore"):  # a signalling NaN is an input like any other
        for part, source in _chunks(values):
            bits = source.view(np.uint32)
            magnitude = (bits & MAGNITUDE).view(np.float32)
            np.minimum(magnitude, limit[: bits.size], out=magnitude)
            power = magnitude.view(np.uint32) & EXPONENT
            np.maximum(power, lanes.min_normal[: bits.size], out=power)
            power += lanes.lift  # of a NaN: wraps to a harmless finite number
            magnitude += power.view(np.float32)
            magnitude -= power.view(np.float32)
            np.bitwise_and(bits, SIGN, out=power)
            np.bitwise_or(magnitude.view(np.uint32), power, out=flat[part].view(np.uint32))
    return _deliver(rounded, flat, out)


def decode(codes: NDArray[np.uint8], fmt: ElementFormat) -> NDArray[np.float32]:
    """Values of uint8 ``codes`` of any shape, exactly, as float32.

    :raises TypeError: if ``codes`` is not uint8.
    :raises ValueError: if a code is wider than the format.
    """
    return _look_up(decode_table(fmt), codes, f"codes of {fmt.name}")


@cache
def decode_table(fmt: ElementFormat) -> NDArray[np.float32]:
    """The value of every code: float32 ``(2**bits,)``, read-only."""
    table = np.empty(1 << fmt.bits, np.float32)
    for code in range(table.size):
        sign = -1.0 if code >> (fmt.bits - 1) else 1.0
        e = code >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1
        m = code & (1 << fmt.mantissa_bits) - 1
        fraction = m / 2**fmt.mantissa_bits
        table[code] = sign * 2.0 ** (max(e, 1) - fmt.bias) * (fraction + (e > 0))
        if code in fmt.nan_codes:
            table[code] = np.nan
        if code in fmt.inf_codes:
            table[code] = sign * np.inf
    table.flags.writeable = False
    return table


def decode_e8m0(scale: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``2^(byte - 127)`` as float32, of any shape; byte 0 is the binary32 subnormal 2^-127, byte 255 is NaN.

    :raises TypeError: if ``scale`` is not uint8.
    """
    return _look_up(_e8m0_table(), scale, "scale")


def encode_e8m0_rp(x: NDArray[Any]) -> NDArray[np.uint8]:
    """The smallest power of two that is at least ``|x|``: PTX ``cvt.rp.satfinite.ue8m0x2.f32``.

    On the bits of x: the exponent field, plus one if the mantissa is not zero. A binary32 subnormal has
    exponent field 0 and the value mantissa * 2^-149; it gives byte 0 up to 2^-127 and byte 1 above. Zero
    gives byte 0, Inf and everything above 2^127 byte 254, NaN byte 255. The sign is ignored.

    :param x: float32, bfloat16 or float16 of any shape.
    """
    magnitude = as_float32(x, "x").view(np.uint32) & MAGNITUDE
    field, mantissa = magnitude >> np.uint32(23), magnitude & np.uint32(0x7FFFFF)
    inexact = mantissa > np.where(field == 0, np.uint32(0x400000), np.uint32(0))
    byte = np.minimum(field + inexact, np.uint32(254))
    return np.where(magnitude > EXPONENT, np.uint32(255), byte).astype(np.uint8)


def decode_ue4m3(scale: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of UE4M3 bytes 0..0x7F, as float32 of the same shape; 0x7F is NaN.

    :raises TypeError: if ``scale`` is not uint8.
    :raises ValueError: if a byte has its top bit set; the hardware gives it no meaning.
    """
    return _look_up(decode_table(E4M3)[:128], scale, "scale of UE4M3")


def encode_ue4m3(x: NDArray[Any]) -> NDArray[np.uint8]:
    """UE4M3 bytes of non-negative ``x``: E4M3's rounding and saturation; NaN gives 0x7F, -0 gives 0.

    :param x: float32, bfloat16 or float16 of any shape.
    :raises ValueError: if a value is negative.
    """
    values = as_float32(x, "x")
    if bool((values < 0).any()):
        raise ValueError(f"x must not be negative for UE4M3, got {float(np.nanmin(values))}")
    return encode(values, E4M3) & np.uint8(0x7F)


def as_float32(x: Any, name: str) -> NDArray[np.float32]:
    """``x`` as float32 without rounding: float32 as it is, bfloat16 and float16 widened.

    :raises TypeError: for any other dtype.
    """
    x = np.asarray(x)
    if x.dtype in (np.dtype(np.float32), np.dtype(bfloat16), np.dtype(np.float16)):
        wide: NDArray[np.float32] = x.astype(np.float32, copy=False)
        return wide
    raise TypeError(
        f"{name} must be float32, bfloat16 or float16, got {x.dtype}: another type would be rounded twice, "
        f"first to float32; where that is meant, write {name}.astype(np.float32)"
    )


@dataclass(frozen=True)
class _Lanes:
    """Constants of Note [Quantum]; the bounds `CHUNK` times, since NumPy's min and max are 3x faster on
    arrays.

    :param max_finite: bits of ``fmt.max_finite`` in binary32.
    :param min_normal: bits of ``fmt.min_normal`` in binary32, a power of two.
    :param lift: what turns the bits of ``2^floor(log2 x)`` into those of 2^23 quanta: 23 - M in the exponent
        field.
    :param origin: what the sum's fields add up to, modulo 256, where the code is 0.
    """

    max_finite: NDArray[np.uint32]
    min_normal: NDArray[np.uint32]
    lift: np.uint32
    origin: np.uint8


@cache
def _lanes(fmt: ElementFormat) -> _Lanes:
    def bits(value: float) -> np.uint32:
        return np.float32(value).view(np.uint32)

    lift = np.uint32((23 - fmt.mantissa_bits) << 23)
    return _Lanes(
        max_finite=np.full(CHUNK, bits(fmt.max_finite)),
        min_normal=np.full(CHUNK, bits(fmt.min_normal)),
        lift=lift,
        origin=np.uint8(int(bits(fmt.min_normal) + lift) >> (23 - fmt.mantissa_bits) & 0xFF),
    )


@cache
def _e8m0_table() -> NDArray[np.float32]:
    table = np.full(256, np.nan, np.float32)
    table[:255] = np.ldexp(np.float32(1), np.arange(255) - 127)
    table.flags.writeable = False
    return table


def _chunks(x: NDArray[np.float32]) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    flat = x.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = slice(start, min(start + CHUNK, flat.size))
        yield part, flat[part]


def _look_up(table: NDArray[np.float32], codes: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """``table[codes]``; in chunks, because NumPy widens the indices to 8 bytes."""
    if getattr(codes, "dtype", None) != np.uint8:
        raise TypeError(f"{name} must be a uint8 array, got {getattr(codes, 'dtype', type(codes).__name__)}")
    if table.size < 256 and codes.size and int(codes.max()) >= table.size:
        raise ValueError(f"{name} must be 0..{table.size - 1}, got {int(codes.max())}")
    values = np.empty(codes.shape, np.float32)
    flat_values, flat_codes = values.reshape(-1), codes.reshape(-1)
    for start in range(0, flat_codes.size, CHUNK):
        part = slice(start, start + CHUNK)
        np.take(table, flat_codes[part], out=flat_values[part], mode="clip")
    return values


def _check_out(out: NDArray[Any] | None, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """``out``, or a new array."""
    if out is None:
        return np.empty(shape, dtype)
    if out.dtype != dtype:
        raise TypeError(f"out must be {np.dtype(dtype)}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out must have the shape {shape} of x, got {out.shape}")
    return out


def _deliver(result: NDArray[Any], flat: NDArray[Any], out: NDArray[Any] | None) -> NDArray[Any]:
    """The filled result; where ``out`` is not contiguous, ``flat`` was a copy and is written back."""
    if out is not None and not np.shares_memory(flat, out):
        out[...] = flat.reshape(out.shape)
    return result
