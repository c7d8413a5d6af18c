"""`setmaxnreg`: what a CTA's warps have at entry, and what they hand to each other."""

import numpy as np
import pytest

from flamia.conformance.simulator import PtxError, simulate
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.registerpool import registers_at_entry
from flamia.kernels import targets
from tests.simulator.kernels import module

TRADE = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, {givers}; @%p1 bra A;
setmaxnreg.inc.sync.aligned.u32 {high}; bra B;
A: setmaxnreg.dec.sync.aligned.u32 {low}; {end}
B: """
ALONE = ".maxntid {0}, 1, 1\n.minnctapersm 1"


def trade(directives, block, low, high, givers=128, end="", **options):
    """Some warps (the first of ``givers`` threads) give registers back, the others ask for more."""
    body = TRADE.format(givers=givers, low=low, high=high, end=end)
    text = module(body, target="sm_90a").replace("\n)\n{", f"\n)\n{directives}\n{{", 1)
    return simulate(text, "k", 1, block, [np.zeros(1, np.uint32)], **options)


@pytest.mark.parametrize("seed", range(3))
def test_what_one_warpgroup_gives_another_may_take(seed):
    trade(ALONE.format(384), 384, 40, 232, seed=seed)
    trade(ALONE.format(512), 512, 32, 160, seed=seed)
    trade(".maxnreg 128", 512, 96, 224, givers=384, seed=seed)


@pytest.mark.parametrize("end", ["bar.sync 0;", "exit;"])
def test_more_than_the_launch_gave_waits_forever_even_if_the_givers_end(end):
    """40 + 2 * 240 of 3 * 168: the first warps get theirs, the last never; registers of ended warps stay with them."""
    with pytest.raises(faults.Deadlock) as found:
        trade(ALONE.format(384), 384, 40, 240, end=end)
    assert "waits for setmaxnreg.inc to 240: 2304 registers, of which 256 are free" in str(found.value)
    with pytest.raises(faults.Deadlock, match=r"setmaxnreg.inc to 232: \d+ registers, of which \d+ are free"):
        trade(".maxnreg 128", 512, 96, 232, givers=384)


def test_a_multiprocessor_shared_by_two_has_half_the_registers():
    bounds = ".maxntid 256, 1, 1\n.minnctapersm {}"
    trade(bounds.format(1), 256, 24, 248)
    trade(bounds.format(2), 256, 24, 232)
    with pytest.raises(faults.Deadlock, match=r"setmaxnreg\.inc to 240"):
        trade(bounds.format(2), 256, 24, 240)


def test_registers_that_come_back_end_the_wait():
    """Both takers want all that is to be had: the second goes on when the first has given its share back."""
    body = """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 7; setp.eq.u32 %p1, %r2, 0; @%p1 bra A;
setmaxnreg.inc.sync.aligned.u32 248; setmaxnreg.dec.sync.aligned.u32 24; bra B;
A: setmaxnreg.dec.sync.aligned.u32 24;
B: """
    directives = ALONE.format(384)
    text = module(body, target="sm_90a").replace("\n)\n{", f"\n)\n{directives}\n{{", 1)
    report = simulate(text, "k", 1, 384, [np.zeros(1, np.uint32)])
    assert sum(c["setmaxnreg.inc.sync.aligned.u32"] for c in report.instructions.values()) >= 8


def test_without_a_number_at_entry_it_is_ignored():
    report = trade(".maxntid 384, 1, 1", 384, 40, 248)
    assert sum(n for what, n in report.remarks.items() if "setmaxnreg that ptxas ignores" in what) == 12


def test_wrong_numbers():
    for low, high in ((200, 208), (40, 120)):
        with pytest.raises(faults.Oversubscribed, match=r"setmaxnreg.(dec to 200|inc to 120) registers, of 168"):
            trade(ALONE.format(384), 384, low, high)
    with pytest.raises(PtxError, match="multiple of 8"):
        trade(ALONE.format(384), 384, 99, 208)


BOUNDS = (
    (128, 1),
    (128, 3),
    (192, 1),
    (256, 1),
    (256, 2),
    (288, 3),
    (384, 1),
    (384, 2),
    (416, 1),
    (416, 2),
    (640, 1),
    (1024, 1),
)
SOURCE = """extern "C" __global__ void __launch_bounds__({}, {}) k(unsigned* a) {{
  if (threadIdx.x < 128) {{ asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); a[0] = 1; }}
  else {{ asm volatile("setmaxnreg.inc.sync.aligned.u32 248;"); a[threadIdx.x] = 2; }}
}}"""


def test_registers_at_entry_are_those_of_ptxas():
    from flamia.kernels.build import read_report
    from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc

    try:
        nvrtc = load_nvrtc()
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    for threads, ctas in BOUNDS:
        source = SOURCE.format(threads, ctas)
        compiled = nvrtc.compile("k.cu", source, {}, targets.SM_90A, ["--ptxas-options=-v"])
        (entry,) = read_report(compiled)
        directives = {"maxntid": (threads, 1, 1), "minnctapersm": (ctas,)}
        assert registers_at_entry(directives) == entry.registers, (threads, ctas)
    assert registers_at_entry({"maxntid": (384, 1, 1)}) is None and registers_at_entry({"maxnreg": (100,)}) == 104
