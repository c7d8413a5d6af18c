"""A malformed cu_seqlens on a GPU: an error at the next call that waits for the device, and no wait before.

Each in a process of its own, because a device-side assertion ends its CUDA context.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CALLS = {
    "schedule": """
plan = schedule.build_schedule(cu, 100, 2, 1, True)
plan.assert_legal()
quantize.quantize_qkv(q, k, k, plan)
""",
    "flamia.attention": """
import flamia
from flamia import dispatch
from flamia.pytorch import call

def forward(q, k, v, cu_seqlens, recipe, causal, scale, longest, saves):
    plan = schedule.build_schedule(cu_seqlens, q.shape[0], q.shape[1], k.shape[1], causal, max_seqlen=longest)
    got = quantize.quantize_qkv(q, k, v, plan)
    row = torch.zeros(q.shape[1], q.shape[0], device=q.device)
    return torch.zeros_like(q), row, row.clone(), row.clone(), [got.q.payload]

kernel = dispatch.AttentionKernel("stand_in", None, (9, 0), ("mxfp8",), (64,), ("bfloat16",), forward, None, None)
dispatch._table["stand_in"] = kernel, None
call.constant_find_kernel = lambda *_: "stand_in"
flamia.attention(q, k, k, cu)
""",
}

PROGRAM = """
import torch
from flamia.kernels import quantize, schedule
q, k = (torch.randn(100, heads, 64, device="cuda").bfloat16() for heads in (2, 1))
good, bad = (torch.tensor(x, device="cuda") for x in ([0, 40, 100], {cu}))

def call(cu):
{body}

call(good)
torch.cuda.synchronize()
print("legal boundaries pass")
torch.cuda.set_sync_debug_mode("error")
call(bad)
torch.cuda.set_sync_debug_mode("default")
print("the call returns")
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("raised:", str(error).splitlines()[0])
"""


@pytest.mark.parametrize("cu", ["[1, 40, 100]", "[0, 60, 40, 100]", "[0, 40, 101]"])
@pytest.mark.parametrize("name", CALLS)
def test_malformed_boundaries_surface_at_the_next_wait(gpu, name, cu):
    body = "\n".join("    " + line for line in CALLS[name].strip().splitlines())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(cu=cu, body=body)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["legal boundaries pass", "the call returns"], done.stderr[-2000:]
    assert lines[2].startswith("raised:") and "device-side assert" in lines[2]
    assert "cu_seqlens must start at 0, never decrease, and end at or before T = 100" in done.stderr


def test_a_forward_quantizes_in_two_launches_and_asserts_in_a_third(gpu):
    import torch
    from torch.profiler import ProfilerActivity, profile

    from flamia.kernels import quantize, schedule

    q, k = (torch.randn(100, heads, 64, device=gpu).bfloat16() for heads in (2, 1))
    cu = torch.tensor([0, 40, 100], device=gpu)

    def forward():
        plan = schedule.build_schedule(cu, 100, 2, 1, True)
        plan.assert_legal()
        quantize.quantize_qkv(q, k, k, plan)

    forward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        forward()
        torch.cuda.synchronize()
    launched = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 3, launched
