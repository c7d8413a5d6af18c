"""Faults of asynchronous operations and of the tensor cores, each a class so that a test can name it."""

from __future__ import annotations

from flamia.conformance.simulator.machine.faults import Fault, Illegal, InFlightRead, LeftBehind, UnwrittenRead
from flamia.conformance.simulator.tensor.illegal import Illegal as IllegalOperand


class MbarrierMisuse(Fault):
    """An mbarrier that was not initialised, was overwritten, or is used in a way that PTX excludes."""


class MbarrierOverrun(Fault):
    """More arrivals than the phase expects, or a phase that went by before a waiter saw the one it waits for."""


class ExpectTxMismatch(Fault):
    """The bytes that a phase was told to expect are not those that the copies bring."""


class Unobserved(Fault):
    """Shared memory that a bulk copy fills is used by a warp that has not waited for the copy, done or not."""


class UnterminatedCopy(LeftBehind):
    """A CTA ended, and nothing waited for a bulk copy that uses its shared memory."""


class EndedCta(Fault):
    """Shared memory, or an mbarrier, of a CTA of the cluster that has ended: its memory may be anybody's by now."""


class RegisterInFlight(Fault):
    """A register is used that an asynchronous operation still writes or reads: a wait is missing."""


class MissingWgmmaFence(Fault):
    """``wgmma.mma_async`` takes registers that were written since the last ``wgmma.fence``."""


class WarpgroupMismatch(Fault):
    """The four warps of a warpgroup do not execute the same ``wgmma``."""


class TmemNotAllocated(Fault):
    """Tensor memory outside every allocation, or after its deallocation."""


class TmemAllocation(Fault):
    """``tcgen05.alloc``, ``dealloc`` or ``relinquish_alloc_permit`` with operands or at a time that PTX excludes."""


class TmemLeak(LeftBehind):
    """A CTA ended with tensor memory still allocated."""


class TmemUnwritten(UnwrittenRead):
    """A read of tensor memory that nothing wrote since its allocation."""


class TmemInFlight(InFlightRead):
    """Tensor memory that ``tcgen05.mma`` or ``cp`` still uses, as far as the accessing thread has waited."""


class MissingTensorWait(Fault):
    """``tcgen05.ld`` or ``st`` without the ``tcgen05.wait`` that orders it before a later access."""


class MissingTensorFence(Fault):
    """``tcgen05.fence::before_thread_sync`` or ``after_thread_sync`` is missing between accesses of two threads."""


class TensorRace(Fault):
    """Two warps access tensor memory with no synchronisation between them."""


class BadDescriptor(Illegal):
    """A matrix or instruction descriptor with impossible fields, misaligned, or out of range."""


class IllegalShape(Illegal):
    """M, N, K or a repetition that the instruction does not have."""


class IllegalMajorness(Illegal):
    """An MN-major operand where only K-major ones exist."""


class IllegalScaleId(Illegal):
    """A scale factor id that the scale vector size excludes."""


class ScaleNotReplicated(Illegal):
    """A table that must be the same in several quadrants of tensor memory is not."""


class TmemRange(Illegal):
    """A tensor memory address that does not exist, or that the warp cannot reach."""


class NotSimulated(Illegal):
    """A legal operand that this simulator does not evaluate."""


_KINDS: dict[str, type[Fault]] = {
    "descriptor": BadDescriptor,
    "shape": IllegalShape,
    "majorness": IllegalMajorness,
    "scale-id": IllegalScaleId,
    "scale-replication": ScaleNotReplicated,
    "tmem-range": TmemRange,
    "unsupported": NotSimulated,
}


def as_fault(error: IllegalOperand) -> Fault:
    """The fault that stands for an operand refused by `flamia.conformance.simulator.tensor`."""
    return _KINDS[error.kind](str(error), (), error.address)
