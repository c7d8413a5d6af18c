"""A model of cycles, not a measurement.

Note [Cycle model]
~~~~~~~~~~~~~~~~~~
The simulator has no clock. From the instructions that each role executed, this model adds up how long the busiest
units of a Blackwell multiprocessor would need for them at published peak rates, every unit by itself:

* *issue*: 4 schedulers, one warp instruction per clock each; a warp belongs to scheduler ``warp % 4``.
* *MUFU* (``ex2``, ``lg2``, ``rcp``, ... ``.approx``): 16 lanes per clock, 32 on sm_103.
* *FP32*: 128 lanes per clock; a packed ``f32x2`` instruction counts twice.
* *conversion* (``cvt`` to narrow pairs): one warp instruction of two elements per clock; to bf16x2 and e2m1x2 two.
* *tensor memory*: ``tcgen05.ld`` and ``st`` 512 bytes per clock.
* *shared memory*: 128 bytes per clock, for loads and stores of the warps.
* *tensor core*: cycles per ``tcgen05.mma`` with M = 128 on one CTA: 64 at N = 128, 128 at N = 256, for a step of K = 16
  (f16), 32 (FP8, MXFP8) or 64 (FP4).

A role needs at least the largest of its numbers. Latencies, dependencies, barriers, bank conflicts, the scheduling by
ptxas and clocks under load are not in it: it tells which unit would be the first limit, and no more.

Sources: lookup1980/microbench-blackwell (tcgen05.mma), Antoniomv7/gb300-microbench (conversions), NVIDIA, "Inside
Blackwell Ultra" (MUFU). Rates of tensor memory are derived from the former.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from flamia.conformance.simulator.machine.launch import Report
from flamia.conformance.simulator.tools.roles import Roles, natural, role_of

UNITS = ("issue", "MUFU", "FP32", "conversion", "tensor memory", "shared memory", "tensor core")
"""Columns of the model."""

_FP32 = {"add", "sub", "mul", "fma", "mad", "min", "max"}
_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def estimate_cycles(report: Report, roles: Roles, *, mma_n: int = 128) -> dict[str, dict[str, float]]:
    """Role -> unit -> clocks; see Note [Cycle model].

    :param mma_n: N of the products.
    :raises ValueError: for a kernel of another target than sm_100 or sm_103.
    """
    if not report.target.startswith(("sm_100", "sm_103")):
        raise ValueError(f"target must be sm_100a or sm_103a for the cycle model, got {report.target}")
    mufu_lanes = 32 if report.target.startswith("sm_103") else 16
    rules: Mapping[str, Callable[[str], float]] = {
        "MUFU": lambda o: 32 / mufu_lanes if ".approx" in o else 0.0,
        "FP32": _fp32,
        "conversion": _conversion,
        "tensor memory": _tensor_memory,
        "shared memory": _shared_memory,
        "tensor core": lambda o: mma_n / 2 if o.startswith("tcgen05.mma") else 0.0,
    }
    out: dict[str, dict[str, float]] = {}
    issued: dict[str, Counter[int]] = {}
    for track in sorted(report.instructions, key=natural):
        role = role_of(track, roles)
        row = out.setdefault(role, dict.fromkeys(UNITS, 0.0))
        executed = report.instructions[track]
        number = re.search(r"(\d+)$", track)
        issued.setdefault(role, Counter())[int(number[1]) % 4 if number else 0] += executed.total()
        row["issue"] = float(max(issued[role].values()))
        for opcode, times in executed.items():
            for unit, rule in rules.items():
                row[unit] += times * rule(opcode)
    return out


def _fp32(opcode: str) -> float:
    parts = opcode.split(".")
    if parts[0] not in _FP32:
        return 0.0
    return 0.5 if parts[-1] == "f32x2" else 0.25 if parts[-1] == "f32" else 0.0


def _conversion(opcode: str) -> float:
    parts = opcode.split(".")
    if parts[0] != "cvt":
        return 0.0
    return 1.0 if {"e4m3x2", "e5m2x2", "ue8m0x2"} & set(parts) else 0.5


def _tensor_memory(opcode: str) -> float:
    found = re.match(r"tcgen05\.(?:ld|st)\..*?(\d+)x(\d+)b\.x(\d+)", opcode)
    if found is None:
        return 0.0
    lanes, bits, repeat = (int(x) for x in found.groups())
    return lanes * bits / 8 * repeat / 512


def _shared_memory(opcode: str) -> float:
    parts = opcode.split(".")
    if parts[0] not in ("ld", "st") or not any(p.startswith("shared") for p in parts):
        return 0.0
    vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
    size = _TYPE_BYTES.get(re.sub(r"\D", "", parts[-1]), 4)
    return 32 * vector * size / 128
