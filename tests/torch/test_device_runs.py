"""`flamia.attention` on a GPU, run by run: the same bytes every time, how many launches, and what bad boundaries do."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from tests.torch.tensors import bits, random_qkv  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [700, 1, 129, 0, 900, 40, 600]
NAMES = ("out", "lse", "dq", "dk", "dv")
RUNS = 100


def draw(device, dim=128):
    """q, k, v, dout and boundaries of a pack that keeps many multiprocessors busy."""
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    tensors = random_qkv(total=sum(LENGTHS) + 9, heads=(8, 2), dim=dim)
    return [*(x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors), cu]


def attend(q, k, v, dout, cu):
    """out, lse and the gradients."""
    out, lse = flamia.attention(q, k, v, cu, return_lse=True)
    return (out, lse, *torch.autograd.grad(out, (q, k, v), dout))


# ---- determinism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128])
def test_a_hundred_runs_give_the_same_bytes(gpu, dim):
    tensors = draw(gpu, dim)
    expected = attend(*tensors)
    for run in range(RUNS):
        for name, a, b in zip(NAMES, attend(*tensors), expected, strict=True):
            assert torch.equal(bits(a), bits(b)), (name, run)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_hundred_runs_beside_other_work_give_the_same_bytes(gpu, dim):
    """Another stream takes multiprocessors away, now more, now fewer: CTAs start late and in another order."""
    tensors = draw(gpu, dim)
    expected = attend(*tensors)
    torch.cuda.synchronize()
    other, mine = torch.cuda.Stream(), torch.cuda.Stream()
    large = torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16)
    small = torch.randn(64, 512, device=gpu)
    busy = torch.cuda.Event()
    overlapped = 0
    for run in range(RUNS):
        with torch.cuda.stream(other):
            for _ in range(192 + run % 7):
                large = torch.tanh(large @ large)
                small = small.sin()
            busy.record()
        with torch.cuda.stream(mine):
            found = attend(*tensors)
            overlapped += not busy.query()
            mine.synchronize()
        for name, a, b in zip(NAMES, found, expected, strict=True):
            assert torch.equal(bits(a), bits(b)), (name, run)
    assert overlapped > RUNS // 4, "the other stream was never busy while attention was launched"


# ---- launches ----------------------------------------------------------------------------------------------


def launches(run):
    """Names of what ``run`` makes the GPU do."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_launches_of_forward_and_backward(gpu, kernel):
    """As many as docs/quickstart.md says: schedule, quantizer, forward, assertion; five for the gradients."""
    if kernel != "hopper":
        pytest.skip(f"the page counts the launches of hopper, not of {kernel}")
    q, k, v, dout, cu = draw(gpu)
    with torch.no_grad():
        forward = launches(lambda: flamia.attention(q, k, v, cu))
    assert len(forward) == 4, forward
    out = flamia.attention(q, k, v, cu)
    backward = launches(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    assert len(backward) == 5, backward


# ---- in a process of their own -----------------------------------------------------------------------------

BAD = """
import sys, torch, flamia
q, k, v = (torch.randn(100, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (2, 1, 1))
good, bad = (torch.tensor(x, device="cuda") for x in ([0, 40, 100], {cu}))
flamia.attention(q, k, v, good, max_seqlen=60).sum().backward()
torch.cuda.synchronize()
print("legal boundaries pass")
torch.cuda.set_sync_debug_mode("error")
flamia.attention(q, k, v, bad, max_seqlen={longest})
torch.cuda.set_sync_debug_mode("default")
print("the call returns")
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("raised:", str(error).splitlines()[0])
"""

ILLEGAL = "cu_seqlens must start at 0, never decrease, and end at or before T = 100"
MALFORMED = {
    "starts at 1": ("[1, 40, 100]", None, ILLEGAL),
    "decreases": ("[0, 60, 40, 100]", None, ILLEGAL),
    "ends past T": ("[0, 40, 101]", None, ILLEGAL),
    "longer than max_seqlen": (
        "[0, 39, 100]",
        60,
        "max_seqlen must be at least the longest document of cu_seqlens, got 60",
    ),
}

COMPILED_FIRST = """
import torch, flamia
attend = torch.compile(lambda q, cu: flamia.attention(q, q, q, cu), fullgraph=True, backend="aot_eager")
q = torch.randn(10, 1, 64, device="cuda", dtype=torch.bfloat16)
cu = torch.tensor([0, 10], device="cuda")
found = attend(q, cu)
print(torch.equal(found, flamia.attention(q, q, q, cu)))
"""


@pytest.fixture(scope="module")
def processes(gpu):
    """Every program of this section, started together; a device-side assertion ends the context of its process."""
    programs = {name: BAD.format(cu=cu, longest=longest) for name, (cu, longest, _) in MALFORMED.items()}
    programs["compiled first"] = COMPILED_FIRST
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, code in programs.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_boundaries_surface_at_the_next_wait(processes, case):
    stdout, stderr = processes[case].communicate(timeout=300)
    lines = stdout.splitlines()
    assert lines[:2] == ["legal boundaries pass", "the call returns"], stderr[-3000:]
    assert lines[2].startswith("raised:") and "device-side assert" in lines[2]
    assert MALFORMED[case][2] in stderr


def test_the_first_use_may_be_inside_torch_compile(processes):
    stdout, stderr = processes["compiled first"].communicate(timeout=300)
    assert stdout == "True\n", stderr[-3000:]
