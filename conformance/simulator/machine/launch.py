"""`simulate`: a kernel, its arguments, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from flamia.conformance.simulator import ops  # noqa: F401  the instruction families register themselves
from flamia.conformance.simulator.machine import faults
from flamia.conformance.simulator.machine.cta import Dim
from flamia.conformance.simulator.machine.devicememory import DeviceMemory, Uninitialised
from flamia.conformance.simulator.machine.memory import APPROXIMATE, GUARD, READ_ONLY, WRITTEN, Space
from flamia.conformance.simulator.machine.program import Program, build_program
from flamia.conformance.simulator.machine.scheduler import Machine
from flamia.conformance.simulator.machine.trace import Span
from flamia.conformance.simulator.machine.types import LANES, REGISTERS
from flamia.conformance.simulator.ptx import Module, parse
from flamia.conformance.simulator.ptx.syntax import Variable


@dataclass
class Report:
    """What a launch did.

    :param instructions: warp instructions executed, by warp and opcode.
    :param unpromised: reliances on orderings that PTX does not promise, by description.
    :param remarks: what is legal but may not be meant.
    :param approximate: bytes of each buffer that hold, or depend on, results of ``.approx`` instructions, whose bits
        are those of a stand-in.
    :param segments: length of the run, in segments.
    """

    entry: str
    target: str
    seed: int
    instructions: dict[str, Counter[str]]
    unpromised: Counter[str]
    approximate: dict[str, int]
    segments: int
    spans: list[Span] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Warp instructions executed."""
        return sum(c.total() for c in self.instructions.values())


@lru_cache(maxsize=64)
def _parse(text: str) -> Module:
    return parse(text)


@lru_cache(maxsize=64)
def _program(text: str, entry: str) -> Program:
    module = _parse(text)
    return build_program(module, module.entry(entry))


def simulate(
    ptx: str,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    cluster: Sequence[int] = (1, 1, 1),
    shared_bytes: int = 0,
    seed: int = 0,
    memory: DeviceMemory | None = None,
    **options: Any,
) -> Report:
    """Execute a kernel.

    :param ptx: text of the module.
    :param args: one for each parameter: an array is a global buffer, which the kernel reads and writes in place, and
        the parameter its address; the same array twice is one buffer, and one that cannot be written is read-only;
        `Uninitialised` is a buffer without contents; a number, or ``bytes`` or a NumPy record for a struct, goes by
        value.
    :param shared_bytes: dynamic shared memory.
    :param seed: of the order of warps and of the delays of asynchronous operations.
    :param memory: holds buffers whose addresses are passed by value, or in structs.
    :param options: of `Machine`: ``strict``, ``fast_mma``, ``trace``, ``resident``, ...
    :raises PtxError: for PTX that is not known.
    :raises Fault: for a rule of PTX that the kernel breaks.
    :raises ValueError: for a wrong entry or wrong arguments.
    """
    program = _program(ptx, entry)
    memory = memory if memory is not None else DeviceMemory()
    dims = [_dim(grid, "grid"), _dim(block, "block"), _dim(cluster, "cluster")]
    _check_shape(program, *dims)
    values = _arguments(program, args, memory)
    arena, addresses = _arena(program, memory, values)
    machine = Machine(
        program, arena, addresses, dims[0], dims[1], cluster=dims[2], dynamic_shared=shared_bytes, seed=seed, **options
    )
    with np.errstate(all="ignore"):
        machine.run()
    memory.close(arena)
    return _report(machine, memory, entry)


def _dim(value: int | Sequence[int], name: str) -> Dim:
    out = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    out = (*out, *(1 for _ in range(3 - len(out))))
    if len(out) != 3 or min(out) < 1:
        raise ValueError(f"{name} must be one to three positive integers, got {value!r}")
    return (out[0], out[1], out[2])


def _check_shape(program: Program, grid: Dim, block: Dim, cluster: Dim) -> None:
    threads = block[0] * block[1] * block[2]
    limits: Mapping[str, tuple[int, ...]] = program.function.directives
    most = int(np.prod(limits.get("maxntid", (1024,))))
    if threads > most:
        raise faults.Oversubscribed(f"{threads} threads where the kernel allows {most}")
    registers = limits.get("maxnreg", (0,))[0] * LANES * -(-threads // LANES)  # else ptxas chooses how many
    if registers > REGISTERS:
        raise faults.Oversubscribed(f"{threads} threads need {registers} registers of a multiprocessor's {REGISTERS}")
    if (exact := limits.get("reqntid")) and int(np.prod(exact)) != threads:
        raise ValueError(f"block must have {int(np.prod(exact))} threads, got {threads}")
    for name in ("reqnctapercluster",):
        if (shape := limits.get(name)) and tuple(shape) + (1,) * (3 - len(shape)) != cluster:
            raise ValueError(f"cluster must be {shape}, got {cluster}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid must be a multiple of the cluster {cluster}, got {grid}")


def _arguments(program: Program, args: Sequence[Any], memory: DeviceMemory) -> list[bytes]:
    parameters = program.function.parameters
    if len(args) != len(parameters):
        raise ValueError(f"args must be {len(parameters)} values, got {len(args)}")
    return [_argument(p, a, memory) for p, a in zip(parameters, args, strict=True)]


def _argument(parameter: Variable, value: Any, memory: DeviceMemory) -> bytes:
    if isinstance(value, np.ndarray | Uninitialised) and not (
        isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.names
    ):
        return memory.allocate(value, parameter.name).to_bytes(parameter.nbytes, "little")
    if isinstance(value, bytes | np.void | np.ndarray):
        raw = bytes(value) if isinstance(value, bytes) else value.tobytes()
    else:
        raw = _number(parameter, value)
    if len(raw) != parameter.nbytes:
        raise ValueError(f"{parameter.name} must be {parameter.nbytes} bytes, got {len(raw)}")
    return raw


def _number(parameter: Variable, value: Any) -> bytes:
    """Bytes of a number passed by value. :raises ValueError: for one that the parameter's type does not hold."""
    kind, bits = parameter.type, 8 * parameter.nbytes
    if isinstance(value, np.generic) and kind.startswith("b"):
        return value.tobytes()
    if kind in ("f32", "f64"):
        number = float(value)
        with np.errstate(over="ignore"):
            out = np.array(number, f"f{parameter.nbytes}")
        if np.isinf(out) and not np.isinf(number):
            raise ValueError(f"{parameter.name} must be a finite .{kind}, got {value!r}")
        return out.tobytes()
    if not isinstance(value, int | np.integer | np.bool_):
        raise ValueError(f"{parameter.name} must be an integer (.{kind}), got {value!r}")
    lowest, highest = -(1 << bits - 1), (1 << bits) - 1
    if not lowest <= int(value) <= highest:
        raise ValueError(f"{parameter.name} must be in {lowest}..{highest} (.{kind}), got {value!r}")
    return (int(value) % (1 << bits)).to_bytes(parameter.nbytes, "little")


def _arena(program: Program, memory: DeviceMemory, values: list[bytes]) -> tuple[Space, dict[str, int]]:
    """Global memory with the module's variables and the parameters of this launch behind the buffers."""
    base = memory.open()
    offset, addresses = base.size, {}
    placed: list[tuple[Variable, bytes]] = list(zip(program.function.parameters, values, strict=True))
    placed += [(v, v.initial) for v in program.module.variables.values() if v.space in ("global", "const")]
    placed += [(v, v.initial) for v in program.function.variables if v.space in ("global", "const")]
    for v, _ in placed:
        align = max(v.align, 16)
        offset = -(-offset // align) * align
        addresses[v.name] = base.base + offset
        offset += v.nbytes + 64
    space = Space(base.name, base.base, offset + GUARD)
    space.data[: base.size], space.state[: base.size] = base.data[: base.size], base.state[: base.size]
    space.has_approximate = bool((space.state & APPROXIMATE).any())
    for v, raw in placed:
        state = WRITTEN | (0 if v.space == "global" else READ_ONLY)
        where = space.allocate(addresses[v.name], v.nbytes, state)
        content = bytearray(raw.ljust(v.nbytes, b"\0"))
        for at, name, addend in v.references:
            content[at : at + 8] = (addresses[name] + addend).to_bytes(8, "little")
        space.data[where] = np.frombuffer(bytes(content), np.uint8)
    if program.uses_async_proxy:
        space.writer = np.zeros(space.data.size // 4, np.uint32)
    return space, addresses


def _report(machine: Machine, memory: DeviceMemory, entry: str) -> Report:
    segments = machine.program.segments
    instructions = {}
    for name, executed in machine.executed.items():
        counter: Counter[str] = Counter()
        for times, segment in zip(executed, segments, strict=False):
            if times:
                for i in segment.instructions:
                    counter[i.opcode] += times
        instructions[name] = counter
    state = machine.global_memory.state
    approximate = {}
    for b in memory.buffers:
        start = b.address - machine.global_memory.base
        if n := int(np.count_nonzero(state[start : start + b.nbytes] & APPROXIMATE)):
            approximate[b.name] = n
    return Report(
        entry,
        machine.program.module.target,
        machine.seed,
        instructions,
        machine.unpromised,
        approximate,
        machine.time,
        machine.trace.spans,
        machine.remarks,
    )
