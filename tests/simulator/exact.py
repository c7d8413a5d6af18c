"""Binary floating point in rational numbers: what PTX says an instruction returns, by definition."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

NAN, POSITIVE, NEGATIVE = "nan", "+inf", "-inf"


@dataclass(frozen=True)
class Binary:
    """A format: precision with the hidden bit, exponents of the smallest and largest binade, canonical NaN.

    :param infinite: whether it has infinities; without them the top codes are numbers up to ``largest``.
    """

    width: int
    precision: int
    lowest: int
    highest: int
    nan: int
    infinite: bool = True
    largest: Fraction | None = None

    @property
    def top(self) -> Fraction:
        """The largest finite number."""
        if self.largest is not None:
            return self.largest
        return (2 - Fraction(1, 2 ** (self.precision - 1))) * Fraction(2) ** self.highest

    @property
    def field(self) -> int:
        """Bits of the stored mantissa."""
        return self.precision - 1


F64 = Binary(64, 53, -1022, 1023, 0x7FF8 << 48)
F32 = Binary(32, 24, -126, 127, 0x7FFFFFFF)
F16 = Binary(16, 11, -14, 15, 0x7FFF)
BF16 = Binary(16, 8, -126, 127, 0x7FFF)
E5M2 = Binary(8, 3, -14, 15, 0x7F)
E4M3 = Binary(8, 4, -6, 8, 0x7F, False, Fraction(448))
E2M1 = Binary(4, 2, 0, 2, 0x7, False, Fraction(6))


def value_of(bits: int, f: Binary) -> Fraction | str:
    """The number of a code; of a zero see `is_negative`."""
    exponent_bits = f.width - 1 - f.field
    field, mantissa = bits >> f.field & ((1 << exponent_bits) - 1), bits & ((1 << f.field) - 1)
    negative = is_negative(bits, f)
    if f.infinite and field == (1 << exponent_bits) - 1:
        return NAN if mantissa else (NEGATIVE if negative else POSITIVE)
    scale = Fraction(2) ** (f.lowest - f.field)
    magnitude = mantissa * scale if field == 0 else (mantissa + (1 << f.field)) * scale * 2 ** (field - 1)
    if not f.infinite and magnitude > f.top:
        return NAN
    return -magnitude if negative else magnitude


def is_negative(bits: int, f: Binary) -> bool:
    """The sign bit."""
    return bool(bits >> (f.width - 1) & 1)


def to_integer(x: Fraction, mode: str, negative: bool = False) -> int:
    """A non-negative rational to an integer; directed modes are those of the signed number.

    :param mode: ``rn`` (ties to even), ``rna`` (ties away), ``rz``, ``rm``, ``rp``.
    """
    whole, rest = divmod(x, 1)
    whole = int(whole)
    match mode:
        case "rn":
            up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
        case "rna":
            up = rest >= Fraction(1, 2)
        case "rz":
            up = False
        case "rm":
            up = negative and rest > 0
        case _:
            up = not negative and rest > 0
    return whole + up


def binade(magnitude: Fraction, f: Binary) -> int:
    """Largest e with 2^e <= magnitude, but at least the format's lowest."""
    if magnitude == 0:
        return f.lowest
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    return max(exponent, f.lowest)


def encode(x: Fraction | str, f: Binary, mode: str = "rn", *, zero_sign: bool = False, finite: bool = False) -> int:
    """The code of a rational, rounded.

    :param zero_sign: sign of an exact zero. :param finite: ``.satfinite``.
    """
    if x == NAN:
        return f.nan
    sign_bit = 1 << (f.width - 1)
    if isinstance(x, str):
        negative, magnitude = x == NEGATIVE, None
    else:
        negative, magnitude = (x < 0) if x else zero_sign, abs(x)
    sign = sign_bit if negative else 0
    infinity = ((1 << (f.width - 1 - f.field)) - 1) << f.field
    if magnitude is None:
        return sign | (_code(f.top, f) if finite or not f.infinite else infinity)
    exponent = binade(magnitude, f)
    spacing = Fraction(2) ** (exponent - f.field)
    rounded = to_integer(magnitude / spacing, mode, negative) * spacing
    if rounded > f.top:
        if finite:
            return sign | _code(f.top, f)
        toward_zero = mode == "rz" or (mode == "rp" and negative) or (mode == "rm" and not negative)
        return sign | (_code(f.top, f) if toward_zero else infinity if f.infinite else f.nan)
    return sign | _code(rounded, f)


def _code(magnitude: Fraction, f: Binary) -> int:
    """Of a number that the format has."""
    if magnitude < Fraction(2) ** f.lowest:
        return int(magnitude / Fraction(2) ** (f.lowest - f.field))
    exponent = binade(magnitude, f)
    mantissa = magnitude / Fraction(2) ** (exponent - f.field) - (1 << f.field)
    return (exponent - f.lowest + 1 << f.field) + int(mantissa)


def flush(bits: int, f: Binary = F32) -> int:
    """A subnormal as zero of its sign."""
    value = value_of(bits, f)
    if isinstance(value, Fraction) and abs(value) < Fraction(2) ** f.lowest:
        return bits & 1 << (f.width - 1)
    return bits


def fused(a: int, b: int, c: int, f: Binary, mode: str = "rn", *, ftz: bool = False) -> int:
    """``a b + c`` of codes, rounded once (IEEE 754)."""
    if ftz:
        a, b, c = flush(a, f), flush(b, f), flush(c, f)
    x, y, z = value_of(a, f), value_of(b, f), value_of(c, f)
    if NAN in (x, y, z):
        return f.nan
    sign = is_negative(a, f) != is_negative(b, f)
    if isinstance(x, str) or isinstance(y, str):
        if x == 0 or y == 0:
            return f.nan
        product: Fraction | str = NEGATIVE if sign else POSITIVE
    else:
        product = x * y
    if isinstance(product, str) or isinstance(z, str):
        if isinstance(product, str) and isinstance(z, str) and product != z:
            return f.nan
        return encode(product if isinstance(product, str) else z, f)
    total = product + z
    if product == 0 and z == 0 and sign == is_negative(c, f):
        zero_sign = sign
    else:
        zero_sign = mode == "rm"
    if ftz and total and abs(total) < Fraction(2) ** f.lowest:
        return 1 << (f.width - 1) if total < 0 else 0
    return encode(total, f, mode, zero_sign=zero_sign)


def minus(bits: int, f: Binary) -> int:
    """The code with the other sign."""
    return bits ^ 1 << (f.width - 1)


def one(f: Binary) -> int:
    """The code of 1."""
    return encode(Fraction(1), f)


def added(a: int, b: int, f: Binary, mode: str = "rn", *, ftz: bool = False) -> int:
    """``a + b``."""
    return fused(a, one(f), b, f, mode, ftz=ftz)


def multiplied(a: int, b: int, f: Binary, mode: str = "rn", *, ftz: bool = False) -> int:
    """``a b``: with an addend of zero that has the product's sign, so that it changes nothing."""
    zero = (is_negative(a, f) != is_negative(b, f)) << (f.width - 1)
    return fused(a, b, zero, f, mode, ftz=ftz)


def divided(a: int, b: int, f: Binary, mode: str = "rn") -> int:
    """``a / b``."""
    x, y = value_of(a, f), value_of(b, f)
    negative = is_negative(a, f) != is_negative(b, f)
    if NAN in (x, y) or (x == 0 and y == 0) or (isinstance(x, str) and isinstance(y, str)):
        return f.nan
    if isinstance(x, str) or y == 0:
        return encode(NEGATIVE if negative else POSITIVE, f)
    if isinstance(y, str):
        return encode(Fraction(0), f, zero_sign=negative)
    return encode(x / y, f, mode, zero_sign=negative)


def root(bits: int, f: Binary, mode: str = "rn") -> int:
    """The square root: by the integer square root of a number with many digits more, and a sticky one."""
    from math import isqrt

    x = value_of(bits, f)
    if x == 0:
        return bits
    if x == NAN or x == NEGATIVE or (isinstance(x, Fraction) and x < 0):
        return f.nan
    if isinstance(x, str):
        return bits
    scale = 4**300
    whole = isqrt(int(x * scale))
    near = Fraction(whole, 2**300)
    if near * near != x:
        near += Fraction(1, 2**301)
    return encode(near, f, mode)
