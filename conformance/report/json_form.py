"""Reports as JSON.

Note [JSON report]
~~~~~~~~~~~~~~~~~~
An object with ``format`` 1, the fields of `results.Report`, ``verdict`` (`verdict.verdict`), ``levels`` (level -> name,
status, and how many checks have each status) and ``results``: a list of the fields of `results.CaseResult`. JSON knows
no NaN and no infinity: as numbers they are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. An array is ``{"dtype",
"shape", "base64"}``, little-endian in C order.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.report.verdict import verdict
from flamia.conformance.results import LEVELS, STATUSES, CaseResult, Report

FORMAT = 1


def to_json(report: Report) -> dict[str, Any]:
    """Note [JSON report]."""
    return {
        "format": FORMAT,
        "verdict": verdict(report),
        "target": report.target,
        "recipe": report.recipe,
        "profile": report.profile,
        "size": report.size,
        "suite_version": report.suite_version,
        "started": report.started,
        "seconds": round(report.seconds, 3),
        "environment": dict(report.environment),
        "levels": {
            str(level): {
                "name": name,
                "status": report.level_status(level),
                **{status: report.count(status, level) for status in STATUSES},
            }
            for level, name in LEVELS.items()
        },
        "results": [_result_to_json(r) for r in report.results],
    }


def from_json(found: Mapping[str, Any]) -> Report:
    """The inverse of `to_json`.

    :raises KeyError, TypeError, ValueError: for anything else.
    """
    if found["format"] != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {found['format']!r}")
    return Report(
        target=found["target"],
        environment=dict(found["environment"]),
        recipe=found["recipe"],
        profile=found["profile"],
        size=found["size"],
        results=tuple(_result_from_json(r) for r in found["results"]),
        started=found["started"],
        seconds=found["seconds"],
        suite_version=found["suite_version"],
    )


def _result_to_json(r: CaseResult) -> dict[str, Any]:
    return {
        "level": r.level,
        "case": r.case,
        "check": r.check,
        "status": r.status,
        "message": r.message,
        "coordinate": None if r.coordinate is None else [int(i) for i in r.coordinate],
        "numbers": {name: _number(x) for name, x in r.numbers.items()},
        "seconds": round(r.seconds, 6),
        "arrays": {name: _array(x) for name, x in r.arrays.items()},
    }


def _result_from_json(r: Mapping[str, Any]) -> CaseResult:
    if r["status"] not in STATUSES:
        raise ValueError(f"status must be one of {STATUSES}, got {r['status']!r}")
    return CaseResult(
        level=r["level"],
        case=r["case"],
        check=r["check"],
        status=r["status"],
        message=r["message"],
        coordinate=None if r["coordinate"] is None else tuple(r["coordinate"]),
        numbers={name: float(x) for name, x in r["numbers"].items()},
        seconds=r["seconds"],
        arrays={name: _read_array(x) for name, x in r["arrays"].items()},
    )


def _number(x: float) -> float | str:
    value = float(x)
    return value if math.isfinite(value) else str(value)


def _array(x: NDArray[Any]) -> dict[str, Any]:
    plain = np.ascontiguousarray(x)
    if plain.dtype.kind not in "biuf":  # bfloat16 and the like
        plain = plain.astype(np.float32)
    plain = plain.astype(plain.dtype.newbyteorder("<"))
    return {
        "dtype": plain.dtype.str.lstrip("<|"),
        "shape": list(x.shape),
        "base64": base64.b64encode(plain.tobytes()).decode("ascii"),
    }


def _read_array(found: Mapping[str, Any]) -> NDArray[Any]:
    flat = np.frombuffer(base64.b64decode(found["base64"]), np.dtype(found["dtype"]).newbyteorder("<"))
    return flat.reshape(found["shape"]).astype(found["dtype"])
