"""The files that CI systems read of a gate: JUnit XML, a step summary, annotations, and benchmark trackers' JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from mlbench_cli.results.analysis.gate import Check
from mlbench_cli.results.analysis.stats import Verdict

MAX_SUMMARY_BYTES = 1_000_000  # a step summary above 1 MiB is dropped as a whole
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def format_junit(checks: Sequence[Check]) -> bytes:
    """JUnit XML: a failed check is a failure, one that cannot be decided is skipped. Names are unique."""
    counts = {verdict: sum(check.decision.verdict is verdict for check in checks) for verdict in Verdict}
    totals = {
        "tests": str(len(checks)),
        "failures": str(counts[Verdict.FAILED]),
        "errors": "0",
        "skipped": str(counts[Verdict.CANNOT_TELL]),
        "time": "0",
    }
    root = ElementTree.Element("testsuites", {"name": "mlbench", **totals})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "mlbench gate", **totals})
    for check in checks:
        facts = {"name": _xml(check.name), "classname": "mlbench.gate", "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", facts)
        tag = {Verdict.FAILED: "failure", Verdict.CANNOT_TELL: "skipped"}.get(check.decision.verdict)
        if tag:
            ElementTree.SubElement(case, tag, {"message": _xml(check.decision.reason)})
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True)) + b"\n"


def format_summary(checks: Sequence[Check]) -> str:
    """A Markdown table for a step summary, cut at a row with a note."""
    text = "| check | verdict | against the baseline | reason |\n| --- | --- | --- | --- |\n"
    for number, check in enumerate(checks):
        row = check.decision.row
        change = "–" if row is None or row.ratio is None else row.words
        cells = (_cell(check.name), check.decision.verdict.phrase, _cell(change), _cell(check.decision.reason))
        line = f"| {' | '.join(cells)} |\n"
        if len((text + line).encode()) > MAX_SUMMARY_BYTES:
            return f"{text}\n{len(checks) - number} more checks are omitted.\n"
        text += line
    return text


def format_annotation(verdict: Verdict, checks: Sequence[Check]) -> str:
    """One workflow command with the verdict: only ten annotations of a kind are kept."""
    bad = [check for check in checks if check.decision.verdict is verdict]
    kind = {Verdict.FAILED: "error", Verdict.CANNOT_TELL: "warning"}.get(verdict, "notice")
    first = f"{bad[0].name}: {bad[0].decision.reason}" if bad else ""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"::{kind} title=mlbench gate {verdict.phrase}::{_command(first + more)}"


def format_action_benchmark(checks: Sequence[Check], *, higher_is_better: bool) -> str:
    """The array of github-action-benchmark, customSmallerIsBetter or customBiggerIsBetter: one direction a file."""
    rows = []
    for check in checks:
        row = check.decision.row
        if check.decision.higher_is_better is higher_is_better and row is not None and row.b is not None:
            spread = (max(row.new) - min(row.new)) / 2
            unit = row.unit or row.name
            rows.append({"name": check.name, "unit": unit, "value": row.b.mean, "range": f"± {spread:.4g}"})
    return json.dumps(rows, indent=2, allow_nan=False) + "\n"


def format_bencher(checks: Sequence[Check]) -> str:
    """Bencher's metric format. Its own measures have fixed units, so that ours have other names."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for check in checks:
        row = check.decision.row
        if row is not None and row.b is not None:
            figures = {"value": row.b.mean, "lower_value": min(row.new), "upper_value": max(row.new)}
            found.setdefault(check.setting[:1024], {})[re.sub(r"\W+", "-", f"mlbench-{row.name}".lower())[:64]] = (
                figures
            )
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _cell(text: str) -> str:
    plain = " ".join(_xml(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|@])", r"\\\1", plain)


def _command(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
