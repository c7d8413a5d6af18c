"""The Hopper backward on a GPU against the NumPy reference, bit for bit.

What the forward would hand over comes from the reference, so that a fault here is one of the backward.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.kernels import hopper_backward, quantize, schedule
from flamia.kernels.hopper import key_operands, pack_qkv
from flamia.kernels.stored import STORED_BYTES
from flamia.reference.backward import attention_backward
from flamia.reference.forward import attention_forward
from flamia.reference.operands import BFLOAT16_LARGEST

PADDING = 5


@dataclass(frozen=True)
class Case:
    """One call: lengths of its documents, query and KV heads, and how its values are drawn.

    ``longest``: max_seqlen; ``stored_bytes``: the bound of memory, if not the usual one.
    """

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)
    dim: int = 128
    causal: bool = True
    recipe: str = "mxfp8"
    dtype: str = "bfloat16"
    scale: float | None = None
    size: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    zero_rows: float = 0.0
    rough: int = 0
    longest: int | None = None
    stored_bytes: int = STORED_BYTES
    specials: dict = field(default_factory=dict)

    def draw(self):
        """q, k, v, dout and cu_seqlens."""
        rng = np.random.default_rng(sum(self.name.encode()))
        tokens = sum(self.lengths) + PADDING
        kind = bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        out = []
        for which, (heads, size) in enumerate(
            zip((self.heads[0], *[self.heads[1]] * 2, self.heads[0]), self.size, strict=True)
        ):
            x = rng.standard_normal((tokens, heads, self.dim)).astype(np.float32) * np.float32(size)
            if self.rough:
                x *= np.exp2(rng.integers(-self.rough, self.rough + 1, (tokens, heads, 1))).astype(np.float32)
            if which == 3:
                x[rng.random((tokens, heads)) < self.zero_rows] = 0
            for token, value in self.specials.get("qkvo"[which], ()):
                x[token] = x[token] if value is None else np.float32(value)
            out.append(x.astype(kind))
        return (*out, np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32))


SEVERAL = (300, 64, 1, 128, 33, 257)
NAN = float("nan")
CASES = (
    Case("one_tile", (128,)),
    Case("half_tile", (40,)),
    Case("two_tiles", (256,)),
    Case("full_tile", (128,), causal=False),
    Case("full_two_tiles", (200,), causal=False),
    Case("pack", SEVERAL, heads=(2, 2)),
    Case("pack_full", SEVERAL, heads=(2, 2), causal=False),
    Case("pack_64", SEVERAL, heads=(2, 2), dim=64),
    Case("pack_64_full", SEVERAL, heads=(2, 2), dim=64, causal=False),
    Case("groups", SEVERAL, heads=(4, 2)),
    Case("groups_64_full", SEVERAL, heads=(4, 1), dim=64, causal=False),
    Case("one_head_at_a_time", SEVERAL, heads=(4, 2), stored_bytes=0, longest=300),
    Case("one_head_at_a_time_full", SEVERAL, heads=(2, 2), dim=64, causal=False, stored_bytes=1 << 20, longest=301),
    Case("many_documents", (1,) * 40 + (129,) + (0, 3) * 8, heads=(2, 1), longest=129),
    Case("float32", SEVERAL, heads=(2, 1), dtype="float32"),
    Case("long", (1100,), heads=(2, 1)),
    Case("sharp", (513,), size=(6.0, 6.0, 1.0, 1.0)),
    Case("high_tops", (70,), size=(7.0, 7.0, 1.0, 1.0)),  # slow steps: m is 127 or more in some rows, not in all
    Case(
        "lost_tokens",
        (90,),
        causal=False,
        specials={x: [(i, NAN)] for x, i in zip("qkvo", (3, 66, 9, 70), strict=True)},
    ),
    Case("zero_rows", SEVERAL, heads=(2, 1), zero_rows=0.6),
    Case("zero_suffix", (256,), specials={"o": [(slice(70, 256), 0.0)]}),
    Case("rough", SEVERAL, heads=(2, 1), rough=6),
    Case("tiny_gradients", SEVERAL, size=(1.0, 1.0, 1.0, 2.0**-110), dtype="float32"),
    Case("large_gradients", SEVERAL, size=(1.0, 1.0, 1.0, 2.0**20), dtype="float32"),
    Case("tiny_values", SEVERAL, size=(1.0, 1.0, 2.0**-120, 1.0), dtype="float32"),
    Case("huge_scores", SEVERAL, size=(2.0**9, 2.0**9, 1.0, 1.0)),
    Case("wide", SEVERAL, rough=60, dtype="float32"),
    Case("flat", SEVERAL, scale=0.0),
    Case("lost_query", SEVERAL, heads=(2, 1), specials={"q": [(10, NAN), (200, NAN)]}),
    Case("lost_key", SEVERAL, heads=(2, 1), specials={"k": [(290, NAN), (640, float("inf"))]}),
    Case("lost_value", SEVERAL, heads=(2, 1), specials={"v": [(131, NAN)]}),
    Case("lost_gradient", SEVERAL, heads=(2, 1), specials={"o": [(77, NAN), (500, float("inf"))]}),
    Case("lost_full", SEVERAL, causal=False, specials={"k": [(5, NAN)], "o": [(400, NAN)]}),
    Case(
        "saturated",
        (200,),
        specials={
            "q": [((150, 0, 1), BFLOAT16_LARGEST), ((slice(None), 0, 2), 0.0), (0, 0.0)],
            "k": [((30, 0, 2), -BFLOAT16_LARGEST), ((slice(None), 0, 1), 0.0)],
            "v": [((20, 0, 3), BFLOAT16_LARGEST), ((slice(None), 0, 4), 0.0)],
            "o": [((0, 0, 4), -BFLOAT16_LARGEST), ((slice(None), 0, 3), 0.0)],
        },
    ),
    Case("zero_tokens", SEVERAL, specials={"q": [(9, 0.0)], "k": [(300, 0.0)], "v": [(slice(0, 300), 0.0)]}),
    *(
        replace(case, name=f"unscaled_{case.name}", recipe="bf16")
        for case in (
            Case("one_tile", (128,)),
            Case("half_tile", (40,)),
            Case("full_two_tiles", (200,), causal=False),
            Case("pack", SEVERAL, heads=(2, 2)),
            Case("groups", SEVERAL, heads=(4, 2)),
            Case("groups_64_full", SEVERAL, heads=(4, 1), dim=64, causal=False),
            Case("one_head_at_a_time", SEVERAL, heads=(4, 2), dim=64, stored_bytes=0, longest=300),
            Case("float32", SEVERAL, heads=(2, 1), dtype="float32"),
            Case("high_tops", (70,), size=(7.0, 7.0, 1.0, 1.0)),
            Case(
                "lost_tokens",
                (90,),
                causal=False,
                specials={x: [(i, NAN)] for x, i in zip("qkvo", (3, 66, 9, 70), strict=True)},
            ),
            Case("lost_key", SEVERAL, heads=(2, 1), specials={"k": [(290, NAN), (640, float("inf"))]}),
            Case("zero_rows", SEVERAL, heads=(2, 1), zero_rows=0.6),
            Case("rough", SEVERAL, heads=(2, 1), rough=6),
            Case("tiny_gradients", SEVERAL, size=(1.0, 1.0, 1.0, 2.0**-125), dtype="float32"),
            Case("tiny_scores", SEVERAL, size=(2.0**-70, 2.0**-70, 1.0, 1.0)),
            Case("huge_scores", SEVERAL, size=(2.0**9, 2.0**9, 1.0, 1.0)),
            Case("huge_values", (300, 90), size=(1.0, 1.0, 2.0**70, 2.0**56)),
            Case("wide", SEVERAL, rough=60, dtype="float32"),
            Case("flat", SEVERAL, scale=0.0),
        )
    ),
)


@pytest.fixture(scope="module")
def hopper(gpu):
    """A device that runs the kernels; skips, with the reason, elsewhere."""
    import torch

    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    return gpu


def upload(x, device):
    """A torch tensor of the same bits."""
    import torch

    x = np.ascontiguousarray(x)
    if x.dtype == bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def first_difference(name, got, want):
    """None, or where two arrays differ first; all NaN are the same."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    different = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    if not different.any():
        return None
    where = tuple(int(i) for i in np.argwhere(different)[0])
    return f"{name}{where}: {got[where]!r} where {want[where]!r} is right; {different.sum()} of {different.size} differ"


def differences(case, device, to_numpy, ways=(False, True)):
    """What differs from the reference in a case, as text; ``ways``: values of ``widens``."""
    q, k, v, dout, cu = case.draw()
    with np.errstate(all="ignore"):
        options = {"recipe": case.recipe, "causal": case.causal, "softmax_scale": case.scale}
        f = attention_forward(q, k, v, cu, **options, profile="hopper")
        want = attention_backward(dout, f)
    plan = schedule.build_schedule(upload(cu, device), q.shape[0], *case.heads, case.causal, max_seqlen=case.longest)
    q, k, v = (upload(x, device) for x in (q, k, v))
    if case.recipe == "bf16":
        inputs = pack_qkv(q, k, v, plan)
    else:
        inputs = quantize.quantize_qkv(q, k, v, plan, keys=key_operands(v, plan, "mxfp8"))
    saved = [upload(x, device) for x in (dout, f.out, f.m, f.l)]
    found = []
    for widens in ways if case.recipe == "mxfp8" else (None,):
        options = {"stored_bytes": case.stored_bytes, "widens": widens}
        got = hopper_backward.attention_backward(*saved, inputs, plan, f.softmax_scale, **options)
        for n in ("dv", "dk", "dq"):
            name = f"{n} with widens={widens}"
            found.append(first_difference(name, to_numpy(getattr(got, n)), getattr(want, n)))
    return [x for x in found if x]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_quick_backward(hopper, poisoned, to_numpy, case):
    found = differences(case, hopper, to_numpy)
    assert not found, "\n".join(found)
