"""The certificates at hand, a line each: whether each is valid, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flamia.conformance.certificates import Certificate, Identity
from flamia.conformance.results import SUITE_VERSION


def print_certificates(
    console: Console, found: Mapping[Path, Certificate | str], current: Identity, folder: Path
) -> bool:
    """Print them; True if one is valid for ``current``.

    :param found: of `certificates.list_certificates`.
    :param current: what the certificates are held against.
    :param folder: the user's, named where there is no valid certificate.
    """
    console.print(
        Text(
            f"held against {current.subject}, source {current.source_hash[:12]}, on {current.device}, "
            f"{current.compiler}, suite {SUITE_VERSION}"
        )
    )
    valid = False
    for path, certificate in found.items():
        if isinstance(certificate, str):
            console.print(Text(f"✗ {certificate}", "red"))
            continue
        reasons = certificate.invalid_because(current)
        valid = valid or not reasons
        without = f" without {', '.join(certificate.not_applicable)}" if certificate.not_applicable else ""
        text = (
            f"{certificate.identity.subject} on {certificate.identity.device}: "
            f"levels {' '.join(map(str, certificate.levels))}{without}, {certificate.size} cases, "
            f"suite {certificate.suite_version}, {certificate.date}, {path}"
        )
        console.print(Text(f"✗ {text}") if reasons else Text(f"✓ {text}", "green"))
        for reason in reasons:
            console.print(Text(f"    not valid: {reason}", "red"))
    if not valid:
        console.print(Text(f"no valid certificate; `flamia conform --certify` writes one into {folder}"))
    return valid
