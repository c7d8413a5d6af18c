"""Conversions and the FMA exponential of a chip against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.comparison import compare_bits
from flamia.conformance.levels.check import Outcome, failed
from flamia.conformance.probes.device import map_elements
from flamia.reference.exp2 import exp2_mantissa
from flamia.reference.formats import E2M1, E4M3, ElementFormat, decode_table, encode, encode_e8m0_rp


def conversions_of(capability: tuple[int, int]) -> dict[str, Callable[[str], Outcome]]:
    """Name -> probe of a chip by compute capability, for a device."""
    found: dict[str, Callable[[str], Outcome]] = {"e4m3": _element("encode_e4m3", E4M3), "exp2": _exp2}
    if capability[0] == 10:
        found |= {"e2m1": _element("encode_e2m1", E2M1), "e8m0": _e8m0}
    return found


def corners(fmt: ElementFormat) -> NDArray[np.float32]:
    """All 65,536 bfloat16 numbers, every code's value and every midpoint of two, and their FP32 neighbours."""
    every = np.arange(1 << 16, dtype=np.uint16).view(bfloat16).astype(np.float32)
    codes = np.unique(decode_table(fmt)[np.isfinite(decode_table(fmt))])
    edges = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2, codes[-1:] * np.float32(464 / 448)]).astype(np.float32)
    with np.errstate(over="ignore"):
        near = [np.nextafter(edges, np.float32(side) * np.float32(np.inf)) for side in (-1, 1)]
    nan = np.array([0x7F800001, 0xFFC00000, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([every, edges, *near, nan])


def _element(entry: str, fmt: ElementFormat) -> Callable[[str], Outcome]:
    def probe(device: str) -> Outcome:
        x = corners(fmt)
        return _compare(fmt.name, map_elements(entry, x, np.uint8, device), encode(x, fmt), x)

    return probe


def _e8m0(device: str) -> Outcome:
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))
    x = np.concatenate([corners(E4M3), powers, np.nextafter(powers, np.float32(np.inf)), -powers])
    return _compare("E8M0", map_elements("encode_e8m0", x, np.uint8, device), encode_e8m0_rp(x), x)


def _exp2(device: str) -> Outcome:
    """Every multiple of 2^-20 in [0, 1], and small and random numbers."""
    rng = np.random.default_rng(0)
    f = np.concatenate([np.arange((1 << 20) + 1) / (1 << 20), rng.random(1 << 18), np.exp2(-rng.random(1 << 16) * 149)])
    f = f.astype(np.float32)
    return _compare("p", map_elements("exp2_mantissa", f, np.float32, device), exp2_mantissa(f.copy()), f)


def _compare(name: str, got: NDArray[Any], expected: NDArray[Any], x: NDArray[np.float32]) -> Outcome:
    found = compare_bits(name, got, expected)
    if found is None:
        return Outcome(numbers={"compared": float(got.size)})
    outcome = failed(found)
    assert found.coordinate is not None
    bits = int(x[found.coordinate].view(np.uint32))
    return Outcome("failed", f"{outcome.message}; of {float(x[found.coordinate])!r} (0x{bits:08x})", found.coordinate)
