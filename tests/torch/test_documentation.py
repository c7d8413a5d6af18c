"""The pages' code runs, and their numbers are measured again."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flamia  # noqa: E402
from tests.torch.tensors import random_qkv, saved_bytes  # noqa: E402

pytestmark = pytest.mark.torch

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["quickstart", "huggingface", "migration"])
def test_code_of_a_page_runs(page):
    if page == "huggingface":
        pytest.importorskip("transformers")
    torch._dynamo.reset()
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}.md, block {number}", "exec"), namespace)


ROW = re.compile(r"^\| *(\d+) *\|" + r" *(\d+) *\|" * 7 + "$", re.M)


def test_memory_table_is_what_is_measured():
    rows = [[int(x) for x in row] for row in ROW.findall((DOCS / "memory.md").read_text(encoding="utf-8"))]
    assert len(rows) >= 4
    for hq, hkv, dim, *stated in rows:
        assert stated == measure(hq, hkv, dim), (hq, hkv, dim)


def measure(hq, hkv, dim, total=64):
    """Bytes per token: of the output, saved by PyTorch's FlashAttention, and by each recipe of FLAMIA."""
    q, k, v, _ = random_qkv(total=total, heads=(hq, hkv), dim=dim)
    cu = torch.tensor([0], dtype=torch.int32)  # nothing but padding: sizes do not depend on the documents
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        flash, out = saved_bytes(
            lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        )
    sizes = [saved_bytes(lambda r=r: flamia.attention(q, k, v, cu, recipe=r))[0] for r in RECIPES]
    return [out.nbytes // total, flash // total, *((size - cu.nbytes) // total for size in sizes)]


RECIPES = ("mxfp8", "nvfp4_fp8", "bf16")
