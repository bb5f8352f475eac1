"""Compare two results: what differs, what stands in the way, and one row for each figure.

Either side is one archive or several, repeats of one another. `compare` is what every presenter prints: `mlbench
compare`, `gate`, `reproduce` and `report`, the API and the dashboard. Runs that did not succeed are counted, and have
no figures.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.goals import BEST, MEAN
from mlbench_cli.model.methods import is_command, method_of
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis import energy
from mlbench_cli.results.analysis.comparability import (
    CHOICES,
    CONDITIONS,
    WORKERS,
    describe,
    describe_condition_difference,
    find_network_difference,
    key_of,
)
from mlbench_cli.results.analysis.figures import IN_DOUBT, TIMES, Figure
from mlbench_cli.results.analysis.numbers import Change, describe_change
from mlbench_cli.results.analysis.program_metrics import find_direction
from mlbench_cli.results.analysis.series import Measurement, drop_duplicates, find_diverged, have_one_unit, measure
from mlbench_cli.results.analysis.sessions import Basis, Sessions, find_sessions, relate
from mlbench_cli.results.analysis.stats import MIN_RUNS, Estimate, Ratio, estimate
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import counted

_UNINTERESTING = ("name", "price", "spec_version", "template")  # of a spec: differ between any two runs, or with argv
_NESTED = ("parameters", "kubernetes")
CODE = "code"
# Settings that sizes and the matrix of an experiment vary, besides parameters.
_AXES = (
    *("task", "preset", "backend", "device", "processes_per_worker", "gpus_per_worker", "cpus"),
    *("method", "network"),
)
_ENTRIES = ("parameter ", "setting ")

Values = tuple[tuple[str, str], ...]  # name and value of each axis that varies


class Row(Struct, frozen=True, dict=True):
    """One figure of both sides, and B's over A's; of values that are not all above 0, B's less A's. A side without the
    figure in each of its runs, in one unit, has no values; `diverged` says of either side where the last value of a
    metric is no number: "nan in 1 of 3 runs". `other_unit` is that of A if it is not B's, so that there is no ratio."""

    name: str
    unit: str
    higher_is_better: bool | None
    is_time: bool
    is_metric: bool
    old: tuple[float, ...]
    new: tuple[float, ...]
    ratio: Ratio | None
    diverged: tuple[str, str] = ("", "")
    other_unit: str = ""

    @cached_property
    def a(self) -> Estimate | None:
        """Mean and interval of A."""
        return estimate(self.old) if self.old else None

    @cached_property
    def b(self) -> Estimate | None:
        """Mean and interval of B."""
        return estimate(self.new) if self.new else None

    @property
    def change(self) -> Change:
        """B relative to A, by its parts."""
        if self.other_unit:
            return Change("other unit")
        return describe_change(self.a, self.b, self.ratio, self.unit, self.higher_is_better, is_time=self.is_time)

    @property
    def words(self) -> str:
        """B relative to A: "1.45× faster (1.39 to 1.52)"."""
        return str(self.change)

    def worse(self, higher_is_better: bool | None) -> Ratio | None:
        """How many times worse B is than A, or by how much."""
        return None if self.ratio is None else self.ratio.inverse if higher_is_better else self.ratio

    def to_dict(self) -> JsonObject:
        """Both sides and their ratio or difference, each with mean and interval, or null."""
        sides = {name: found.to_dict() if (found := getattr(self, name)) else None for name in ("a", "b")}
        each: JsonObject = {**sides, **documents_of(self.ratio)}
        facts: JsonObject = {"unit": self.unit, "higher_is_better": self.higher_is_better, "is_time": self.is_time}
        facts |= {"is_metric": self.is_metric, "diverged": list(self.diverged), "other_unit": self.other_unit}
        return {**each, **facts, "words": self.words, "change": to_builtins(self.change)}


def documents_of(found: Ratio | None) -> JsonObject:
    """The entries `ratio` and `difference` of a JSON document, of which one is null."""
    document = None if found is None else found.to_dict()
    is_difference = found is not None and found.is_difference
    return {"ratio": None if is_difference else document, "difference": document if is_difference else None}


class Obstacle(Struct, frozen=True):
    """Why figures should not be compared. `word` is the argument of `--across` that accepts it; empty if it cannot be
    accepted. `reason`: what several runs may have in common, of an obstacle that is about one run.
    """

    word: str
    text: str
    reason: str = ""

    @property
    def sentence(self) -> str:
        """The text, and how to accept it."""
        return f"{self.text} Accept it with --across {self.word}." if self.word else self.text


def be(name: str) -> str:
    """ "is", or "are" for a plural such as "2 workers"."""
    return "are" if name.endswith("workers") and name[:1].isdecimal() else "is"


class Comparison(Struct, frozen=True):
    """Two sides with a row for each figure.

    `obstacles` say why the figures mean little together, without those that the user accepted (`across`). `excluded`
    names the runs that have no figures, with how they ended; `failed` those of B that did not succeed. `about` is the
    only figure that the comparison has been reduced to; empty: all.
    """

    a: str
    b: str
    differences: Mapping[str, tuple[Any, Any]]
    obstacles: tuple[Obstacle, ...]
    rows: Mapping[str, Row]
    sessions: Sessions
    excluded: Mapping[str, str]
    failed: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    conditions: Mapping[str, str] | None = None
    energy_sources: tuple[str, ...] = ()
    about: str = ""

    def reduce_to(self, name: str) -> "Comparison":
        """The same comparison of a single figure."""
        return replace(self, rows={name: self.rows[name]}, about=name)

    @property
    def blocking(self) -> tuple[Obstacle, ...]:
        """The obstacles other than settings that people choose: with them the figures cannot be compared."""
        return tuple(each for each in self.obstacles if each.word not in CHOICES)

    @property
    def counts(self) -> str:
        """ "3 and 3 runs"."""
        if len(self.sessions.a) == len(self.sessions.b) == 1:
            return "one run each"
        return f"{len(self.sessions.a)} and {counted(len(self.sessions.b), 'run')}"

    @property
    def verdict(self) -> str | None:
        """The verdict in a sentence: which side takes longer, if the runs can tell, and nothing but settings that
        people choose differs. None without a common figure."""
        names = (self.about,) if self.about else TIMES
        row = next((self.rows[name] for name in names if name in self.rows and self.rows[name].ratio), None)
        for name, runs in ((self.a, self.sessions.a), (self.b, self.sessions.b)):
            if not runs:
                return f"No verdict on {self.a} and {self.b}: no run of {name} succeeded."
        if self.blocking:
            return f"No verdict on {self.a} and {self.b} ({self.counts}): {self.blocking[0].sentence}"
        if row is None or row.ratio is None:
            return None
        found = row.ratio
        if found.low is None:
            return f"{self._too_few(found)}; each side needs at least {MIN_RUNS}."
        if found.is_confounded:
            return f"No verdict on {self.a} and {self.b} ({self.counts}): {self.sessions.note}."
        if not row.is_time:
            return f"{row.name}, {self.b} against {self.a}: {row.words} (95 %; {self.counts})."
        if not found.is_different:
            take = "take" if be(self.b) == "are" else "takes"
            return f"No difference seen: {self.b} {take} {row.change.ends} as long as {self.a} (95 %; {self.counts})."
        change = row.change
        return f"{self.b} {be(self.b)} {change.difference} than {self.a} (95 %: {change.ends}; {self.counts})."

    def _too_few(self, found: Ratio) -> str:
        if self.sessions.basis in (Basis.PAIRED, Basis.BETWEEN):
            return f"Too few sessions for a verdict on {self.a} and {self.b}: {self.sessions.note}"
        return f"Too few runs for a verdict on {self.a} and {self.b}: {self.counts}"

    def to_dict(self) -> JsonObject:
        """As `mlbench compare -o json` prints it."""
        return {
            "schema_version": 1,
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict,
            "rows": {name: row.to_dict() for name, row in self.rows.items()},
            "runs": [len(self.sessions.a), len(self.sessions.b)],
            "excluded": dict(self.excluded),
            "sessions": {
                "a": len(set(self.sessions.a)),
                "b": len(set(self.sessions.b)),
                "shared": len(self.sessions.shared),
                "basis": str(self.sessions.basis),
                "note": self.sessions.note,
                "warning": self.sessions.warning,
                "in_blocks": self.sessions.in_blocks,
            },
            "differences": {name: list(values) for name, values in self.differences.items()},
            "is_comparable": not self.blocking,
            "obstacles": [obstacle.text for obstacle in self.obstacles],
            "obstacle_words": sorted({obstacle.word for obstacle in self.obstacles if obstacle.word}),
            "across": list(self.across),
            "conditions": dict(self.conditions or {}),
            "energy_sources": list(self.energy_sources),
        }


def compare(
    a: Sequence[Archive],
    b: Sequence[Archive],
    names: tuple[str, str] | None = None,
    across: Collection[str] = (),
) -> Comparison:
    """Compare two sides of verified archives.

    `names` are those of the sides, by default those of their runs. `across` are the words of differences that are
    wanted (comparability.WORDS). An archive that is given twice counts once. Raises UsageError for two archives of one
    run that differ.
    """
    if not a or not b:
        raise UsageError("A comparison needs at least one archive on each side.")
    drop_duplicates([*a, *b])  # refuses two versions of one run, also one on each side
    a, b = drop_duplicates(a), drop_duplicates(b)
    measured = {id(archive): measure(archive) for archive in (*a, *b)}
    one, other = ([measured[id(archive)] for archive in side] for side in (a, b))
    rows, sessions = compare_runs([run for run in one if run.good], [run for run in other if run.good])
    first, second = names or (", ".join(run.name for run in one), ", ".join(run.name for run in other))
    counted_in = [[each for each in side if measured[id(each)].good] or side for side in (a, b)]
    obstacles = [found for found in dict.fromkeys(_obstacles(*counted_in)) if found.word not in across]
    obstacles += [*_unreached(first, one), *_unreached(second, other)]
    every = [*one, *other]
    return Comparison(
        first,
        second,
        _differences(_settings(a), _settings(b)),
        (*obstacles, *(Obstacle("", describe_doubt(each), IN_DOUBT) for each in b if each.result.get("doubts"))),
        rows,
        sessions,
        {run.name: run.outcome.replace("_", " ") for run in every if not run.good},
        tuple(run.name for run in other if not run.good and run.outcome != IN_DOUBT),
        tuple(sorted(across)),
        {run.name: run.conditions.phrase for run in every if run.conditions.phrase},
        tuple(dict.fromkeys(found.label for run in (*a, *b) if (found := energy.find_energy(run)))),
    )


def compare_runs(one: Sequence[Measurement], other: Sequence[Measurement]) -> tuple[dict[str, Row], Sessions]:
    """A row for each figure of two sides of repeats, and the sessions that they were measured in."""
    sessions = find_sessions([run.moment for run in one], [run.moment for run in other])
    runs = (*other, *one)
    known = {name: Figure(math.nan, "", find_direction(name), is_metric=True) for run in runs for name in run.diverged}
    known |= {name: found for run in runs for name, found in run.figures.items()}
    order = dict.fromkeys(name for run in (*one, *other) for name in (*run.figures, *run.diverged))
    diverged = find_diverged(one), find_diverged(other)
    rows = {}
    for name in order:
        about, units = known[name], (_unit(name, one), _unit(name, other))
        old, new = (_values(name, side) for side in (one, other))
        other_unit = units[0] if all(units) and units[0] != units[1] else ""
        rows[name] = Row(
            name,
            units[1] or units[0],
            about.higher_is_better,
            about.is_time,
            about.is_metric,
            old,
            new,
            None if other_unit else relate(old, new, sessions, takes_difference=not about.is_time),
            (diverged[0].get(name, ""), diverged[1].get(name, "")) if about.is_metric else ("", ""),
            other_unit,
        )
    return rows, sessions


def _unit(name: str, side: Sequence[Measurement]) -> str:
    """The unit of a figure; "ms and s" if the runs have several. A run may report none."""
    found = [run.figures[name].unit for run in side if name in run.figures]
    return " and ".join(dict.fromkeys(filter(None, found)))


def _values(name: str, side: Sequence[Measurement]) -> tuple[float, ...]:
    """One value for each run; none at all if a run lacks the figure, or has it in another unit."""
    found = [run.figures[name] for run in side if name in run.figures]
    is_whole = len(found) == len(side) and have_one_unit(found)
    return tuple(figure.value for figure in found) if is_whole else ()


def find_metric(rows: Iterable[str], asked: str | None, option: str = "--metric") -> str | None:
    """The figure that is meant: by its name, by "bandwidth", or by a part of it that is unique. The time by default.

    Raises UsageError that names those that exist.
    """
    names = list(rows)
    if asked is None:
        return next((name for name in TIMES if name in names), None)
    plain = asked.lower()
    wanted = plain if any(name.lower() == plain for name in names) else {"bandwidth": "busbw"}.get(plain, plain)
    exact = [name for name in names if name == asked] or [name for name in names if name.lower() == wanted]
    matches = exact or [name for name in names if wanted in name.lower()]
    lasts = [name for name in matches if not name.endswith((BEST, MEAN))]
    matches = lasts if len(lasts) == 1 else matches  # "acc" means the last value of accuracy, not its best or mean
    if len(matches) == 1:
        return matches[0]
    if not names:
        raise UsageError(
            f'{option} "{asked[:60]}": these results have no figures, because no run succeeded on both sides.',
            hint="mlbench status RUN says why a run failed",
        )
    problem = f"names {len(matches)} figures" if matches else "is not a figure of these results"
    near = "" if matches else did_you_mean(asked, names)
    raise UsageError(f'{option} "{asked[:60]}" {problem}.{near}', hint=f"One of: {', '.join(matches or names)}.")


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
        "code": key_of(archive).code,
        "outcome": archive.result["outcome"],
        "mlbench": archive.run.get("mlbench"),
    }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _obstacles(one: Sequence[Archive], other: Sequence[Archive]) -> Iterator[Obstacle]:
    first = one[0]
    reference, judged = key_of(first), (*one, *other)
    for archive in judged[1:]:
        # Two versions of a user's program are what a comparison is for; within a side they are no repeats.
        is_before_and_after = archive in other and is_command(first.run["spec"]) and is_command(archive.run["spec"])
        for difference in reference.differences(key_of(archive)):
            if not (difference.word == CODE and is_before_and_after):
                yield Obstacle(difference.word, difference.phrase)
        if (measured := find_network_difference(first, archive)) is not None:
            yield Obstacle(measured.word, measured.phrase)
        counts = [run.result["workers"] for run in (first, archive)]
        if counts[0] != counts[1]:
            yield Obstacle(WORKERS, f"The numbers of workers differ: {counts[0]} and {counts[1]}.")
    for archive in other[1:] if is_command(other[0].run["spec"]) else ():
        codes = [key_of(each).code for each in (other[0], archive)]
        if codes[0] != codes[1]:
            yield Obstacle(CODE, f"The digests of the code differ: {codes[0]} and {codes[1]}.")
    for archive in judged:
        if archive.result["label"]["word"] == "functional":
            reason = archive.result["label"]["reason"]
            yield Obstacle("label", f"{archive.name} is functional, not a performance measurement: {reason}.")
    if (differ := describe_condition_difference(one, other)) is not None:
        yield Obstacle(CONDITIONS, differ)
    both = {archive.run["id"] for archive in one} & {archive.run["id"] for archive in other}
    for archive in one:
        if archive.run["id"] in both:
            yield Obstacle("", f"{archive.name} is on both sides.", "on both sides")


def _unreached(name: str, side: Sequence[Measurement]) -> Iterator[Obstacle]:
    """What is unknown of a side whose runs did not all reach the goal: the others are those that needed less time."""
    missed = sum(run.is_unreached for run in side)
    if missed and any(run.good for run in side):
        counts = f"{missed} of {counted(len(side), 'run')} of {name}"
        yield Obstacle("", f"{counts} did not reach the goal, so the time of {name} is unknown.", f"goal of {name}")


def describe_doubt(archive: Archive) -> str:
    """Why an archive has no figures, in a sentence."""
    return f"The evidence of {archive.name} is in doubt ({', '.join(archive.result['doubts'])})."


# --- several sizes or settings --------------------------------------------------------------------------------------


class Pair(Struct, frozen=True):
    """The runs of both sides with equal `values`; no values if neither side varies anything."""

    values: Values
    a: tuple[Archive, ...]
    b: tuple[Archive, ...]


def pair_cells(a: Sequence[Archive], b: Sequence[Archive]) -> tuple[list[Pair], list[str]]:
    """The settings that both sides have, in the order of A's runs, and the labels of those that one side lacks.

    Runs of a side that differ in nothing that an experiment varies on purpose are repeats of one another. Raises
    UsageError if the sides have nothing in common.
    """
    axes = dict.fromkeys([*_varying_axes(a), *_varying_axes(b)])
    ours, theirs = _cells(a, axes), _cells(b, axes)
    pairs = [Pair(values, tuple(ours[values]), tuple(theirs[values])) for values in ours if values in theirs]
    alone = [f"{describe_cell(values)} (A only)" for values in ours if values not in theirs]
    alone += [f"{describe_cell(values)} (B only)" for values in theirs if values not in ours]
    if not pairs:
        raise UsageError(
            f"A and B have no size or setting in common: {'; '.join(alone)}.",
            hint="To compare them anyway, name single runs.",
        )
    return pairs, alone


def compare_cells(
    a: Sequence[Archive], b: Sequence[Archive], names: tuple[str, str] | None = None, across: Collection[str] = ()
) -> tuple[dict[Values, Comparison], list[str]]:
    """The comparison of each setting that both sides have, and the labels of those that one side lacks.

    What `mlbench compare`, the API and the dashboard show. Raises UsageError if the sides have nothing in common.
    """
    pairs, alone = pair_cells(a, b)
    return {pair.values: compare(pair.a, pair.b, names, across) for pair in pairs}, alone


def make_document(found: Sequence[tuple[Values, Comparison]], alone: Sequence[str]) -> JsonObject:
    """A single comparison as is; several as a list, each with the values of its cell."""
    if [values for values, _ in found] == [()]:
        return found[0][1].to_dict()
    comparisons = [{"cell": dict(values), **comparison.to_dict()} for values, comparison in found]
    return {"schema_version": 1, "comparisons": comparisons, "left_out": list(alone)}


def describe_cell(values: Values) -> str:
    """ "2 workers, backend mpi", for tables and messages."""
    return ", ".join(_describe(name, value) for name, value in values)


def _describe(name: str, value: str) -> str:
    if name == WORKERS:
        return f"{value} worker{'' if value == '1' else 's'}"
    return describe(name, value) or f"no {name}"


def _axes_of(archive: Archive) -> dict[str, str]:
    facts = key_of(archive).facts()
    axes = {name: value for name, value in facts.items() if name in _AXES or name.startswith(_ENTRIES)}
    return {WORKERS: str(archive.result["workers"]), **axes}


def _varying_axes(side: Sequence[Archive]) -> list[str]:
    every = [_axes_of(archive) for archive in side]
    names = dict.fromkeys(name for axes in every for name in axes)
    return [name for name in names if len({axes.get(name, "") for axes in every}) > 1]


def _cells(side: Sequence[Archive], axes: Iterable[str]) -> dict[Values, list[Archive]]:
    cells: dict[Values, list[Archive]] = {}
    for archive in side:
        own = _axes_of(archive)
        cells.setdefault(tuple((name, own.get(name, "")) for name in axes), []).append(archive)
    return cells
