"""Loads, stores, atomics and copies: values, spaces, and the faults of each access."""

import numpy as np
import pytest

from flamia.conformance.simulator import DeviceMemory, PtxError, Uninitialised
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.order import Order
from tests.simulator.kernels import module, run

LANE = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd100, %rd1;"


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "b64", "f32"])
def test_loads_extend_by_their_type(kind):
    """Into registers wider than the type, too."""
    size = int(kind[1:]) // 8
    data = np.random.default_rng(1).integers(0, 256, 32 * size, np.uint8)
    out = np.zeros(32, np.uint64)
    register = "rd5" if kind != "f32" else "f5"
    widen = "" if kind != "f32" else "mov.b32 %r5, %f5; cvt.u64.u32 %rd5, %r5;"
    run(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, {size}; add.u64 %rd1, %rd1, %rd100;
ld.global.{kind} %{register}, [%rd1]; {widen}
mul.wide.u32 %rd2, %r1, 8; add.u64 %rd2, %rd2, %rd101; st.global.u64 [%rd2], %rd5;""",
        [data, out],
    )
    values = data.view(f"{kind[0].replace('s', 'i').replace('b', 'u').replace('f', 'u')}{size}")
    assert out.tolist() == [int(v) % (1 << 64) for v in values]


@pytest.mark.parametrize("kind", ["b8", "u16", "u32"])
def test_stores_take_the_low_bytes(kind):
    size = int(kind[1:]) // 8
    out = np.zeros(32 * size, np.uint8)
    run(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, {size}; add.u64 %rd1, %rd1, %rd100;
mad.lo.u32 %r2, %r1, 0x01010101, 0x80706050; st.global.{kind} [%rd1], %r2;""",
        [out],
    )
    words = (np.arange(32) * 0x01010101 + 0x80706050).astype(np.uint64) & 0xFFFFFFFF
    assert out.view(f"u{size}").tolist() == [int(w) % (1 << 8 * size) for w in words]


@pytest.mark.parametrize(("kind", "count"), [("u32", 2), ("u32", 4), ("u64", 2), ("u16", 4), ("u8", 4), ("b32", 8)])
def test_vectors(kind, count):
    size = int(kind[1:]) // 8
    data = np.arange(32 * count * size, dtype=np.uint16).astype(np.uint8) * 7
    out = np.zeros_like(data)
    prefix = {"16": "h", "64": "rd"}.get(kind[1:], "r")
    names = ", ".join(f"%{prefix}{i + 10}" for i in range(count))
    back = ", ".join(f"%{prefix}{i + 10}" for i in reversed(range(count)))
    run(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, {count * size}; add.u64 %rd2, %rd1, %rd100;
add.u64 %rd3, %rd1, %rd101; ld.global.v{count}.{kind} {{{names}}}, [%rd2];
st.global.v{count}.{kind} [%rd3], {{{back}}};""",
        [data, out],
    )
    assert (out.view(f"u{size}").reshape(32, count) == data.view(f"u{size}").reshape(32, count)[:, ::-1]).all()


def test_128_bit_registers():
    data, out = np.arange(64, dtype=np.uint64) * 3, np.zeros(64, np.uint64)
    run(
        """.reg .b128 %q1; mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 16; add.u64 %rd2, %rd1, %rd100;
add.u64 %rd3, %rd1, %rd101; ld.global.b128 %q1, [%rd2]; mov.b128 {%rd4, %rd5}, %q1; add.u64 %rd4, %rd4, 1;
mov.b128 %q1, {%rd5, %rd4}; st.global.b128 [%rd3], %q1;""",
        [data, out],
    )
    pairs = data.reshape(32, 2)
    assert (out.reshape(32, 2) == np.stack([pairs[:, 1], pairs[:, 0] + 1], 1)).all()


def test_spaces_and_their_generic_addresses():
    """The same bytes by the address of the space and by the generic one; isspacep tells them apart."""
    out = np.zeros(32 * 8, np.uint32)
    run(
        """.local .align 4 .b8 depot[64];
mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4;
mov.u64 %rd2, smem; add.u64 %rd2, %rd2, %rd1; cvta.shared.u64 %rd3, %rd2;
mad.lo.u32 %r2, %r1, 5, 1; st.shared.u32 [%rd2], %r2; ld.u32 %r3, [%rd3];
mov.u64 %rd4, depot; cvta.local.u64 %rd5, %rd4; mad.lo.u32 %r4, %r1, 7, 2;
st.u32 [%rd5+8], %r4; ld.local.u32 %r5, [%rd4+8];
mad.lo.u32 %r6, %r1, 32, 0; cvt.u64.u32 %rd6, %r6; add.u64 %rd6, %rd6, %rd100;
isspacep.shared %p1, %rd3; selp.u32 %r10, 1, 0, %p1; isspacep.local %p2, %rd5; selp.u32 %r11, 1, 0, %p2;
isspacep.global %p3, %rd6; selp.u32 %r12, 1, 0, %p3; isspacep.global %p3, %rd3; selp.u32 %r13, 1, 0, %p3;
cvta.to.shared.u64 %rd7, %rd3; setp.eq.u64 %p4, %rd7, %rd2; selp.u32 %r14, 1, 0, %p4;
st.v4.u32 [%rd6], {%r3, %r5, %r10, %r11}; st.global.v4.u32 [%rd6+16], {%r12, %r13, %r14, %r14};""",
        [out],
        shared=128,
    )
    lane = np.arange(32)
    expected = [5 * lane + 1, 7 * lane + 2, *(np.full(32, v) for v in (1, 1, 1, 0, 1, 1))]
    assert (out.reshape(32, 8) == np.stack(expected, 1)).all()


def test_module_variables_and_references():
    """Initial values, addresses among them; constants; a generic load through a pointer in memory."""
    ptx = """.version 9.0
.target sm_100a
.address_size 64
.const .align 4 .u32 table[4] = {10, 20, 0x1E, 40};
.global .align 4 .b8 bytes[8] = {1, 2, 3, 4, 5};
.global .align 8 .u64 pointer = generic(bytes)+1;
.global .align 4 .f32 real = 0f3F800000;
.visible .entry k(.param .u64 out) {
.reg .b64 %rd<6>; .reg .b32 %r<8>;
ld.param.u64 %rd1, [out]; ld.const.u32 %r1, [table+8]; ld.global.u64 %rd2, [pointer]; ld.u8 %r2, [%rd2];
ld.global.u32 %r3, [bytes+4]; ld.global.u32 %r4, [real];
st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; ret; }"""
    from flamia.conformance.simulator import simulate

    out = np.zeros(4, np.uint32)
    simulate(ptx, "k", 1, 1, [out])
    assert out.tolist() == [30, 2, 5, 0x3F800000]


def test_buffers_outlast_a_launch():
    """What one kernel writes in memory of the device, the next reads; the host reads it back."""
    memory = DeviceMemory()
    address = memory.allocate(Uninitialised(128), "scratch")
    run(f"{LANE} st.global.u32 [%rd2], %r1;", [np.uint64(address)], parameters=["u64"], memory=memory)
    out = np.zeros(32, np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd100, %rd1; add.u64 %rd3, %rd101, %rd1;
ld.global.u32 %r2, [%rd2]; add.u32 %r2, %r2, 100; st.global.u32 [%rd3], %r2;""",
        [np.uint64(address), out],
        parameters=["u64", "u64"],
        memory=memory,
    )
    assert out.tolist() == list(range(100, 132))
    assert memory.read(address, np.uint32, 32).tolist() == list(range(32))


FAULTS = {
    "read past the end": (faults.OutOfBounds, "ld.global.u32 %r2, [%rd2+64];", "global memory"),
    "read before the start": (faults.OutOfBounds, "ld.global.u32 %r2, [%rd2+-128];", "global memory"),
    "write past the end": (faults.OutOfBounds, "st.global.u32 [%rd2+64], %r1;", "outside every allocation"),
    "read at an odd address": (faults.Misaligned, "ld.global.u32 %r2, [%rd2+2];", "read of 4 bytes"),
    "vector at half its size": (faults.Misaligned, "ld.global.v2.u32 {%r2, %r3}, [%rd100+4];", "read of 8 bytes"),
    "shared memory nobody wrote": (faults.UnwrittenRead, "ld.shared.u32 %r2, [smem];", "shared memory of CTA 0"),
    "shared memory of nobody": (faults.OutOfBounds, "st.shared.u32 [smem+64], %r1;", "shared memory"),
    "the null pointer": (faults.OutOfBounds, "mov.u64 %rd5, 0; ld.u32 %r2, [%rd5];", "outside"),
    "local memory nobody wrote": (
        faults.UnwrittenRead,
        ".local .align 4 .b8 depot[8]; ld.local.u32 %r2, [depot];",
        "local memory",
    ),
    "local memory past the end": (
        faults.OutOfBounds,
        ".local .align 4 .b8 depot[8]; mov.u64 %rd5, depot; st.local.u32 [%rd5+64], %r1;",
        "local memory",
    ),
    "a parameter written": (
        faults.ReadOnly,
        "mov.u64 %rd5, k_param_0; cvta.param.u64 %rd6, %rd5; st.u64 [%rd6], %rd5;",
        "read-only",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_accesses(name):
    kind, body, words = FAULTS[name]
    with pytest.raises(kind, match=words) as caught:
        run(f"{LANE}\n{body}", [np.zeros(20, np.uint32)], block=20, shared=64)
    text = module(f"{LANE}\n{body}", shared=64)
    line = 1 + next(i for i, row in enumerate(text.splitlines()) if body in row)
    assert caught.value.instruction.line == line
    assert "CTA 0 warp 0" in str(caught.value) and f"PTX line {line}" in str(caught.value)


@pytest.mark.parametrize("access", ["ld.global.u32 %r2, [%rd3];", "st.global.u32 [%rd3], %r1;"])
def test_one_lane_of_a_whole_warp_is_misaligned(access):
    body = f"{LANE} mov.u64 %rd3, %rd2; setp.eq.u32 %p1, %r1, 9; @%p1 add.u64 %rd3, %rd3, 2; {access}"
    with pytest.raises(faults.Misaligned) as caught:
        run(body, [np.zeros(64, np.uint32)])
    assert caught.value.lanes == (9,)


def test_faults_name_the_lanes_and_the_address():
    data = np.zeros(20, np.uint32)
    with pytest.raises(faults.OutOfBounds) as caught:
        run(f"{LANE} ld.global.u32 %r2, [%rd2];", [data])
    assert caught.value.lanes == tuple(range(20, 32))
    memory = DeviceMemory()
    assert caught.value.address == memory.allocate(data) + 80


def test_uninitialised_buffers():
    with pytest.raises(faults.UnwrittenRead):
        run(f"{LANE} ld.global.u32 %r2, [%rd2];", [Uninitialised(128)], parameters=["u64"])
    run(f"{LANE} st.global.u32 [%rd2], %r1; ld.global.u32 %r2, [%rd2];", [Uninitialised(128)], parameters=["u64"])


def test_knowledge_covers_what_came_before_the_release():
    """Note [Proxy order]: who acquires a release and then fences makes earlier writes visible, and no later ones."""
    writer, reader = Order((0, 2)), Order((1, 2))
    before = writer.tag
    knowledge = writer.release()
    after = writer.tag
    reader.acquire(knowledge)
    tags = np.array([0, before, after], np.uint32)
    assert reader.unfenced(tags).tolist() == [False, True, True]
    reader.proxy_fence()
    assert reader.unfenced(tags).tolist() == [False, False, True]


def test_masked_lanes_are_not_checked():
    out = np.zeros(20, np.uint32)
    run(f"{LANE} setp.lt.u32 %p1, %r1, 20; @%p1 st.global.u32 [%rd2], %r1;", [out])
    assert out.tolist() == list(range(20))


def test_too_much_shared_memory():
    with pytest.raises(faults.Oversubscribed, match="233472 bytes of shared memory"):
        run("mov.u32 %r1, smem;", [np.zeros(1, np.uint32)], shared=1024, shared_bytes=227 * 1024)


BITWISE = ("and", "or", "xor", "exch")
ATOMICS = {
    "add": lambda old, b, c: old + b,
    "min": lambda old, b, c: min(old, b),
    "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b,
    "xor": lambda old, b, c: old ^ b,
    "exch": lambda old, b, c: b,
    "inc": lambda old, b, c: 0 if old >= b else old + 1,
    "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_of_words(name, space):
    """Eight lanes on each of four words; the old values, in some order, are the chain that leads to the last one."""
    start, kind = np.array([5, 0, 2**31, 2**32 - 1], np.uint32), "b32" if name in BITWISE else "u32"
    data, old = start.copy(), np.zeros(32, np.uint32)
    operand = (np.arange(32, dtype=np.uint64) * 0x9E3779B1 % (1 << 31)).astype(np.uint32)
    body = f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; and.b32 %r2, %r1, 3; mul.wide.u32 %rd2, %r2, 4;
add.u64 %rd3, %rd102, %rd1; ld.global.u32 %r3, [%rd3]; add.u64 %rd4, %rd100, %rd2; mov.u64 %rd6, %rd4;
setp.lt.u32 %p1, %r1, 4; ld.global.u32 %r5, [%rd4];
{"mov.u64 %rd6, smem; add.u64 %rd6, %rd6, %rd2; @%p1 st.shared.u32 [%rd6], %r5;" if space == "shared" else ""}
bar.sync 0;
atom.{space}.{name}.{kind} %r4, [%rd6], %r3;
bar.sync 0; ld.{space}.u32 %r6, [%rd6]; @%p1 st.global.u32 [%rd4], %r6;
add.u64 %rd5, %rd101, %rd1; st.global.u32 [%rd5], %r4;"""
    run(body, [data, old, operand], shared=16, seed=3)
    for word in range(4):
        left = {i: int(old[i]) for i in range(word, 32, 4)}
        assert is_chain(name, int(start[word]), left, operand, int(data[word])), f"word {word}: {left}"


def without(left, lane):
    return {k: v for k, v in left.items() if k != lane}


def is_chain(name, value, left, operand, last):
    """Whether the lanes can have come in some order: each saw what the one before left."""
    if not left:
        return value == last
    return any(
        is_chain(name, ATOMICS[name](value, int(operand[i]), 0) % (1 << 32), without(left, i), operand, last)
        for i, seen in left.items()
        if seen == value
    )


def test_compare_and_swap():
    """A lock-free maximum of a hash: a loop of atom.cas that every lane leaves once."""
    data, operand = np.array([7], np.uint32), (np.arange(32, dtype=np.uint64) * 77777 % 1000).astype(np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd1, %rd1, %rd101; ld.global.u32 %r2, [%rd1];
ld.global.u32 %r3, [%rd100];
LOOP: max.u32 %r4, %r3, %r2; mov.u32 %r6, %r3; atom.global.cas.b32 %r3, [%rd100], %r6, %r4;
setp.ne.u32 %p1, %r3, %r6; @%p1 bra LOOP;""",
        [data, operand],
    )
    assert data[0] == operand.max()


def test_float_atomics():
    """Small integers in FP32, FP64, pairs of halves: exact in every order. Halves of 65504 and 1 round back."""
    data, out = np.zeros(8, np.uint32), np.zeros(8, np.uint32)
    run(
        """mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1; red.global.add.f32 [%rd100], %f1;
mov.b32 %r2, 0x3C003C00; red.global.add.noftz.f16x2 [%rd100+4], %r2;
mov.b32 %r3, 0x3F803F80; atom.global.add.noftz.bf16x2 %r4, [%rd100+8], %r3;
.reg .f64 %d1; cvt.rn.f64.u32 %d1, %r1; red.global.add.f64 [%rd100+16], %d1;""",
        [data],
    )
    assert data[0] == np.float32(sum(range(32))).view(np.uint32)
    assert data[1] == 0x50005000  # 32 in binary16
    assert data[2] == 0x42004200  # 32 in bfloat16
    assert data[4:6].view(np.float64)[0] == sum(range(32))
    assert out.sum() == 0


def test_cp_async():
    data, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 16; add.u64 %rd2, %rd100, %rd1; mov.u64 %rd3, smem;
add.u64 %rd3, %rd3, %rd1; shl.b32 %r2, %r1, 1; and.b32 %r2, %r2, 28; min.u32 %r2, %r2, 16;
cp.async.cg.shared.global [%rd3], [%rd2], 16, %r2; cp.async.commit_group; {wait}
bar.sync 0; ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd3]; add.u64 %rd4, %rd101, %rd1;
st.global.v4.u32 [%rd4], {{%r4, %r5, %r6, %r7}};"""
    for wait in ("cp.async.wait_group 0;", "cp.async.wait_all;"):
        run(body.format(wait=wait), [data, out], shared=512)
        real = np.minimum((2 * np.arange(32)) & 28, 16)
        kept = np.where(np.arange(16) < real[:, None], data.view(np.uint8).reshape(32, 16), 0)
        assert (out.view(np.uint8).reshape(32, 16) == kept).all()
    with pytest.raises(faults.InFlightRead):
        run(body.format(wait=""), [data, out], shared=512)


def test_unwaited_groups_may_be_under_way():
    """wait_group 1 leaves the last group alone."""
    data, out = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    body = """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd100, %rd1; mov.u64 %rd3, smem;
add.u64 %rd3, %rd3, %rd1; cp.async.ca.shared.global [%rd3], [%rd2], 4; cp.async.commit_group;
cp.async.ca.shared.global [%rd3+128], [%rd2+128], 4; cp.async.commit_group; cp.async.wait_group 1;
ld.shared.u32 %r4, [%rd3+{offset}]; add.u64 %rd4, %rd101, %rd1; st.global.u32 [%rd4], %r4; cp.async.wait_all;"""
    run(body.format(offset=0), [data, out], shared=256)
    assert (out == data[:32]).all()
    caught = 0
    for seed in range(16):
        try:
            run(body.format(offset=128), [data, out], shared=256, seed=seed)
        except faults.InFlightRead:
            caught += 1
    assert caught >= 2


def test_approximate_results_are_reported():
    x, out = np.full(64, 0.5, np.float32), np.zeros(64, np.float32)
    body = """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd100, %rd1; ld.global.f32 %f1, [%rd2];
{op} add.u64 %rd3, %rd101, %rd1; st.global.f32 [%rd3], %f3; st.global.f32 [%rd3+128], %f1;"""
    exact = run(body.format(op="add.f32 %f2, %f1, %f1; mov.f32 %f3, %f2;"), [x, out])
    assert exact.approximate == {}
    rough = run(body.format(op="ex2.approx.f32 %f2, %f1; add.f32 %f3, %f2, %f1;"), [x, out])
    assert rough.approximate == {"k_param_1": 128}
    through = run(
        """mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; mov.u64 %rd4, smem; add.u64 %rd4, %rd4, %rd1;
lg2.approx.f32 %f2, 0f3F800000; st.shared.f32 [%rd4], %f2; ld.shared.f32 %f3, [%rd4];
add.u64 %rd3, %rd100, %rd1; st.global.f32 [%rd3], %f3;""",
        [out],
        shared=128,
    )
    assert through.approximate == {"k_param_0": 128}


GUARDED = {
    "a guarded move": "mov.u32 %r3, 1; @%p1 mov.u32 %r3, 2; st.global.u32 [%rd100], %r3;",
    "a guarded store": "st.global.u32 [%rd100], 1; @%p1 st.global.u32 [%rd100], 2;",
    "a guarded atomic": "@%p1 red.global.add.u32 [%rd100], 2;",
    "a count of predicates": "bar.red.popc.u32 %r3, 0, %p1; st.global.u32 [%rd100], %r3;",
    "a selection": "selp.u32 %r3, 1, 2, %p1; st.global.u32 [%rd100], %r3;",
}


@pytest.mark.parametrize("how", GUARDED)
def test_the_mark_of_approximate_results_follows_predicates(how):
    for source, marked in (("ex2.approx.f32 %f2, 0f3F800000;", {"k_param_0": 4}), ("mov.f32 %f2, 0f40000000;", {})):
        report = run(f"{source} setp.gt.f32 %p1, %f2, 0f3F800000; {GUARDED[how]}", [np.zeros(1, np.uint32)], block=32)
        assert report.approximate == marked


@pytest.mark.parametrize(
    "form", ["ld.global.v3.u32 %r1, [%rd100];", "st.global.v8.u64 [%rd100], %rd1;", "ld.surface.u32 %r1, [%rd1];"]
)
def test_accesses_that_ptx_does_not_have(form):
    with pytest.raises(PtxError, match="PTX line"):
        run(form, [np.zeros(4, np.uint32)])
