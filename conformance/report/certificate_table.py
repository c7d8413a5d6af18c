"""The certificates at hand, a line each: whether each is valid, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flamia.conformance.certificates import Certificate, Identity
from flamia.conformance.results import SUITE_VERSION


def print_certificates(
    console: Console, found: Mapping[Path, Certificate | str], current: Identity, folder: Path, missing: str = ""
) -> bool:
    """Print them; True if one is valid for ``current``.

    :param found: of `certificates.list_certificates`.
    :param current: what the certificates are held against; what is unknown of it is not compared.
    :param folder: the user's, named where there is no valid certificate.
    :param missing: why something is unknown.
    """

    def show(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)  # a path that is cut in two cannot be copied

    unknown = ", ".join(name.replace("_", " ") for name in current.unknown)
    known = [current.subject if current.recipe else current.kernel]
    known += [f"source {current.source_hash[:12]}"] if current.source_hash else []
    known += [name for name in (current.device, current.compiler) if name]
    show(f"held against {', '.join(known)}, suite {SUITE_VERSION}")
    if missing:
        show(f"cannot be checked: {unknown}, because {missing}", "yellow")
    valid, others = False, set()
    for path, certificate in found.items():
        if isinstance(certificate, str):
            show(f"✗ {certificate}", "red")
            continue
        mine = certificate.identity
        without = f" without {', '.join(certificate.not_applicable)}" if certificate.not_applicable else ""
        text = (
            f"{mine.subject} on {mine.device}, {mine.compiler}, source {mine.source_hash[:12]}: "
            f"levels {' '.join(map(str, certificate.levels))}{without}, {certificate.size} cases, "
            f"suite {certificate.suite_version}, {certificate.date}, {path}"
        )
        assumed = replace(current, **{name: getattr(mine, name) for name in current.unknown})
        if mine.subject != assumed.subject:
            other = "recipe or profile"
            if mine.kernel != current.kernel:
                other = "target"
                others.add(f"--target {mine.kernel}")
            show(f"– for another {other}: {text}", "dim")
            continue
        reasons = certificate.invalid_because(assumed)
        holds = not reasons and not current.unknown
        valid = valid or holds
        show(f"✓ {text}" if holds else f"✗ {text}" if reasons else f"? {text}", "green" if holds else "")
        for reason in reasons:
            show(f"    not valid: {reason}", "red")
        if not reasons and not holds:
            show("    what can be checked here agrees")
    if not valid and not missing:
        command = f"flamia conform --target {current.kernel} --certify"
        show(f"no valid certificate for {current.kernel}; `{command}` writes one into {folder}")
    if others and not valid:
        show(f"whether another target's hold: {', '.join(sorted(others))}")
    return valid
