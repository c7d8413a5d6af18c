"""What the Blackwell forward needs of a multiprocessor: counts from its machine code, and a model of cycles from them.

Note [Forward model]
~~~~~~~~~~~~~~~~~~~~
A model, not a measurement: no chip was at hand. Clocks per tile of 128 queries x 128 keys, one CTA per multiprocessor.

*Rates*, published ones (sources in `tools.cycles`): tensor core 64 clocks per ``tcgen05.mma`` with N = 128 (M = 128;
half at N = 64), for N = 16 a guess of 32; MUFU 16 lanes per clock, 32 on sm_103; FP32 128 lanes, a packed instruction
counting twice; integer multiply-add 64 lanes *of the same pipe*; other integer and min/max 64 lanes; conversions of two
elements 32 lanes; issue 4 warp instructions; tensor memory 512 bytes; shared memory 128 bytes.

*Softmax* counts are those of the code that turns a row of scores into P, from the disassembly. A warp has 32 rows, and
each scheduler one warp of each softmax warpgroup, so a count per row is one of warp instructions per scheduler.

*Chain*: what lies between a query tile's P and its next scores, and overlaps with the other query tile alone: P V and l
with a tail of `TAIL` clocks, l read back (head_dim 128), Q K with the same tail, and hand-overs through mbarriers at
`HOP` clocks each. The tail is measured by others, a hop is an assumption.

*Prediction*: two query tiles take twice the busiest unit, or softmax and chain of one of them, whichever is longer.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flamia.kernels.build import build
from flamia.kernels.disassembly import disassemble
from flamia.kernels.registry import BLACKWELL_FORWARD
from flamia.kernels.targets import get_target

CLOCK_GHZ = {"sm_100a": 1.85, "sm_103a": 1.95}
"""Under load; maxima are 1.965 and 2.07."""
SMS = 148
TAIL, HOP, LOAD_LATENCY = 137, 40, 60
"""Clocks: from the last product's issue to its end beyond its own; an mbarrier hand-over; a tcgen05.ld."""

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Za-z0-9_.]*)", re.MULTILINE)
FP32, INTEGER_FMA, MUFU, CONVERSION = {"FFMA2", "FADD2", "FMUL2"}, {"IMAD"}, {"MUFU"}, {"F2FP"}
ALU = {"FMNMX", "FMNMX3", "LEA", "PRMT", "LOP3", "IADD3", "VIADD", "SHF", "SEL", "FSEL", "ISETP", "FSETP", "VIMNMX"}
NOT_ISSUED = {"NOP"}


def softmax_counts(sass: str) -> Counter[str]:
    """Warp instructions by opcode from the loads of S to the last store of P: the fast path of one tile.

    :param sass: of `flamia.kernels.disassembly.disassemble`.
    :raises ValueError: if the path is not where it is expected.
    """
    names = _INSTRUCTION.findall(sass)
    floors = [i for i, name in enumerate(names) if name == "FFMA2.RM"]
    if not floors:
        raise ValueError("there is no FFMA2.RM in the machine code: it is not the softmax of the Blackwell forward")
    first = [i for i, name in enumerate(names[: floors[0]]) if name.startswith("LDTM")][-4]
    stores = [i for i, name in enumerate(names[first:], first) if name.startswith("STTM.x8")]
    last = stores[3]
    return Counter(name.split(".")[0] for name in names[first : last + 1] if name not in NOT_ISSUED)


@dataclass(frozen=True)
class Prediction:
    """Clocks per tile by unit, and what follows from them.

    :param units: softmax units for one tile; tensor core, tensor memory and shared memory too.
    :param chain: clocks of one query tile outside its softmax.
    """

    target: str
    units: dict[str, float]
    chain: float

    @property
    def softmax(self) -> float:
        """Clocks of one tile's softmax if it had the multiprocessor to itself."""
        return max(self.units[name] for name in ("issue", "FP32", "ALU", "MUFU", "conversion", "tensor memory"))

    @property
    def ceiling(self) -> float:
        """Clocks per tile if everything overlapped."""
        return max(self.units.values())

    @property
    def clocks(self) -> float:
        """Predicted clocks per tile."""
        return max(2 * self.ceiling, self.softmax + self.chain) / 2

    def petaflops(self, head_dim: int, clocks: float) -> float:
        """Of dense attention: 4 T T D operations per tile."""
        return 4 * 128 * 128 * head_dim / clocks * SMS * CLOCK_GHZ[self.target] * 1e9 / 1e15


def predict(target: str, counts: Counter[str], head_dim: int = 128, nvfp4: bool = False) -> Prediction:
    """The prediction of Note [Forward model] for the steady state of a long document.

    :param counts: of `softmax_counts`.
    """

    def sum_of(names: set[str]) -> int:
        return sum(counts[name] for name in names)

    steps = head_dim // (64 if nvfp4 else 32)
    score, value, row_sum = 64 * steps, 4 * 64 * head_dim // 128, 4 * 32
    score_bytes = head_dim // 2 if nvfp4 else head_dim
    shared = 128 * (2 * score_bytes + head_dim) + 4 * 512  # Q, K, V and the ones, as operands
    shared += 128 * (score_bytes + head_dim) // 2  # copies of K and V, shared by two query tiles
    shared += 5 * 512 + 128 * 4  # scale tiles through tcgen05.cp, and P's scales
    units = {
        "issue": float(counts.total()),
        "FP32": 2.0 * sum_of(FP32) + 2.0 * sum_of(INTEGER_FMA),
        "ALU": 2.0 * sum_of(ALU),
        "MUFU": sum_of(MUFU) * (4.0 if target == "sm_103a" else 8.0),
        "conversion": 4.0 * sum_of(CONVERSION),
        "tensor memory": 4 * 128 * (128 + 40) / 512,
        "tensor core": float(score + value + row_sum),
        "shared memory": shared / 128,
    }
    resident = head_dim == 64
    hops = 4 if resident else 6
    chain = score + value + row_sum + (1 if resident else 2) * TAIL + hops * HOP + (0 if resident else LOAD_LATENCY)
    return Prediction(target, units, float(chain))


@dataclass(frozen=True)
class Counts:
    """What one build of the kernel is.

    :param softmax: `softmax_counts`.
    """

    target: str
    recipe: str
    dim: int
    exp2: str
    registers: int
    spills: int
    shared_bytes: int
    code_bytes: int
    softmax: Counter[str]


RECORD = Path(__file__).with_name("forward_counts.json")
"""Counts of every build, as `count_builds` found them: tables need no disassembler."""


def count_builds(
    dims: tuple[int, ...] = (128, 64), recipes: tuple[str, ...] = ("mxfp8", "nvfp4_fp8")
) -> Iterator[Counts]:
    """Compile and disassemble released builds, and their variants with hardware exponentials.

    :raises BuildError: for a build that spills. :raises DisassemblerNotFoundError: without nvdisasm.
    """
    for dim in dims:
        for recipe in recipes:
            for target in ("sm_100a", "sm_103a"):
                for exp2 in ("exact", "hardware"):
                    unit = BLACKWELL_FORWARD.unit(recipe=recipe, dim=dim, exp2=exp2, strict=0, hooks=0)
                    artifact = build(unit, get_target(target))
                    (e,) = artifact.entries
                    softmax = softmax_counts(disassemble(artifact.cubin))
                    sizes = (e.registers, e.spill_bytes, e.dynamic_shared_bytes, e.code_bytes)
                    yield Counts(target, recipe, dim, exp2, *sizes, softmax)


def read_counts() -> list[Counts]:
    """The recorded counts."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return [Counts(**{**row, "softmax": Counter(row["softmax"])}) for row in rows]


def write_counts() -> None:
    """Record the counts of this compiler."""
    rows = [{**vars(c), "softmax": dict(c.softmax)} for c in count_builds()]
    RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
