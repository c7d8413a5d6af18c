"""What the Blackwell backward needs of a multiprocessor: counts from its machine code, and a model of cycles from them.

Note [Backward model]
~~~~~~~~~~~~~~~~~~~~~
A model, not a measurement: no chip was at hand. Clocks per tile of 128 queries x 128 keys, one CTA per multiprocessor;
rates are those of Note [Forward model] of `forward_model`. What a tile costs a computing warp is counted in the machine
code: everything that it issues on the usual way through the loop over tiles (`machine_path`), for its two 32x32 tiles.
Eight warps make a tile of 128 x 128, two for each scheduler.

*Memory*: 7.0 TB/s over 148 multiprocessors, for stored tiles of X, once out and once in; everything else comes from the
L2 cache.

*Prediction*: a kernel takes its busiest unit; published kernels reach 73 to 79 % of such a bound, and `ATTAINED` is
taken for what FLAMIA might reach. The products of the next tile overlap with the numbers of this one (Note [Order of
backward products]), so no chain is added. CTAs are taken to be equally busy; `busiest_share` says how busy they are.

*Comparison*: with times that cuDNN's authors published for bfloat16, causal, 64 query heads on 8 KV heads of 128, on a
GB200 (cudnn-frontend, ``benchmark/sdpa_benchmark_training/results/llama3.1/gb200/llama3.1_20260424_100750.csv``), with
half of the attention matrix counted, as they do. Forward (exact exponentials) and backward reach `ATTAINED` of their
bounds; quantization and the row pass, 0.6 GB at 8K, pass at memory speed.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flamia.conformance.simulator import forward_model
from flamia.conformance.simulator.forward_model import ALU, CLOCK_GHZ, CONVERSION, FP32, INTEGER_FMA, SMS
from flamia.conformance.simulator.machine_path import shortest_turn
from flamia.kernels.build import build
from flamia.kernels.disassembly import disassemble
from flamia.kernels.registry import BLACKWELL_BACKWARD, BLACKWELL_DQ, Unit
from flamia.kernels.targets import get_target

MEMORY_BYTES_PER_SECOND = 7.0e12
ATTAINED = 0.75
X_BYTES = 128 * 128 + 16
WARPS, WARPS_PER_SCHEDULER = 8, 2
"""Computing warps, each with two 32x32 tiles of a tile of 128 x 128."""

HALF_FLOATS = {"HADD2"}
WORK = {
    "keys": {"FFMA2": 160, "FADD2": 32, "FMUL2": 64},
    "queries": {"FFMA2": 128, "FADD2": 64, "FMUL2": 96},
}
"""What tells the usual turn of the loop over tiles: packed operations, 16 for one on all entries of a 32x32 tile."""
MOVES = {"LDTM": 6, "STTM": 4, "CREDUX": 6, "HADD2": 64}
STORES = {"keys": {"STG": 5}, "queries": {"STG": 0}}
NEVER = ("VIMNMX", "FRND")
"""Opcodes of the operations of the reference."""


def turn_counts(sass: str, owner: str) -> Counter[str]:
    """Warp instructions by opcode of the usual turn of the loop over tiles: everything a warp issues for a tile.

    :raises ValueError: if there is none.
    """
    return shortest_turn(sass, WORK[owner] | MOVES | STORES[owner], NEVER)


@dataclass(frozen=True)
class Counts:
    """What one build of a kernel is.

    :param owner: ``"keys"``, ``"queries"``, or ``"stored"`` for dQ from stored X.
    :param turn: `turn_counts`; empty for ``"stored"``.
    """

    target: str
    owner: str
    recipe: str
    dim: int
    registers: int
    spills: int
    shared_bytes: int
    code_bytes: int
    turn: Counter[str]


def kernel_units(c: Counts) -> dict[str, float]:
    """Clocks per tile of 128 x 128 by unit."""
    clock = CLOCK_GHZ[c.target] * 1e9
    stored = X_BYTES / (MEMORY_BYTES_PER_SECOND / SMS / clock)
    tokens = 4 * 64 * c.dim / 128
    if c.owner == "stored":
        shared = 128 * (2 * 128 + 2 * c.dim) - 128 * c.dim / 2  # A and B, copies in; K for two query tiles
        return {"tensor core": tokens, "shared memory": shared / 128, "memory": stored}
    nvfp4, keys = c.recipe != "mxfp8", c.owner == "keys"
    score_row = c.dim // 2 if nvfp4 else c.dim

    def sum_of(names: set[str]) -> int:
        return sum(c.turn[name] for name in names)

    products = 64 * (score_row // 32 + c.dim // 32) + (2 if keys else 1) * tokens
    operands = 128 * (2 * score_row + 2 * c.dim + (2 if keys else 1) * c.dim)
    copies = 128 * (score_row + c.dim + (c.dim if nvfp4 else 0))
    columns = 8 * 2 * (16 + 16 if keys else 8) * 128  # 16-byte loads that all lanes share take a clock each
    return {
        "issue": float(WARPS_PER_SCHEDULER * c.turn.total()),
        "FP32": WARPS_PER_SCHEDULER * (2.0 * sum_of(FP32 | INTEGER_FMA) + sum_of(HALF_FLOATS)),
        "ALU": WARPS_PER_SCHEDULER * 2.0 * sum_of(ALU),
        "conversion": float(WARPS * sum_of(CONVERSION)),
        "tensor core": float(products),
        "tensor memory": 4 * 128 * (2 * 128 + 3 * 32) / 512,
        "shared memory": (operands + copies + columns) / 128,
        "memory": stored if keys else 0.0,
    }


def petaflops(target: str, dim: int, clocks: float) -> float:
    """Of dense attention: 10 T T D operations per tile of the backward."""
    return 10 * 128 * 128 * dim / clocks * SMS * CLOCK_GHZ[target] * 1e9 / 1e15


PUBLISHED = {8192: (1.574, 1.332, 1.157), 32768: (1.622, 1.226, 1.068)}
"""PFLOP/s of cuDNN in bfloat16 by length: forward, backward, deterministic backward; Note [Backward model]."""
QUANTIZING_MS = {8192: 0.10, 32768: 0.40}
"""Quantization of q, k, v and dout, and the row pass."""


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of forward and backward, by the model and as published.

    :param forward, backward: of FLAMIA, at `ATTAINED` of the bound. :param rest: of quantization and the row pass.
    :param published: of cuDNN in bfloat16; ``deterministic``: the same with its deterministic backward.
    """

    forward: float
    backward: float
    rest: float
    published: float
    deterministic: float

    @property
    def total(self) -> float:
        """Of FLAMIA."""
        return self.forward + self.backward + self.rest

    @property
    def gain(self) -> float:
        """How many times faster than cuDNN in bfloat16."""
        return self.published / self.total


def compare(length: int, clocks: float | None = None, heads: int = 64) -> Comparison:
    """The comparison of Note [Backward model], for MXFP8 on sm_100a and a head_dim of 128.

    :param length: a key of `PUBLISHED`.
    :param clocks: of the backward per tile; None: those of dQ from stored X.
    """
    if clocks is None:
        clocks = sum(max(kernel_units(c).values()) for c in (_record("keys"), _record("stored")))
    (record,) = (
        c
        for c in forward_model.read_counts()
        if (c.target, c.recipe, c.dim, c.exp2) == ("sm_100a", "mxfp8", 128, "exact")
    )
    predicted = forward_model.predict(record.target, record.softmax, record.dim)
    work = length**2 * 128 * heads / 2 / 1e12  # of one product is twice that
    forward, backward, deterministic = PUBLISHED[length]
    return Comparison(
        4 * work / predicted.petaflops(128, predicted.clocks) / ATTAINED,
        10 * work / petaflops("sm_100a", 128, clocks) / ATTAINED,
        QUANTIZING_MS[length],
        4 * work / forward + 10 * work / backward,
        4 * work / forward + 10 * work / deterministic,
    )


def apart_clocks() -> float:
    """Clocks per tile if dQ from stored X ran beside the owner of keys of other heads, on multiprocessors of its own.

    Then memory has the time of both, and dQ takes its busiest unit but memory.
    """
    own, stored = kernel_units(_record("keys")), kernel_units(_record("stored"))
    together = own["memory"] + stored.pop("memory")
    return max(max(own.values()) + max(stored.values()), together)


def busiest_share(length: int, kv_heads: int, group: int = 8) -> float:
    """Work of the busiest CTA of a launch of the owner of keys, over the mean: a causal document, longest items first.

    :param kv_heads: of the launch, of ``group`` query heads each.
    """
    items = [group * tiles for tiles in range(length // 128, 0, -1) for _ in range(kv_heads)]
    ctas = [0] * SMS
    for item in items:
        heapq.heapreplace(ctas, ctas[0] + item)
    return max(ctas) / (sum(items) / SMS)


def _record(owner: str) -> Counts:
    return next(c for c in read_counts() if (c.target, c.owner, c.dim) == ("sm_100a", owner, 128))


RECORD = Path(__file__).with_name("backward_counts.json")
"""Counts of every build, as `count_builds` found them: tables need no disassembler."""


def count_builds() -> Iterator[Counts]:
    """Compile and disassemble the released builds.

    :raises BuildError: for a build that spills. :raises DisassemblerNotFoundError: without nvdisasm.
    """
    for target in ("sm_100a", "sm_103a"):
        for recipe in ("mxfp8", "nvfp4_fp8"):
            for dim in (128, 64):
                for owner in ("keys", "queries"):
                    unit = BLACKWELL_BACKWARD.unit(owner=owner, recipe=recipe, dim=dim, exp2="exact", strict=0, hooks=0)
                    yield _count(unit, target, owner, recipe, dim)
        for dim in (128, 64):
            yield _count(BLACKWELL_DQ.unit(dim=dim), target, "stored", "", dim)


def _count(unit: Unit, target: str, owner: str, recipe: str, dim: int) -> Counts:
    artifact = build(unit, get_target(target))
    (e,) = artifact.entries
    turn = Counter[str]() if owner == "stored" else turn_counts(disassemble(artifact.cubin), owner)
    sizes = (e.registers, e.spill_bytes, e.dynamic_shared_bytes, e.code_bytes)
    return Counts(target, owner, recipe, dim, *sizes, turn)


def read_counts() -> list[Counts]:
    """The recorded counts."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return [Counts(**{**row, "turn": Counter(row["turn"])}) for row in rows]


def write_counts() -> None:
    """Record the counts of this compiler."""
    rows = [{**vars(c), "turn": dict(c.turn)} for c in count_builds()]
    RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def resource_table() -> list[str]:
    """Lines of a Markdown table: what each build is."""
    out = ["| target | owner | recipe | head_dim | registers | spills | shared memory | machine code | per entry |"]
    out.append("|---|---|---|---|---|---|---|---|---|")
    for c in read_counts():
        entry = f"{c.turn.total() / 64:.1f}" if c.turn else "-"
        recipe = c.recipe or "both"
        out.append(
            f"| {c.target} | {c.owner} | {recipe} | {c.dim} | {c.registers} | {c.spills} | {c.shared_bytes:,} "
            f"| {c.code_bytes:,} | {entry} |"
        )
    return out


def model_table() -> list[str]:
    """Lines of a Markdown table: clocks by unit, and PFLOP/s of both ways to dQ."""
    names = ("issue", "FP32", "ALU", "conversion", "tensor core", "shared memory", "memory")
    out = [f"| target | owner | recipe | head_dim | {' | '.join(names)} |", "|---|---|---|---|" + "---|" * len(names)]
    for c in read_counts():
        units = kernel_units(c)
        cells = " | ".join(f"{units.get(name, 0):.0f}" for name in names)
        out.append(f"| {c.target} | {c.owner} | {c.recipe or 'both'} | {c.dim} | {cells} |")
    return out


def prediction_table() -> list[str]:
    """Lines of a Markdown table: clocks and PFLOP/s of the whole backward, X stored or computed twice."""
    out = ["| target | recipe | head_dim | dQ | clocks | ceiling, PFLOP/s | at 75 % |", "|---|---|---|---|---|---|---|"]
    counts = read_counts()
    for c in counts:
        if c.owner != "keys":
            continue
        for owner, name in (("stored", "from stored X"), ("queries", "X computed twice")):
            (other,) = (
                o
                for o in counts
                if (o.target, o.owner, o.dim) == (c.target, owner, c.dim) and o.recipe in ("", c.recipe)
            )
            own = kernel_units(c) | ({} if owner == "stored" else {"memory": 0.0})
            clocks = max(own.values()) + max(kernel_units(other).values())
            ceiling = petaflops(c.target, c.dim, clocks)
            row = f"| {c.target} | {c.recipe} | {c.dim} | {name} | {clocks:.0f}"
            out.append(f"{row} | {ceiling:.2f} | {ATTAINED * ceiling:.2f} |")
    return out


def comparison_table() -> list[str]:
    """Lines of a Markdown table: `compare` for every published length."""
    out = ["| length | forward | backward | quantization, row pass | all | cuDNN bf16 | faster | deterministic |"]
    out.append("|---|---|---|---|---|---|---|---|")
    for length in PUBLISHED:
        c = compare(length)
        parts = f"{c.forward:.2f} | {c.backward:.2f} | {c.rest:.2f} | {c.total:.2f} | {c.published:.2f}"
        out.append(f"| {length} | {parts} | **{c.gain:.2f}** | {c.deterministic / c.total:.2f} |")
    return out
