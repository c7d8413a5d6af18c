"""Reports as JUnit XML, the form that CI systems read.

A test suite per level, a test case per check. What does not apply to the target is *skipped*, with the reason.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as Xml

from flamia.conformance.results import LEVELS, CaseResult, Report

NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, escaped or not."""


def to_junit(report: Report) -> str:
    """The XML document as text."""
    root = Xml.Element("testsuites", _counts(report.results, f"flamia conform: {report.target}", report.seconds))
    for level, name in LEVELS.items():
        results = [r for r in report.results if r.level == level]
        if results:
            seconds = sum(r.seconds for r in results)
            suite = Xml.SubElement(root, "testsuite", _counts(results, f"level {level}: {name}", seconds))
            suite.set("timestamp", report.started)
            properties = Xml.SubElement(suite, "properties")
            for key, value in _properties(report).items():
                Xml.SubElement(properties, "property", name=_clean(key), value=_clean(value))
            for r in results:
                suite.append(_case(report, r))
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _properties(report: Report) -> dict[str, str]:
    return {
        "target": report.target,
        "recipe": report.recipe,
        "profile": report.profile,
        "size": report.size,
        "suite version": report.suite_version,
        **report.environment,
    }


def _counts(results: tuple[CaseResult, ...] | list[CaseResult], name: str, seconds: float) -> dict[str, str]:
    by_status = [r.status for r in results]
    return {
        "name": _clean(name),
        "tests": str(len(results)),
        "failures": str(by_status.count("failed")),
        "errors": str(by_status.count("error")),
        "skipped": str(by_status.count("not_applicable")),
        "time": f"{seconds:.3f}",
    }


def _case(report: Report, r: CaseResult) -> Xml.Element:
    element = Xml.Element(
        "testcase",
        classname=_clean(f"{report.target}.level {r.level} {LEVELS[r.level]}.{r.case}"),
        name=_clean(r.name),
        time=f"{r.seconds:.3f}",
    )
    first_line = _clean(r.message.partition("\n")[0])
    if r.status == "not_applicable":
        Xml.SubElement(element, "skipped", message=f"not applicable: {first_line}")
    elif r.status != "passed":
        tag = "failure" if r.status == "failed" else "error"
        detail = Xml.SubElement(element, tag, message=first_line, type=f"level {r.level} {r.check}")
        where = "" if r.coordinate is None else f"\ncoordinate: {list(r.coordinate)}"
        detail.text = _clean(r.message + where)
    if r.numbers:
        out = Xml.SubElement(element, "system-out")
        out.text = _clean("\n".join(f"{name}: {value:.6g}" for name, value in r.numbers.items()))
    return element


def _clean(text: str) -> str:
    return NOT_XML.sub("\ufffd", text)
