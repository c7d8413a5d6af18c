"""State of the instruction families: one object of each kind for a warp, a CTA, a cluster or a launch."""

from __future__ import annotations

from typing import Any, TypeVar

Unit = TypeVar("Unit")


class Units:
    """What owns such objects."""

    def __init__(self) -> None:
        self._units: dict[Any, Any] = {}

    def unit(self, kind: type[Unit]) -> Unit:
        """The one object ``kind(self)`` of this owner, made when first asked for."""
        found: Unit | None = self._units.get(kind)
        if found is None:
            found = self._units[kind] = kind(self)  # type: ignore[call-arg]
        return found
