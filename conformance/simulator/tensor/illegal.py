"""The one exception of this folder."""

from __future__ import annotations


class Illegal(ValueError):
    """An operand, a descriptor or a combination that PTX does not allow, or that this simulator does not evaluate.

    :param kind: the name of the fault, for reports: ``descriptor``, ``shape``, ``majorness``, ``scale-id``,
        ``scale-replication``, ``tmem-range``, ``unsupported``.
    :param message: what it was and what is allowed.
    :param address: the shared or tensor memory address concerned, if one is.
    """

    def __init__(self, kind: str, message: str, address: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.address = address
