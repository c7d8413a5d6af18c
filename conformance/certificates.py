"""Certificates: records that one implementation passed the suite on one chip.

Note [Certificates]
~~~~~~~~~~~~~~~~~~~
A certificate says that what has this *source hash* passed these *levels* of this *suite version* on this *chip* after
compilation by this *compiler*. It is issued from a `Report` without a failure that has every case of its size. Levels
that were not asked for, or that do not apply to the target, are not in it, and checks of its levels that never applied
are named.

A certificate speaks for exactly what it names. It is not valid (`Certificate.invalid_because`) for

* another source: one changed byte is another kernel;
* another chip, by name or compute capability, even of the same family;
* another compiler, whose code for the same source was never run;
* a newer suite: what an older one did not look for may be there. A newer certificate satisfies an older suite;
* levels that it does not have.

A run on a simulator or on a CPU is no run on a GPU: its certificate names that, and so is not valid for a real chip.

Certificates are JSON files: those shipped in ``flamia/conformance/certified`` and those in the user's folder, which is
``FLAMIA_CERTIFICATE_DIR``, else ``flamia/certificates`` in the user's data folder (``XDG_DATA_HOME``,
``~/.local/share``; ``~/Library/Application Support`` on macOS, ``%LOCALAPPDATA%`` on Windows). A file appears whole or
not at all. They are records, not proofs: whoever can write the folder can write what they like.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from flamia.conformance.cases import SIZES, select_cases
from flamia.conformance.results import LEVELS, SUITE_VERSION, Report
from flamia.conformance.targets.base import Target, describe_recipe

FORMAT = 1
"""Version of the files."""

NO_VERSIONS = ("device", "compute capability", "platform", "flamia")
"""Entries of a target's environment that say nothing about how it was compiled."""

SHIPPED = Path(__file__).resolve().parent / "certified"
"""Certificates that come with the package."""


@dataclass(frozen=True)
class Identity:
    """What a certificate is about, and what it is verified against.

    :param kernel: name of the kernel or target.
    :param recipe: whose bits or budget it is held to.
    :param profile: the machine profile of the same.
    :param source_hash: SHA-256 of all that the kernel is compiled from, 64 hexadecimal digits.
    :param chip: name of the device, such as ``NVIDIA H200``.
    :param compute_capability: such as ``9.0``; empty for a CPU.
    :param compiler: name and version, such as ``NVRTC 13.0.88``; for what is not compiled here, the versions of the
        packages that it runs on.
    """

    kernel: str
    recipe: str
    profile: str
    source_hash: str
    chip: str
    compute_capability: str
    compiler: str

    @property
    def subject(self) -> str:
        """Kernel, recipe and profile."""
        return f"{self.kernel} ({self.recipe}, {self.profile})"

    @property
    def unknown(self) -> tuple[str, ...]:
        """What could not be found out here, and is empty. (A CPU has no compute capability.)"""
        empty = (f.name for f in fields(self) if not getattr(self, f.name))
        return tuple(name for name in empty if name != "compute_capability" or not self.chip)

    @property
    def device(self) -> str:
        """Chip and compute capability."""
        return self.chip + (f" ({self.compute_capability})" if self.compute_capability else "")


@dataclass(frozen=True)
class Certificate:
    """The record. See Note [Certificates].

    :param identity: what passed.
    :param suite_version: `results.SUITE_VERSION` of the suite that it passed.
    :param levels: those of which checks ran and all passed.
    :param size: ``quick``, ``full`` or ``stress``.
    :param checks: how many checks passed.
    :param date: UTC, ISO 8601, when the run started.
    :param environment: versions and machine, as in the report.
    :param not_applicable: checks of these levels that applied in no case, such as ``"graph"`` of a target that does not
        promise it: what the certificate does not speak of.
    """

    identity: Identity
    suite_version: str
    levels: tuple[int, ...]
    size: str
    checks: int
    date: str
    environment: Mapping[str, str]
    not_applicable: tuple[str, ...] = ()

    def invalid_because(self, current: Identity, levels: Iterable[int] = (), size: str = "quick") -> list[str]:
        """Why it does not hold for what is here now, a sentence per reason; empty: it is valid.

        :param current: the kernel as it is now, on the chip that it will run on.
        :param levels: levels that it must have.
        :param size: the size of cases that it must have, or more.
        """
        mine = self.identity
        if mine.subject != current.subject:
            return [f"it is for {mine.subject}, this is {current.subject}"]
        reasons = []
        if mine.source_hash != current.source_hash:
            reasons.append(
                f"the source has changed: certified was {mine.source_hash[:12]}, this is {current.source_hash[:12]}"
            )
        if (mine.chip, mine.compute_capability) != (current.chip, current.compute_capability):
            reasons.append(f"it was issued on {mine.device}, this is {current.device}")
        if mine.compiler != current.compiler:
            reasons.append(f"it was compiled by {mine.compiler}, this is {current.compiler}")
        if _version(self.suite_version) < _version(SUITE_VERSION):
            reasons.append(f"it passed suite {self.suite_version}, this is suite {SUITE_VERSION}, which checks more")
        missing = sorted(set(levels) - set(self.levels))
        if missing:
            named = ", ".join(f"{level} ({LEVELS.get(level, 'unknown')})" for level in missing)
            reasons.append(f"it does not have level {named}")
        if SIZES.index(self.size) < SIZES.index(size):
            reasons.append(f"it passed the {self.size} cases, not the {size} ones")
        return reasons

    @property
    def file_name(self) -> str:
        """Of the file that holds it: one per identity; a newer run replaces an older one."""
        i = self.identity
        told_apart = hash_sources(asdict(i))[:12]
        return f"{_slug(i.kernel)}--{_slug(i.device)}--{told_apart}.json"


def issue_certificate(report: Report, identity: Identity) -> Certificate:
    """The certificate that a report is worth.

    :raises ValueError: for a report in which anything failed, nothing passed, or cases are missing.
    """
    failures = list(report.failures())
    if failures:
        raise ValueError(
            f"report must be without failures to certify {report.target}, got {len(failures)}, first: "
            f"level {failures[0].level}, {failures[0].name}"
        )
    levels = tuple(level for level in LEVELS if report.level_status(level) == "passed")
    if not levels:
        raise ValueError(f"report must have checks that passed to certify {report.target}, got none")
    for case in select_cases(None, report.size, report.profile):
        for level in set(levels) & set(case.levels):
            if not any(r.level == level and r.case == case.name for r in report.results):
                raise ValueError(
                    f"report must have every {report.size} case to certify {report.target}, got none of level {level} "
                    f"for {case.name}"
                )
    return Certificate(
        identity=identity,
        suite_version=report.suite_version,
        levels=levels,
        size=report.size,
        checks=report.count("passed"),
        date=report.started,
        environment=dict(report.environment),
        not_applicable=_never_applied(report, levels),
    )


def _never_applied(report: Report, levels: Iterable[int]) -> tuple[str, ...]:
    asked = {(r.check, r.status) for r in report.results if r.level in levels}
    return tuple(sorted({name for name, _ in asked} - {name for name, status in asked if status == "passed"}))


def identify_target(target: Target, here: bool = True) -> Identity:
    """The identity of a target as it is now.

    :param here: False if its device is missing: chip and compiler are then unknown.

    Its chip and compiler are those of ``target.environment()`` (``device``, ``compute capability``, ``compiler``;
    without a compiler, all versions in it). Its source is what ``target.sources()`` says, if it has that: text by name.
    Otherwise it is the package or module that defines the callable, without what that imports.
    """
    environment = target.environment() if here else {"device": ""}
    own = getattr(target, "sources", None)
    sources = own() if callable(own) else defining_sources(getattr(target, "subject", target))
    versions = ", ".join(f"{name} {text}" for name, text in sorted(environment.items()) if name not in NO_VERSIONS)
    return Identity(
        kernel=target.name,
        recipe=describe_recipe(target.recipe),
        profile=target.profile,
        source_hash=hash_sources(sources),
        chip=environment.get("device", environment.get("platform", "unknown")),
        compute_capability=environment.get("compute capability", ""),
        compiler=environment.get("compiler", versions),
    )


def defining_sources(subject: Any) -> dict[str, str]:
    """Text of the module that defines a callable or object, by file name.

    For `flamia.reference`, which a `ReferenceTarget` names as its package, every module of it.

    :raises ValueError: if there is no source to read, as for a built-in function.
    """
    engine = getattr(subject, "engine", None)
    if engine is not None:
        module = inspect.getmodule(engine.forward)
        folder = Path(str(getattr(module, "__file__", ""))).parent
        return {f.name: f.read_text(encoding="utf-8") for f in sorted(folder.glob("*.py"))}
    kind = subject if inspect.isroutine(subject) or inspect.isclass(subject) else type(subject)
    try:
        file = inspect.getsourcefile(inspect.unwrap(kind))
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise ValueError(f"target must have a source file to be certified, got {subject!r}")
    return {Path(file).name: Path(file).read_text(encoding="utf-8")}


def hash_sources(sources: Mapping[str, str]) -> str:
    """SHA-256 of texts by name, independent of their order, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()


# ---- files -------------------------------------------------------------------------------------------------


def user_folder() -> Path:
    """Where the user's certificates lie, see the top of this file; not created by asking."""
    chosen = os.environ.get("FLAMIA_CERTIFICATE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "flamia" / "certificates"


def write_certificate(certificate: Certificate, folder: Path | None = None) -> Path:
    """Write a certificate into ``folder`` (default: the user's) and return its path.

    :raises OSError: naming the folder, when it cannot be written.
    """
    place = user_folder() if folder is None else folder
    text = json.dumps({"format": FORMAT, **asdict(certificate)}, indent=2, sort_keys=True) + "\n"
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=".", suffix=".draft", dir=place)
    except OSError as error:
        raise OSError(
            f"certificates cannot be written to {place} ({error}): set FLAMIA_CERTIFICATE_DIR to a folder that can"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(0o644)  # mkstemp's 0600 would hide it from other users
        target = place / certificate.file_name
        Path(draft).replace(target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return target


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file.

    :raises ValueError: naming the file, if it holds none of this format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        found["identity"] = Identity(**found["identity"])
        found["levels"], found["not_applicable"] = tuple(found["levels"]), tuple(found["not_applicable"])
        certificate = Certificate(**found)
        _require_types(certificate)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} must hold a certificate of format {FORMAT}: {error!r}") from error
    return certificate


def list_certificates(folders: Iterable[Path] | None = None) -> dict[Path, Certificate | str]:
    """Every certificate file by path, the user's before the shipped ones: its certificate, or why it is unreadable."""
    found: dict[Path, Certificate | str] = {}
    for folder in (user_folder(), SHIPPED) if folders is None else folders:
        for path in sorted(folder.glob("*.json")):
            try:
                found[path] = read_certificate(path)
            except (ValueError, OSError) as error:
                found[path] = str(error)
    return found


def find_valid(current: Identity, levels: Iterable[int] = (), folders: Iterable[Path] | None = None) -> Certificate:
    """A certificate that is valid for ``current``; of several, the one of most levels, then the latest.

    :raises LookupError: if there is none, saying why those for the same kernel are not valid.
    """
    needed = tuple(levels)
    candidates = [c for c in list_certificates(folders).values() if isinstance(c, Certificate)]
    valid = [c for c in candidates if not c.invalid_because(current, needed)]
    if valid:
        return max(valid, key=lambda c: (len(c.levels), datetime.fromisoformat(c.date)))
    near = [c for c in candidates if c.identity.subject == current.subject]
    if not near:
        raise LookupError(f"{current.subject} has no certificate")
    why = "\n".join(f"- of {c.date}: {'; '.join(c.invalid_because(current, needed))}" for c in near)
    raise LookupError(f"{current.subject} has no valid certificate on {current.device}:\n{why}")


def _require_types(certificate: Certificate) -> None:
    """What `asdict` wrote, and nothing else: a wrong type would surface far from the file."""
    texts = [getattr(certificate.identity, f.name) for f in fields(Identity)]
    texts += [getattr(certificate, name) for name in ("suite_version", "date")]
    texts += [*certificate.environment, *certificate.environment.values(), *certificate.not_applicable]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is of another type")
    if not all(level in LEVELS for level in certificate.levels) or not isinstance(certificate.checks, int):
        raise ValueError("levels or checks are not numbers")
    if certificate.size not in SIZES:
        raise ValueError(f"its size is not one of {SIZES}")
    _version(certificate.suite_version)
    if datetime.fromisoformat(certificate.date).tzinfo is None:
        raise ValueError("its date has no time zone")


def _version(text: str) -> tuple[int, ...]:
    """``"1.10"`` as numbers, so that it is newer than ``"1.9"``."""
    return tuple(int(part) for part in text.split("."))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unnamed"
