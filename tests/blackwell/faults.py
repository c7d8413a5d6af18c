"""Faults planted in the Blackwell forward: each is a small change of its text, and what must be found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flamia.conformance.simulator.attention import Build, sources

SMALL = Build(dim=64)
WIDE = Build(dim=128)
NVFP4 = Build(recipe="nvfp4_fp8", dim=64)

WRONG = "wrong bytes"
RACE = ("MissingTensorWait", "MissingTensorFence", "TensorRace", "TmemInFlight", "TmemUnwritten")
"""What an access to tensor memory out of order is called, by how far the other one has come."""


@dataclass(frozen=True)
class PlantedFault:
    """One fault.

    :param file: of the kernel's source. :param old: what is in it, once. :param new: what takes its place.
    :param also: a second such change of the same file, old and new.
    :param found: kinds of faults, or `WRONG`: one of them must be found.
    :param says: words that must be in the message.
    :param seeds: how many random timings it may take.
    :param strict: simulate strictly: relying on an order that PTX does not promise is a fault.
    :param options: of `check`: other documents, other heads.
    """

    name: str
    file: str
    old: str
    new: str
    found: tuple[str, ...]
    says: str = ""
    build: Build = SMALL
    seeds: int = 1
    strict: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    also: tuple[str, str] | None = None

    def planted(self) -> Build:
        """The build with the fault.

        :raises ValueError: if the text is not there exactly once.
        """
        name = f"blackwell/{self.file}"
        text = sources()[name]
        for old, new in ((self.old, self.new), *([self.also] if self.also else [])):
            if text.count(old) != 1:
                raise ValueError(f"fault {self.name!r}: {old!r} is {text.count(old)} times in {name}, not once")
            text = text.replace(old, new)
        return replace(self.build, text=((name, text),))


def _fault(name: str, file: str, old: str, new: str, *found: str, **rest: Any) -> PlantedFault:
    options = tuple(rest.pop("options", {}).items())
    return PlantedFault(name, file, old, new, found, options=options, **rest)


FAULTS = (
    # ---- waits and phases ----
    _fault(
        "scores do not wait for K",
        "multiply.cuh",
        "if (first) wait(shared.k_full[k.stage], k.phase);",
        "",
        "Unobserved",
    ),
    _fault(
        "scores do not wait for Q",
        "multiply.cuh",
        "if (starts) wait(shared.q_full[i], taken[i] & 1);",
        "",
        "Unobserved",
    ),
    _fault(
        "products do not wait for V",
        "multiply.cuh",
        "if (first) wait(shared.v_full[v.stage], v.phase);",
        "",
        "Unobserved",
    ),
    _fault(
        "products do not wait for P",
        "multiply.cuh",
        "wait(shared.p_ready[i], multiplied[i]++ & 1);",
        "",
        *RACE,
        "Deadlock",
        "Unobserved",
        "MissingProxyFence",
    ),
    _fault(
        "wrong phase of P",
        "multiply.cuh",
        "multiplied[i]++ & 1)",
        "multiplied[i]++ & 1 ^ 1)",
        *RACE,
        "Deadlock",
        "UnwrittenRead",
        "MissingProxyFence",
    ),
    _fault(
        "O is overwritten before the epilogue has read it",
        "multiply.cuh",
        "if (starts) wait(shared.o_free[i], taken_o[i]++ & 1 ^ 1);",
        "",
        *RACE,
        seeds=6,
        options={"lengths": (40, 33), "heads": (2, 1)},
    ),
    _fault(
        "scales are parked before the scores there were read",
        "multiply.cuh",
        "wait(shared.s_read[1 - i], scored[1 - i] & 1 ^ 1);",
        "",
        *RACE,
        "Unpromised",
        seeds=4,
    ),
    _fault(
        "scores do not wait until l is read",
        "multiply.cuh",
        "wait(shared.l_read[i], scored[i] & 1 ^ 1);",
        "",
        *RACE,
        "Unpromised",
        build=WIDE,
        seeds=4,
    ),
    _fault("softmax does not wait for S", "softmax.cuh", "    wait(shared.s_full[i], parity);\n", "", *RACE),
    _fault(
        "softmax does not wait for l", "softmax.cuh", "      wait(shared.pv_done[i], parity);\n", "", *RACE, build=WIDE
    ),
    _fault(
        "the epilogue does not wait for the rows",
        "epilogue.cuh",
        "wait(shared.rows_final[i], parity);",
        "",
        *RACE,
        "UnwrittenRead",
    ),
    _fault(
        "loads do not wait for a free stage",
        "load.cuh",
        "wait(shared.v_empty[ring.stage], ring.phase ^ 1);",
        "",
        "MbarrierOverrun",
        "SharedRace",
        seeds=4,
        options={"lengths": (500,)},
    ),
    _fault(
        "wrong phase of a ring",
        "pipeline.cuh",
        "phase ^= 1;",
        "",
        "Deadlock",
        "MbarrierOverrun",
        "Unobserved",
        options={"lengths": (500,)},
    ),
    _fault(
        "V1's exponents are given back before softmax has read them",
        "softmax.cuh",
        "  arrive_warp(shared.q_empty[i]);\n",
        "",
        "Unobserved",
        says="a generic load uses bytes of a bulk copy",
        also=("  Row state;\n#pragma", "  Row state;\n  arrive_warp(shared.q_empty[i]);\n#pragma"),
        options={"lengths": (40, 33), "heads": (2, 1)},
    ),
    _fault(
        "a count of 6 for the 5 that free Q",
        "forward.cu",
        "init(shared.q_empty[i], 1 + 4);",
        "init(shared.q_empty[i], 2 + 4);",
        "Deadlock",
        options={"lengths": (40, 33), "heads": (2, 1)},
    ),
    _fault(
        "a count of 14 for 13 readers of the work item",
        "forward.cu",
        "1 + 4 * QUERY_TILES + 4);",
        "2 + 4 * QUERY_TILES + 4);",
        "Deadlock",
        options={"lengths": (40, 33, 10)},
    ),
    _fault(
        "S is committed before its products",
        "multiply.cuh",
        "    const uint64_t a = describe_operand<SCORE_ROW>",
        "    ptx::tcgen05_commit(at(&shared.s_full[i]));\n    const uint64_t a = describe_operand<SCORE_ROW>",
        *RACE,
        "MbarrierOverrun",
        "Deadlock",
        WRONG,
    ),
    # ---- fences ----
    _fault(
        "P's scales reach the tensor core without a proxy fence",
        "softmax.cuh",
        "    ptx::fence_proxy_async();\n    ptx::tcgen05_wait_st();",
        "    ptx::tcgen05_wait_st();",
        "MissingProxyFence",
    ),
    _fault(
        "out leaves without a proxy fence", "epilogue.cuh", "    ptx::fence_proxy_async();\n", "", "MissingProxyFence"
    ),
    _fault(
        "P is announced before it is stored",
        "softmax.cuh",
        "    ptx::tcgen05_wait_st();\n    arrive_warp_tensor(shared.p_ready[i]);",
        "    arrive_warp_tensor(shared.p_ready[i]);",
        "MissingTensorWait",
        says="wait::st is missing",
        build=Build(dim=64, hooks=0),
    ),
    _fault(
        "no fence before the arrival of P",
        "softmax.cuh",
        "arrive_warp_tensor(shared.p_ready[i]);",
        "arrive_warp(shared.p_ready[i]);",
        "MissingTensorFence",
        says="before_thread_sync is missing",
    ),
    _fault(
        "no fence behind the wait for S",
        "softmax.cuh",
        "but its arrival may lag behind\n    ptx::tcgen05_fence_after_thread_sync();",
        "\n",
        "MissingTensorFence",
        says="after_thread_sync is missing",
    ),
    _fault(
        "scores are used before they have arrived",
        "softmax.cuh",
        "ptx::tcgen05_ld_x32(x + i, s + i);\n    ptx::tcgen05_wait_ld();",
        "ptx::tcgen05_ld_x32(x + i, s + i);",
        "RegisterInFlight",
        says="tcgen05.ld",
    ),
    _fault(
        "a CTA ends before out has left",
        "epilogue.cuh",
        "  ptx::cp_async_bulk_wait_group();\n",
        "",
        "UnterminatedCopy",
        seeds=12,
    ),
    _fault(
        "staging is overwritten while a copy reads it",
        "epilogue.cuh",
        "    ptx::cp_async_bulk_wait_group_read();\n",
        "",
        "OperandOverwritten",
        seeds=4,
        options={"lengths": (40,), "dtype": "float32"},
    ),
    # ---- bytes ----
    _fault(
        "V1's scales are not counted", "load.cuh", "(p.causal ? SCALES : 0)", "0", "ExpectTxMismatch", says="512 bytes"
    ),
    _fault(
        "half a tile of K",
        "load.cuh",
        "slot * SCORE_TILE, SCORE_TILE, full);\n  fetch(shared.k_scales",
        "slot * SCORE_TILE, SCORE_TILE / 2, full);\n  fetch(shared.k_scales",
        "ExpectTxMismatch",
        says="4096 bytes less",
    ),
    # ---- numbers ----
    _fault("scale ids do not step", "layout.cuh", "return step << 29 | step << 4;", "return 0 * step;", WRONG),
    _fault("V32 in the diagonal", "load.cuh", "(diagonal ? p.v1 : p.v) + slot", "p.v + slot", WRONG, says="out"),
    _fault(
        "V's scales of the stage before",
        "multiply.cuh",
        "at(shared.v_scales[v.stage])",
        "at(shared.v_scales[v.stage == 0 ? 0 : v.stage - 1])",
        WRONG,
        "Unobserved",
        "UnwrittenRead",
        options={"lengths": (300,)},
    ),
    _fault(
        "the fold has the wrong sign",
        "softmax.cuh",
        "int(exponents[j]) - int(largest)",
        "int(largest) - int(exponents[j])",
        WRONG,
        says="out",
    ),
    _fault(
        "the fold's factor is left out of the scales",
        "softmax.cuh",
        "scale_byte(__fadd_rn(__fsub_rn(above, 8.0f), e))",
        "scale_byte(__fsub_rn(above, 8.0f))",
        WRONG,
        says="out",
    ),
    _fault(
        "a row sees the block behind its own",
        "softmax.cuh",
        "} else if (b == w) {",
        "} else if (b == w && lane == 77) {",
        WRONG,
        says="out",
    ),
    _fault("l sums P' instead of P", "multiply.cuh", "s + P_COLUMN + 8 * step, ones", "p + 8 * step, ones", WRONG),
    _fault(
        "the mask is one column off",
        "exp2.cuh",
        "s[i] = first + i > last ?",
        "s[i] = first + i >= last ?",
        WRONG,
        "Deadlock",
    ),
    _fault(
        "the tail of the document is not masked",
        "softmax.cuh",
        "p.causal ? row : work.last_rows - 1",
        "p.causal ? row : 127",
        WRONG,
        options={"causal": False, "lengths": (200,)},
    ),
    _fault(
        "P is held against the running maximum",
        "softmax.cuh",
        "const float step = __fsub_rn(before, after);",
        "const float step = __fsub_rn(after, before);",
        WRONG,
        options={"lengths": (300,), "growing": True},
    ),
    _fault(
        "the tile's factor is left out",
        "softmax.cuh",
        "scale_byte(__fsub_rn(above, 8.0f));",
        "scale_byte(-8.0f);",
        WRONG,
        options={"lengths": (300,), "growing": True},
    ),
    _fault("floor rounds to nearest", "exp2.cuh", "ptx::fma_rm_f32x2(s, c, k)", "ptx::fma_rn_f32x2(s, c, k)", WRONG),
    _fault(
        "another head's keys",
        "load.cuh",
        "int32_t(head / p.group * p.max_tiles)",
        "int32_t(head % 1 * p.max_tiles)",
        WRONG,
        options={"lengths": (40,), "heads": (4, 2)},
    ),
    _fault(
        "stride of an operand halved",
        "layout.cuh",
        "uint64_t(8 * WIDTH >> 4) << 32",
        "uint64_t(4 * WIDTH >> 4) << 32",
        WRONG,
        "BadDescriptor",
        "Unobserved",
    ),
    _fault(
        "V is read K-major",
        "layout.cuh",
        "shape(D) | E8M0_SCALES | B_MN_MAJOR",
        "shape(D) | E8M0_SCALES",
        WRONG,
        "BadDescriptor",
        "Unobserved",
        "OutOfBounds",
    ),
    _fault(
        "scales of UE4M3 marked as E8M0",
        "layout.cuh",
        "NVFP4 ? E2M1_TYPES :",
        "NVFP4 ? E2M1_TYPES | E8M0_SCALES :",
        WRONG,
        "BadDescriptor",
        "IllegalShape",
        build=NVFP4,
    ),
    # ---- tensor memory ----
    _fault(
        "P and l overlap",
        "layout.cuh",
        "L_COLUMNS = 16, L_IN_S = 32;",
        "L_COLUMNS = 16, L_IN_S = 24;",
        "CompileError",
        says="P and l must not overlap",
    ),
    _fault(
        "O of both tiles overlap",
        "multiply.cuh",
        "o = tensor + O_COLUMN + i * D;",
        "o = tensor + O_COLUMN + i * D / 2;",
        WRONG,
        *RACE,
        "Unpromised",
    ),
    _fault(
        "scales of P and of V overlap",
        "multiply.cuh",
        "tcgen05_cp_32x128b_warpx4(s + V_SCALE_COLUMN",
        "tcgen05_cp_32x128b_warpx4(s + P_SCALE_COLUMN",
        WRONG,
        "Unpromised",
        *RACE,
        "ScaleNotReplicated",
    ),
    _fault(
        "tensor memory is not given back", "forward.cu", "    ptx::tcgen05_dealloc(tensor, COLUMNS);\n", "", "TmemLeak"
    ),
    _fault(
        "the quadrant of another warp",
        "layout.cuh",
        "return uint32_t(w) << 21;",
        "return uint32_t(w ^ 1) << 21;",
        "TmemRange",
    ),
)
