"""Do runs repeat an earlier result? A pure function from the archives of both sides to a verdict.

Every figure is tested for equivalence within a margin (equivalence.py). All of them have to lie within it, and each is
tested at 5 %, which keeps the whole at 5 % (an intersection-union test); for "different" one of k figures suffices, so
each is tested at 5 % / k. What could not be the same is listed beside the verdict. A figure that differs where the
machine, the software or the conditions differ, too, is no verdict on the original. Runs of another request,
for example of another method, may be different, but never reproduce anything.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.baseline import SECONDS, figures_of
from mlbench_cli.results.analysis.comparability import (
    UNKNOWN,
    Difference,
    conditions_of,
    find_network_difference,
    key_of,
)
from mlbench_cli.results.analysis.equivalence import (
    LEVEL,
    MIN_REPEATS,
    LogRatio,
    decidable_margin,
    log_ratio,
    paired_log_ratio,
    repeats_needed,
    upper_deviation,
)
from mlbench_cli.results.analysis.numbers import format_value, unit_of
from mlbench_cli.results.analysis.series import drop_duplicates, measure
from mlbench_cli.results.analysis.sessions import Basis, Sessions, find_sessions, mean_by_session
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.text import counted

DEFAULT_MARGIN = 0.10
REPEATS_OF_ONE = 5  # of an original that is a single run, whose spread nobody knows
_THROUGHPUT = "throughput"
_BANDWIDTH = "busbw GB/s"
# Words of comparability that a request does not decide: another machine, release or cluster has other ones.
_SURROUNDINGS = frozenset({"cluster", "machine", "image", "code", "framework", "judge", "division", "label"})
_PLACE_SETTINGS = ("values of engine", "values of kubernetes.")
_MAX_PACKAGES = 5


class Answer(StrEnum):
    """What became of a reproduction."""

    REPRODUCED = "reproduced"
    DIFFERENT = "different"
    CANNOT_TELL = "cannot_tell"

    @property
    def exit_code(self) -> int:
        """0, 7 or 9, as of the gate."""
        verdicts = {Answer.REPRODUCED: Verdict.PASSED, Answer.DIFFERENT: Verdict.FAILED}
        return verdicts.get(self, Verdict.CANNOT_TELL).exit_code

    @property
    def phrase(self) -> str:
        """For people: "cannot tell"."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class Figure:
    """One figure of both sides. `ratio` is reproduction / original of geometric means, `low` to `high` its 90 %
    interval, and `p` the p-value of equivalence; None if they cannot be had."""

    name: str
    answer: Answer
    reason: str
    original: tuple[float, ...]
    reproduction: tuple[float, ...]
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    def to_dict(self) -> JsonObject:
        """The figure as a receipt has it."""
        return {
            "name": self.name,
            "verdict": str(self.answer),
            "reason": self.reason,
            "original": list(self.original),
            "reproduction": list(self.reproduction),
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "p": self.p,
        }


@dataclass(frozen=True)
class NotTheSame:
    """A fact in which the runs differ from the original's. `matters`: times may differ because of it."""

    name: str
    original: str
    reproduction: str
    matters: bool


@dataclass(frozen=True)
class Reproduction:
    """The verdict on a result, with all that it was made from."""

    answer: Answer
    reason: str
    margin: float
    figures: tuple[Figure, ...]
    not_the_same: tuple[NotTheSame, ...]
    sessions: str

    def to_dict(self) -> JsonObject:
        """The verdict as a receipt has it."""
        return {
            "verdict": str(self.answer),
            "reason": self.reason,
            "margin": self.margin,
            "level": LEVEL,
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
        name = archive.run["name"]
        if doubts := archive.result.get("doubts"):
            raise UsageError(
                f"The evidence of {name} is in doubt ({', '.join(doubts)}): it has no result to reproduce.",
                hint=f"mlbench verify {archive.path}",
            )
        if not measure(archive).good:
            raise UsageError(
                f"{name} ended as {measure(archive).outcome.replace('_', ' ')}: it has no result to reproduce.",
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
    known = set.intersection(*(set(figures_of(archive)) for archive in original))
    for name in asked:
        if name not in known:
            raise UsageError(f'The original has no figure "{name[:60]}".', hint=f"One of: {', '.join(sorted(known))}")
    if asked:
        return list(dict.fromkeys(asked))
    if bandwidths := sorted(name for name in known if name.endswith(_BANDWIDTH)):
        return bandwidths
    result = original[0].result
    goal = result["goal"]
    if goal and result["budget_seconds"] is not None and goal["metric"] in known:
        return [goal["metric"]]
    return [_THROUGHPUT] if not goal and _THROUGHPUT in known else [SECONDS]


def choose_repeats(original: Sequence[Archive], names: Sequence[str], margin: float) -> Repeats:
    """As many repeats as the original's own spread demands: for its noisiest figure, with a limit of that spread."""
    count = len(original)
    if count == 1:
        return Repeats(REPEATS_OF_ONE, None)
    spreads = []
    for name in names:
        values = [figures_of(archive)[name][0] for archive in original]
        if min(values) > 0:
            spreads.append(statistics.stdev(map(math.log, values)))
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
    original = check_original(original)
    known = {archive.run["id"] for archive in original}
    reproduction = in_order(reproduction)
    if both := [archive.run["name"] for archive in reproduction if archive.run["id"] in known]:
        raise UsageError(
            f"{both[0]} is one of the original runs, so it cannot reproduce the original.", hint="Leave it out."
        )
    names = choose_figures(original, asked)
    sessions = find_sessions(original, reproduction)
    requested, differences = _find_differences(original, reproduction)
    figures = tuple(_judge_figure(name, original, reproduction, sessions, margin, len(names)) for name in names)
    found = Reproduction(
        Answer.CANNOT_TELL, "", margin, figures, (*differences, _session_difference(sessions)), _describe(sessions)
    )
    if reproduction and (ended := _judge_ends(original, reproduction)) is not None:
        return replace(found, answer=ended[0], reason=ended[1])
    decided = _decide(found)
    if not requested:
        return decided
    phrase = f"The requests differ. {requested[0].phrase}"
    named = (*(NotTheSame(each.name, each.a, each.b, True) for each in requested), *found.not_the_same)
    if decided.answer is Answer.DIFFERENT:
        return replace(decided, reason=f"{decided.reason} {phrase}", not_the_same=named)
    return replace(found, reason=phrase, not_the_same=named)


def _decide(found: Reproduction) -> Reproduction:
    answers = {figure.answer for figure in found.figures}
    worst = next(
        figure
        for answer in (Answer.DIFFERENT, Answer.CANNOT_TELL, Answer.REPRODUCED)
        for figure in found.figures
        if figure.answer is answer
    )
    if answers == {Answer.REPRODUCED}:
        reason = worst.reason if len(found.figures) == 1 else f"All {len(found.figures)} figures are. {worst.reason}"
        return replace(found, answer=Answer.REPRODUCED, reason=reason)
    if Answer.DIFFERENT not in answers:
        return replace(found, reason=worst.reason)
    if causes := [each.name for each in found.not_the_same if each.matters]:
        reason = f"{worst.reason} But there were other differences: {', '.join(causes)}."
        return replace(found, reason=reason)
    return replace(found, answer=Answer.DIFFERENT, reason=worst.reason)


def _judge_ends(original: Sequence[Archive], reproduction: Sequence[Archive]) -> tuple[Answer, str] | None:
    """What follows from runs that did not succeed, or measured nothing; None if all did."""
    for archive in (*original, *reproduction):
        label = archive.result["label"]
        if label["word"] == "functional":
            name = archive.run["name"]
            return Answer.CANNOT_TELL, f"{name} is functional, not a performance measurement: {label['reason']}."
    bad = [archive for archive in reproduction if not measure(archive).good]
    if not bad:
        return None
    failed = [archive for archive in bad if measure(archive).outcome != "goal_missed"]
    if failed:
        outcome = measure(failed[0]).outcome.replace("_", " ")
        return Answer.CANNOT_TELL, f"{failed[0].run['name']} ended as {outcome}."
    counts = f"{len(bad)} of {len(reproduction)} runs missed the goal, which the original reached"
    if len(bad) < len(reproduction) or len(reproduction) < MIN_REPEATS:
        return Answer.CANNOT_TELL, f"{counts}."
    return Answer.DIFFERENT, f"All {len(reproduction)} runs missed the goal, which the original reached."


def _judge_figure(
    name: str,
    original: Sequence[Archive],
    reproduction: Sequence[Archive],
    sessions: Sessions,
    margin: float,
    count: int,
) -> Figure:
    before, after = (
        [figures[name][0] for archive in side if name in (figures := figures_of(archive))]
        for side in (original, reproduction)
    )
    values = (tuple(before), tuple(after))
    if len(after) < len(reproduction) or not after:
        return Figure(name, Answer.CANNOT_TELL, f"Some repeats lack {name}.", *values)
    found = _ratio_of(before, after, sessions)
    if found is None:
        counts = f"{len(before)} and {len(after)} values"
        return Figure(name, Answer.CANNOT_TELL, f"{name}: {counts} give no interval; add repeats.", *values)
    low, high = found.interval(1 - 2 * LEVEL)
    answer, reason = judge_ratio(name, found, margin, count)
    return Figure(name, answer, reason, *values, found.ratio, low, high, found.equivalence_p(margin))


def judge_ratio(name: str, found: LogRatio, margin: float, count: int) -> tuple[Answer, str]:
    """The verdict on one of `count` figures, and the reason in a sentence."""
    low, high = found.interval(1 - 2 * LEVEL)
    limit = f"margin {format_margin(margin)}"
    if 1 / (1 + margin) < low and high < 1 + margin:
        reach = max(high, 1 / low) - 1
        text = (
            f"{name}: reproduced within {format_margin(reach)} ({_format_interval(found.ratio, low, high)}; {limit})."
        )
        return Answer.REPRODUCED, text
    wide = found.interval(1 - LEVEL / count)
    if wide[0] > 1 + margin or wide[1] < 1 / (1 + margin):
        text = f"{name}: different, {_format_interval(found.ratio, *wide)} the original; {limit}."
        return Answer.DIFFERENT, text
    text = f"{name}: {_format_interval(found.ratio, low, high)} the original, which is undecided; {limit}."
    return Answer.CANNOT_TELL, f"{text} More repeats would narrow the interval."


def _format_interval(ratio: float, low: float, high: float) -> str:
    digits = 3 if ratio < 9.995 else 1
    return f"{ratio:.{digits}f}× ({low:.{digits}f} to {high:.{digits}f})"


def format_margin(margin: float) -> str:
    """ "10 %", "2.5 %", rounded up, so that what is said to lie within does."""
    percent = math.ceil(1000 * margin - 1e-9) / 10
    return f"{percent:g}\u00a0%"


def _ratio_of(before: Sequence[float], after: Sequence[float], sessions: Sessions) -> LogRatio | None:
    """Over runs, or over means of sessions where both sides have several."""
    if sessions.basis is Basis.PAIRED and min(*before, *after) > 0:
        means = mean_by_session(before, sessions.a), mean_by_session(after, sessions.b)
        return paired_log_ratio([math.log(means[1][each] / means[0][each]) for each in sessions.shared])
    if sessions.basis is Basis.BETWEEN:
        sides = mean_by_session(before, sessions.a), mean_by_session(after, sessions.b)
        return log_ratio(*(list(side.values()) for side in sides))
    return log_ratio(before, after)


# --- what was not the same ----------------------------------------------------------------------------------------


def _find_differences(
    original: Sequence[Archive], reproduction: Sequence[Archive]
) -> tuple[list[Difference], list[NotTheSame]]:
    """What was asked for differently; and what of machine, software and conditions could not be the same."""
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
    packages = [found.get("packages") or {} for found in (one, other)]
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
        return "one session on a side, so the interval has no session spread"
    return sessions.note


def in_order(archives: Iterable[Archive]) -> list[Archive]:
    """Each run once, in an order that does not depend on how they were given."""
    return sorted(
        drop_duplicates(archives),
        key=lambda archive: tuple(str(archive.run[name]) for name in ("created", "name", "id")),
    )


def unit_of_figure(name: str) -> str:
    """The unit of a figure's values."""
    return "s" if name == SECONDS else unit_of(name)
