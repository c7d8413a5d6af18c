"""Lanes of a timeline: the warps of one role in one CTA, or an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping

Roles = Mapping[str, tuple[int, ...]]
"""Name of a role -> its warps."""

_WARP = re.compile(r"(CTA .+) warp (\d+)(| .+)$")


def role_of(track: str, roles: Roles) -> str:
    """``CTA 0 warp 4`` -> ``CTA 0 load``; a track that is no warp, or a warp without a role, keeps its name.

    So do engines of a warp: ``CTA 0 warp 4 tensor memory`` -> ``CTA 0 load tensor memory``.
    """
    found = _WARP.search(track)
    if found is None:
        return track
    cta, warp = found[1], int(found[2])
    for name, warps in roles.items():
        if warp in warps:
            return f"{cta} {name}{found[3]}"
    return track


def natural(track: str) -> tuple[object, ...]:
    """Sort key: numbers by value, warps and roles before engines is up to the caller."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", track))
