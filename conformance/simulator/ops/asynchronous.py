"""What the asynchronous instruction families share: shared addresses, single threads, completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine import asyncfaults, faults
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import lanes_of
from flamia.conformance.simulator.machine.windows import RANK_SHIFT, SHARED_WINDOW
from flamia.conformance.simulator.ops.addressing import compile_address
from flamia.conformance.simulator.ptx.syntax import Operand
from flamia.conformance.simulator.tensor.illegal import Illegal

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp

Mask: TypeAlias = "NDArray[np.bool_]"
SharedReader: TypeAlias = "Callable[[Warp, Mask], NDArray[np.int64]]"


def compile_shared_address(site: Site, operand: int | Operand, space: str) -> SharedReader:
    """A closure that gives shared::cluster addresses as 32 int64.

    :param space: ``shared``, ``shared::cta`` or ``shared::cluster``; empty for generic addresses.
    """
    read = compile_address(site, operand)

    def shared(warp: Warp, mask: Mask) -> NDArray[np.int64]:
        address = read(warp)
        if not space:
            address = address - SHARED_WINDOW
            if ((address[mask] >> 32) != 0).any():
                bad = int(read(warp)[mask][0])
                raise faults.OutOfBounds("a generic address outside the shared window", lanes_of(mask), bad)
        if space == "shared::cta" and ((address[mask] >> RANK_SHIFT) != warp.cta.rank).any():
            raise faults.OutOfBounds(
                f"shared::cta address of another CTA than {warp.cta}", lanes_of(mask), int(address[mask][0])
            )
        return address

    return shared


def single_lane(warp: Warp, mask: Mask, what: str) -> int:
    """The one active lane. :raises Divergent: if there are several: each would issue the operation once more."""
    lanes = lanes_of(mask)
    if len(lanes) != 1:
        raise faults.Divergent(f"{what} is issued by {len(lanes)} threads of the warp; one is meant to", lanes)
    return lanes[0]


def need_converged(warp: Warp, mask: Mask, what: str) -> None:
    """:raises Divergent: unless all lanes of the warp execute together."""
    if not warp.is_converged(mask):
        raise faults.Divergent(f"{what} needs all lanes of the warp", lanes_of(mask))


def translate(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, raising faults in place of operands refused by `flamia.conformance.simulator.tensor`."""

    def run(*args: Any) -> Any:
        try:
            return step(*args)
        except Illegal as error:
            raise asyncfaults.as_fault(error) from error

    return run


def later(site: Site, warp: Warp, engine: str, action: Callable[[], None], label: str, ordered: bool = True) -> None:
    """Let the machine call ``action`` after a random delay; its faults name the instruction that issued it."""

    def run() -> None:
        try:
            action()
        except Illegal as error:
            fault = asyncfaults.as_fault(error)
            fault.place(site.instruction, str(warp))
            raise fault from error
        except faults.Fault as fault:
            fault.place(site.instruction, str(warp))
            raise

    warp.machine.after_random_delay(engine, run, label, ordered)


def line_of(site: Site) -> str:
    """``tcgen05.mma (PTX line 12, gemm.cu:34)``: a short name of an instruction; the line is that of the kernel."""
    parts = site.instruction.opcode.split(".")
    name = ".".join(parts[: 2 if parts[0] in ("tcgen05", "wgmma", "mbarrier") else 3])
    source = site.instruction.source
    while source is not None and source.inlined_at is not None:
        source = source.inlined_at
    where = "" if source is None else f", {source.file.rsplit('/', 1)[-1]}:{source.line}"
    return f"{name} (PTX line {site.instruction.line}{where})"
