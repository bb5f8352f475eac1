"""Compare two results: differences, obstacles, and ratios of figures.

Either side is one archive or several, repeats of one another; then its figures are means with their intervals.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlbench_cli.model.methods import method_of
from mlbench_cli.results.analysis import collectives, energy, program_metrics
from mlbench_cli.results.analysis.comparability import (
    CONDITIONS,
    WORKERS,
    conditions_of,
    describe_condition_difference,
    find_network_difference,
    key_of,
)
from mlbench_cli.results.analysis.numbers import format_change, unit_of, verdict_sentence
from mlbench_cli.results.analysis.series import IN_DOUBT, SUCCESSFUL, drop_duplicates, measure, outcome_of
from mlbench_cli.results.analysis.sessions import Basis, Sessions, find_sessions, mean_by_session
from mlbench_cli.results.analysis.statistics import Estimate, estimate, ratio
from mlbench_cli.results.archive.reader import Archive

_UNINTERESTING = ("name", "price", "spec_version")  # fields of a spec that may differ between any two runs
_NESTED = ("parameters", "kubernetes")
THROUGHPUT = "samples per second"
TIMES = ("task", "run")  # main figure of a comparison: the first that both sides have


@dataclass(frozen=True)
class ComparisonRow:
    """One figure of both sides, and B's over A's; None if a side has none. `higher_is_better` is None if unknown."""

    a: Estimate | None
    b: Estimate | None
    ratio: Estimate | None
    higher_is_better: bool | None = False

    def to_dict(self) -> dict[str, Any]:
        """Both sides and their ratio, each with mean and interval, or None."""
        each = {name: found.to_dict() if (found := getattr(self, name)) else None for name in ("a", "b", "ratio")}
        return {**each, "higher_is_better": self.higher_is_better}


@dataclass(frozen=True)
class Obstacle:
    """Why figures should not be compared. `word` is the argument of `--across` that accepts it; empty if it cannot be
    accepted.
    """

    word: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """`seconds` by what took them, `others` that are no times (the goal's metric at the end, samples per second),
    `metrics` that the program reported, each with its last, best and mean value (program_metrics.py).

    Ratios of seconds below 1: B was faster. `obstacles` say why the figures mean little together, without those that
    the user accepted (`across`). `failed` names the runs of B that did not succeed. `about` is the only figure that the
    comparison has been reduced to; empty: all.
    """

    a: str
    b: str
    differences: Mapping[str, tuple[Any, Any]]
    obstacles: tuple[Obstacle, ...]
    seconds: Mapping[str, ComparisonRow]
    others: Mapping[str, ComparisonRow]
    failed: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    sessions: Sessions = field(default_factory=lambda: Sessions((), ()))
    energy_sources: tuple[str, ...] = ()
    metrics: Mapping[str, ComparisonRow] = field(default_factory=dict)
    about: str = ""

    def reduce_to(self, name: str) -> "Comparison":
        """The same comparison of a single figure."""
        seconds, others, metrics = (
            {name: rows[name]} if name in rows else {} for rows in (self.seconds, self.others, self.metrics)
        )
        return replace(self, seconds=seconds, others=others, metrics=metrics, about=name)

    @property
    def verdict(self) -> str | None:
        """The verdict in a sentence: which side takes longer, and whether the difference is significant."""
        names = (self.about,) if self.about else TIMES
        rows = (self.rows[name] for name in names if name in self.rows)
        row = next((row for row in rows if row.ratio is not None), None)
        if row is None or row.a is None or row.b is None or row.ratio is None:
            return None
        counts = f"{len(self.sessions.a) or row.a.count} and {len(self.sessions.b) or row.b.count} runs"
        if self.sessions.a and self.sessions.basis is Basis.UNKNOWN:
            return f"No verdict on {self.a} and {self.b} ({counts}): {self.sessions.note}."
        if self.about and self.about not in TIMES:
            is_time, unit = self.about in self.seconds, unit_of(self.about)
            change = format_change(row.a, row.b, row.ratio, unit, row.higher_is_better, is_time=is_time)
            return f"{self.about}, {self.b} against {self.a}: {change} ({counts})."
        return verdict_sentence(self.a, self.b, row.ratio, counts)

    @property
    def rows(self) -> dict[str, ComparisonRow]:
        """All figures by name: times first, then the others, then the program's metrics."""
        return {**self.seconds, **self.others, **self.metrics}

    @property
    def ratios(self) -> dict[str, float | None]:
        """B's mean over A's for each time; None if a side has none."""
        return {name: row.ratio.mean if row.ratio else None for name, row in self.seconds.items()}

    def to_dict(self) -> dict[str, Any]:
        """`seconds` and `ratios` are means; `estimates` has everything with number of repeats and interval."""
        return {
            "schema_version": 1,
            "a": self.a,
            "b": self.b,
            "differences": {name: list(values) for name, values in self.differences.items()},
            "obstacles": [obstacle.text for obstacle in self.obstacles],
            "obstacle_words": sorted({obstacle.word for obstacle in self.obstacles if obstacle.word}),
            "across": list(self.across),
            "verdict": self.verdict,
            "runs": [len(self.sessions.a), len(self.sessions.b)],
            "sessions": {
                "a": len(set(self.sessions.a)),
                "b": len(set(self.sessions.b)),
                "shared": len(self.sessions.shared),
                "basis": str(self.sessions.basis),
                "note": self.sessions.note,
                "in_blocks": self.sessions.in_blocks,
            },
            "conditions": dict(self.conditions),
            "energy_sources": list(self.energy_sources),
            "seconds": {
                name: [side.mean if side else None for side in (row.a, row.b)] for name, row in self.seconds.items()
            },
            "ratios": self.ratios,
            "estimates": {name: row.to_dict() for name, row in self.rows.items()},
        }


def compare(
    a: Sequence[Archive],
    b: Sequence[Archive],
    names: tuple[str, str] | None = None,
    across: Collection[str] = (),
) -> Comparison:
    """Compare two sides of verified archives: settings, outcomes, seconds in total and by category (rank 0's), the
    goal's metric and the throughput.

    `names` are those of the sides, by default those of their runs. `across` are the words of differences that are
    wanted (comparability.WORDS). An archive that is given twice counts once. Raises UsageError for two archives of one
    run that differ.
    """
    drop_duplicates([*a, *b])  # refuses two versions of one run, also one on each side
    a, b = drop_duplicates(a), drop_duplicates(b)
    sessions = find_sessions(a, b)
    seconds = [[_seconds(archive.result) for archive in side] for side in (a, b)]
    others = [[_others(archive) for archive in side] for side in (a, b)]
    reported = [[program_metrics.figures_of(archive) for archive in side] for side in (a, b)]
    known = {*others[0][0], *others[1][0]}
    metrics = [[{n: value for n, (value, _) in each.items() if n not in known} for each in side] for side in reported]
    better = {name: higher for side in reported for each in side for name, (_, higher) in each.items()}
    first, second = names or (", ".join(archive.run["name"] for archive in a), ", ".join(x.run["name"] for x in b))
    obstacles = [found for found in dict.fromkeys(_obstacles(a, b)) if found.word not in across]
    labeled = {str(archive.run["name"]): conditions_of(archive).phrase for archive in (*a, *b)}
    return Comparison(
        first,
        second,
        _differences(_settings(a), _settings(b)),
        tuple(obstacles),
        _rows(seconds[0], seconds[1], sessions),
        _rows(others[0], others[1], sessions, _directions(b[0])),
        tuple(str(archive.run["name"]) for archive in b if outcome_of(archive.result) not in (*SUCCESSFUL, IN_DOUBT)),
        tuple(sorted(across)),
        {name: phrase for name, phrase in labeled.items() if phrase},
        sessions,
        tuple(dict.fromkeys(found.label for run in (*a, *b) if (found := energy.find_energy(run)))),
        _rows(metrics[0], metrics[1], sessions, better),
    )


def _settings(side: Sequence[Archive]) -> dict[str, object]:
    every = [_settings_of(archive) for archive in side]
    if len(every) == 1:
        return every[0]
    found = {}
    for name in dict.fromkeys(name for settings in every for name in settings):
        values = [settings.get(name) for settings in every]
        found[name] = values[0] if all(value == values[0] for value in values) else values
    return found


def _settings_of(archive: Archive) -> dict[str, Any]:
    spec = archive.run["spec"]
    plain = {name: value for name, value in spec.items() if name not in (*_UNINTERESTING, *_NESTED)}
    return {
        **plain,
        "method": method_of(spec),
        **{f"{group}.{name}": value for group in _NESTED for name, value in (spec.get(group) or {}).items()},
        "data": archive.result["data"],
        "synthetic": archive.result["synthetic"],
        "division": archive.result["division"]["word"],
        "outcome": archive.result["outcome"],
        "mlbench": archive.run.get("mlbench"),
    }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _obstacles(one: Sequence[Archive], other: Sequence[Archive]) -> Iterator[Obstacle]:
    first = one[0]
    reference, judged = key_of(first), (*one, *other)
    for archive in judged[1:]:
        for difference in reference.differences(key_of(archive)):
            yield Obstacle(difference.word, difference.phrase)
        if (measured := find_network_difference(first, archive)) is not None:
            yield Obstacle(measured.word, measured.phrase)
        counts = [run.result["workers"] for run in (first, archive)]
        if counts[0] != counts[1]:
            yield Obstacle(WORKERS, f"The numbers of workers differ: {counts[0]} and {counts[1]}.")
    for archive in judged:
        result = archive.result
        if result["label"]["word"] == "functional":
            reason = result["label"]["reason"]
            yield Obstacle("label", f"{result['run']} is functional, not a performance measurement: {reason}.")
        if result.get("doubts"):
            yield Obstacle("", f"The evidence of {result['run']} is in doubt: {', '.join(result['doubts'])}.")
        elif result["outcome"] not in SUCCESSFUL:
            yield Obstacle("", f"{result['run']} ended as {result['outcome']}, so its times are not times to the goal.")
    if (differ := describe_condition_difference(one, other)) is not None:
        yield Obstacle(CONDITIONS, differ)
    both = {archive.run["id"] for archive in one} & {archive.run["id"] for archive in other}
    for archive in one:
        if archive.run["id"] in both:
            yield Obstacle("", f"{archive.run['name']} is on both sides.")


def _seconds(result: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        "run": result["wall_seconds"],
        "task": result["task_seconds"]["wall"],
        "training": result["task_seconds"]["training"],
        **{category: spread["rank0"] for category, spread in result["timings"].items()},
    }


def _others(archive: Archive) -> dict[str, float | None]:
    found = measure(archive)
    goal = archive.result["goal"]
    figures = {**({goal["metric"]: found.value} if goal else {}), THROUGHPUT: found.throughput}
    return {**figures, **energy.figures_of(archive), **collectives.figures_of(archive)}


def _rows(
    a: Sequence[Mapping[str, float | None]],
    b: Sequence[Mapping[str, float | None]],
    sessions: Sessions,
    directions: Mapping[str, bool | None] | None = None,
) -> dict[str, ComparisonRow]:
    """The figures of both sides by name; None for a side of which not every run has the figure.

    `directions`: whether higher is better; None: lower is better, for all of them.
    """
    names = dict.fromkeys(name for figures in (*a, *b) for name in figures)
    rows = {}
    for name in names:
        better = False if directions is None else directions.get(name)
        one, other = (_values(name, side) for side in (a, b))
        rows[name] = _row(one, other, sessions, better)
    return rows


def _values(name: str, side: Sequence[Mapping[str, float | None]]) -> list[float]:
    """One value for each run; none at all if a run lacks the figure."""
    found = [value for figures in side if (value := figures.get(name)) is not None]
    return found if len(found) == len(side) else []


def _row(a: Sequence[float], b: Sequence[float], sessions: Sessions, higher_is_better: bool | None) -> ComparisonRow:
    """With several sessions on a side, its estimate is over one mean per session."""
    if not a or not b:
        return ComparisonRow(estimate(a) if a else None, estimate(b) if b else None, None, higher_is_better)
    means = mean_by_session(a, sessions.a), mean_by_session(b, sessions.b)
    if sessions.basis is Basis.PAIRED:
        return ComparisonRow(estimate(a), estimate(b), _paired_ratio(*means, sessions.shared), higher_is_better)
    one, other = (
        estimate(list(each.values()) if sessions.basis is Basis.BETWEEN else values)
        for values, each in zip((a, b), means, strict=True)
    )
    found = ratio(other, one)
    if found is not None and sessions.basis is Basis.UNKNOWN:
        found = Estimate(found.count, found.mean)
    return ComparisonRow(one, other, found, higher_is_better)


def _paired_ratio(a: Mapping[int, float], b: Mapping[int, float], shared: Sequence[int]) -> Estimate | None:
    """B / A from the logarithms of one ratio for each session."""
    if min(*(a[session] for session in shared), *(b[session] for session in shared)) <= 0:
        return None
    found = estimate([math.log(b[session] / a[session]) for session in shared])
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Estimate(found.count, math.exp(found.mean), low, high)


def _directions(archive: Archive) -> dict[str, bool | None]:
    """Of each figure that is no time, whether higher is better."""
    goal = archive.result["goal"]
    own = {goal["metric"]: goal["comparison"] == ">="} if goal else {}
    curves = {name: not name.endswith("alpha us") for name in collectives.figures_of(archive)}
    return {**own, THROUGHPUT: True, **dict.fromkeys(energy.FIGURES, False), **curves}
