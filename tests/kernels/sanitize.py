"""Every kernel once on small ragged inputs, to be run under a checker:

compute-sanitizer --tool memcheck python tests/kernels/sanitize.py      (or initcheck, synccheck)
compute-sanitizer --tool racecheck python tests/kernels/sanitize.py --every-lane

``--every-lane`` builds the kernels in a form that the race checker can follow: Note [Arrivals] of ``hopper/ptx.cuh``.
"""

import sys

import torch

from flamia.kernels import build, conversions, epilogue, hopper, hopper_backward, quantize, schedule


def main() -> None:
    """Run them all."""
    lengths = [127, 1, 0, 128, 300, 0, 33, 31, 32, 5]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    used = int(cu[-1])
    for dtype in (torch.bfloat16, torch.float32):
        for dim, hadamard in ((64, True), (128, False), (128, True)):
            plan = schedule.build_schedule(cu, used + 7, 4, 2, True)
            q, k, v, out = (torch.randn(used + 7, h, dim, device="cuda").to(dtype) for h in (4, 2, 2, 4))
            ones = [torch.ones(h, 2, device="cuda") for h in (4, 2)]
            nvfp4 = quantize.Nvfp4(*ones, hadamard=hadamard)
            row_sum, row_max = torch.rand(4, used + 7, device="cuda") + 1, torch.zeros(4, used + 7, device="cuda")
            got = quantize.quantize_qkv(q, k, v, plan, nvfp4=nvfp4, out=out, rows=[(row_sum, 0.0)])
            row_sum += 1
            passed = quantize.row_pass(q, out, row_sum, row_max, plan, gradients=(out,))
            tiles = int(plan.status[schedule.NUM_TILES])
            partial = torch.randn(4, plan.max_tiles, 128, dim, device="cuda")
            epilogue.reduce_heads(partial, k, plan, got.k.exponents)
            for decoded in (got.q, got.v, got.v1, got.q4, passed.dout):
                epilogue.decode_tiles(decoded, plan).sum()
            assert tiles == sum(-(-n // 128) for n in lengths)
    plan = schedule.build_schedule(cu.int(), used + 7, 4, 2, False)
    wide = torch.zeros(used + 7, 4 * 64 + 1, device="cuda").bfloat16()
    unaligned = wide.as_strided((used + 7, 4, 64), (257, 64, 1), 1)
    quantize.quantize_values(unaligned, plan)
    quantize.quantize_tokens(unaligned, plan, 1)
    for conversion in conversions.CONVERSIONS:
        conversions.convert(torch.randn(1000, device="cuda"), conversion)
    if torch.cuda.get_device_capability() == (9, 0):
        attend_on_hopper(cu, used + 7)
    torch.cuda.synchronize()


def attend_on_hopper(cu: torch.Tensor, tokens: int) -> None:
    """The attention kernels."""
    for dim in (64, 128):
        for causal, (q_heads, kv_heads) in ((True, (4, 2)), (False, (4, 2)), (True, (3, 3))):
            heads = (q_heads, kv_heads, kv_heads, q_heads)
            q, k, v, dout = (torch.randn(tokens, h, dim, device="cuda").bfloat16() for h in heads)
            for recipe, widens in (("bf16", False), ("mxfp8", False), ("mxfp8", True)):
                got = hopper.attention_forward(q, k, v, cu, recipe=recipe, causal=causal)
                saved = (dout, got.out, got.m, got.l, got.inputs, got.schedule)
                hopper_backward.attention_backward(*saved, dim**-0.5, widens=widens)


if __name__ == "__main__":
    if "--every-lane" in sys.argv[1:]:
        build.OPTIONS = (*build.OPTIONS, "-DEVERY_LANE_ARRIVES")
    main()
