"""Floating-point instructions against rational numbers, rounded by definition."""

from fractions import Fraction

import numpy as np
import pytest

from tests.simulator import exact
from tests.simulator.exact import BF16, F16, F32, F64
from tests.simulator.single import apply, assert_bits, crossed, random_bits

F32_CORNERS = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x00800001, 0x00C00000),
    *(0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x3F000000, 0x40000000, 0x4B800000, 0xCB800001, 0x33800000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x1F800000),
    *(0x20000001, 0x5F000000, 0xDEADBEEF),
]
F16_CORNERS = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x8400, 0x3C00, 0xBC00, 0x3C01, 0x3BFF, 0x7BFF, 0xFBFF]
F16_CORNERS += [0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x1400, 0x5555]
BF16_CORNERS = [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0xBF80, 0x3F81, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0]
BF16_CORNERS += [0xFFC1]
MODES = ("rn", "rz", "rm", "rp")


def near_each_other(count, seed):
    """Pairs of FP32 numbers whose sums and products cancel, tie or go subnormal, and random ones."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 1 << 32, count, np.uint64)
    exponents = rng.integers(1, 254, count).astype(np.int64)
    a = (a & 0x807FFFFF) | (exponents << 23).astype(np.uint64)
    other = np.clip(exponents + rng.integers(-26, 27, count), 0, 254)
    b = (rng.integers(0, 1 << 32, count, np.uint64) & 0x807FFFFF) | (other << 23).astype(np.uint64)
    few = np.where(np.arange(count) % 3 == 0, 0xFFFFF000, 0xFFFFFFFF).astype(np.uint64)  # few mantissa bits: ties
    return [int(v) for v in a & few], [int(v) for v in b & few]


def small_products(count, seed):
    """Pairs of FP32 numbers whose products are around and below 2^-126."""
    rng = np.random.default_rng(seed)
    first = rng.integers(20, 110, count)
    second = 127 - 126 + 127 - first + rng.integers(-28, 3, count)
    a = rng.integers(0, 1 << 23, count) | first << 23
    b = rng.integers(0, 1 << 23, count) | np.clip(second, 1, 254) << 23
    return [int(v) for v in a], [int(v) for v in b]


def f32_pairs():
    a, b = crossed(F32_CORNERS, F32_CORNERS)
    for extra in (near_each_other(300, 1), small_products(200, 2)):
        a, b = a + extra[0], b + extra[1]
    return a, b


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_f32_sums_and_products(mode, ftz):
    a, b = f32_pairs()
    flushed = bool(ftz)
    for name, function in (
        ("add", lambda x, y: exact.added(x, y, F32, mode, ftz=flushed)),
        ("sub", lambda x, y: exact.added(x, exact.minus(y, F32), F32, mode, ftz=flushed)),
        ("mul", lambda x, y: exact.multiplied(x, y, F32, mode, ftz=flushed)),
    ):
        form = f"{name}.{mode}{ftz}.f32"
        got = apply(form, "f32", ("f32", a), ("f32", b))
        assert_bits(form, got, [function(x, y) for x, y in zip(a, b, strict=True)], a, b)


def test_f32_defaults_to_nearest():
    a, b = near_each_other(200, 5)
    for name, function in (("add", exact.added), ("mul", exact.multiplied)):
        got = apply(f"{name}.f32", "f32", ("f32", a), ("f32", b))
        assert_bits(name, got, [function(x, y, F32) for x, y in zip(a, b, strict=True)], a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_f32_fma_rounds_once(mode, ftz):
    a, b = f32_pairs()
    rng = np.random.default_rng(3)
    c = [int(v) for v in rng.choice(np.array(F32_CORNERS), len(a))]
    # Addends that nearly cancel the product, or lie half an ulp of it away.
    for i in range(len(a) // 2):
        product = exact.multiplied(a[i], b[i], F32)
        shift = int(rng.integers(0, 60))
        exponent = (product >> 23 & 255) - shift
        c[i] = product ^ 0x80000000 if shift < 4 else (product & 0x80000000) | max(exponent, 0) << 23 | int(shift % 2)
    form = f"fma.{mode}{ftz}.f32"
    got = apply(form, "f32", ("f32", a), ("f32", b), ("f32", c))
    expected = [exact.fused(x, y, z, F32, mode, ftz=bool(ftz)) for x, y, z in zip(a, b, c, strict=True)]
    assert_bits(form, got, expected, a, b, c)


def test_fma_where_float64_would_round_twice():
    """(1 + 2^-23)(1 - 2^-23) is 2^-46 less than 1. A float64 sum with something much larger loses that, lies on a tie
    of FP32 and goes to the even neighbour above; the right result is the odd one below. Once normal, once subnormal."""
    a = [0x3F800001, 0x1A000001]  # (1 + 2^-23) and that times 2^-75
    b = [0x337FFFFE, 0x19FFFFFE]  # (1 - 2^-23) times 2^-24 and times 2^-75
    c = [0x3F800001, 0x007FFFFF]
    for i in range(2):  # each in a launch of its own: lanes of a warp are computed together
        assert apply("fma.rn.f32", "f32", ("f32", a[i : i + 1]), ("f32", b[i : i + 1]), ("f32", c[i : i + 1])) == [c[i]]
    assert [exact.fused(*row, F32) for row in zip(a, b, c, strict=True)] == c
    pairs = [tuple(x << 32 | x for x in v) for v in (a, b, c)]
    assert apply("fma.rn.f32x2", "f32x2", *[("f32x2", p) for p in pairs]) == list(pairs[2])


@pytest.mark.parametrize("mode", MODES)
def test_f32_quotients_and_roots(mode):
    a, b = crossed(F32_CORNERS, F32_CORNERS)
    extra = near_each_other(300, 7)
    a, b = a + extra[0], b + extra[1]
    got = apply(f"div.{mode}.f32", "f32", ("f32", a), ("f32", b))
    assert_bits("div", got, [exact.divided(x, y, F32, mode) for x, y in zip(a, b, strict=True)], a, b)
    got = apply(f"rcp.{mode}.f32", "f32", ("f32", b))
    assert_bits("rcp", got, [exact.divided(0x3F800000, y, F32, mode) for y in b], b)
    got = apply(f"sqrt.{mode}.f32", "f32", ("f32", a))
    assert_bits("sqrt", got, [exact.root(x, F32, mode) for x in a], a)


def test_f32_saturation():
    a, b = crossed(F32_CORNERS, F32_CORNERS[:12])

    def clamp(bits):
        value = exact.value_of(bits, F32)
        if value == exact.NAN or (isinstance(value, Fraction) and value <= 0) or value == exact.NEGATIVE:
            return 0
        return 0x3F800000 if value == exact.POSITIVE or value >= 1 else bits

    got = apply("add.sat.f32", "f32", ("f32", a), ("f32", b))
    assert_bits("add.sat", got, [clamp(exact.added(x, y, F32)) for x, y in zip(a, b, strict=True)], a, b)
    got = apply("fma.rn.sat.f32", "f32", ("f32", a), ("f32", b), ("f32", b))
    assert_bits("fma.sat", got, [clamp(exact.fused(x, y, y, F32)) for x, y in zip(a, b, strict=True)], a, b)


def extreme(codes, f, largest, propagate=False):
    """The chosen code: numbers before NaN (unless they propagate), -0 below +0."""
    numbers = [c for c in codes if exact.value_of(c, f) != exact.NAN]
    if not numbers or (propagate and len(numbers) < len(codes)):
        return f.nan

    def key(code):
        value = exact.value_of(code, f)
        order = {exact.NEGATIVE: Fraction(-(2**200)), exact.POSITIVE: Fraction(2**200)}.get(value, value)
        return order, not exact.is_negative(code, f)

    return (max if largest else min)(numbers, key=key)


@pytest.mark.parametrize("name", ["min", "max"])
def test_f32_extremes(name):
    a, b = crossed(F32_CORNERS, F32_CORNERS)
    c = random_bits(32, len(a), 3)
    largest = name == "max"
    rows = list(zip(a, b, c, strict=True))
    operands = [("f32", a), ("f32", b)]
    check = [
        (f"{name}.f32", operands, [extreme(r[:2], F32, largest) for r in rows]),
        (f"{name}.NaN.f32", operands, [extreme(r[:2], F32, largest, True) for r in rows]),
        (f"{name}.f32", [*operands, ("f32", c)], [extreme(r, F32, largest) for r in rows]),
        (f"{name}.NaN.f32", [*operands, ("f32", c)], [extreme(r, F32, largest, True) for r in rows]),
        (f"{name}.ftz.f32", operands, [extreme([exact.flush(x) for x in r[:2]], F32, largest) for r in rows]),
    ]
    for form, given, expected in check:
        assert_bits(form, apply(form, "f32", *given), expected, *(o for _, o in given))
    got = apply(f"{name}.xorsign.abs.f32", "f32", *operands)
    for (x, y, _), value in zip(rows, got, strict=True):
        chosen = extreme([x & 0x7FFFFFFF, y & 0x7FFFFFFF], F32, largest)
        if chosen != F32.nan:
            assert value == chosen | (x ^ y) & 0x80000000, (hex(x), hex(y))


def test_signs_and_classes():
    a, b = crossed(F32_CORNERS, F32_CORNERS)
    numbers = [x for x in F32_CORNERS if exact.value_of(x, F32) != exact.NAN]
    assert apply("abs.f32", "f32", ("f32", numbers)) == [x & 0x7FFFFFFF for x in numbers]
    assert apply("neg.f32", "f32", ("f32", numbers)) == [x ^ 0x80000000 for x in numbers]
    assert apply("neg.ftz.f32", "f32", ("f32", numbers)) == [exact.flush(x) ^ 0x80000000 for x in numbers]
    got = apply("copysign.f32", "f32", ("f32", a), ("f32", b))
    assert got == [y & 0x7FFFFFFF | x & 0x80000000 for x, y in zip(a, b, strict=True)]
    values = [exact.value_of(x, F32) for x in F32_CORNERS]
    tests = {
        "finite": [not isinstance(v, str) for v in values],
        "infinite": [v in (exact.POSITIVE, exact.NEGATIVE) for v in values],
        "number": [v != exact.NAN for v in values],
        "notanumber": [v == exact.NAN for v in values],
        "normal": [isinstance(v, Fraction) and abs(v) >= Fraction(2) ** -126 for v in values],
        "subnormal": [isinstance(v, Fraction) and 0 < abs(v) < Fraction(2) ** -126 for v in values],
    }
    for name, expected in tests.items():
        got = apply(f"testp.{name}.f32", "pred", ("f32", F32_CORNERS))
        assert got == [int(e) for e in expected], name


def test_comparisons_with_nan():
    a, b = crossed(F32_CORNERS, F32_CORNERS)
    order = {exact.NEGATIVE: Fraction(-(2**200)), exact.POSITIVE: Fraction(2**200)}
    functions = {
        "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y,
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
    }
    values = [tuple(exact.value_of(v, F32) for v in pair) for pair in zip(a, b, strict=True)]

    def holds(name, pair, unordered):
        if exact.NAN in pair:
            return unordered
        return functions[name](*(order.get(v, v) for v in pair))

    for name in functions:
        for form, unordered in ((name, False), (f"{name}u", True)):
            got = apply(f"setp.{form}.f32", "pred", ("f32", a), ("f32", b))
            assert_bits(form, got, [int(holds(name, p, unordered)) for p in values], a, b)
    assert apply("setp.num.f32", "pred", ("f32", a), ("f32", b)) == [int(exact.NAN not in p) for p in values]
    assert apply("setp.nan.f32", "pred", ("f32", a), ("f32", b)) == [int(exact.NAN in p) for p in values]
    small = [0x00000001, 0x80000001, 0x00800000]
    assert apply("setp.eq.ftz.f32", "pred", ("f32", small), ("f32", [0, 0, 0])) == [1, 1, 0]
    assert apply("setp.eq.f32", "pred", ("f32", small), ("f32", [0, 0, 0])) == [0, 0, 0]


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("mode", MODES)
def test_pairs_of_f32(mode, ftz):
    a, b = f32_pairs()
    c = random_bits(32, len(a), 8)
    low = [x | y << 32 for x, y in zip(a, b, strict=True)]
    high = [y | x << 32 for x, y in zip(a, b, strict=True)]
    third = [z | z << 32 for z in c]
    flushed = bool(ftz)

    def both(function, *operands):
        return [
            function(*(v & 0xFFFFFFFF for v in row)) | function(*(v >> 32 for v in row)) << 32
            for row in zip(*operands, strict=True)
        ]

    got = apply(f"add.{mode}{ftz}.f32x2", "f32x2", ("f32x2", low), ("f32x2", high))
    assert_bits("add", got, both(lambda x, y: exact.added(x, y, F32, mode, ftz=flushed), low, high), low, high)
    got = apply(f"mul.{mode}{ftz}.f32x2", "f32x2", ("f32x2", low), ("f32x2", high))
    assert_bits("mul", got, both(lambda x, y: exact.multiplied(x, y, F32, mode, ftz=flushed), low, high), low, high)
    got = apply(f"fma.{mode}{ftz}.f32x2", "f32x2", ("f32x2", low), ("f32x2", high), ("f32x2", third))
    expected = both(lambda x, y, z: exact.fused(x, y, z, F32, mode, ftz=flushed), low, high, third)
    assert_bits("fma", got, expected, low, high, third)


@pytest.mark.parametrize(("kind", "f", "some"), [("f16", F16, F16_CORNERS), ("bf16", BF16, BF16_CORNERS)])
def test_halves(kind, f, some):
    a, b = crossed(some, some)
    a, b = a + random_bits(16, 200, 1), b + random_bits(16, 200, 2)
    c = random_bits(16, len(a), 3)
    rows = list(zip(a, b, c, strict=True))
    expected = {
        "add": [exact.added(x, y, f) for x, y, _ in rows],
        "sub": [exact.added(x, exact.minus(y, f), f) for x, y, _ in rows],
        "mul": [exact.multiplied(x, y, f) for x, y, _ in rows],
        "min": [extreme(r[:2], f, False) for r in rows],
        "max.NaN": [extreme(r[:2], f, True, True) for r in rows],
    }
    for name, wanted in expected.items():
        assert_bits(name, apply(f"{name}.{kind}", kind, (kind, a), (kind, b)), wanted, a, b)
        pairs = [x | y << 16 for x, y in zip(a, b, strict=True)]
        swapped = [y | x << 16 for x, y in zip(a, b, strict=True)]
        back = dict(zip(zip(a, b, strict=True), wanted, strict=True))
        got = apply(f"{name}.{kind}x2", f"{kind}x2", (f"{kind}x2", pairs), (f"{kind}x2", swapped))
        assert [g & 0xFFFF for g in got] == [back[x, y] for x, y, _ in rows], name
    wanted = [exact.fused(x, y, z, f) for x, y, z in rows]
    assert_bits("fma", apply(f"fma.rn.{kind}", kind, (kind, a), (kind, b), (kind, c)), wanted, a, b, c)
    numbers = [x for x in a if exact.value_of(x, f) != exact.NAN]
    assert apply(f"neg.{kind}", kind, (kind, numbers)) == [x ^ 0x8000 for x in numbers]
    assert apply(f"abs.{kind}", kind, (kind, numbers)) == [x & 0x7FFF for x in numbers]


def test_doubles():
    rng = np.random.default_rng(0)
    a, b, c = (list(rng.integers(0, 1 << 63, 100, np.uint64) * 2 + rng.integers(0, 2, 100, np.uint64)) for _ in "abc")
    a, b, c = ([int(v) & 0xBFFFFFFFFFFFFFFF | 0x3000000000000000 for v in x] for x in (a, b, c))
    for name, function in (("add", exact.added), ("mul", exact.multiplied), ("div", exact.divided)):
        got = apply(f"{name}.rn.f64", "f64", ("f64", a), ("f64", b))
        assert_bits(name, got, [function(x, y, F64) for x, y in zip(a, b, strict=True)], a, b)
    got = apply("fma.rn.f64", "f64", ("f64", a), ("f64", b), ("f64", c))
    assert_bits("fma", got, [exact.fused(x, y, z, F64) for x, y, z in zip(a, b, c, strict=True)], a, b, c)


def test_extremes_of_doubles():
    """-0 below +0 in both orders, a number before NaN."""
    plus, minus, one, nan = 0, 1 << 63, 0x3FF0000000000000, 0x7FF8000000000000
    a = [plus, minus, plus, minus, one, nan, minus, one] * 5
    b = [minus, plus, plus, minus, minus, one, nan, one] * 5
    least, most = [minus, minus, plus, minus, minus, one, minus, one], [plus, plus, plus, minus, one, one, minus, one]
    assert apply("min.f64", "f64", ("f64", a), ("f64", b)) == least * 5
    assert apply("max.f64", "f64", ("f64", a), ("f64", b)) == most * 5


@pytest.mark.parametrize(
    ("form", "function"),
    [
        ("ex2.approx.f32", lambda x: 2.0**x),
        ("lg2.approx.f32", np.log2),
        ("rcp.approx.ftz.f32", lambda x: 1 / x),
        ("rsqrt.approx.f32", lambda x: x**-0.5),
        ("sqrt.approx.f32", lambda x: x**0.5),
        ("sin.approx.f32", np.sin),
        ("cos.approx.f32", np.cos),
        ("tanh.approx.f32", np.tanh),
    ],
)
def test_approximations_are_near(form, function):
    """PTX bounds them: by 2^-11 relative (tanh) or better, sin and cos by 2^-20.5 absolute."""
    x = np.linspace(0.07, 3.1, 64, dtype=np.float32)
    got = np.array(apply(form, "f32", ("f32", x.view(np.uint32))), np.uint32).view(np.float32)
    np.testing.assert_allclose(got, function(x.astype(np.float64)), rtol=2**-20, atol=2**-20)


def test_approximation_of_special_values():
    special = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000]
    one, inf, minus_inf, nan = 0x3F800000, 0x7F800000, 0xFF800000, 0x7FFFFFFF
    for form, expected in {
        "ex2.approx.ftz.f32": [one, one, inf, 0, nan],
        "lg2.approx.f32": [minus_inf, minus_inf, inf, nan, nan],
        "rcp.approx.ftz.f32": [inf, minus_inf, 0, 0x80000000, nan],
        "rsqrt.approx.f32": [inf, minus_inf, 0, nan, nan],
        "sqrt.approx.f32": [0, 0x80000000, inf, nan, nan],
    }.items():
        assert_bits(form, apply(form, "f32", ("f32", special)), expected, special)
