"""The table of docs/memory.md that was measured on a GPU is measured again."""

import re
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from tests.torch.tensors import saved_bytes  # noqa: E402

pytestmark = pytest.mark.torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
ROW = re.compile(
    r"^\| *(\d+) x (\d+) *" + r"\| *(\d+) *" * 3 + r"\| *([a-z0-9]+) *" + r"\| *(\d+) *" * 3 + r"\|$", re.M
)


def flash(q, k, v, lengths):
    """bfloat16 FlashAttention of documents of one length, as PyTorch has it."""
    count, length = lengths
    batch = [x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=q.shape != k.shape)
    return out.transpose(1, 2).flatten(0, 1)


def mxfp8(q, k, v, lengths):
    """`flamia.attention` of the same, which is told how long a document is."""
    count, length = lengths
    cu = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=q.device)
    return flamia.attention(q, k, v, cu, max_seqlen=length)


def peak_bytes(run):
    """What ``run`` returns, and the most bytes that it had asked PyTorch's allocator for."""
    time.sleep(0.1)  # autograd's thread lets go of a call's gradients a moment after the call has returned
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = run()
    return result, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def measure(attend, lengths, heads, dim):
    """Bytes per token: saved, and at the peak of forward and backward beyond what was there before each."""
    total = lengths[0] * lengths[1]
    q, k, v, dout = (
        torch.randn(total, h, dim, device="cuda", dtype=torch.bfloat16)
        for h in (heads[0], heads[1], heads[1], heads[0])
    )
    for x in (q, k, v):
        x.requires_grad_()
    torch.autograd.grad(attend(q, k, v, lengths), (q, k, v), dout)  # kernels are loaded
    numbers = [saved_bytes(lambda: attend(q, k, v, lengths))[0]]
    out, peak = peak_bytes(lambda: attend(q, k, v, lengths))
    numbers.append(peak)
    numbers.append(peak_bytes(lambda: torch.autograd.grad(out, (q, k, v), dout))[1])
    return [round(n / total) for n in numbers]


def test_the_table_is_what_is_measured(gpu, kernel):
    if kernel != "hopper":
        pytest.skip(f"the page measures hopper, not {kernel}")
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 8
    found = []
    for count, length, hq, hkv, dim, name, *_ in rows:
        attend = {"flash": flash, "mxfp8": mxfp8}[name]
        shape = [int(x) for x in (count, length, hq, hkv, dim)]
        numbers = measure(attend, tuple(shape[:2]), tuple(shape[2:4]), shape[4])
        found.append((*map(str, (count, length, hq, hkv, dim)), name, *map(str, numbers)))
    assert found == rows, "measured:\n" + "\n".join(f"| {r[0]} x {' | '.join(r[1:])} |" for r in found)
