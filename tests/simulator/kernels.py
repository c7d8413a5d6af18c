"""PTX kernels written by hand for one instruction each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flamia.conformance.simulator.machine.launch import Report, simulate

REGISTERS = {"p": "pred", "h": "b16", "r": "b32", "f": "f32", "rd": "b64"}


def module(body: str, parameters: Sequence[str] = ("u64",), shared: int = 0, target: str = "sm_100a") -> str:
    """A module with one entry ``k``.

    :param body: instructions; registers ``%r3``, ``%rd1``, ``%f0``, ``%p1``, ``%h2`` are declared as they are used, and
        parameter i is loaded into ``%rd10<i>`` (64 bits) or ``%r10<i>``.
    :param shared: bytes of the shared array ``smem``, aligned to 1024.
    """
    loads = []
    for i, kind in enumerate(parameters):
        wide = kind in ("u64", "b64")
        loads.append(f"ld.param.{'b64' if wide else 'b32'} %{'rd' if wide else 'r'}10{i}, [k_param_{i}];")
    text = "\n".join([*loads, body])
    declared = []
    for name, kind in REGISTERS.items():
        numbers = [int(n) for n in re.findall(rf"%{name}(\d+)\b", text)]
        if numbers:
            declared.append(f".reg .{kind} %{name}<{max(numbers) + 1}>;")
    array = f".shared .align 1024 .b8 smem[{shared}];" if shared else ""
    listed = ",\n".join(f".param .{kind} k_param_{i}" for i, kind in enumerate(parameters))
    return f".version 9.0\n.target {target}\n.address_size 64\n.visible .entry k(\n{listed}\n)\n{{\n" + "\n".join(
        [*declared, array, text, "ret;\n}\n"]
    )


def run(
    body: str,
    args: Sequence[Any],
    *,
    block: int = 32,
    grid: int = 1,
    shared: int = 0,
    parameters: Sequence[str] | None = None,
    target: str = "sm_100a",
    **options: Any,
) -> Report:
    """Run a kernel of `module`; array arguments are ``u64`` parameters, others ``u32`` unless told."""
    kinds = parameters or ["u64" if hasattr(a, "nbytes") and getattr(a, "ndim", 1) else "u32" for a in args]
    return simulate(module(body, kinds, shared, target), "k", grid, block, args, **options)


ONE = "mov.u32 %r1, %tid.x;\nsetp.eq.u32 %p1, %r1, 0;"
"""``%p1``: whether this is thread 0."""


def wait(address: str, parity: int | str, label: str) -> str:
    """Spin on ``mbarrier.try_wait.parity``, with ``%p9``."""
    return f"""{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p9, [{address}], {parity};
@!%p9 bra {label};"""
