"""Gates: is B worse than A by more than the limit, is it not, or can the runs not tell?

`check_results` finds what results have to be compared with in a baseline; `decide` answers for one comparison, by the
interval of the row that `mlbench compare` prints.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.methods import is_command, method_phrase
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.comparability import ComparisonKey, Difference, conditions_of, key_of, title_of
from mlbench_cli.results.analysis.compare import (
    CODE,
    Comparison,
    Row,
    compare,
    compare_runs,
    describe_doubt,
    find_metric,
)
from mlbench_cli.results.analysis.figures import IN_DOUBT, SECONDS, SUCCESSFUL, outcome_of
from mlbench_cli.results.analysis.numbers import CLOSE, format_amount
from mlbench_cli.results.analysis.series import drop_duplicates, measure
from mlbench_cli.results.analysis.sessions import Basis
from mlbench_cli.results.analysis.stats import (
    MIN_HISTORY,
    MIN_REFERENCE,
    MIN_RUNS,
    Verdict,
    find_least_mean,
    find_worst,
    trimmed_mean,
)
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import counted, list_some, significant

DEFAULT_LIMIT = 1.10
MAX_PLAIN_SHARE = 50.0  # percent; from here on a limit without a sign can be meant in two ways
UNCLEAR_FACTOR = 3.0  # from here on a number alone may be meant in percent
CONVERGENCE = "convergence"  # the check of epochs to the goal
_SHARE = re.compile(r"(\d+(?:\.\d*)?)%")


class Direction(StrEnum):
    """Which direction is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True)
class Decision:
    """A verdict with its reason; `row` is what it rests on, if both sides have the figure."""

    verdict: Verdict
    reason: str
    metric: str | None = None
    limit: float = 1.0
    row: Row | None = None
    higher_is_better: bool | None = None

    def to_dict(self) -> JsonObject:
        """As `-o json` prints it. `worse` is how many times worse B is than A, or by how much, with its interval."""
        worse = None if self.row is None else self.row.worse(self.higher_is_better)
        direction = None if self.higher_is_better is None else "higher" if self.higher_is_better else "lower"
        return {
            "verdict": str(self.verdict),
            "reason": self.reason,
            "metric": self.metric,
            "direction": direction,
            "limit": self.limit,
            "worse": None if worse is None else worse.to_dict(),
            "row": None if self.row is None else self.row.to_dict(),
        }


def decide(
    found: Comparison, limit: float, metric: str | None = None, direction: Direction | None = None, checks: int = 1
) -> Decision:
    """Check a figure of a comparison against `limit`, as one of several `checks` at once. Raises UsageError for an
    unknown figure."""
    name = find_metric(found.rows, metric) if found.rows else metric
    row = found.rows.get(name) if name else None
    higher = None if row is None else _find_direction(row.higher_is_better, direction)

    def say(verdict: Verdict, reason: str) -> Decision:
        return Decision(verdict, reason, name, limit, row, higher)

    if found.failed:
        return say(Verdict.FAILED, _describe_failed(found))
    if found.obstacles:
        return say(Verdict.CANNOT_TELL, found.obstacles[0].sentence)
    if row is not None and any(row.diverged):
        of_baseline, ours = row.diverged
        what = f"{name}: {ours}" if ours else f"{name} of the baseline: {of_baseline}"
        return say(Verdict.FAILED if ours else Verdict.CANNOT_TELL, f"{what}.")
    if row is not None and row.other_unit:
        return say(Verdict.CANNOT_TELL, f"{name} is in {row.other_unit} in the baseline, and in {row.unit} now.")
    if row is None or row.ratio is None:
        has_both = row is not None and row.old and row.new
        return say(Verdict.CANNOT_TELL, f"Not both sides have {name or 'a time'}{' above 0' if has_both else ''}.")
    if higher is None:
        raise UsageError(
            f'It is unknown whether lower or higher is better for "{name}".', hint="--direction higher, or lower"
        )
    begin = f"{name}: {found.b} against {found.a}: {row.words}; {describe_limit(limit, row)}"
    if row.ratio.low is None:
        few = f"{MIN_RUNS} of each side, or {MIN_HISTORY} earlier ones, are needed for an interval"
        what = found.sessions.note if found.sessions.basis in (Basis.PAIRED, Basis.BETWEEN) else found.counts
        return say(Verdict.CANNOT_TELL, f"{begin}; {what}: {few}.")
    if row.ratio.is_confounded:
        hint = "Measure both sides in one session, e.g. as a matrix, which alternates them"
        return say(Verdict.CANNOT_TELL, f"{begin}; {found.sessions.note}. {hint}.")
    worse = row.ratio.inverse if higher else row.ratio
    shown = f"; {found.sessions.note}{'; the sides did not alternate' if found.sessions.in_blocks else ''}"
    verdict = worse.gate(limit, checks)
    what = "interval, with the uncertainty of the baseline's mean," if worse.is_difference else "interval"
    undecided = f". The {what} includes the limit; more repeats narrow it" if verdict is Verdict.CANNOT_TELL else ""
    if verdict is Verdict.CANNOT_TELL and worse.gate(limit) is Verdict.FAILED:
        undecided = f". It is beyond the limit, but not surely so as one of {checks} checks at once"
    return say(verdict, f"{begin}{shown}{undecided}.")


def _find_direction(known: bool | None, given: Direction | None) -> bool | None:
    """Whether higher is better: `given` is said for all checks at once, so it decides only where the name does not."""
    return known if known is not None or given is None else given is Direction.HIGHER


def _describe_failed(found: Comparison) -> str:
    first = found.failed[0]
    count = len(found.failed)
    more = f" ({count} runs failed)" if count > 1 else ""
    return f"{first} ended as {found.excluded[first]}{more}."


def parse_limit(text: str, what: str) -> float:
    """The factor in "1.2" or "+20%". Raises UsageError that names `what`, also for what can be read in two ways."""
    text = "".join(text.split())  # "5 %" is "5%"
    share = text.removeprefix("+").removesuffix("%")
    if text.endswith("%") and not text.startswith(("+", "-")) and _is_number(share):
        factor = max(float(share), 100.0) / (min(float(share), 100.0) or 100.0)  # never by 0
        raise UsageError(
            f'{what} "{text[:60]}" can mean {text[:60]} worse, or {text[:60]} of the baseline.',
            hint=f"Write {factor:.4g}, or +{text[:60]}.",
        )
    if not text.endswith("%") and _is_number(share) and (text.startswith("+") or float(share) >= UNCLEAR_FACTOR):
        raise UsageError(
            f'{what} "{text[:60]}" can mean a factor of {float(share):g}, or {float(share):g} % more.',
            hint=f"Write +{100 * (float(share) - 1):.4g}%, or +{float(share):g}%.",
        )
    try:
        if "_" in text:
            raise ValueError("Python's digit separator")
        factor = 1 + float(share) / 100 if text.endswith("%") else float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise UsageError(f'{what} "{text[:60]}" is neither a factor nor a percentage.', hint="For example 1.2 or +20%.")
    return factor


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def describe_limit(limit: float, row: Row) -> str:
    """ "limit 1.2× (+20 %)", close to 1 "limit +0.1 %", of a difference "limit 2.4 (20 % of the baseline's mean)"."""
    share = 100 * (limit - 1)
    if row.ratio is not None and row.ratio.base is not None:
        amount = format_amount((limit - 1) * row.ratio.base, row.unit)
        return f"limit {amount} ({_trim(share)} % of the baseline's mean)"
    percent = f"{'+' if share >= 0 else ''}{_trim(share)} %"
    return f"limit {percent}" if limit < CLOSE else f"limit {_trim(limit)}× ({percent})"


def _trim(value: float) -> str:
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


# --- against a baseline ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A figure that is checked, by its name or a part of it, and the factor allowed."""

    metric: str = SECONDS
    limit: float = DEFAULT_LIMIT

    @classmethod
    def parse(cls, text: str) -> "Wanted":
        """ "seconds=1.1", "seconds=+10%", "throughput". Raises UsageError."""
        name, given, limit = text.rpartition("=") if "=" in text else (text, "", "")
        limit = "".join(limit.split())
        if (found := _SHARE.fullmatch(limit)) and float(found[1]) < MAX_PLAIN_SHARE:
            limit = f"+{limit}"  # 10 % can only mean 10 % worse, but 90 % also 90 % of the baseline
        factor = parse_limit(limit, f"--check {name[:60]}:") if given else DEFAULT_LIMIT
        if not name or factor < 1:
            raise UsageError(
                f'--check "{text[:60]}": write METRIC=FACTOR with a factor of at least 1, or METRIC=+SHARE%.',
                hint="seconds=1.1, or seconds=+10%",
            )
        return cls(name, factor)


@dataclass(frozen=True)
class Check:
    """One figure of one setting and size, whose name is unique."""

    setting: str
    metric: str
    workers: int
    decision: Decision

    @property
    def name(self) -> str:
        """Setting and figure."""
        return f"{self.setting}: {self.metric}"

    def to_dict(self) -> JsonObject:
        """As the gate's JSON document has it."""
        row = self.decision.row
        sides = {"values": list(row.new) if row else [], "baseline": list(row.old) if row else []}
        return {"name": self.name, "workers": self.workers, **self.decision.to_dict(), **sides}


def check_results(
    results: Sequence[Archive],
    baseline: Sequence[Archive],
    wanted: Sequence[Wanted],
    across: Collection[str] = (),
    direction: Direction | None = None,
) -> list[Check]:
    """Compare verified archives with earlier ones of equal task, goal, data, machine, parameters and workers.

    `across` are the words of differences to accept (comparability.WORDS). `direction` is that of figures whose name
    does not tell it. An archive that is on both sides counts as a result only. Raises UsageError for a figure that no
    result has.
    """
    results = drop_duplicates(results)
    ids = {archive.run["id"] for archive in results}
    earlier = [archive for archive in drop_duplicates(baseline) if archive.run["id"] not in ids]
    cells = _cells(results)
    rows, _ = compare_runs([], [run for run in map(measure, results) if run.good])
    known = {name: row.higher_is_better for name, row in rows.items()}
    names = [_find_name(each, known, direction) for each in wanted]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f'"{twice[0][:60]}" is checked twice.', hint="Give each figure one --check.")
    _require_use(direction, {name: known[name] for name in names if name in known})
    alike = {name: [each for each in earlier if is_baseline_of(each, own, across)] for name, own in cells.items()}
    count = sum(1 for found in alike.values() if found) * len(wanted)
    checks = []
    for name, own in cells.items():
        for each, metric in zip(wanted, names, strict=True):
            if metric == CONVERGENCE:
                decision = _decide_convergence(own, earlier)
            elif (found := _find_reason(own, earlier, alike[name], across)) is not None:
                rows, _ = compare_runs([], [run for run in map(measure, own) if run.good])
                higher = _find_direction(known.get(metric), direction)
                decision = Decision(*found, metric, each.limit, rows.get(metric), higher)
            else:
                compared = compare(alike[name], own, ("the baseline", _name_of(own)), across)
                if metric in compared.rows:
                    decision = decide(compared, each.limit, metric, direction, count)
                else:
                    decision = Decision(Verdict.CANNOT_TELL, f"These runs have no {metric}.", metric, each.limit)
            if labels := sorted({label for run in own for label in conditions_of(run).labels}):
                reason = f"{decision.reason.rstrip('.')}. Some runs were {list_some(labels)}."
                decision = replace(decision, reason=reason)
            checks.append(Check(name, metric, int(own[0].result["workers"]), decision))
    return checks


def _find_name(wanted: Wanted, known: dict[str, bool | None], direction: Direction | None) -> str:
    if wanted.metric == CONVERGENCE or not known:
        return wanted.metric
    name = str(find_metric(known, wanted.metric, "--check"))
    if direction is None and known[name] is None:
        raise UsageError(
            f'It is unknown whether lower or higher is better for "{name[:60]}".', hint="--direction higher, or lower"
        )
    return name


def _require_use(given: Direction | None, known: dict[str, bool | None]) -> None:
    """Raise UsageError if --direction contradicts the names of all figures that are checked."""
    if given is None or None in known.values():
        return
    for name, higher in known.items():
        if higher is not _find_direction(None, given):
            raise UsageError(
                f'Of "{name[:60]}", {"higher" if higher else "lower"} is better, as its name says.',
                hint="Leave out --direction, which is for metrics whose name does not tell.",
            )


def _name_of(archives: Sequence[Archive]) -> str:
    first = archives[0].name
    return first if len(archives) == 1 else f"{first} and {len(archives) - 1} more"


def group_key(archive: Archive) -> tuple[ComparisonKey, int]:
    """The key that repeats of one run share."""
    return key_of(archive), int(archive.result["workers"])


def _cells(results: Sequence[Archive]) -> dict[str, list[Archive]]:
    """Labels by task, backend, device and workers, with a number if these are ambiguous."""
    found: dict[Any, list[Archive]] = {}
    for archive in results:
        found.setdefault(group_key(archive), []).append(archive)
    names: dict[str, list[Archive]] = {}
    for archives in found.values():
        result = archives[0].result
        preset = "" if is_command(archives[0].run["spec"]) else f" {result['preset']}"
        name = f"{title_of(archives[0])}{preset} {result['backend']} {result['device']} {result['workers']}"
        number = sum(1 for other in names if other == name or other.startswith(f"{name} #"))
        names[f"{name} #{number + 1}" if number else name] = archives
    return names


def is_baseline_of(earlier: Archive, results: Sequence[Archive], across: Collection[str]) -> bool:
    """Whether a run that succeeded is one that results can be compared with."""
    is_alike = earlier.result["workers"] == results[0].result["workers"]
    is_good = outcome_of(earlier.result) in SUCCESSFUL
    return is_alike and is_good and not _differences(earlier, results[0], across)


def _differences(earlier: Archive, result: Archive, across: Collection[str]) -> list[Difference]:
    """Why an earlier run is no baseline of a result. Another version of a user's command is what a gate is for."""
    accepted = {*across, *({CODE} if is_command(result.run["spec"]) else ())}
    return [found for found in key_of(earlier).differences(key_of(result)) if found.word not in accepted]


def _find_reason(
    results: Sequence[Archive],
    earlier: Sequence[Archive],
    alike: Sequence[Archive],
    across: Collection[str],
) -> tuple[Verdict, str] | None:
    """The verdict if there is nothing to compare: the results failed, or the baseline has no comparable runs."""
    failed = [each for each in results if outcome_of(each.result) not in (*SUCCESSFUL, IN_DOUBT)]
    if failed:
        count = f"{len(failed)} of {len(results)} runs failed: " if len(results) > 1 else ""
        ended = outcome_of(failed[0].result).replace("_", " ")
        return Verdict.FAILED, f"{count}{failed[0].run['name']} ended as {ended}."
    if doubted := next((each for each in results if each.result.get("doubts")), None):
        return Verdict.CANNOT_TELL, describe_doubt(doubted)
    if alike:
        return None
    workers = results[0].result["workers"]
    near = [each for each in earlier if each.run["spec"]["task"] == results[0].run["spec"]["task"]]
    differences = [_differences(each, results[0], across) for each in near if each.result["workers"] == workers]
    if not differences:
        if not earlier:
            return Verdict.CANNOT_TELL, "The baseline has no other runs than these."
        return Verdict.CANNOT_TELL, f"The baseline has no run of this task with {counted(workers, 'worker')}."
    first = min(differences, key=len)
    if not first:
        return Verdict.CANNOT_TELL, "No run of the baseline with equal conditions succeeded."
    accept = f" Accept it with --across {first[0].word}." if first[0].word else ""
    return Verdict.CANNOT_TELL, f"No run of the baseline has equal conditions. {first[0].phrase}{accept}"


def overall(checks: Sequence[Check]) -> Verdict:
    """The worst verdict; "cannot tell" without any check."""
    return find_worst(check.decision.verdict for check in checks) if checks else Verdict.CANNOT_TELL


# --- convergence ------------------------------------------------------------------------------------------------------


def _decide_convergence(results: Sequence[Archive], earlier: Sequence[Archive]) -> Decision:
    """Epochs to the goal; reference runs may be on other machines and have other numbers of ranks."""
    key = training_key(results[0])
    alike = [each for each in earlier if key is not None and training_key(each) == key]
    epochs = [epochs_to_goal(side) for side in (alike, results)]
    return Decision(*decide_convergence(*epochs), CONVERGENCE)


@dataclass(frozen=True)
class TrainingKey:
    """Settings that must be equal for epochs to be comparable."""

    task: str
    preset: str
    goal: str
    method: str
    data: str
    batch: float  # samples of a step, all ranks together
    parameters: str  # those that are not the batch of a rank


def training_key(archive: Archive) -> TrainingKey | None:
    """The key of a run with a goal and a batch size; None for any other."""
    result, parameters = archive.result, archive.run["spec"]["parameters"]
    goal, batch = result["goal"], parameters.get("batch_size")
    if not goal or not is_finite_number(batch):
        return None
    identity = result["data_identity"]
    others = {key: value for key, value in sorted(parameters.items()) if key != "batch_size"}
    return TrainingKey(
        str(result["task"]),
        str(result["preset"]),
        f"{goal['metric']} {goal['comparison']} {goal['threshold']}",
        method_phrase(archive.run["spec"].get("method") or {}),
        str(identity["digest"] if identity and identity["digest"] else result["data"]),
        float(batch) * int(result["world_size"]),
        repr(others),
    )


def epochs_to_goal(archives: Sequence[Archive]) -> list[float]:
    """Epochs of the runs that reached their goal."""
    values = (archive.result["epochs"] for archive in archives if archive.result["outcome"] == "goal_reached")
    return [float(value) for value in values if is_finite_number(value) and value > 0]


def decide_convergence(reference: Sequence[float], values: Sequence[float]) -> tuple[Verdict, str]:
    """Detect trainings that reach their goal in fewer epochs than the reference possibly can, so are not the same.

    The rule is that of MLPerf's reference convergence points (rcp_checker of mlperf-logging 4.1.68): means without the
    least and the greatest value, the deviation of all, and a one-sided t-test with pooled degrees of freedom at 5 %. So
    the least acceptable mean is m - t(0.95, n + k - 2) s sqrt(1/n + 1/k), where n and k are the numbers of values in
    the two means. Batch sizes are summed over all ranks; machine and backend may differ, the method may not. It needs
    at least 5 reference runs.
    """
    if len(reference) < MIN_REFERENCE:
        known = f"{len(reference)} reference runs have equal task, goal, data, parameters and batch"
        return Verdict.CANNOT_TELL, f"{known}; {MIN_REFERENCE} are needed"
    if not values:
        return Verdict.CANNOT_TELL, "no run reached its goal"
    mean, used = trimmed_mean(values)
    least = find_least_mean(reference, used)
    text = (
        f"{significant(mean)} epochs to the goal; the reference's mean is {significant(trimmed_mean(reference)[0])}, "
        f"and {significant(least)} is the minimum it allows"
    )
    if mean < least:
        return Verdict.FAILED, f"{text}: converged faster than the reference can"
    return Verdict.PASSED, text
