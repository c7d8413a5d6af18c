"""Control flow: branches and meetings, calls, exits, barriers, deadlock, clusters, special registers."""

import numpy as np
import pytest

from flamia.conformance.simulator import PtxError, simulate
from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.flow import find_joins
from flamia.conformance.simulator.machine.scheduler import MOST_SEGMENTS
from tests.simulator.kernels import module, run, wait

LANE = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd100, %rd1;"


def collatz(n):
    steps = 0
    while n > 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_loops_that_lanes_leave_one_by_one(seed):
    out = np.zeros(64, np.uint32)
    report = run(
        f"""{LANE} add.u32 %r2, %r1, 1; mov.u32 %r3, 0;
LOOP: setp.le.u32 %p1, %r2, 1; @%p1 bra DONE;
and.b32 %r4, %r2, 1; setp.eq.u32 %p2, %r4, 0; @%p2 bra EVEN;
mad.lo.u32 %r2, %r2, 3, 1; bra NEXT;
EVEN: shr.u32 %r2, %r2, 1;
NEXT: add.u32 %r3, %r3, 1; bra LOOP;
DONE: st.global.u32 [%rd2], %r3;""",
        [out],
        block=64,
        seed=seed,
    )
    assert out.tolist() == [collatz(n) for n in range(1, 65)]
    # The lanes of a warp meet again: one store for all of them.
    assert all(c["st.global.u32"] == 1 for c in report.instructions.values())


def test_nested_branches_meet_at_their_post_dominators():
    """Each pair of sides writes its own value, and activemask sees who is together in every place."""
    out = np.zeros(32 * 4, np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 16; add.u64 %rd2, %rd100, %rd1;
and.b32 %r2, %r1, 1; and.b32 %r3, %r1, 2; setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r3, 0;
@%p1 bra A; mov.u32 %r10, 1; activemask.b32 %r11;
@%p2 bra B; mov.u32 %r12, 3; bra C;
B: mov.u32 %r12, 2;
C: activemask.b32 %r13; bra END0;
A: mov.u32 %r10, 0; activemask.b32 %r11; mov.u32 %r12, 9; mov.u32 %r13, %r11;
END0: activemask.b32 %r14; st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13}; add.u32 %r12, %r12, %r14;
st.global.u32 [%rd2+8], %r12;""",
        [out],
    )
    rows = out.reshape(32, 4)
    even, odd = 0x55555555, 0xAAAAAAAA
    assert (rows[0::2] == [0, even, (9 + 0xFFFFFFFF) % 2**32, even]).all()
    assert (rows[1::4] == [1, odd, (2 + 0xFFFFFFFF) % 2**32, odd]).all()
    assert (rows[3::4] == [1, odd, (3 + 0xFFFFFFFF) % 2**32, odd]).all()


def test_post_dominators():
    # 0 branches to 1 and 2, which meet at 3; 3 loops to itself or goes to 4, the last.
    assert find_joins([[1, 2], [3], [3], [3, 4], [5]]) == [3, 3, 3, 4, -1]
    # A branch around a return meets only at the end; a loop without an end never.
    assert find_joins([[1, 2], [3], [3]]) == [-1, -1, -1]
    assert find_joins([[0], [2]]) == [-1, -1]


def test_lanes_that_wait_for_lanes_of_their_own_warp():
    """A lane spins on what a lane of the other side of a branch writes: PTX promises progress to both."""
    out = np.zeros(32, np.uint32)
    body = f"""{LANE} setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [smem], 0; bar.warp.sync 0xffffffff;
@%p1 bra LEADER;
SPIN: ld.volatile.shared.u32 %r2, [smem]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; bra END0;
LEADER: st.volatile.shared.u32 [smem], 7; mov.u32 %r2, 7;
END0: st.global.u32 [%rd2], %r2;"""
    for seed in range(6):
        out[:] = 0
        run(body, [out], shared=16, seed=seed)
        assert (out == 7).all()


def test_a_leader_waits_while_the_others_arrive():
    """The lanes that the leader waits for stand at the meeting behind its branch: they are let go, which is counted."""
    out = np.zeros(32, np.uint32)
    body = f"""{LANE} setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, smem;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 31; bar.warp.sync -1;
@!%p1 bra AFTER;
{wait("%r2", 0, "W")}
AFTER: @!%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];
st.global.u32 [%rd2], 1;"""
    report = run(body, [out], shared=16)
    assert (out == 1).all()
    ((what, times),) = report.unpromised.items()
    assert times == 1 and what.startswith("lanes that ran on before the rest of their warp met them: PTX line")
    with pytest.raises(faults.Unpromised, match="ran on before the rest"):
        run(body, [out], shared=16, strict=True)


def test_exits_of_some_lanes():
    out = np.zeros(32, np.uint32)
    run(
        f"""{LANE} st.global.u32 [%rd2], 1; setp.lt.u32 %p1, %r1, 5; @%p1 exit;
vote.sync.ballot.b32 %r3, 1, 0xffffffff; st.global.u32 [%rd2], %r3; setp.lt.u32 %p1, %r1, 9; @%p1 ret;
bar.sync 0; activemask.b32 %r3; st.global.u32 [%rd2], %r3;""".replace(
            "vote.sync.ballot.b32 %r3, 1,",
            """
setp.eq.u32 %p2, %r1, %r1; vote.sync.ballot.b32 %r3, %p2,""",
        ),
        [out],
    )
    assert out.tolist() == [1] * 5 + [0xFFFFFFE0] * 4 + [0xFFFFFE00] * 23


def test_warps_that_ended_are_not_waited_for():
    out = np.zeros(96, np.uint32)
    for seed in range(4):
        out[:] = 0
        run(
            f"""{LANE} setp.lt.u32 %p1, %r1, 32; @%p1 exit; bar.sync 0; st.global.u32 [%rd2], 1;""",
            [out],
            block=96,
            seed=seed,
        )
        assert out.tolist() == [0] * 32 + [1] * 64


def test_partial_warps():
    """Threads that do not exist take no part: 40 threads are a warp and a quarter."""
    out = np.zeros(40, np.uint32)
    run(f"{LANE} activemask.b32 %r2; bar.sync 0; st.global.u32 [%rd2], %r2;", [out], block=40)
    assert out.tolist() == [2**32 - 1] * 32 + [0xFF] * 8


def test_calls():
    """A device function with a loop and a call of its own, called from both sides of a branch."""
    ptx = """.version 9.0
.target sm_100a
.address_size 64
.func (.param .b32 r) twice(.param .b32 x) {
.reg .b32 %r<3>; ld.param.b32 %r1, [x]; add.u32 %r2, %r1, %r1; st.param.b32 [r+0], %r2; ret; }
.func (.param .b32 r) power(.param .b32 x, .param .b32 n) {
.reg .b32 %r<5>; .reg .pred %p1; ld.param.b32 %r1, [x]; ld.param.b32 %r2, [n];
L: setp.eq.u32 %p1, %r2, 0; @%p1 bra E;
{ .param .b32 a; .param .b32 b; st.param.b32 [a+0], %r1; call.uni (b), twice, (a); ld.param.b32 %r1, [b+0]; }
sub.u32 %r2, %r2, 1; bra L;
E: st.param.b32 [r+0], %r1; ret; }
.visible .entry k(.param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<3>;
ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
and.b32 %r2, %r1, 7; setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW;
{ .param .b32 a; .param .b32 n; .param .b32 v; st.param.b32 [a], 3; st.param.b32 [n], %r2;
call.uni (v), power, (a, n); ld.param.b32 %r3, [v]; }
bra END;
LOW: { .param .b32 a; .param .b32 v; st.param.b32 [a], %r1; call.uni (v), twice, (a); ld.param.b32 %r3, [v]; }
END: st.global.u32 [%rd1], %r3; ret; }"""
    out = np.zeros(32, np.uint32)
    simulate(ptx, "k", 1, 32, [out])
    assert out.tolist() == [2 * i for i in range(16)] + [3 << i % 8 for i in range(16, 32)]
    with pytest.raises(PtxError, match="'twice' calls itself"):
        simulate(ptx.replace("add.u32 %r2, %r1, %r1;", "call.uni (r), twice, (x); mov.u32 %r2, 0;"), "k", 1, 32, [out])
    with pytest.raises(PtxError, match="the function 'vprintf' has no body here"):
        simulate(ptx.replace("power, (a, n)", "vprintf, (a, n)"), "k", 1, 32, [out])


@pytest.mark.parametrize("seed", range(5))
def test_barriers_separate_the_halves_of_an_exchange(seed):
    out = np.zeros(256, np.uint32)
    run(
        f"""{LANE} mov.u64 %rd3, smem; add.u64 %rd4, %rd3, %rd1; st.shared.u32 [%rd4], %r1; bar.sync 0;
sub.u32 %r2, 255, %r1; mul.wide.u32 %rd5, %r2, 4; add.u64 %rd5, %rd3, %rd5; ld.shared.u32 %r3, [%rd5];
st.global.u32 [%rd2], %r3;""",
        [out],
        block=256,
        shared=1024,
        seed=seed,
    )
    assert out.tolist() == list(range(255, -1, -1))


def test_a_missing_barrier_shows():
    caught = 0
    for seed in range(10):
        try:
            run(
                f"""{LANE} mov.u64 %rd3, smem; add.u64 %rd4, %rd3, %rd1; st.shared.u32 [%rd4], %r1;
xor.b32 %r2, %r1, 32; mul.wide.u32 %rd5, %r2, 4; add.u64 %rd5, %rd3, %rd5; ld.shared.u32 %r3, [%rd5];""",
                [np.zeros(1, np.uint32)],
                block=64,
                shared=256,
                seed=seed,
            )
        except faults.UnwrittenRead:
            caught += 1
    assert caught >= 3


@pytest.mark.parametrize("seed", range(5))
def test_named_barriers_of_producers_and_consumers(seed):
    """Warps 0 and 1 arrive at barrier 3 and run on; warps 2 and 3 wait there for all 128 threads."""
    out = np.zeros(128, np.uint32)
    run(
        f"""{LANE} mov.u64 %rd3, smem; add.u64 %rd4, %rd3, %rd1; setp.ge.u32 %p1, %r1, 64; @%p1 bra CONSUME;
mad.lo.u32 %r2, %r1, 3, 5; st.shared.u32 [%rd4], %r2; bar.arrive 3, 128; bra END0;
CONSUME: bar.sync 3, 128; ld.shared.u32 %r2, [%rd4+-256]; st.global.u32 [%rd2], %r2;
END0:""",
        [out],
        block=128,
        shared=256,
        seed=seed,
    )
    assert out[64:].tolist() == [3 * i + 5 for i in range(64)]


def test_barrier_reductions():
    out = np.zeros(96 * 3, np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 12; add.u64 %rd2, %rd100, %rd1;
setp.gt.u32 %p1, %r1, 39; bar.red.popc.u32 %r2, 0, %p1; bar.red.and.pred %p2, 1, 96, %p1;
bar.red.or.pred %p3, 2, !%p1; selp.u32 %r3, 1, 0, %p2; selp.u32 %r4, 1, 0, %p3;
st.global.u32 [%rd2], %r2; st.global.u32 [%rd2+4], %r3; st.global.u32 [%rd2+8], %r4;""",
        [out],
        block=96,
    )
    assert (out.reshape(96, 3) == [56, 0, 1]).all()


BARRIER_FAULTS = {
    "a barrier within a branch": (
        faults.Divergent,
        "setp.lt.u32 %p1, %r1, 7; @%p1 bra A; bar.sync 0; A:",
        "without lanes",
    ),
    "counts that disagree": (
        faults.BarrierMisuse,
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:",
        "opened for",
    ),
    "a count that is no multiple of 32": (faults.BarrierMisuse, "bar.sync 1, 40;", "multiple of 32"),
    "a seventeenth barrier": (faults.BarrierMisuse, "bar.sync 16;", "barriers 0 to 15"),
    "a barrier that not all reach": (
        faults.Deadlock,
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; A: bar.sync 2, 64;",
        "barrier 1 .32 of 64 threads.",
    ),
    "trap": (faults.Trap, "trap;", "trap"),
}


@pytest.mark.parametrize("name", BARRIER_FAULTS)
def test_barrier_faults(name):
    kind, body, words = BARRIER_FAULTS[name]
    with pytest.raises(kind, match=words):
        run(f"{LANE} {body}", [np.zeros(64, np.uint32)], block=64)


@pytest.mark.parametrize(("block", "voters"), [(48, 48), (40, 40), (64, 40), (64, 32)])
def test_reductions_count_the_threads_that_are_there(block, voters):
    """Lanes beyond the block, or that exited, vote for nothing and against nothing."""
    out = np.zeros((64, 2), np.uint32)
    run(
        f"""mov.u32 %r1, %tid.x; setp.ge.u32 %p2, %r1, {voters}; @%p2 exit; setp.ge.u32 %p1, %r1, 0;
bar.red.popc.u32 %r2, 0, %p1; bar.red.and.pred %p3, 1, %p1; selp.u32 %r3, 1, 0, %p3;
mul.wide.u32 %rd1, %r1, 8; add.u64 %rd2, %rd100, %rd1; st.global.v2.u32 [%rd2], {{%r2, %r3}};""",
        [out],
        block=block,
    )
    assert (out[:voters] == [voters, 1]).all() and not out[voters:].any()


def test_arrivals_that_nobody_waits_for_are_remarked():
    report = run("bar.arrive 2, 128;", [np.zeros(64, np.uint32)], block=64)
    assert report.remarks == {"a CTA ended with barrier 2 at 64 of 128 threads": 1}


@pytest.mark.parametrize("strict", [False, True])
def test_deadlock_says_who_waits_on_what(strict):
    with pytest.raises(faults.Deadlock) as caught:
        run(
            f"""{LANE} setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 96; bra B;
A: mov.u32 %r2, smem; setp.eq.u32 %p2, %r1, 0; @%p2 mbarrier.init.shared::cta.b64 [%r2], 2; bar.warp.sync -1;
{wait("%r2", 0, "W")}
B:""",
            [np.zeros(64, np.uint32)],
            block=64,
            shared=16,
            strict=strict,
        )
    text = str(caught.value)
    assert "CTA 0 warp 0" in text and "CTA 0 warp 1" in text
    assert "mbarrier" in text and "barrier 1 (32 of 96 threads)" in text and "PTX line" in text


def test_unaligned_barriers_take_lanes_in_parts():
    """barrier.sync without .aligned: the halves of a warp arrive from two places."""
    out = np.zeros(32, np.uint32)
    run(
        f"""{LANE} setp.lt.u32 %p1, %r1, 16; @%p1 bra A; barrier.sync 1, 32; mov.u32 %r2, 5; bra B;
A: barrier.sync 1, 32; mov.u32 %r2, 6;
B: st.global.u32 [%rd2], %r2;""",
        [out],
    )
    assert out.tolist() == [6] * 16 + [5] * 16


@pytest.mark.parametrize("seed", range(6))
def test_both_sides_of_a_branch_go_on_from_their_waits(seed):
    """The sides wait at different places and are let go in the same moment; all meet behind the branch."""
    out = np.zeros(128, np.uint32)
    run(
        f"""{LANE} and.b32 %r2, %r1, 31; setp.lt.u32 %p1, %r2, 11; @%p1 bra A; barrier.sync 1; mov.u32 %r2, 5; bra B;
A: barrier.sync 1; mov.u32 %r2, 6;
B: activemask.b32 %r3; add.u32 %r2, %r2, %r3; st.global.u32 [%rd2], %r2;""",
        [out],
        block=128,
        seed=seed,
    )
    assert (out.reshape(4, 32) + np.uint32(1) == np.array([6] * 11 + [5] * 21, np.uint32)).all()


@pytest.mark.parametrize("seed", range(6))
def test_waits_at_the_end_of_both_sides_of_a_branch(seed):
    """Behind the waits is the meeting itself: each side leaves the list of those that run as it is looked through."""
    out = np.zeros(32, np.uint32)
    run(
        f"""{LANE} setp.lt.u32 %p1, %r1, 16; @%p1 bra A; barrier.sync 1, 32; bra B;
A: barrier.sync 1, 32;
B: st.global.u32 [%rd2], 1;""",
        [out],
        seed=seed,
    )
    assert out.all()


def grid_barrier(ctas, **options):
    count = np.zeros(1, np.uint32)
    run(
        f"""atom.global.add.u32 %r2, [%rd100], 1;
S: ld.volatile.global.u32 %r3, [%rd100]; setp.lt.u32 %p2, %r3, {ctas}; @%p2 bra S;""",
        [count],
        grid=ctas,
        block=1,
        instruction_limit=20_000,
        **options,
    )
    return int(count[0])


def test_a_barrier_of_the_grid_needs_all_its_clusters_resident():
    assert grid_barrier(6, resident=6) == 6
    with pytest.raises(faults.Livelock, match=r"2 of 6 clusters have not started, as resident=4 .* resident=6"):
        grid_barrier(6)


def test_spins_without_end_are_stopped():
    with pytest.raises(faults.Livelock):
        run("L: bra L;", [np.zeros(1, np.uint32)], instruction_limit=20_000)
    assert MOST_SEGMENTS <= 20_000_000  # about ten minutes at most


def test_special_registers():
    names = "tid.x tid.y tid.z ntid.x ntid.y ctaid.x ctaid.y nctaid.x laneid warpid lanemask_lt lanemask_ge".split()
    out = np.zeros((4, 96, len(names)), np.uint32)
    loads = "\n".join(f"mov.u32 %r20, %{n}; st.global.u32 [%rd2+{4 * i}], %r20;" for i, n in enumerate(names))
    run(
        f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mad.lo.u32 %r4, %r3, 6, %r2;
mad.lo.u32 %r4, %r4, 8, %r1;
mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mad.lo.u32 %r5, %r6, 2, %r5; mad.lo.u32 %r4, %r5, 96, %r4;
mul.wide.u32 %rd1, %r4, {4 * len(names)}; add.u64 %rd2, %rd100, %rd1;
{loads}""",
        [out],
        block=(8, 6, 2),
        grid=(2, 2),
    )
    for cta in range(4):
        for t in range(96):
            lane = t % 32
            masks = ((1 << lane) - 1, 0xFFFFFFFF << lane & 0xFFFFFFFF)
            expected = [t % 8, t // 8 % 6, t // 48, 8, 6, cta % 2, cta // 2, 2, lane, t // 32, *masks]
            assert out[cta, t].tolist() == expected


def test_clocks_do_not_go_back():
    out = np.zeros(4, np.uint32)
    run(
        """mov.u32 %r1, %clock; L: add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 99; @%p1 bra L;
mov.u64 %rd1, %clock64; cvt.u32.u64 %r2, %rd1; st.global.v2.u32 [%rd100], {%r1, %r2};""".replace(
            "mov.u32 %r1, %clock;", "mov.u32 %r1, %clock; mov.u32 %r3, 0;"
        ),
        [out],
        block=1,
    )
    assert out[0] <= out[1]


def test_cluster_barriers_and_remote_memory():
    """Each CTA of a pair writes into the other's shared memory between two cluster barriers."""
    out = np.zeros((8, 32), np.uint32)
    for seed in range(4):
        out[:] = 0
        run(
            """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mov.u32 %r4, smem;
mov.u32 %r5, %ctaid.x; mad.lo.u32 %r6, %r5, 100, %r1; mad.lo.u32 %r7, %r1, 4, %r4;
mapa.shared::cluster.u32 %r8, %r7, %r3;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
st.shared::cluster.u32 [%r8], %r6;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
ld.shared.u32 %r9, [%r7]; mad.lo.u32 %r10, %r5, 32, %r1; mul.wide.u32 %rd1, %r10, 4; add.u64 %rd2, %rd100, %rd1;
getctarank.shared::cluster.u32 %r11, %r8; setp.ne.u32 %p1, %r11, %r3; @%p1 trap;
st.global.u32 [%rd2], %r9;""",
            [out],
            grid=8,
            cluster=(2, 1, 1),
            shared=128,
            seed=seed,
        )
        for cta in range(8):
            assert out[cta].tolist() == [100 * (cta ^ 1) + lane for lane in range(32)]
    with pytest.raises(faults.OutOfBounds, match="no CTA of rank 3"):
        run(
            "mov.u32 %r4, smem; mapa.shared::cluster.u32 %r8, %r4, 3; st.shared::cluster.u32 [%r8], %r4;",
            [out],
            grid=2,
            cluster=(2, 1, 1),
            shared=128,
        )
    with pytest.raises(faults.BarrierMisuse, match="without an arrival"):
        run("barrier.cluster.wait;", [out], grid=2, cluster=(2, 1, 1))
    with pytest.raises(faults.BarrierMisuse, match="two arrivals"):
        run("barrier.cluster.arrive; barrier.cluster.arrive;", [out], grid=2, cluster=(2, 1, 1))


ENDED = {
    "load": "ld.shared::cluster.u32 %r9, [%r8];",
    "store": "st.shared::cluster.u32 [%r8], %r9;",
    "generic load": "cvt.u64.u32 %rd3, %r8; cvta.shared::cluster.u64 %rd4, %rd3; ld.u32 %r9, [%rd4];",
    "atomic": "atom.shared::cluster.add.u32 %r9, [%r8], 1;",
    "arrival": "mbarrier.arrive.shared::cluster.b64 _, [%r8+8];",
}


@pytest.mark.parametrize("name", ENDED)
def test_shared_memory_of_a_cta_that_ended(name):
    """CTA 1 uses the memory of CTA 0, which does not wait for that; a last barrier of the cluster makes it right."""
    body = """mov.u32 %r4, smem; mov.u32 %r9, 0; st.shared.u32 [%r4], %r9; mbarrier.init.shared::cta.b64 [%r4+8], 1;
mapa.shared::cluster.u32 %r8, %r4, 0; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p1, %r5, 0; @%p1 bra END0;
SPIN: add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 200; @%p2 bra SPIN;
{use}
END0: {last}"""
    last = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    shape = {"grid": 2, "cluster": (2, 1, 1), "block": 1, "shared": 64}
    found = 0
    for seed in range(6):
        run(body.format(use=ENDED[name], last=last), [np.zeros(1, np.uint32)], seed=seed, **shape)
        try:
            run(body.format(use=ENDED[name], last=""), [np.zeros(1, np.uint32)], seed=seed, **shape)
        except asyncfaults.EndedCta as fault:
            assert "CTA 0 has ended" in str(fault) and fault.instruction.opcode.split(".")[0] in ENDED[name]
            found += 1
    assert found >= 3


def test_launches_are_checked():
    out = np.zeros(4, np.uint32)
    with pytest.raises(ValueError, match="entry must be one of"):
        simulate(".version 9.0\n.target sm_90a\n.address_size 64\n", "k", 1, 1, [])
    with pytest.raises(ValueError, match="args must be 1 values, got 2"):
        run("", [out, out], parameters=["u64"])
    with pytest.raises(ValueError, match="grid must be a multiple of the cluster"):
        run("", [out], grid=3, cluster=(2, 1, 1))
    with pytest.raises(faults.Oversubscribed, match="2048 threads"):
        run("", [out], block=2048)
    hungry = module("").replace("\n{", "\n.maxnreg 128\n{", 1)
    simulate(hungry, "k", 1, 512, [out])
    with pytest.raises(faults.Oversubscribed, match="513 threads need 69632 registers of a multiprocessor's 65536"):
        simulate(hungry, "k", 1, 513, [out])
    with pytest.raises(ValueError, match="C-contiguous"):
        run("", [np.zeros((4, 4), np.uint32).T])
