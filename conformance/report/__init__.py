"""What a run found, for people and machines: terminal, JSON, JUnit XML and one HTML page."""

from flamia.conformance.report.files import read_json, write_html, write_json, write_junit
from flamia.conformance.report.verdict import EXIT_CODES, exit_code, verdict

__all__ = ["EXIT_CODES", "exit_code", "read_json", "verdict", "write_html", "write_json", "write_junit"]
