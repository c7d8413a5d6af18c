"""The host's side: arguments that a kernel cannot have meant are refused, and arrays are the buffers they are."""

import numpy as np
import pytest

from flamia.conformance.simulator import DeviceMemory, simulate
from flamia.conformance.simulator.machine import faults
from tests.simulator.kernels import module, run

ADD_ONE = "ld.global.u32 %r3, [%rd100]; add.u32 %r3, %r3, 1; st.global.u32 [%rd101], %r3;"


def test_an_array_given_twice_is_one_buffer():
    x = np.array([5, 0], np.uint32)
    run("st.global.u32 [%rd100], 7; ld.global.u32 %r3, [%rd101]; st.global.u32 [%rd101+4], %r3;", [x, x], block=1)
    assert x.tolist() == [7, 7]


def test_an_array_in_two_launches_is_one_buffer():
    memory, x = DeviceMemory(), np.array([5], np.uint32)
    for _ in range(3):
        run(ADD_ONE, [x, x], block=1, memory=memory)
    assert x.tolist() == [8] and len(memory.buffers) == 1
    assert memory.allocate(x) == memory.buffers[0].address


def test_overlapping_arrays_are_refused():
    x = np.zeros(8, np.uint32)
    with pytest.raises(ValueError, match="buffer k_param_1 must be the array of buffer k_param_0 or apart from it"):
        run(ADD_ONE, [x, x[1:]], block=1)


@pytest.mark.parametrize("how", ["not writeable", "read_only"])
def test_stores_to_a_read_only_array_are_found(how):
    x, memory = np.array([5], np.uint32), DeviceMemory()
    if how == "not writeable":
        x.flags.writeable = False
    else:
        memory.allocate(x, "x", read_only=True)
    out = np.zeros(1, np.uint32)
    run(ADD_ONE, [x, out], block=1, memory=memory)
    assert out[0] == 6
    with pytest.raises(faults.ReadOnly, match="global memory that are read-only"):
        run(ADD_ONE, [out, x], block=1, memory=memory)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("u32", 1.75, r"k_param_1 must be an integer \(.u32\), got 1.75"),
        ("u32", np.float32(2), r"k_param_1 must be an integer"),
        ("u32", 2**40 + 5, r"k_param_1 must be in -2147483648..4294967295 \(.u32\), got 1099511627781"),
        ("u32", np.int64(1 << 33), r"k_param_1 must be in"),
        ("s32", -(2**31) - 1, r"k_param_1 must be in"),
        ("u64", 2**64, r"k_param_1 must be in"),
        ("f32", 1e39, r"k_param_1 must be a finite .f32, got 1e\+39"),
        ("u32", b"123", r"k_param_1 must be 4 bytes, got 3"),
    ],
)
def test_numbers_that_the_parameter_does_not_hold_are_refused(kind, value, says):
    with pytest.raises(ValueError, match=says):
        run("", [np.zeros(1, np.uint32), value], parameters=["u64", kind])


@pytest.mark.parametrize(
    ("kind", "value", "bits"),
    [
        ("u32", 2**32 - 1, 2**32 - 1),
        ("u32", -1, 2**32 - 1),
        ("s32", np.int64(-5), 2**32 - 5),
        ("u32", True, 1),
        ("b32", np.float32(1), 0x3F800000),
        ("f32", 1, 0x3F800000),
        ("f32", np.float64(1.5), 0x3FC00000),
        ("f32", float("inf"), 0x7F800000),
    ],
)
def test_numbers_that_it_holds(kind, value, bits):
    out = np.zeros(1, np.uint32)
    run("st.global.b32 [%rd100], %r101;", [out, value], parameters=["u64", kind], block=1)
    assert out[0] == bits


def test_module_variables_begin_anew_with_every_launch():
    memory, out = DeviceMemory(), np.zeros(1, np.uint32)
    body = "ld.global.u32 %r3, [n]; add.u32 %r3, %r3, 1; st.global.u32 [n], %r3; st.global.u32 [%rd100], %r3;"
    ptx = module(body).replace(".visible", ".global .u32 n = 41;\n.visible")
    for _ in range(2):
        simulate(ptx, "k", 1, 1, [out], memory=memory)
        assert out[0] == 42
