"""Do runs repeat an earlier result? A pure function from the archives of both sides to a verdict.

Every figure is one row of `compare`, and is the same if its interval lies within the margin. All of them have to; for
"different" one of k figures suffices, so each needs the level 5 % / k. Facts that could not be the same are listed with
the verdict. A figure that differs where the machine, the software or the conditions differ, too, is no verdict on the
original. Runs of another request, for example of another method, may be different, but never reproduce anything.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.comparability import (
    UNKNOWN,
    Difference,
    conditions_of,
    find_network_difference,
    key_of,
)
from mlbench_cli.results.analysis.compare import Row, compare_runs
from mlbench_cli.results.analysis.figures import SECONDS, SUCCESSFUL, THROUGHPUT, figures, outcome_of
from mlbench_cli.results.analysis.numbers import format_amount, format_value
from mlbench_cli.results.analysis.series import drop_duplicates, measure
from mlbench_cli.results.analysis.sessions import Basis, Sessions
from mlbench_cli.results.analysis.stats import (
    CONFIDENCE,
    MIN_HISTORY,
    MIN_RUNS,
    Verdict,
    decidable_margin,
    repeats_needed,
    upper_deviation,
)
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import counted, list_some

DEFAULT_MARGIN = 0.10
REPEATS_OF_ONE = MIN_HISTORY  # of an original that is a single run, whose spread nobody knows
_BANDWIDTH = "busbw GB/s"
# Words of comparability that a request does not decide: another machine, release or cluster has other ones.
_SURROUNDINGS = frozenset({"cluster", "machine", "image", "code", "framework", "judge", "division", "label"})
_PLACE_SETTINGS = ("values of engine", "values of kubernetes.")
_MAX_PACKAGES = 5


class Figure(Struct, frozen=True):
    """One row of the comparison, original against reproduction, with its verdict and the reason."""

    row: Row
    verdict: Verdict
    reason: str

    def to_dict(self) -> JsonObject:
        """The figure as a receipt has it."""
        found = None if self.row.ratio is None or self.row.ratio.is_difference else self.row.ratio
        return {
            "name": self.row.name,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "original": list(self.row.old),
            "reproduction": list(self.row.new),
            "ratio": None if found is None else found.mean,
            "low": None if found is None else found.low,
            "high": None if found is None else found.high,
        }


class NotTheSame(Struct, frozen=True):
    """A fact in which the runs differ from the original's. `matters`: times may differ because of it."""

    name: str
    original: str
    reproduction: str
    matters: bool


class Reproduction(Struct, frozen=True):
    """The verdict on a result, with everything that it was derived from."""

    verdict: Verdict
    reason: str
    margin: float
    figures: tuple[Figure, ...]
    not_the_same: tuple[NotTheSame, ...]
    sessions: str

    def to_dict(self) -> JsonObject:
        """The verdict as a receipt has it."""
        return {
            "verdict": str(self.verdict),
            "reason": self.reason,
            "margin": self.margin,
            "confidence": CONFIDENCE,
            "figures": [figure.to_dict() for figure in self.figures],
            "not_the_same": [asdict(each) for each in self.not_the_same],
            "sessions": self.sessions,
        }


class Repeats(NamedTuple):
    """How many repeats to make. `margin`: the smallest within which they can probably decide, if both sides scatter
    alike; None if the original is a single run, whose spread nobody knows."""

    number: int
    margin: float | None


def check_original(archives: Sequence[Archive]) -> list[Archive]:
    """The repeats that are an original, each once. Raises UsageError if there is no one result to reproduce."""
    original = in_order(archives)
    first = original[0]
    for archive in original:
        name = archive.name
        if doubts := archive.result.get("doubts"):
            raise UsageError(
                f"The evidence of {name} is in doubt ({', '.join(doubts)}): it has no result to reproduce.",
                hint=f"mlbench verify {shlex.quote(str(archive.path))}",
            )
        if (outcome := outcome_of(archive.result)) not in SUCCESSFUL:
            raise UsageError(
                f"{name} ended as {outcome.replace('_', ' ')}: it has no result to reproduce.",
                hint="Leave it out.",
            )
        if archive.result["workers"] != first.result["workers"]:
            counts = f"{first.result['workers']} and {archive.result['workers']}"
            raise UsageError(
                f"{first.run['name']} and {name} have different numbers of workers, {counts}.",
                hint="Reproduce one size at a time: name its runs or their archives.",
            )
        if differences := key_of(first).differences(key_of(archive)):
            raise UsageError(
                f"{first.run['name']} and {name} are not repeats of one run. {differences[0].phrase}",
                hint="Reproduce one setting at a time: name its runs or their archives.",
            )
    return original


def choose_figures(original: Sequence[Archive], asked: Sequence[str] = ()) -> list[str]:
    """The figures that a result is about: bandwidths of collectives, the metric after a time budget, samples per second
    of what has no goal, or else the time. Raises UsageError for one that was asked for and is not there."""
    known = set.intersection(*(set(figures(archive)) for archive in original))
    for name in asked:
        if name not in known:
            lacking = [archive.name for archive in original if name not in figures(archive)]
            who = "The original has" if len(lacking) == len(original) else f"{list_some(lacking)} of the original has"
            raise UsageError(f'{who} no figure "{name[:60]}".', hint=f"One of: {', '.join(sorted(known))}")
    if asked:
        return list(dict.fromkeys(asked))
    if bandwidths := sorted(name for name in known if name.endswith(_BANDWIDTH)):
        return bandwidths
    result = original[0].result
    goal = result["goal"]
    if goal and result["budget_seconds"] is not None and goal["metric"] in known:
        return [goal["metric"]]
    return [THROUGHPUT] if not goal and THROUGHPUT in known else [SECONDS]


def choose_repeats(original: Sequence[Archive], names: Sequence[str], margin: float) -> Repeats:
    """As many repeats as the original's own spread demands: for its noisiest figure, with a limit of that spread."""
    count = len(original)
    if count == 1:
        return Repeats(REPEATS_OF_ONE, None)
    spreads = []
    for name in names:
        values = [figures(archive)[name].value for archive in original]
        if min(values) > 0:
            spreads.append(statistics.stdev(map(math.log, values)))
        elif mean := abs(statistics.fmean(values)):
            spreads.append(statistics.stdev(values) / mean)
    worst = upper_deviation(max(spreads, default=0.0), count)
    number = repeats_needed(worst, count, margin)
    return Repeats(number, decidable_margin(worst, count, number))


def judge_reproduction(
    original: Sequence[Archive],
    reproduction: Sequence[Archive],
    margin: float = DEFAULT_MARGIN,
    asked: Sequence[str] = (),
) -> Reproduction:
    """The verdict on `original`, repeats of one run, by the verified archives of the runs that repeat it.

    The order of the archives does not matter. Raises UsageError if there is no one result to reproduce.
    """
    if not 0 < margin < 10:
        raise UsageError(f"The margin is {margin:g}: it must be above 0 and below 10.", hint="0.1 means 10 %.")
    if not original or not reproduction:
        raise UsageError("A reproduction needs at least one archive on each side.")
    original = check_original(original)
    known = {archive.run["id"] for archive in original}
    reproduction = in_order(reproduction)
    if both := [archive.name for archive in reproduction if archive.run["id"] in known]:
        raise UsageError(
            f"{both[0]} is one of the original runs, so it cannot reproduce the original.", hint="Leave it out."
        )
    names = choose_figures(original, asked)
    measured = ([measure(archive) for archive in side] for side in (original, reproduction))
    rows, sessions = compare_runs(*([run for run in side if run.good] for side in measured))
    requested, differences = _find_differences(original, reproduction)
    judged = tuple(judge_row(rows[name], margin, len(names)) for name in names)
    found = Reproduction(
        Verdict.CANNOT_TELL, "", margin, judged, (*differences, _session_difference(sessions)), _describe(sessions)
    )
    if reproduction and (ended := _judge_ends(original, reproduction)) is not None:
        return replace(found, verdict=ended[0], reason=ended[1])
    decided = _decide(found)
    if not requested:
        return decided
    phrase = f"The requests differ. {requested[0].phrase}"
    named = (*(NotTheSame(each.name, each.a, each.b, True) for each in requested), *found.not_the_same)
    if decided.verdict is Verdict.DIFFERENT:
        return replace(decided, reason=f"{decided.reason} {phrase}", not_the_same=named)
    return replace(found, reason=phrase, not_the_same=named)


def judge_row(row: Row, margin: float, count: int) -> Figure:
    """The verdict on one of `count` figures, and the reason in a sentence."""
    if not row.new:
        return Figure(row, Verdict.CANNOT_TELL, f"Some repeats lack {row.name}.")
    found, limit = row.ratio, f"margin {format_margin(margin)}"
    if found is None or found.low is None or found.high is None:
        counts = f"{len(row.old)} and {len(row.new)} values"
        few = f"{MIN_RUNS} on each side, or {MIN_HISTORY} on one, are needed"
        return Figure(row, Verdict.CANNOT_TELL, f"{row.name}: {counts} give no interval; {few}.")
    if found.base is None:
        reach = max(found.high, 1 / found.low) - 1
        ends, original = f"{_factor(found.mean)} ({_factor(found.low)} to {_factor(found.high)})", "the original"
    else:
        reach = max(found.high, -found.low) / (found.base or 1.0)
        mean, low, high = (format_amount(value, row.unit) for value in (found.mean, found.low, found.high))
        ends, original = f"{mean} ({low} to {high})", "from the original"
    verdict = found.same(margin, count)
    if verdict is Verdict.REPRODUCED:
        return Figure(row, verdict, f"{row.name}: reproduced within {format_margin(reach)} ({ends}; {limit}).")
    if verdict is Verdict.DIFFERENT:
        return Figure(row, verdict, f"{row.name}: different, {ends} {original}; {limit}.")
    text = f"{row.name}: {ends} {original}, which is undecided; {limit}."
    return Figure(row, verdict, f"{text} More repeats would narrow the interval.")


def _factor(value: float) -> str:
    return f"{value:.3f}×" if value < 9.995 else f"{value:.1f}×"


def _decide(found: Reproduction) -> Reproduction:
    verdicts = {figure.verdict for figure in found.figures}
    worst = next(
        figure
        for verdict in (Verdict.DIFFERENT, Verdict.CANNOT_TELL, Verdict.REPRODUCED)
        for figure in found.figures
        if figure.verdict is verdict
    )
    if verdicts == {Verdict.REPRODUCED}:
        reason = worst.reason if len(found.figures) == 1 else f"All {len(found.figures)} figures are. {worst.reason}"
        return replace(found, verdict=Verdict.REPRODUCED, reason=reason)
    if Verdict.DIFFERENT not in verdicts:
        return replace(found, reason=worst.reason)
    if causes := [each.name for each in found.not_the_same if each.matters]:
        reason = f"{worst.reason} But there were other differences: {', '.join(causes)}."
        return replace(found, reason=reason)
    return replace(found, verdict=Verdict.DIFFERENT, reason=worst.reason)


def _judge_ends(original: Sequence[Archive], reproduction: Sequence[Archive]) -> tuple[Verdict, str] | None:
    """What follows from runs that did not succeed, or measured nothing; None if all did."""
    for archive in (*original, *reproduction):
        label = archive.result["label"]
        if label["word"] == "functional":
            name = archive.name
            return Verdict.CANNOT_TELL, f"{name} is functional, not a performance measurement: {label['reason']}."
    outcomes = [(archive.name, outcome_of(archive.result)) for archive in reproduction]
    bad = [(name, outcome) for name, outcome in outcomes if outcome not in SUCCESSFUL]
    if not bad:
        return None
    failed = next(((name, outcome) for name, outcome in bad if outcome != "goal_missed"), None)
    if failed:
        return Verdict.CANNOT_TELL, f"{failed[0]} ended as {failed[1].replace('_', ' ')}."
    counts = f"{len(bad)} of {len(reproduction)} runs missed the goal, which the original reached"
    if len(bad) < len(reproduction) or len(reproduction) < MIN_RUNS:
        return Verdict.CANNOT_TELL, f"{counts}."
    return Verdict.DIFFERENT, f"All {len(reproduction)} runs missed the goal, which the original reached."


def format_margin(margin: float) -> str:
    """ "10 %", "2.5 %", rounded up, so that figures do lie within the margin shown."""
    percent = math.ceil(1000 * margin - 1e-9) / 10
    return f"{percent:g}\u00a0%"


# --- what was not the same ----------------------------------------------------------------------------------------


def _find_differences(
    original: Sequence[Archive], reproduction: Sequence[Archive]
) -> tuple[list[Difference], list[NotTheSame]]:
    """The requested settings that differ, and the facts of machine, software and conditions that differ."""
    reference = original[0]
    asked: dict[Difference, None] = {}
    surroundings: dict[NotTheSame, None] = {}
    for archive in reproduction:
        found = [*key_of(reference).differences(key_of(archive))]
        if archive.result["workers"] != reference.result["workers"]:
            counts = (str(each.result["workers"]) for each in (reference, archive))
            found.append(Difference("workers", "numbers of workers", *counts))
        for difference in found:
            if difference.word in _SURROUNDINGS or difference.name.startswith(_PLACE_SETTINGS):
                each = NotTheSame(difference.name, difference.a, difference.b, True)
                surroundings[each] = None
            else:
                asked[difference] = None
        if (measured := find_network_difference(reference, archive)) is not None:
            surroundings[NotTheSame(measured.name, measured.a, measured.b, True)] = None
        surroundings |= dict.fromkeys(_provenance_differences(reference, archive))
    labels = [
        sorted({label for each in side for label in conditions_of(each).labels}) for side in (original, reproduction)
    ]
    if labels[0] != labels[1]:
        before, after = (", ".join(each) or "none" for each in labels)
        surroundings[NotTheSame("conditions", before, after, True)] = None
    return list(asked), list(surroundings)


# Facts of run.json's provenance that the comparability key leaves out, and whether times may depend on them.
_FACTS: dict[str, tuple[Callable[[JsonObject], object], bool]] = {
    "GPU driver": (lambda found: (found.get("machine") or {}).get("gpu_driver"), True),
    "memory": (lambda found: format_value((found.get("machine") or {}).get("memory_bytes"), "B"), False),
    "operating system": (lambda found: (found.get("machine") or {}).get("platform"), False),
    "Python": (lambda found: found.get("python"), False),
    "mlbench": (lambda found: found.get("mlbench"), False),
}


def _provenance_differences(original: Archive, reproduction: Archive) -> Iterable[NotTheSame]:
    one, other = (archive.run.get("provenance") for archive in (original, reproduction))
    if not isinstance(one, dict) or not isinstance(other, dict):
        return
    for name, (read, matters) in _FACTS.items():
        a, b = read(one), read(other)
        if a != b:
            yield NotTheSame(name, str(a or UNKNOWN), str(b or UNKNOWN), matters)
    packages = [known for found in (one, other) if (known := found.get("packages")) is not None]
    if len(packages) < 2:
        return
    changed = [name for name in sorted({*packages[0], *packages[1]}) if packages[0].get(name) != packages[1].get(name)]
    for name in changed[:_MAX_PACKAGES]:
        before, after = (str(each.get(name) or "none") for each in packages)
        yield NotTheSame(f"package {name}", before, after, False)
    if len(changed) > _MAX_PACKAGES:
        yield NotTheSame("packages", "–", f"{len(changed) - _MAX_PACKAGES} more differ", False)


def _session_difference(sessions: Sessions) -> NotTheSame:
    counts = [len(set(side)) for side in (sessions.a, sessions.b)]
    words = [counted(count, "session") for count in counts]
    both = f", {len(sessions.shared)} of them common" if sessions.shared else ", at another time"
    return NotTheSame("time", words[0], f"{words[1]}{both}", False)


def _describe(sessions: Sessions) -> str:
    if sessions.basis is Basis.UNKNOWN:
        return "one session on a side, so differences from day to day are not included"
    return sessions.note


def in_order(archives: Iterable[Archive]) -> list[Archive]:
    """Each run once, in an order that does not depend on how they were given."""
    return sorted(
        drop_duplicates(archives),
        key=lambda archive: tuple(str(archive.run[name]) for name in ("created", "name", "id")),
    )
