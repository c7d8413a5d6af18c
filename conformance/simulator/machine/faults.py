"""What can go wrong on the machine. Each fault is a class, so that a test can name it."""

from __future__ import annotations

from flamia.conformance.simulator.ptx.syntax import Instruction


class Fault(RuntimeError):
    """A kernel broke a rule of PTX.

    :param message: one sentence.
    :param lanes: of the warp, where they are known.
    :param address: where one is known; shared addresses hold the rank of the CTA in bits 24 and up.
    """

    def __init__(self, message: str, lanes: tuple[int, ...] = (), address: int | None = None) -> None:
        super().__init__(message)
        self.message, self.lanes, self.address = message, lanes, address
        self.instruction: Instruction | None = None
        self.warp: str | None = None

    @property
    def kind(self) -> str:
        """Name of the class."""
        return type(self).__name__

    def place(self, instruction: Instruction | None, warp: str | None) -> None:
        """Say where it happened, unless that was said."""
        self.instruction = self.instruction or instruction
        self.warp = self.warp or warp

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}"]
        if self.instruction is not None:
            lines.append(f"  at PTX line {self.instruction.line}: {self.instruction.opcode}")
            if self.instruction.source is not None:
                lines.append(f"  from {self.instruction.source}")
        if self.warp is not None:
            lanes = f", lanes {format_lanes(self.lanes)}" if self.lanes else ""
            lines.append(f"  in {self.warp}{lanes}")
        if self.address is not None:
            lines.append(f"  address {self.address:#x}")
        return "\n".join(lines)


def format_lanes(lanes: tuple[int, ...]) -> str:
    """Lane numbers with runs shortened: ``0-15, 20``."""
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and runs[-1][1] == lane - 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Deadlock(Fault):
    """No warp can run and nothing is under way; the message has the table of who waits on what."""


class Livelock(Fault):
    """The limit of executed instructions was reached."""


class OutOfBounds(Fault):
    """An address outside every allocation of its space."""


class Misaligned(Fault):
    """An address that is no multiple of the size of the access."""


class UnwrittenRead(Fault):
    """A read of memory that nothing ever wrote."""


class InFlightRead(Fault):
    """A read of memory that an asynchronous operation is still writing."""


class InFlightWrite(Fault):
    """A write to memory that an asynchronous operation is still writing."""


class OperandOverwritten(Fault):
    """A write to memory that an asynchronous operation is still reading."""


class MissingProxyFence(Fault):
    """The async proxy reads what the generic proxy wrote, and no fence.proxy.async lies between."""


class ReadOnly(Fault):
    """A write to parameters, constants or a buffer that is read-only."""


class Divergent(Fault):
    """An ``.aligned`` instruction, or one that needs named lanes, is executed by other lanes."""


class NotUniform(Fault):
    """Lanes differ in an operand that must be the same in all of them."""


class BarrierMisuse(Fault):
    """A named barrier is used with other counts, or by more threads, than it was opened for."""


class Oversubscribed(Fault):
    """More shared memory, registers or threads than a multiprocessor has."""


class LeftBehind(Fault):
    """A CTA ended with something still held or under way."""


class Unpromised(Fault):
    """Reliance on an ordering that PTX does not promise, in strict mode."""


class Illegal(Fault):
    """Operands at run time that the instruction does not allow."""


class Trap(Fault):
    """The kernel executed trap."""
