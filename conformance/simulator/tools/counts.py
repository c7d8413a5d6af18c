"""How many instructions each warp role executed."""

from __future__ import annotations

from collections import Counter

from flamia.conformance.simulator.machine.launch import Report
from flamia.conformance.simulator.tools.roles import Roles, natural, role_of


def count_by_role(report: Report, roles: Roles, *, full: bool = False) -> dict[str, Counter[str]]:
    """Warp instructions by role and opcode.

    :param full: whole forms (``ld.shared.v4.f32``) instead of the first part (``ld``; of ``tcgen05``, ``mbarrier`` and
        ``cp`` the first two).
    """
    out: dict[str, Counter[str]] = {}
    for track in sorted(report.instructions, key=natural):
        counter = out.setdefault(role_of(track, roles), Counter())
        for opcode, times in report.instructions[track].items():
            counter[opcode if full else base_of(opcode)] += times
    return out


def base_of(opcode: str) -> str:
    """The mnemonic of a form."""
    parts = opcode.split(".")
    if parts[0] == "cp":
        return ".".join(parts[:3]) if "bulk" in parts[:3] or "bulk" in opcode else ".".join(parts[:2])
    return ".".join(parts[:2]) if parts[0] in ("tcgen05", "mbarrier", "wgmma", "fence", "bar", "barrier") else parts[0]
