"""What a control instruction may answer instead of None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Blocked:
    """The lanes wait.

    :param reason: for the table of a deadlock and the timeline, for example ``mbarrier 0x400 phase 1``.
    :param ready: asked whenever something changed on the machine (`Machine.changed`); true ends the wait.
    :param resume: called then, and the lanes go on behind the instruction; without it they execute it again.
    """

    reason: str
    ready: Callable[[], bool]
    resume: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class NeedLanes:
    """The instruction needs exactly these lanes together: wait until they are all here, then execute it for all.

    :param anywhere: whether "here" is any instruction that asks for the same lanes with ``anywhere``.
    """

    lanes: NDArray[Any]
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """The lanes of the mask end."""

    lanes: NDArray[Any]
