"""Faults planted in the Blackwell backward: each is a small change of its text, and what must be found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flamia.conformance.simulator.attention_backward import OWNERS, STORED, Build, sources
from flamia.conformance.simulator.machine.faults import Fault
from flamia.kernels.nvrtc import CompileError
from tests.blackwell.backward import run

SMALL = Build(dim=64, hooks=0)
WATCHED = Build(dim=64, hooks=1)

WRONG = "wrong bytes"
COMPILER = "CompileError"
TENSOR = ("MissingTensorWait", "MissingTensorFence", "TensorRace", "TmemInFlight", "TmemUnwritten")
"""What an access to tensor memory out of order is called, by how far the other one has come."""
STALE = (
    *(WRONG, "SharedRace", "UnwrittenRead", "Unobserved", "MbarrierOverrun", "SharedInFlight", "MissingProxyFence"),
    "OperandOverwritten",
)
"""What data that is read too early, or overwritten too early, may show as."""


@dataclass(frozen=True)
class PlantedFault:
    """One fault.

    :param file: of the kernels' source. :param old: what is in it, once. :param new: what takes its place.
    :param found: kinds of faults, `WRONG` or `COMPILER`: one of them must be found.
    :param owners: the kernels that are run.
    :param seeds: how many random timings it may take.
    :param options: of `run`: other documents, other heads.
    """

    name: str
    file: str
    old: str
    new: str
    found: tuple[str, ...]
    owners: tuple[str, ...] = ("keys",)
    build: Build = SMALL
    seeds: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    def planted(self) -> Build:
        """The build with the fault.

        :raises ValueError: if the text is not there exactly once.
        """
        name = f"blackwell/{self.file}"
        text = sources()[name]
        if text.count(self.old) != 1:
            raise ValueError(f"fault {self.name!r}: {self.old!r} is {text.count(self.old)} times in {name}, not once")
        return replace(self.build, text=((name, text.replace(self.old, self.new)),))

    def find(self) -> tuple[str, str]:
        """Kind and message of what is found, over the seeds; two empty strings for nothing."""
        build = self.planted()
        options: dict[str, Any] = {"lengths": (140,), "heads": (1, 1), **dict(self.options)}
        for seed in range(self.seeds):
            try:
                _, wrong = run(build, owners=self.owners, seed=seed, **options)
            except CompileError as error:
                return COMPILER, str(error)
            except Fault as found:
                return found.kind, str(found)
            if wrong is not None:
                return WRONG, wrong
        return "", ""


def _fault(name: str, file: str, old: str, new: str, *found: str, **rest: Any) -> PlantedFault:
    options = tuple(rest.pop("options", {}).items())
    file = f"backward{file}" if file[0] in "_." else file
    return PlantedFault(name, file, old, new, found, options=options, **rest)


QUERIES = {"owners": ("queries",)}
GROUP = {"options": {"heads": (3, 1), "lengths": (33,)}}
LONG = {"options": {"lengths": (500,)}}
DAMAGED = {"options": {"damaged": True, "lengths": (160,)}}
NEXT_PRODUCTS = """  for (;; works.advance(), ++items) {
    const Work work = next_work(shared, works);
    ptx::mbarrier_arrive"""

FAULTS = (
    # ---- waits and phases ----
    _fault(
        "scores do not wait for Q",
        "_multiply.cuh",
        "wait(shared.score_full[scored.stage], scored.phase);",
        "",
        *STALE,
    ),
    _fault(
        "dP does not wait for dO'",
        "_multiply.cuh",
        "wait(shared.gradient_full[graded.stage], graded.phase);",
        "",
        *STALE,
    ),
    _fault(
        "products do not wait for K",
        "_multiply.cuh",
        "wait(shared.fixed_full[fixed.stage], fixed.phase);",
        "",
        *STALE,
    ),
    _fault(
        "scales of S are copied over dP that is being read",
        "_multiply.cuh",
        "wait(shared.g_read, parity ^ 1);",
        "",
        *TENSOR,
        seeds=3,
    ),
    _fault(
        "scales of dP are copied over S that is being read",
        "_multiply.cuh",
        "wait(shared.s_read, parity);",
        "",
        *TENSOR,
        seeds=3,
    ),
    _fault("dV does not wait for P", "_multiply.cuh", "wait(shared.p_ready, parity);", "", *TENSOR, *STALE),
    _fault("dK does not wait for X", "_multiply.cuh", "wait(shared.x_ready, tiles_x++ & 1);", "", *TENSOR, *STALE),
    _fault("dP is not committed", "_multiply.cuh", "ptx::tcgen05_commit(at(&shared.g_full));", "", "Deadlock"),
    _fault(
        "Q is given back before dK has read it",
        "_multiply.cuh",
        "ptx::tcgen05_commit(at(&shared.s_full));",
        "ptx::tcgen05_commit(at(&shared.s_full)); ptx::tcgen05_commit(at(&shared.score_empty[scored.stage]));",
        *STALE,
        seeds=4,
        **LONG,
    ),
    _fault(
        "dO' is never given back",
        "_multiply.cuh",
        "ptx::tcgen05_commit(at(&shared.gradient_empty[graded.stage]));",
        "",
        "Deadlock",
        **LONG,
    ),
    _fault(
        "columns are not waited for",
        "_compute.cuh",
        "wait(shared.columns_full[stage], tile >> 1 & 1);",
        "",
        *STALE,
        seeds=3,
    ),
    _fault(
        "one reader of a work item is forgotten",
        ".cu",
        "1 + b::COLUMN_WARPS + b::COMPUTE_WARPS);",
        "b::COLUMN_WARPS + b::COMPUTE_WARPS);",
        *STALE,
        "Deadlock",
        seeds=4,
        options={"lengths": (20,) * 6},
    ),
    _fault(
        "too few bytes are expected",
        "_load.cuh",
        "VALUE_TILE + (KEYS ? 2 : 1) * SCALES);",
        "VALUE_TILE + SCALES);",
        *STALE,
        "ExpectTxMismatch",
        "Deadlock",
        seeds=4,
    ),
    # ---- fences ----
    _fault(
        "scales of P are not fenced",
        "_compute.cuh",
        "store_scales(shared.p_scales, p_bytes);\n      ptx::fence_proxy_async();",
        "store_scales(shared.p_scales, p_bytes);",
        "MissingProxyFence",
    ),
    _fault(
        "scales of X are not fenced",
        "_compute.cuh",
        "store_scales(shared.x_scales, x_bytes);\n    ptx::fence_proxy_async();",
        "store_scales(shared.x_scales, x_bytes);",
        "MissingProxyFence",
        **QUERIES,
    ),
    _fault(
        "P is announced before it is stored",
        "_compute.cuh",
        "ptx::tcgen05_wait_st();\n      arrive_warp_tensor(shared.p_ready);",
        "arrive_warp_tensor(shared.p_ready);",
        *TENSOR,
    ),
    _fault(
        "X is announced without a fence",
        "_compute.cuh",
        "arrive_warp_tensor(shared.x_ready);",
        "arrive_warp(shared.x_ready);",
        *TENSOR,
    ),
    _fault(
        "dP is read without a fence",
        "_compute.cuh",
        "wait(shared.g_full, parity);\n    ptx::tcgen05_fence_after_thread_sync();",
        "wait(shared.g_full, parity);",
        *TENSOR,
    ),
    _fault("tensor memory is not given back", ".cu", "ptx::tcgen05_dealloc(tensor, b::COLUMNS);", "", "TmemLeak"),
    # ---- operands ----
    _fault(
        "every block takes the first scale",
        "_multiply.cuh",
        "VALUE_INSTRUCTION | scale_ids(step)",
        "VALUE_INSTRUCTION",
        WRONG,
    ),
    _fault(
        "dO' is read K-major for dV",
        "_multiply.cuh",
        "VALUE_INSTRUCTION | scale_ids(step)",
        "VALUE_INSTRUCTION & ~B_MN_MAJOR | scale_ids(step)",
        WRONG,
        "OutOfBounds",
        "BadDescriptor",
        "UnwrittenRead",
        *STALE,
    ),
    _fault(
        "V32 in the diagonal tile",
        "_multiply.cuh",
        "KEYS && j == work.diagonal ? 1 : 0",
        "0",
        WRONG,
    ),
    _fault(
        "V32 in the diagonal tile of the owner of queries",
        "_load.cuh",
        "diagonal ? p.v1 : p.v)",
        "p.v)",
        WRONG,
        **QUERIES,
    ),
    _fault(
        "dK takes the scales of X for Q",
        "_multiply.cuh",
        "copy_scales(X_SCALES + 4, shared.one_scales);",
        "copy_scales(X_SCALES + 4, shared.x_scales);",
        WRONG,
    ),
    _fault(
        "scales are parked over P",
        "_layout.cuh",
        "GRADIENT_SCALES = S_COLUMN + 32",
        "GRADIENT_SCALES = S_COLUMN + 12",
        COMPILER,
    ),
    _fault(
        "halves of P are adjacent for the product",
        "_multiply.cuh",
        "HALF * (step / 2) + BLOCK_WORDS * (step % 2)",
        "BLOCK_WORDS * step",
        WRONG,
        *TENSOR,
    ),
    # ---- numbers ----
    _fault("E is rounded down", "ptx.cuh", "fma.rp.f32x2", "fma.rm.f32x2", WRONG, build=WATCHED),
    _fault("a query does not see itself", "_numbers.cuh", "KEYS ? column >= bound", "KEYS ? column > bound", WRONG),
    _fault(
        "inactive queries count for E",
        "_numbers.cuh",
        "top == infinity() ? IDLE_TOP : top); }\n__device__ __forceinline__ float reach_of",
        "top == infinity() ? -6.0f : top); }\n__device__ __forceinline__ float reach_of",
        WRONG,
        options={"lengths": (40,)},
    ),
    _fault(
        "the scale of X is that of one row",
        "_numbers.cuh",
        "amax = ptx::redux_max_u32(__float_as_uint(own))",
        "amax = __float_as_uint(own)",
        WRONG,
    ),
    _fault("the floor of a score is one too high", "_load.cuh", "__fsub_rn(shift, 1.0f)", "shift", WRONG),
    _fault("the scale of X is off by one", "_numbers.cuh", "relative + p_byte - 127", "relative + p_byte - 126", WRONG),
    _fault(
        "scales of a row's two blocks of X share a place",
        "_compute.cuh",
        "bytes |= byte << 8 * i;\n      hook(p.stage_x",
        "bytes |= byte << 8 * (i & t.g);\n      hook(p.stage_x",
        WRONG,
    ),
    _fault("delta is added", "_load.cuh", "columns.minus[column] = -", "columns.minus[column] = ", WRONG),
    _fault(
        "exponents of K are not undone",
        "_compute.cuh",
        "KEYS && !keys_second ? 1.0f : power_of(-row.exponent)",
        "1.0f",
        WRONG,
    ),
    _fault("the first head of a group is left out", "_compute.cuh", "if (g > 0) {", "if (g > 1) {", WRONG, **GROUP),
    _fault(
        "a lost key reaches inactive queries",
        "_numbers.cuh",
        "x[0] = sees(i, bound) && top != infinity() ? y : 0.0f;",
        "x[0] = sees(i, bound) ? y : 0.0f;",
        WRONG,
        owners=("queries",),
        options={"damaged": True, "lengths": (160,)},
    ),
    _fault(
        "an entry that is not finite saturates",
        "_numbers.cuh",
        "fabsf(x[i]) < infinity() ? __fmul_rn(x[i], inverse) : not_a_number()",
        "__fmul_rn(x[i], inverse) == __fmul_rn(x[i], inverse) ? __fmul_rn(x[i], inverse) : 448.0f",
        WRONG,
        **DAMAGED,
    ),
    _fault(
        "the ticket is not given back",
        "_load.cuh",
        "p.ticket[0] = p.ticket[1] = 0;",
        "p.ticket[1] = 0;",
        WRONG,
        owners=OWNERS,
    ),
    # ---- dQ from stored X ----
    _fault(
        "a CTA without work leaves a copy under way",
        "dq.cu",
        NEXT_PRODUCTS,
        "  copy_table(tensor + ONE_COLUMN, shared.one);\n" + NEXT_PRODUCTS,
        "TmemNotAllocated",
        owners=("keys", STORED),
        seeds=6,
        options={"lengths": (20,), "ctas": 3},
    ),
    _fault(
        "stored X is read K-major",
        "dq.cu",
        "E8M0_SCALES | A_MN_MAJOR | B_MN_MAJOR",
        "E8M0_SCALES | B_MN_MAJOR",
        WRONG,
        *STALE,
        owners=("keys", STORED),
    ),
    _fault(
        "scales of stored X are not turned",
        "dq.cu",
        "const uint32_t which = b | (4 + b) << 4;",
        "const uint32_t which = b | (4 + b) << 4; if (b >= 0) { of_queries[b] = (&of_keys.x)[b]; continue; }",
        WRONG,
        owners=("keys", STORED),
        options={"lengths": (200,)},
    ),
    _fault(
        "scale tables do not wait for their place",
        "dq.cu",
        "          wait(shared.x_empty[xs.stage], xs.phase ^ 1);\n          ptx::st_shared_v4",
        "          ptx::st_shared_v4",
        *STALE,
        *TENSOR,
        "Deadlock",
        owners=("keys", STORED),
        seeds=4,
        options={"lengths": (500,)},
    ),
    _fault(
        "the next item's sums overwrite those being stored",
        "dq.cu",
        "wait(shared.sums_read, items & 1 ^ 1);",
        "",
        *TENSOR,
        WRONG,
        owners=("keys", STORED),
        seeds=4,
        options={"lengths": (20,) * 4},
    ),
    _fault(
        "stored X of another head",
        "dq.cu",
        "return head * p.pairs + pair_of",
        "return (head ^ 1) * p.pairs + pair_of",
        WRONG,
        owners=("keys", STORED),
        options={"lengths": (33,), "heads": (2, 2)},
    ),
    _fault(
        "stored tiles of a causal document are as far apart as the first two",
        "_compute.cuh",
        "step += more;",
        "",
        WRONG,
        "UnwrittenRead",
        owners=("keys", STORED),
        options={"lengths": (300,)},
    ),
    _fault(
        "half a stored block is out of place",
        "_compute.cuh",
        "(at ^ 16), make_uint4",
        "(at ^ 48), make_uint4",
        WRONG,
        owners=("keys", STORED),
    ),
    _fault(
        "scales of all stored tiles lie in one place",
        "_compute.cuh",
        "scales += int64_t(pairs) * 16;",
        "",
        WRONG,
        "UnwrittenRead",
        owners=("keys", STORED),
        options={"lengths": (300,)},
    ),
    # ---- reliance ----
    _fault(
        "a strict build does not settle",
        "_multiply.cuh",
        "if constexpr (WAIT_ALWAYS) {",
        "if constexpr (false) {",
        "Unpromised",
        build=replace(SMALL, strict=1),
        options={"strict": True},
    ),
)
