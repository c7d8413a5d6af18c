"""shfl, vote, match, redux, elect, bar.warp.sync and matrix fragments: by the text of PTX, in plain Python."""

from fractions import Fraction

import numpy as np
import pytest

from flamia.conformance.simulator import PtxError
from flamia.conformance.simulator.machine import faults
from tests.simulator import exact
from tests.simulator.exact import F32
from tests.simulator.kernels import run
from tests.simulator.test_float import F32_CORNERS, extreme

LANE = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd100, %rd1; add.u64 %rd3, %rd101, %rd1;"
VALUES = (np.arange(32, dtype=np.uint64) * 0x9E3779B1 % 2**32).astype(np.uint32)


def per_lane(body, inputs=VALUES, words=1, **options):
    """Lane i's %r2 is the i-th input; results are %r20, %r21, ..."""
    out = np.zeros((words, 32), np.uint32)
    stores = "\n".join(f"st.global.u32 [%rd3+{128 * i}], %r{20 + i};" for i in range(words))
    run(f"{LANE} ld.global.u32 %r2, [%rd2];\n{body}\n{stores}", [np.ascontiguousarray(inputs), out], **options)
    return out


def shuffled(mode, values, b, c):
    """The pseudocode of PTX, "shfl.sync"."""
    out, valid = [], []
    for lane in range(32):
        bval, cval, mask = b & 31, c & 31, c >> 8 & 31
        last, first = (lane & mask) | (cval & ~mask), lane & mask
        match mode:
            case "up":
                j = lane - bval
                p = j >= last
            case "down":
                j = lane + bval
                p = j <= last
            case "bfly":
                j = lane ^ bval
                p = j <= last
            case _:
                j = first | (bval & ~mask & 31)
                p = j <= last
        out.append(int(values[j if p else lane]))
        valid.append(int(p))
    return [out, valid]


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8, 1])
def test_shuffles(mode, width):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    for b in (0, 1, 3, 7, 16, 31, 33):
        form = f"shfl.sync.{mode}.b32 %r20|%p1, %r2, {b}, {c}, -1; selp.u32 %r21, 1, 0, %p1;"
        assert per_lane(form, words=2).tolist() == shuffled(mode, VALUES, b, c), (b, c)
        from_registers = f"mov.u32 %r5, {b}; mov.u32 %r6, {c}; shfl.sync.{mode}.b32 %r20, %r2, %r5, %r6, 0xffffffff;"
        assert per_lane(from_registers)[0].tolist() == shuffled(mode, VALUES, b, c)[0], (b, c)


def test_shuffle_with_an_index_per_lane():
    got = per_lane("mad.lo.u32 %r5, %r1, 7, 3; shfl.sync.idx.b32 %r20, %r2, %r5, 31, -1;")[0]
    assert got.tolist() == [int(VALUES[(7 * i + 3) % 32]) for i in range(32)]


def test_shuffles_among_some_lanes():
    """The named lanes alone; a source that takes no part is counted, as its value is undefined."""
    body = """setp.lt.u32 %p1, %r1, 8; mov.u32 %r20, 0; @!%p1 bra END0;
shfl.sync.bfly.b32 %r20, %r2, {b}, 31, 0xff; END0:"""
    got = per_lane(body.format(b=5))[0]
    assert got.tolist() == [int(VALUES[i ^ 5]) for i in range(8)] + [0] * 24
    report = run(f"{LANE} mov.u32 %r2, %r1; {body.format(b=9)}", [VALUES.copy(), VALUES.copy()])
    assert report.unpromised["shfl from a lane that does not take part"] == 1
    with pytest.raises(faults.Unpromised):
        run(f"{LANE} mov.u32 %r2, %r1; {body.format(b=9)}", [VALUES.copy(), VALUES.copy()], strict=True)


def test_votes():
    for limit in (0, 5, 32):
        got = per_lane(
            f"""setp.lt.u32 %p1, %r1, {limit}; vote.sync.all.pred %p2, %p1, -1; selp.u32 %r20, 1, 0, %p2;
vote.sync.any.pred %p2, %p1, -1; selp.u32 %r21, 1, 0, %p2; vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r22, 1, 0, %p2;
vote.sync.ballot.b32 %r23, %p1, -1; vote.sync.ballot.b32 %r24, !%p1, -1;""",
            words=5,
        )
        held = (1 << limit) - 1
        expected = [limit == 32, limit > 0, limit in (0, 32), held, held ^ 0xFFFFFFFF]
        assert got.tolist() == [[int(e)] * 32 for e in expected]


def test_votes_and_reductions_of_both_sides_of_a_branch():
    """Each side names its own lanes."""
    got = per_lane(
        """setp.lt.u32 %p1, %r1, 12; @%p1 bra LOW; redux.sync.add.u32 %r20, %r1, 0xfffff000; bra END0;
LOW: redux.sync.add.u32 %r20, %r1, 0xfff;
END0:"""
    )[0]
    assert got.tolist() == [sum(range(12))] * 12 + [sum(range(12, 32))] * 20


def test_lanes_come_from_two_places():
    """A member mask over both sides of a branch: bar.warp.sync may be at different places."""
    got = per_lane(
        """setp.lt.u32 %p1, %r1, 12; @%p1 bra LOW; st.shared.u32 [smem], 5; bar.warp.sync 0xffffffff;
mov.u32 %r20, 1; bra END0;
LOW: bar.warp.sync 0xffffffff; ld.shared.u32 %r20, [smem];
END0:""",
        shared=16,
    )[0]
    assert got.tolist() == [5] * 12 + [1] * 20


def test_matches():
    inputs = np.array([i * i % 7 for i in range(32)], np.uint32)
    got = per_lane(
        """match.any.sync.b32 %r20, %r2, -1; match.all.sync.b32 %r21|%p1, %r2, -1; selp.u32 %r22, 1, 0, %p1;
mov.u32 %r9, 4; match.all.sync.b32 %r23|%p2, %r9, -1; selp.u32 %r24, 1, 0, %p2;
cvt.u64.u32 %rd9, %r2; shl.b64 %rd9, %rd9, 32; match.any.sync.b64 %r25, %rd9, -1;""",
        inputs,
        words=6,
    )
    equal = [sum(1 << j for j in range(32) if inputs[j] == inputs[i]) for i in range(32)]
    assert got.tolist() == [equal, [0] * 32, [0] * 32, [2**32 - 1] * 32, [1] * 32, equal]


def test_reductions_of_integers():
    signed = [int(v) for v in VALUES.view(np.int32)]
    whole = [int(v) for v in VALUES]
    expected = {
        "add.u32": sum(whole),
        "add.s32": sum(signed),
        "min.u32": min(whole),
        "max.u32": max(whole),
        "min.s32": min(signed),
        "max.s32": max(signed),
        "and.b32": int(np.bitwise_and.reduce(VALUES)),
        "or.b32": int(np.bitwise_or.reduce(VALUES)),
        "xor.b32": int(np.bitwise_xor.reduce(VALUES)),
    }
    for name, value in expected.items():
        assert per_lane(f"redux.sync.{name} %r20, %r2, -1;")[0].tolist() == [value % 2**32] * 32, name


def test_reductions_of_floats():
    numbers = [c for c in F32_CORNERS if exact.value_of(c, F32) != exact.NAN][:32]
    numbers += [exact.encode(Fraction(i), F32) for i in range(32 - len(numbers))]
    with_nan = [*numbers[:31], 0x7FC00001]
    for codes in (numbers, with_nan):
        inputs = np.array(codes, np.uint32)
        plain = [c & 0x7FFFFFFF for c in codes]
        for name, largest in (("min", False), ("max", True)):
            for flags, values, nan in (
                ("", codes, False),
                (".NaN", codes, True),
                (".abs", plain, False),
                (".abs.NaN", plain, True),
            ):
                got = per_lane(f"redux.sync.{name}{flags}.f32 %r20, %r2, -1;", inputs)[0]
                assert got.tolist() == [extreme(values, F32, largest, nan)] * 32, (name, flags)


def test_election():
    body = """mov.u32 %r6, 1; shl.b32 %r5, %r6, %r1; and.b32 %r5, %r5, {mask}; setp.eq.u32 %p2, %r5, 0;
mov.u32 %r20, 99; mov.u32 %r21, 0; @%p2 bra END0;
elect.sync %r20|%p1, {mask}; selp.u32 %r21, 1, 0, %p1;
END0:"""
    for mask, lanes in (("0xffffffff", range(32)), ("0xff00", range(8, 16))):
        leaders = []
        for seed in range(12):
            got = per_lane(body.format(mask=mask), words=2, seed=seed)
            (leader,) = np.flatnonzero(got[1])
            assert leader in lanes and {int(got[0, i]) for i in lanes} == {int(leader)}
            leaders.append(int(leader))
        assert leaders[0] == lanes[0]  # as on the chip
        assert len(set(leaders)) > 1  # PTX leaves open which
    twice = per_lane("elect.sync %r20|%p1, -1; elect.sync %r21|%p1, -1;", words=2, seed=5)
    assert (twice[0] == twice[1]).all()  # but it is always the same


def test_lanes_that_are_not_named_are_a_fault():
    with pytest.raises(faults.Divergent, match="does not name"):
        per_lane("shfl.sync.idx.b32 %r20, %r2, 0, 31, 0xff;")
    with pytest.raises(faults.NotUniform):
        per_lane("shfl.sync.idx.b32 %r20, %r2, 0, 31, %r1;")
    with pytest.raises(faults.Deadlock, match=r"lanes \(0, 1, 2, 3, 4\) at a .sync instruction"):
        per_lane(
            """setp.lt.u32 %p1, %r1, 5; @%p1 bra LOW; vote.sync.any.pred %p2, %p1, -1; bra END0;
LOW: vote.sync.all.pred %p2, %p1, -1;
END0:"""
        )


@pytest.mark.parametrize(
    "form", ["shfl.up.b32 %r20, %r2, 1, 0;", "vote.all.pred %p1, %p1;", "redux.sync.and.u32 %r20, %r2, -1;"]
)
def test_forms_without_sync_are_refused(form):
    with pytest.raises(PtxError):
        per_lane(form)


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_fragments(count, transposed):
    """Eight rows of 16 bytes per matrix, at the addresses of threads 8k to 8k+7; the rows lie 32 bytes apart."""
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 1 << 16, (32, 8), np.uint16)
    source, out = np.zeros((32, 16), np.uint16), np.zeros((count, 32), np.uint32)
    source[:, :8] = rows
    back = np.zeros((32, 16), np.uint16)
    registers = ", ".join(f"%r{20 + i}" for i in range(count))
    listed = f"{{{registers}}}"
    run(
        f"""{LANE} mov.u32 %r3, smem; mad.lo.u32 %r4, %r1, 32, %r3;
mul.wide.u32 %rd5, %r1, 32; add.u64 %rd6, %rd100, %rd5;
ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd6]; st.shared.v4.u32 [%r4], {{%r5, %r6, %r7, %r8}}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {listed}, [%r4];
{" ".join(f"st.global.u32 [%rd3+{128 * i}], %r{20 + i};" for i in range(count))}
bar.sync 0; st.shared.v4.u32 [%r4], {{%r1, %r1, %r1, %r1}}; bar.sync 0;
stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r4], {listed}; bar.sync 0;
ld.shared.v4.u32 {{%r5, %r6, %r7, %r8}}, [%r4]; add.u64 %rd7, %rd102, %rd5;
st.global.v4.u32 [%rd7], {{%r5, %r6, %r7, %r8}};""",
        [source, out, back],
        shared=1024,
    )
    for k in range(count):
        for thread in range(32):
            row, column = thread // 4, 2 * (thread % 4)
            block = rows[8 * k : 8 * k + 8]
            low, high = (block[column, row], block[column + 1, row]) if transposed else block[row, column : column + 2]
            assert out[k, thread] == int(low) | int(high) << 16, (k, thread)
    assert (back[: 8 * count, :8] == rows[: 8 * count]).all()


def test_movmatrix():
    got = per_lane("movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r2;")[0]
    block = VALUES.view(np.uint16).reshape(8, 8)
    for thread in range(32):
        row, column = thread // 4, 2 * (thread % 4)
        assert got[thread] == int(block[column, row]) | int(block[column + 1, row]) << 16


def test_aligned_instructions_need_the_whole_warp():
    with pytest.raises(faults.Divergent, match="without some lanes"):
        per_lane("setp.lt.u32 %p1, %r1, 5; @%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r2;")
