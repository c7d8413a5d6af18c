"""Integer and bit instructions against Python integers."""

import pytest

from flamia.conformance.simulator import PtxError
from tests.simulator.single import apply, assert_bits, corners, crossed, random_bits, signed

WORDS = [f"{k}{bits}" for bits in (16, 32, 64) for k in "us"]


def pairs(width, seed=0):
    a, b = crossed(corners(width), corners(width))
    return a + random_bits(width, 200, seed), b + random_bits(width, 200, seed + 1)


def as_kind(value, kind):
    width = int(kind[1:])
    return signed(value, width) if kind[0] == "s" else value % (1 << width)


def check(form, kind, function, *operands, result=None, kinds=None):
    """``function`` takes and gives Python integers of the kinds; results are cut to the width of the result."""
    result = result or kind
    kinds = kinds or [kind] * len(operands)
    got = apply(form, result, *zip(kinds, operands, strict=True))
    values = [[as_kind(v, k) for v in o] for k, o in zip(kinds, operands, strict=True)]
    expected = [int(function(*v)) % (1 << int(result[1:])) for v in zip(*values, strict=True)]
    assert_bits(form, got, expected, *operands)


@pytest.mark.parametrize("kind", WORDS)
def test_sums_products_and_extremes(kind):
    a, b = pairs(int(kind[1:]))
    width = int(kind[1:])
    check(f"add.{kind}", kind, lambda x, y: x + y, a, b)
    check(f"sub.{kind}", kind, lambda x, y: x - y, a, b)
    check(f"mul.lo.{kind}", kind, lambda x, y: x * y, a, b)
    check(f"mul.hi.{kind}", kind, lambda x, y: x * y >> width, a, b)
    check(f"min.{kind}", kind, min, a, b)
    check(f"max.{kind}", kind, max, a, b)
    c = random_bits(width, len(a), 9)
    check(f"mad.lo.{kind}", kind, lambda x, y, z: x * y + z, a, b, c)
    check(f"mad.hi.{kind}", kind, lambda x, y, z: (x * y >> width) + z, a, b, c)
    check(f"sad.{kind}", kind, lambda x, y, z: z + abs(x - y), a, b, c)
    if width < 64:
        wide = f"{kind[0]}{2 * width}"
        check(f"mul.wide.{kind}", kind, lambda x, y: x * y, a, b, result=wide)
        d = random_bits(2 * width, len(a), 10)
        check(f"mad.wide.{kind}", kind, lambda x, y, z: x * y + z, a, b, d, result=wide, kinds=[kind, kind, wide])


@pytest.mark.parametrize("kind", WORDS)
def test_quotients_round_toward_zero(kind):
    a, b = pairs(int(kind[1:]))
    a, b = zip(*[(x, y) for x, y in zip(a, b, strict=True) if y], strict=True)

    def quotient(x, y):
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    check(f"div.{kind}", kind, quotient, a, b)
    check(f"rem.{kind}", kind, lambda x, y: x - quotient(x, y) * y, a, b)


@pytest.mark.parametrize("kind", [k for k in WORDS if k[0] == "s"])
def test_signs(kind):
    a = corners(int(kind[1:]))
    check(f"abs.{kind}", kind, abs, a)
    check(f"neg.{kind}", kind, lambda x: -x, a)


def test_saturation_and_relu():
    a, b = pairs(32)
    top = 2**31 - 1
    check("add.sat.s32", "s32", lambda x, y: max(-top - 1, min(top, x + y)), a, b)
    check("sub.sat.s32", "s32", lambda x, y: max(-top - 1, min(top, x - y)), a, b)
    check("max.relu.s32", "s32", lambda x, y: max(x, y, 0), a, b)
    check("min.relu.s32", "s32", lambda x, y: max(min(x, y), 0), a, b)
    c = random_bits(32, len(a), 4)
    check("mad.hi.sat.s32", "s32", lambda x, y, z: max(-top - 1, min(top, (x * y >> 32) + z)), a, b, c)


@pytest.mark.parametrize("kind", ["u16x2", "s16x2"])
def test_pairs_of_halves(kind):
    a, b = random_bits(32, 300, 1), random_bits(32, 300, 2)

    def halves(function):
        def run(x, y):
            out = 0
            for shift in (0, 16):
                u, v = (as_kind(w >> shift, kind[:3]) for w in (x, y))
                out |= function(u, v) % (1 << 16) << shift
            return out

        return run

    for name, function in (("add", lambda u, v: u + v), ("sub", lambda u, v: u - v), ("min", min), ("max", max)):
        check(f"{name}.{kind}", "u32", halves(function), a, b)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products(kind):
    a, b = pairs(32)
    for part, shift in (("lo", 0), ("hi", 16)):
        sign = kind[0]
        check(
            f"mul24.{part}.{kind}",
            kind,
            lambda x, y, shift=shift, sign=sign: (
                (signed(x, 24) if sign == "s" else x % 2**24) * (signed(y, 24) if sign == "s" else y % 2**24) >> shift
            ),
            a,
            b,
        )


def test_dot_products():
    a, b, c = (random_bits(32, 200, s) for s in (1, 2, 3))

    def four(x, y, z):
        return z + sum(signed(x >> 8 * i, 8) * (y >> 8 * i & 255) for i in range(4))

    check("dp4a.s32.u32", "u32", four, a, b, c)
    for half, start in (("lo", 0), ("hi", 2)):
        check(
            f"dp2a.{half}.u32.u32",
            "u32",
            lambda x, y, z, start=start: z + sum((x >> 16 * i & 0xFFFF) * (y >> 8 * (start + i) & 255) for i in (0, 1)),
            a,
            b,
            c,
        )


def test_carries():
    """A 128-bit sum and difference from 64-bit halves, and a 64-bit product and sum from 32-bit ones."""
    a, b, c, d = (random_bits(64, 200, s) for s in (1, 2, 3, 4))
    a[:4], c[:4] = [2**64 - 1, 0, 2**64 - 1, 5], [1, 0, 2**64 - 1, 6]
    operands = [("u64", v) for v in (a, b, c, d)]
    text = "{.reg .b64 t; %s.cc.u64 t, $a, $c; %sc.u64 $d, $b, $e;}"
    got = apply(text % ("add", "add"), "u64", *operands)
    wide = [((x + (y << 64)) + (z + (w << 64))) >> 64 & 2**64 - 1 for x, y, z, w in zip(a, b, c, d, strict=True)]
    assert_bits("add.cc", got, wide, a, b, c, d)
    got = apply(text % ("sub", "sub"), "u64", *operands)
    wide = [((x + (y << 64)) - (z + (w << 64))) >> 64 & 2**64 - 1 for x, y, z, w in zip(a, b, c, d, strict=True)]
    assert_bits("sub.cc", got, wide, a, b, c, d)
    # A carry that runs through a limb of ones.
    form = "{.reg .b64 t; add.cc.u64 t, $a, 1; addc.cc.u64 t, $b, 0; addc.u64 $d, $c, 0;}"
    limbs = ([2**64 - 1, 2**64 - 1, 5], [2**64 - 1, 7, 2**64 - 1], [41, 41, 41])
    assert apply(form, "u64", *[("u64", v) for v in limbs]) == [42, 41, 41]
    form = "{.reg .b64 t; sub.cc.u64 t, $a, 1; subc.cc.u64 t, $b, 0; subc.u64 $d, $c, 0;}"
    assert apply(form, "u64", *[("u64", v) for v in ([0, 0, 5], [0, 7, 0], [41, 41, 41])]) == [40, 41, 41]
    a, b, c, d = (random_bits(32, 200, s) for s in (5, 6, 7, 8))
    form = "{.reg .b32 t; mad.lo.cc.u32 t, $a, $b, $c; madc.hi.u32 $d, $a, $b, $e;}"
    got = apply(form, "u32", *[("u32", v) for v in (a, b, c, d)])
    wide = [(x * y + z + (w << 32)) >> 32 & 2**32 - 1 for x, y, z, w in zip(a, b, c, d, strict=True)]
    assert_bits("madc.hi", got, wide, a, b, c, d)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_logic_and_shifts(width):
    a, b = pairs(width)
    kind = f"b{width}"
    check(f"and.{kind}", kind, lambda x, y: x & y, a, b)
    check(f"or.{kind}", kind, lambda x, y: x | y, a, b)
    check(f"xor.{kind}", kind, lambda x, y: x ^ y, a, b)
    check(f"not.{kind}", kind, lambda x: ~x, a)
    check(f"cnot.{kind}", kind, lambda x: x == 0, a)
    amounts = [0, 1, width - 1, width, width + 1, 255, 2**31, 2**32 - 1, 5, 13]
    a, n = crossed(corners(width), amounts)
    for form, k, function in (
        (f"shl.b{width}", f"b{width}", lambda x, y: x << y if y < width else 0),
        (f"shr.u{width}", f"u{width}", lambda x, y: x >> min(y, 100)),
        (f"shr.s{width}", f"s{width}", lambda x, y: x >> min(y, 100)),
    ):
        check(form, k, function, a, n, kinds=[k, "u32"])
    for immediate in (0, 3, width - 1, width, 70):
        check(f"shl.b{width} $d, $a, {immediate};", f"b{width}", lambda x, y=immediate: x << y, a)
        check(f"shr.s{width} $d, $a, {immediate};", f"s{width}", lambda x, y=immediate: x >> y, a)


def test_predicate_logic():
    a, b = [0, 0, 1, 1], [0, 1, 0, 1]
    for name, expected in (("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0])):
        assert apply(f"{name}.pred", "pred", ("pred", a), ("pred", b)) == expected
    assert apply("not.pred", "pred", ("pred", a)) == [1, 1, 0, 0]
    assert apply("mov.pred", "pred", ("pred", a)) == a


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(mode):
    a, b = random_bits(32, 320, 1), random_bits(32, 320, 2)
    n = [0, 1, 5, 31, 32, 33, 63, 64, 100, 2**32 - 1] * 32

    def amount(c):
        return min(c, 32) if mode == "clamp" else c % 32

    for form, function in (
        (f"shf.l.{mode}.b32", lambda x, y, c: (y << 32 | x) << amount(c) >> 32),
        (f"shf.r.{mode}.b32", lambda x, y, c: (y << 32 | x) >> amount(c)),
    ):
        check(form, "u32", function, a, b, n)


def test_lop3():
    a, b, c = (random_bits(32, 64, s) for s in (1, 2, 3))
    for table in (0x00, 0xFF, 0x80, 0xFE, 0x96, 0xCA, 0xE8, 0xC0, 0x3C, 0x1B):

        def by_bits(x, y, z, table=table):
            index = [(x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1) for i in range(32)]
            return sum((table >> k & 1) << i for i, k in enumerate(index))

        check(f"lop3.b32 $d, $a, $b, $c, {table};", "u32", by_bits, a, b, c)
    q = [0, 1] * 32
    form = "{.reg .b32 t; lop3.or.b32 t|$d, $a, $b, $c, 0x80, $e;}"
    got = apply(form, "pred", ("b32", a), ("b32", b), ("b32", c), ("pred", q))
    assert got == [int((x & y & z) != 0 or p) for x, y, z, p in zip(a, b, c, q, strict=True)]


def test_prmt():
    a, b, c = (random_bits(32, 400, s) for s in (1, 2, 3))

    def byte(x, y, i):
        return (y << 32 | x) >> 8 * i & 255

    def default(x, y, z):
        out = 0
        for k in range(4):
            s = z >> 4 * k & 15
            v = byte(x, y, s & 7)
            out |= (255 * (v >> 7) if s & 8 else v) << 8 * k
        return out

    check("prmt.b32", "u32", default, a, b, c)
    # Bytes from the least significant one for selector 0, 1, 2, 3 (PTX ISA, "prmt").
    modes = {
        "f4e": ["3210", "4321", "5432", "6543"],
        "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"],
        "rc16": ["1010", "3232", "1010", "3232"],
    }
    for mode, rows in modes.items():
        check(
            f"prmt.b32.{mode}",
            "u32",
            lambda x, y, z, rows=rows: sum(byte(x, y, int(ch)) << 8 * (3 - i) for i, ch in enumerate(rows[z % 4])),
            a,
            b,
            c,
        )


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe(kind):
    width = int(kind[1:])
    a = random_bits(width, 600, 1)
    position = [p % 256 for p in random_bits(16, 600, 2)]
    length = [n % 256 for n in random_bits(16, 600, 3)]
    position[:6], length[:6] = [0, 31, 32, 63, 5, 200], [0, 1, 32, 64, 0, 10]

    def by_the_text(x, p, n):
        x %= 1 << width
        if kind[0] == "u" or n == 0:
            sign = 0
        else:
            sign = x >> min(p + n - 1, width - 1) & 1
        bits = [(x >> p + i & 1) if i < n and p + i < width else sign for i in range(width)]
        return sum(b << i for i, b in enumerate(bits))

    check(f"bfe.{kind}", kind, by_the_text, a, position, length, kinds=[kind, "u32", "u32"])


@pytest.mark.parametrize("width", [32, 64])
def test_bfi_and_counts(width):
    kind = f"b{width}"
    a, b = random_bits(width, 400, 1), random_bits(width, 400, 2)
    position, length = [n % 80 for n in random_bits(16, 400, 3)], [n % 80 for n in random_bits(16, 400, 4)]

    def insert(x, y, p, n):
        for i in range(n):
            if p + i < width:
                y = y & ~(1 << p + i) | (x >> i & 1) << p + i
        return y

    check(f"bfi.{kind}", kind, insert, a, b, position, length, kinds=[kind, kind, "u32", "u32"])
    a = corners(width) + a
    check(f"popc.{kind}", kind, lambda x: x.bit_count(), a, result="u32")
    check(f"clz.{kind}", kind, lambda x: width - x.bit_length(), a, result="u32")
    check(f"brev.{kind}", kind, lambda x: int(f"{x:0{width}b}"[::-1], 2), a)
    for k in "us":

        def highest(x):
            return ((~x if x < 0 else x).bit_length() - 1) % 2**32

        check(f"bfind.{k}{width}", f"{k}{width}", highest, a, result="u32")
        check(
            f"bfind.shiftamt.{k}{width}",
            f"{k}{width}",
            lambda x, highest=highest: width - 1 - highest(x) if highest(x) < width else 2**32 - 1,
            a,
            result="u32",
        )


def test_masks_and_extension():
    a, b = crossed([0, 1, 5, 30, 31, 32, 40, 2**32 - 1], [0, 1, 2, 17, 31, 32, 33, 2**32 - 1])
    check("bmsk.clamp.b32", "b32", lambda p, n: (((1 << min(n, 32)) - 1) << p) if p < 32 else 0, a, b)
    check("bmsk.wrap.b32", "b32", lambda p, n: ((1 << n % 32) - 1) << p % 32, a, b)
    x, n = crossed(corners(32), [0, 1, 5, 8, 16, 31, 32, 50])

    def extend(value, length, sign):
        value %= 1 << length
        return value - (1 << length) if sign and length and value >> (length - 1) else value

    for kind, sign in (("u32", False), ("s32", True)):
        check(
            f"szext.clamp.{kind}",
            kind,
            lambda v, m, s=sign: extend(v, min(m, 32), s),
            x,
            n,
            kinds=[kind, "u32"],
        )
        check(f"szext.wrap.{kind}", kind, lambda v, m, s=sign: extend(v, m % 32, s), x, n, kinds=[kind, "u32"])


def test_fns():
    words = random_bits(32, 200, 1)
    base = [b % 32 for b in random_bits(16, 200, 2)]
    offset = [(o % 11) - 5 for o in random_bits(16, 200, 3)]

    def find(word, at, n):
        if n == 0:
            return at if word >> at & 1 else 2**32 - 1
        places = range(at, 32) if n > 0 else range(at, -1, -1)
        found = [i for i in places if word >> i & 1]
        return found[abs(n) - 1] if len(found) >= abs(n) else 2**32 - 1

    check("fns.b32", "b32", find, words, base, offset, kinds=["b32", "u32", "s32"])


COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("kind", WORDS)
def test_comparisons(kind):
    a, b = pairs(int(kind[1:]))
    values = [(as_kind(x, kind), as_kind(y, kind)) for x, y in zip(a, b, strict=True)]
    names = dict(COMPARISONS)
    if kind[0] == "u":
        names |= {"lo": names["lt"], "ls": names["le"], "hi": names["gt"], "hs": names["ge"]}
    for name, function in names.items():
        got = apply(f"setp.{name}.{kind}", "pred", (kind, a), (kind, b))
        assert_bits(name, got, [int(function(x, y)) for x, y in values], a, b)


def test_boolean_comparisons_and_selection():
    a, b = pairs(32)
    c = [i % 2 for i in range(len(a))]
    rows = list(zip(a, b, c, strict=True))
    for boolean, function in (("and", lambda t, q: t and q), ("or", lambda t, q: t or q), ("xor", lambda t, q: t != q)):
        operands = [("u32", a), ("u32", b), ("pred", c)]
        form = "{.reg .pred q; setp.lt.%s.u32 %s, $a, $b, %s;}"
        got = apply(form % (boolean, "$d|q", "$c"), "pred", *operands)
        assert got == [int(function(x < y, bool(q))) for x, y, q in rows]
        got = apply(form % (boolean, "q|$d", "!$c"), "pred", *operands)
        assert got == [int(function(not x < y, not q)) for x, y, q in rows]
        got = apply(f"set.lt.{boolean}.u32.u32", "u32", *operands)
        assert got == [2**32 - 1 if function(x < y, bool(q)) else 0 for x, y, q in rows]
    assert apply("set.ge.f32.s32", "f32", ("s32", a), ("s32", b)) == [
        0x3F800000 if signed(x, 32) >= signed(y, 32) else 0 for x, y in zip(a, b, strict=True)
    ]
    assert apply("selp.b32", "b32", ("b32", a), ("b32", b), ("pred", c)) == [x if q else y for x, y, q in rows]
    assert apply("slct.u32.s32", "u32", ("u32", a), ("u32", b), ("s32", a)) == [
        x if signed(x, 32) >= 0 else y for x, y in zip(a, b, strict=True)
    ]


def test_division_by_zero_gives_ones_and_the_dividend():
    assert apply("div.u32", "u32", ("u32", [7]), ("u32", [0])) == [2**32 - 1]
    assert apply("rem.s32", "s32", ("s32", [7]), ("s32", [0])) == [7]


@pytest.mark.parametrize("form", ["mul.u32", "add.sat.u32", "shl.u32", "setp.num.u32", "mul.wide.u64", "add.ftz.s32"])
def test_forms_that_ptx_does_not_have_are_refused_by_name(form):
    with pytest.raises(PtxError, match=f"PTX line .*{form}"):
        apply(form, "u32", ("u32", [1]), ("u32", [1]))
