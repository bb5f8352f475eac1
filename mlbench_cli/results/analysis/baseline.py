"""Check results against a baseline, by figure and size, and write the files that CI systems read."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.methods import is_command
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis import collectives, convergence, program_metrics
from mlbench_cli.results.analysis.comparability import (
    CONDITIONS,
    Difference,
    conditions_of,
    describe_condition_difference,
    key_of,
    title_of,
)
from mlbench_cli.results.analysis.compare import THROUGHPUT
from mlbench_cli.results.analysis.gate import Direction, parse_limit
from mlbench_cli.results.analysis.history import Judged, decide
from mlbench_cli.results.analysis.series import IN_DOUBT, SUCCESSFUL, drop_duplicates, measure, outcome_of
from mlbench_cli.results.analysis.sessions import find_sessions
from mlbench_cli.results.analysis.verdict import Verdict, find_worst
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.text import significant

SECONDS = "seconds"
DEFAULT_LIMIT = 1.10
MAX_SUMMARY_BYTES = 1_000_000  # a step summary above 1 MiB is dropped as a whole
_SMALL_SHARE = re.compile(r"\d{1,2}(\.\d*)?%")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


@dataclass(frozen=True)
class Wanted:
    """A figure that is checked: "seconds", "throughput", a metric or a collective's; the factor allowed."""

    metric: str = SECONDS
    limit: float = DEFAULT_LIMIT

    @classmethod
    def parse(cls, text: str) -> "Wanted":
        """ "seconds=1.1", "seconds=+10%", "throughput". Raises UsageError."""
        name, given, limit = text.rpartition("=") if "=" in text else (text, "", "")
        # A limit is at least 1, so that "10%" can only mean 10 % more.
        limit = f"+{limit}" if _SMALL_SHARE.fullmatch(limit) else limit
        factor = parse_limit(limit, "--check") if given else DEFAULT_LIMIT
        if not name or factor < 1:
            raise UsageError(
                f'--check "{text[:60]}": write METRIC=FACTOR with a factor of at least 1, or METRIC=+SHARE%.',
                hint="seconds=1.1, or seconds=+10%",
            )
        return cls(name, factor)


@dataclass(frozen=True)
class Check:
    """One figure of one job and size."""

    name: str  # unique
    metric: str
    workers: int
    values: tuple[float, ...]
    baseline: tuple[float, ...]
    higher_is_better: bool
    limit: float
    judged: Judged

    def to_dict(self) -> JsonObject:
        """The check as the gate's JSON document has it."""
        judged = self.judged
        return {
            "name": self.name,
            "metric": self.metric,
            "workers": self.workers,
            "limit": self.limit,
            "values": list(self.values),
            "baseline": list(self.baseline),
            "verdict": str(judged.verdict),
            "reason": judged.reason,
            "worse": judged.worse,
            "low": judged.low,
            "high": judged.high,
        }


def check_results(
    results: Sequence[Archive],
    baseline: Sequence[Archive],
    wanted: Sequence[Wanted],
    across: Collection[str] = (),
    direction: Direction | None = None,
) -> list[Check]:
    """Compare verified archives with earlier ones of equal task, goal, data, machine, parameters and workers.

    `across` are the words of differences to accept (comparability.WORDS). `direction` is that of metrics
    whose name does not tell it.

    An archive that is on both sides counts as a result only. Raises UsageError for a metric that no result has.
    """
    results = drop_duplicates(results)
    ids = {archive.run["id"] for archive in results}
    earlier = [archive for archive in drop_duplicates(baseline) if archive.run["id"] not in ids]
    cells = _cells(results)
    known = {name for archives in cells.values() for archive in archives for name in figures_of(archive)}
    better = {name: higher for each in results for name, (_, higher) in figures_of(each).items()}
    for each in wanted:
        if known and each.metric not in (*known, convergence.METRIC):
            near = did_you_mean(each.metric, list(known))
            raise UsageError(f'No result has "{each.metric[:60]}".{near}', hint=f"One of: {', '.join(sorted(known))}")
        if direction is None and each.metric in better and better[each.metric] is None:
            raise UsageError(
                f'It is unknown whether lower or higher is better for "{each.metric[:60]}".',
                hint="--direction higher, or lower",
            )
    count = len(cells) * len(wanted)
    figures = [each for each in wanted if each.metric != convergence.METRIC]
    found = [
        _check(name, archives, earlier, each, count, across, direction)
        for name, archives in cells.items()
        for each in figures
    ]
    if len(figures) < len(wanted):
        found += [_check_convergence(name, archives, earlier) for name, archives in cells.items()]
    return found


def _check_convergence(name: str, results: Sequence[Archive], earlier: Sequence[Archive]) -> Check:
    """Epochs to the goal; reference runs may be on other machines and have other numbers of ranks."""
    key = convergence.training_key(results[0])
    alike = [each for each in earlier if key is not None and convergence.training_key(each) == key]
    values, reference = convergence.epochs_to_goal(results), convergence.epochs_to_goal(alike)
    judged = convergence.decide_convergence(reference, values)
    workers = int(results[0].result["workers"])
    about = (f"{name}: {convergence.METRIC}", convergence.METRIC, workers)
    return Check(*about, tuple(values), tuple(reference), True, 1.0, judged)


def figures_of(archive: Archive) -> dict[str, tuple[float, bool | None]]:
    """Name to value, and whether higher is better (None: unknown); nothing for a run that did not succeed, or whose
    evidence is in doubt."""
    measured = measure(archive)
    if not measured.good:
        return {}
    found: dict[str, tuple[float, bool | None]] = program_metrics.figures_of(archive)
    found[SECONDS] = (measured.seconds, False)
    if measured.throughput is not None:
        found["throughput"] = (measured.throughput, True)
    goal = archive.result["goal"]
    if goal and measured.value is not None:
        found[goal["metric"]] = (measured.value, goal["comparison"] == ">=")
    for name, value in collectives.figures_of(archive).items():
        found[name] = (value, not name.endswith("alpha us"))
    return found


def _cells(results: Sequence[Archive]) -> dict[str, list[Archive]]:
    """Labels by task, backend, device and workers, and further differences if these are ambiguous."""
    found: dict[object, list[Archive]] = {}
    for archive in results:
        found.setdefault((key_of(archive), archive.result["workers"]), []).append(archive)
    names: dict[str, list[Archive]] = {}
    for archives in found.values():
        result = archives[0].result
        preset = "" if is_command(archives[0].run["spec"]) else f" {result['preset']}"
        name = f"{title_of(archives[0])}{preset} {result['backend']} {result['device']} {result['workers']}"
        number = sum(1 for other in names if other == name or other.startswith(f"{name} #"))
        names[f"{name} #{number + 1}" if number else name] = archives
    return names


def _check(
    name: str,
    results: Sequence[Archive],
    earlier: Sequence[Archive],
    wanted: Wanted,
    count: int,
    across: Collection[str],
    direction: Direction | None,
) -> Check:
    workers = int(results[0].result["workers"])
    alike = [each for each in earlier if each.result["workers"] == workers]
    alike = [each for each in alike if not _find_differences(each, results[0], across) and measure(each).good]
    measured, known = ([each for each in side if wanted.metric in figures_of(each)] for side in (results, alike))
    values, before = ([figures_of(each)[wanted.metric][0] for each in side] for side in (measured, known))
    own = figures_of(measured[0])[wanted.metric][1] if measured else False
    higher = direction is Direction.HIGHER if own is None else own
    judged = _find_obstacle(results, earlier, alike, across) or decide(
        *(before, values, wanted.limit),
        higher_is_better=higher,
        checks=count,
        sessions=find_sessions(known, measured),
    )
    if labels := sorted({label for each in results for label in conditions_of(each).labels}):
        judged = replace(judged, reason=f"{judged.reason}; conditions: {', '.join(labels)}")
    return Check(
        f"{name}: {wanted.metric}", wanted.metric, workers, tuple(values), tuple(before), higher, wanted.limit, judged
    )


def _find_differences(earlier: Archive, result: Archive, across: Collection[str]) -> list[Difference]:
    """Why an earlier run is no baseline of a result. Another version of a user's command is what a gate is for."""
    own = {"code"} if is_command(result.run["spec"]) else set()
    return [found for found in key_of(earlier).differences(key_of(result)) if found.word not in {*own, *across}]


def _find_obstacle(
    results: Sequence[Archive], earlier: Sequence[Archive], alike: Sequence[Archive], across: Collection[str]
) -> Judged | None:
    """Why the figures do not decide: failed results fail the gate; those that are functional or in doubt, or whose
    conditions are not the baseline's, cannot pass."""
    failed = [each for each in results if outcome_of(each.result) not in (*SUCCESSFUL, IN_DOUBT)]
    if failed:
        count = f"{len(failed)} of {len(results)} runs failed: " if len(results) > 1 else ""
        ended = f"{failed[0].run['name']} ended as {outcome_of(failed[0].result)}"
        return Judged(Verdict.FAILED, f"{count}{ended}")
    for archive in results:
        if doubts := archive.result.get("doubts"):
            reason = f"the evidence of {archive.run['name']} is in doubt ({', '.join(doubts)})"
            return Judged(Verdict.CANNOT_TELL, reason)
    for archive in results:
        if archive.result["label"]["word"] == "functional":
            return Judged(Verdict.CANNOT_TELL, f"{archive.run['name']} is functional, not a performance measurement")
    if alike:
        differ = describe_condition_difference(alike, results)
        return None if differ is None or CONDITIONS in across else Judged(Verdict.CANNOT_TELL, differ.rstrip("."))
    workers = results[0].result["workers"]
    near = [each for each in earlier if each.run["spec"]["task"] == results[0].run["spec"]["task"]]
    differences = [_find_differences(each, results[0], across) for each in near if each.result["workers"] == workers]
    if not differences:
        return Judged(Verdict.CANNOT_TELL, f"the baseline has no run of this task with {workers} workers")
    first = min(differences, key=len)
    accept = f" Accept it with --across {first[0].word}." if first and first[0].word else ""
    reason = f"{first[0].phrase}{accept}" if first else "They did not succeed."
    return Judged(Verdict.CANNOT_TELL, f"no run of the baseline has equal conditions. {reason}")


def overall(checks: Sequence[Check]) -> Verdict:
    """The worst verdict; "cannot tell" without any check."""
    return find_worst(check.judged.verdict for check in checks) if checks else Verdict.CANNOT_TELL


# --- files for CI ---------------------------------------------------------------------------------------------------


def format_junit(checks: Sequence[Check]) -> bytes:
    """JUnit XML: a failed check is a failure, one that cannot be decided is skipped. Names are unique."""
    counts = {verdict: sum(check.judged.verdict is verdict for check in checks) for verdict in Verdict}
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
        tag = {Verdict.FAILED: "failure", Verdict.CANNOT_TELL: "skipped"}.get(check.judged.verdict)
        if tag:
            ElementTree.SubElement(case, tag, {"message": _xml(check.judged.reason)})
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True)) + b"\n"


def format_summary(checks: Sequence[Check]) -> str:
    """A Markdown table for a step summary, cut at a row with a note."""
    text = "| check | verdict | worse by | reason |\n| --- | --- | ---: | --- |\n"
    for number, check in enumerate(checks):
        worse = "–" if check.judged.worse is None else f"{significant(check.judged.worse)}×"
        row = f"| {_cell(check.name)} | {check.judged.verdict.phrase} | {worse} | {_cell(check.judged.reason)} |\n"
        if len((text + row).encode()) > MAX_SUMMARY_BYTES:
            return f"{text}\n{len(checks) - number} more checks are omitted.\n"
        text += row
    return text


def format_annotation(verdict: Verdict, checks: Sequence[Check]) -> str:
    """One workflow command with the verdict: only ten annotations of a kind are kept."""
    bad = [check for check in checks if check.judged.verdict is verdict]
    kind = {Verdict.FAILED: "error", Verdict.CANNOT_TELL: "warning"}.get(verdict, "notice")
    first = f"{bad[0].name}: {bad[0].judged.reason}" if bad else ""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"::{kind} title=mlbench gate {verdict.phrase}::{_command(first + more)}"


def format_action_benchmark(checks: Sequence[Check], *, higher_is_better: bool) -> str:
    """The array of github-action-benchmark, customSmallerIsBetter or customBiggerIsBetter: one direction a file."""
    rows = []
    for check in checks:
        if check.higher_is_better is higher_is_better and check.values:
            mean = sum(check.values) / len(check.values)
            spread = (max(check.values) - min(check.values)) / 2
            rows.append({"name": check.name, "unit": _unit(check.metric), "value": mean, "range": f"± {spread:.4g}"})
    return json.dumps(rows, indent=2, allow_nan=False) + "\n"


def format_bencher(checks: Sequence[Check]) -> str:
    """Bencher's metric format. Its own measures have fixed units, so that ours have other names."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for check in checks:
        if check.values:
            mean = sum(check.values) / len(check.values)
            figures = {"value": mean, "lower_value": min(check.values), "upper_value": max(check.values)}
            name = check.name.rpartition(": ")[0][:1024]
            found.setdefault(name, {})[re.sub(r"\W+", "-", f"mlbench-{check.metric}".lower())[:64]] = figures
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def _unit(metric: str) -> str:
    return {SECONDS: "s", "throughput": THROUGHPUT}.get(metric, metric)


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _cell(text: str) -> str:
    plain = " ".join(_xml(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|@])", r"\\\1", plain)


def _command(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
