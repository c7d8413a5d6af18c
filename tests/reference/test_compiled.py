"""The compiled loops give the bits of the NumPy versions."""

import sys

import numpy as np
import pytest

from flamia.reference import compiled, formats, probabilities

pytestmark = pytest.mark.skipif(compiled.loops() is None, reason="numba is not installed (extra fast)")

F32 = np.float32


@pytest.fixture
def interpreted(monkeypatch):
    """Call a function without the compiled loops."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            for module in (formats, probabilities):
                patch.setattr(module, "loops", lambda: None)
            with np.errstate(all="ignore"):
                return function(*args)

    return call


def every_kind_of_float(n: int) -> np.ndarray:
    """Random bit patterns: NaN, Inf, subnormals and all magnitudes; and scores as they occur."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(F32)
    return np.concatenate([patterns, rng.standard_normal(n, F32) * F32(8), F32([0.0, -0.0, np.inf, -np.inf, np.nan])])


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """NaN for NaN: its sign and payload carry nothing."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    keep = ~np.isnan(a)
    np.testing.assert_array_equal(a.view(np.uint32)[keep], b.view(np.uint32)[keep])


@pytest.mark.parametrize("fmt", [formats.E4M3, formats.E5M2, formats.E2M1], ids=lambda f: f.name)
def test_round_to(fmt, interpreted) -> None:
    x = every_kind_of_float(2_000_000)
    same_bits(formats.round_to(x, fmt), interpreted(formats.round_to, x, fmt))


@pytest.mark.parametrize("c", [0.0, 0.12751743, 1.0, 1.5, 1e30])
def test_exponential(c, interpreted) -> None:
    x = probabilities.raise_overflowed(every_kind_of_float(2_000_000))
    twin = probabilities.exponential(x.copy(), F32(c))
    for got, expected in zip(twin, interpreted(probabilities.exponential, x.copy(), F32(c)), strict=True):
        same_bits(got, expected)


def test_a_numba_that_does_not_work_is_as_none(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # the import raises
    compiled.loops.cache_clear()
    try:
        assert compiled.loops() is None
    finally:
        compiled.loops.cache_clear()


def test_round_to_writes_to_strided_and_given_arrays(interpreted) -> None:
    x = every_kind_of_float(100)[:200].reshape(20, 10)
    out = np.zeros((10, 20), F32).T
    assert formats.round_to(x.T.copy().T, formats.E4M3, out=out) is out
    same_bits(np.ascontiguousarray(out), interpreted(formats.round_to, x, formats.E4M3))
