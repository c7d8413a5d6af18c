"""Tiled tensor copies: boxes, edges, swizzles, reductions, and their faults."""

import numpy as np
import pytest

from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.devicememory import DeviceMemory
from flamia.conformance.simulator.machine.launch import simulate
from flamia.conformance.simulator.machine.tensormap import TensorMap
from tests.simulator.kernels import ONE, module, wait

BODY = f"""{ONE}
mov.u32 %r2, smem;
add.u32 %r3, %r2, 1024;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
@!%p1 bra END;
mov.b64 %rd1, k_param_0;
cvta.param.u64 %rd2, %rd1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {{bytes}};
cp.async.bulk.tensor.{{rank}}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd2, {{{{{{at}}}}}}], [%r2];
{wait("%r2", 0, "W")}
{{more}}
END:"""


def launch(source, box, swizzle, start, *, more="", dtype="u16", expected_bytes=None, seed=0, base=0):
    """Load a box, then send shared memory from 1024 on to the output."""
    memory = DeviceMemory()
    address = memory.allocate(source, "source") + base
    strides = tuple(int(s) for s in source.strides[::-1][1:])
    tensor = TensorMap(address, dtype, source.shape[::-1], strides, box, swizzle)
    out = np.zeros(tensor.box_bytes, np.uint8)
    send = (
        more
        or f"""cp.async.bulk.global.shared::cta.bulk_group [%rd101], [%r3], {tensor.box_bytes};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;"""
    )
    text = BODY.format(
        bytes=tensor.box_bytes if expected_bytes is None else expected_bytes,
        rank=len(box),
        at=", ".join(map(str, start)),
        more=send,
    )
    ptx = module(text, ["u64", "u64"], 1024 + tensor.box_bytes).replace(
        ".param .u64 k_param_0", ".param .align 64 .b8 k_param_0[128]"
    )
    ptx = ptx.replace("ld.param.b64 %rd100, [k_param_0];\n", "")
    simulate(ptx, "k", 1, 32, [tensor.encode(), out], memory=memory, seed=seed)
    return out


@pytest.mark.parametrize(("swizzle", "width"), [("none", 0), ("32B", 1), ("64B", 2), ("128B", 3)])
@pytest.mark.parametrize("start", [(0, 0), (48, -3), (-8, 20)])
def test_boxes_of_a_matrix(swizzle, width, start):
    """Rows of the box, zeros outside the tensor, 16-byte units exchanged as the swizzle says."""
    source = np.arange(1, 1 + 24 * 64, dtype=np.uint16).reshape(24, 64)
    columns = {"none": 40, "32B": 16, "64B": 32, "128B": 64}[swizzle]
    out = launch(source, (columns, 16), swizzle, start)
    for row in range(16):
        for column in range(columns):
            x, y = start[0] + column, start[1] + row
            want = source[y, x] if 0 <= y < 24 and 0 <= x < 64 else 0
            at = 2048 + 2 * (row * columns + column)  # smem begins at 1024, the box 1024 bytes further on
            for bit in range(width):
                at ^= (at >> (7 + bit) & 1) << (4 + bit)
            assert out[at - 2048 : at - 2046].view(np.uint16)[0] == want


def test_a_box_of_three_dimensions():
    source = np.arange(4 * 6 * 32, dtype=np.uint16).reshape(4, 6, 32)
    out = launch(source, (16, 3, 2), "none", (8, 2, 1)).view(np.uint16).reshape(2, 3, 16)
    assert np.array_equal(out, source[1:3, 2:5, 8:24])


SHAPES = {1: (96,), 2: (5, 32), 3: (3, 4, 32), 4: (3, 2, 4, 32), 5: (2, 3, 2, 3, 32)}
"""Of tensors with so many dimensions, the innermost last."""


@pytest.mark.parametrize("rank", SHAPES)
def test_boxes_of_every_rank_come_in_after_a_prefetch(rank):
    shape = SHAPES[rank]
    source = np.arange(1, 1 + np.prod(shape), dtype=np.uint16).reshape(shape)
    at = ", ".join("0" for _ in shape)
    send = f"""cp.async.bulk.global.shared::cta.bulk_group [%rd101], [%r3], {2 * 8 * 2 ** (rank - 1)};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;"""
    more = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global [%rd2, {{{at}}}];\n{send}"
    start = (8, *(1 for _ in shape[:-1]))
    out = launch(source, (8, *(2 for _ in shape[:-1])), "none", start, more=more).view(np.uint16)
    padded = np.pad(source, [(0, 2)] * (rank - 1) + [(0, 0)])
    want = padded[(*tuple(slice(1, 3) for _ in shape[:-1]), slice(8, 16))]
    assert np.array_equal(out, want.ravel())


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("operation", ["", "add", "min", "max", "and", "or", "xor", "inc", "dec"])
def test_boxes_of_every_rank_go_out(rank, operation):
    """What lay at the origin is stored at, or combined with, what lies 4 elements further inside."""
    shape = SHAPES[rank]
    source = np.random.default_rng(rank).integers(0, 1 << 30, shape, dtype=np.uint32)
    before = source.copy()
    kind = f"cp.reduce.async.bulk.tensor.{rank}d" if operation else f"cp.async.bulk.tensor.{rank}d"
    tail = f".{operation}" if operation else ""
    at = ", ".join(["4", *("0" for _ in shape[:-1])])
    more = f"""{kind}.global.shared::cta{tail}.bulk_group [%rd2, {{{at}}}], [%r3];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;"""
    launch(source, (4, *(1 for _ in shape[:-1])), "none", (0,) * rank, more=more, dtype="u32")
    first = (0,) * (rank - 1)
    a, b = before[first][0:4], before[first][4:8]
    combine = {
        "": lambda: a,
        "add": lambda: a + b,
        "min": lambda: np.minimum(a, b),
        "max": lambda: np.maximum(a, b),
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "inc": lambda: np.where(b >= a, 0, b + 1),
        "dec": lambda: np.where((b == 0) | (b > a), a, b - 1),
    }
    want = before.copy()
    want[first][4:8] = combine[operation]()
    assert np.array_equal(source, want)


@pytest.mark.parametrize("operation", ["", "add"])
def test_a_box_goes_out(operation):
    """What was loaded is stored, or added, one row further down; rows outside the tensor are left out."""
    source = np.arange(8 * 16, dtype=np.uint32).reshape(8, 16)
    before = source.copy()
    head = (
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}"
        if operation
        else ("cp.async.bulk.tensor.2d.global.shared::cta")
    )
    more = f"""{head}.bulk_group [%rd2, {{4, 5}}], [%r3];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;"""
    launch(source, (4, 4), "none", (0, 0), more=more, dtype="u32")
    want = before.copy()
    want[5:8, 4:8] = before[0:3, 0:4] + (before[5:8, 4:8] if operation else 0)
    assert np.array_equal(source, want)


def test_faults():
    source = np.zeros((8, 64), np.uint16)
    with pytest.raises(faults.Misaligned, match="128-byte"):
        launch(
            source,
            (8, 4),
            "none",
            (0, 0),
            more="cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 0}], [%r3+16];",
        )
    with pytest.raises(faults.Illegal, match="2 dimensions, the instruction 1"):
        launch(
            source,
            (8, 4),
            "none",
            (0, 0),
            more="cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd2, {0}], [%r3];",
        )
    with pytest.raises(faults.Illegal, match="no tensor map"):
        launch(
            source,
            (8, 4),
            "none",
            (0, 0),
            more="cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd101, {0}], [%r3];".replace(
                "%rd101", "%rd2+8"
            ),
        )
    with pytest.raises(faults.Fault, match="expected"):
        launch(source, (8, 4), "none", (0, 0), expected_bytes=128)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"address": 8}, "multiples of 16"),
        ({"strides": (24,)}, "multiples of 16"),
        ({"box": (4, 8)}, "16-byte units"),
        ({"box": (64, 300)}, "at most|1 to 256"),
        ({"swizzle": "128B", "box": (128, 8)}, "does not fit"),
        ({"dtype": "e4m3"}, "dtype must be"),
        ({"box": (64,)}, "dimensions"),
    ],
)
def test_maps_that_do_not_exist(change, text):
    fields = {"address": 0, "dtype": "u16", "shape": (128, 8), "strides": (256,), "box": (64, 8), "swizzle": "none"}
    with pytest.raises(ValueError, match=text):
        TensorMap(**{**fields, **change})
