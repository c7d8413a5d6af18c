"""Element types of the matrix operands: how wide their containers are and what their codes mean.

Note [Element containers]
~~~~~~~~~~~~~~~~~~~~~~~~~
In shared memory an element of 8 or 16 bits fills its container. Narrower ones come in two ways (PTX 9.7.16.10.2):

* *packed*, in the kinds ``mxf4`` and ``mxf4nvf4``: two E2M1 codes per byte, the even element in the low nibble;
* *padded*, in ``f8f6f4`` and ``mxf8f6f4``: 16 elements occupy 16 bytes, of which the first 8 (E2M1, ``b4x16_p64``) or
  12 (E2M3 and E3M2, ``b6x16_p32``) hold the codes, packed with the lowest bits first.

So one K step reads 32 bytes of every row, whatever the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Element:
    """One element type.

    :param name: as PTX spells it.
    :param bits: width of a code.
    :param exponent_bits, mantissa_bits: fields below the sign.
    :param specials: what the largest exponent field means: ``ieee`` (Inf and NaN), ``nan`` (all ones is NaN, E4M3),
        ``none`` (ordinary numbers).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    specials: str

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, which subnormals share."""
        return 1 - self.bias


E4M3 = Element("e4m3", 8, 4, 3, "nan")
E5M2 = Element("e5m2", 8, 5, 2, "ieee")
E2M3 = Element("e2m3", 6, 2, 3, "none")
E3M2 = Element("e3m2", 6, 3, 2, "none")
E2M1 = Element("e2m1", 4, 2, 1, "none")
F16 = Element("f16", 16, 5, 10, "ieee")
BF16 = Element("bf16", 16, 8, 7, "ieee")


@cache
def decode_table(element: Element) -> F32:
    """The value of every code, float32 ``(2^bits,)``; read-only."""
    codes = np.arange(1 << element.bits)
    mantissa = codes & ((1 << element.mantissa_bits) - 1)
    exponent = codes >> element.mantissa_bits & ((1 << element.exponent_bits) - 1)
    sign: NDArray[np.float64] = np.where(codes >> (element.bits - 1), -1.0, 1.0)
    fraction = mantissa / (1 << element.mantissa_bits) + (exponent > 0)
    value = sign * fraction * np.exp2(np.maximum(exponent, 1).astype(np.float64) - element.bias)
    top = exponent == (1 << element.exponent_bits) - 1
    if element.specials == "ieee":
        value = np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    elif element.specials == "nan":
        value = np.where(top & (mantissa == (1 << element.mantissa_bits) - 1), np.nan, value)
    table: F32 = value.astype(np.float32)
    table.flags.writeable = False
    return table


def decode_bytes(raw: Bytes, element: Element, padded: bool) -> F32:
    """Decode rows of container bytes.

    :param raw: uint8 ``(rows, bytes)``, contiguous along K.
    :param padded: whether sub-byte elements come in 16-byte containers; see Note [Element containers].
    :returns: float32 ``(rows, K)``.
    """
    rows = raw.shape[0]
    table = decode_table(element)
    if element.bits == 8:
        return table[raw]
    if element.bits == 16:
        return table[np.ascontiguousarray(raw).view(np.uint16)]
    if not padded:
        codes = np.empty((rows, 2 * raw.shape[1]), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = raw & 0xF, raw >> 4
        return table[codes]
    groups = raw.reshape(rows, -1, 16)[:, :, : 2 * element.bits]
    bits = np.unpackbits(groups, axis=-1, bitorder="little").reshape(rows, -1, element.bits)
    return table[bits @ (1 << np.arange(element.bits))]


def decode_e8m0(raw: Bytes) -> NDArray[np.float64]:
    """UE8M0 scale bytes as powers of two in float64; 255 is NaN."""
    value: NDArray[np.float64] = np.exp2(raw.astype(np.float64) - 127)
    value[raw == 255] = np.nan
    return value


def decode_ue4m3(raw: Bytes) -> NDArray[np.float64]:
    """UE4M3 scale bytes in float64; the sign bit is ignored, 127 is NaN."""
    value: NDArray[np.float64] = decode_table(E4M3)[raw & 0x7F].astype(np.float64)
    return value
