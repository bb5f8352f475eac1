"""Two results side by side: what differs, whether they may be compared, and how their figures relate.

Either side is one archive or several, repeats of one another; then its figures are means with their intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.series import SUCCESSFUL, measure
from mlbench_cli.results.analysis.statistics import Estimate, estimate, ratio
from mlbench_cli.results.archive.reader import Archive

_SPEC_FIELDS = (
    *("task", "preset", "backend", "device", "workers", "processes_per_worker", "gpus_per_worker", "cpus", "goal"),
    *("seed", "engine", "cluster", "image"),
)
THROUGHPUT = "samples per second"


@dataclass(frozen=True)
class Row:
    """One figure of both sides, and B's over A's; None where a side has none."""

    a: Estimate | None
    b: Estimate | None
    ratio: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        return {name: found.to_dict() if (found := getattr(self, name)) else None for name in ("a", "b", "ratio")}


@dataclass(frozen=True)
class Comparison:
    """`seconds` by what took them, `others` that are no times (the goal's metric at the end, samples per second).
    Ratios of seconds below 1: B was faster. `obstacles` say why the figures mean little together.
    """

    a: str
    b: str
    differences: Mapping[str, tuple[Any, Any]]
    obstacles: tuple[str, ...]
    seconds: Mapping[str, Row]
    others: Mapping[str, Row]

    @property
    def ratios(self) -> dict[str, float | None]:
        return {name: row.ratio.mean if row.ratio else None for name, row in self.seconds.items()}

    def to_dict(self) -> dict[str, Any]:
        """`seconds` and `ratios` are means; `estimates` has everything with number of repeats and interval."""
        rows = {**self.seconds, **self.others}
        return {
            "schema_version": 1,
            **{name: value for name, value in asdict(self).items() if name not in ("seconds", "others")},
            "seconds": {
                name: [side.mean if side else None for side in (row.a, row.b)] for name, row in self.seconds.items()
            },
            "ratios": self.ratios,
            "estimates": {name: row.to_dict() for name, row in rows.items()},
        }


def compare(a: Sequence[Archive], b: Sequence[Archive], names: tuple[str, str] | None = None) -> Comparison:
    """Compare two sides of verified archives: settings, outcomes, seconds in total and by category (rank 0's), the
    goal's metric and the throughput. `names` are those of the sides, by default those of their runs.
    """
    seconds = [_columns([_seconds(archive.result) for archive in side]) for side in (a, b)]
    others = [_columns([_others(archive) for archive in side]) for side in (a, b)]
    first, second = names or (", ".join(archive.run["name"] for archive in a), ", ".join(x.run["name"] for x in b))
    return Comparison(
        first,
        second,
        _differences(_settings(a), _settings(b)),
        tuple(dict.fromkeys(_obstacles(a, b))),
        _rows(*seconds),
        _rows(*others),
    )


def _settings(side: Sequence[Archive]) -> dict[str, Any]:
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
    parameters = spec.get("parameters") or {}
    return {
        **{name: spec.get(name) for name in _SPEC_FIELDS},
        **{f"parameters.{name}": value for name, value in parameters.items()},
        "data": archive.result["data"],
        "synthetic": archive.result["synthetic"],
        "division": archive.result["division"]["word"],
        "outcome": archive.result["outcome"],
        "mlbench": archive.run.get("mlbench"),
    }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _obstacles(one: Sequence[Archive], other: Sequence[Archive]) -> list[str]:
    found = []
    a, b = one[0].result, other[0].result
    if a["task"] != b["task"]:
        found.append(f"The tasks differ: {a['task']} and {b['task']}.")
    if _goal(a) != _goal(b):
        found.append(f"The goals differ: {_goal(a) or 'none'} and {_goal(b) or 'none'}.")
    if (a["data"], a["synthetic"]) != (b["data"], b["synthetic"]):
        found.append(f"The data differ: {_data(a)} and {_data(b)}.")
    if a["budget_seconds"] != b["budget_seconds"]:
        found.append("One trained to its goal, or both had different times to spend; their times are not comparable.")
    for result in (archive.result for archive in (*one, *other)):
        if result["label"]["word"] == "functional":
            found.append(f"{result['run']} is functional, no measure of performance: {result['label']['reason']}.")
        if result["outcome"] not in SUCCESSFUL:
            found.append(f"{result['run']} ended as {result['outcome']}: its times are not those to a goal.")
    return found


def _goal(result: Mapping[str, Any]) -> str | None:
    goal = result["goal"]
    return f"{goal['metric']} {goal['comparison']} {goal['threshold']:g}" if goal else None


def _data(result: Mapping[str, Any]) -> str:
    return f"{result['data'] or 'unnamed'}{' (synthetic)' if result['synthetic'] else ''}"


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
    told = {**({goal["metric"]: found.value} if goal else {}), THROUGHPUT: found.throughput}
    return {**told, **collectives.figures_of(archive)}


def _columns(every: Sequence[Mapping[str, float | None]]) -> dict[str, Estimate | None]:
    """Name to estimate; None where not every archive has that figure."""
    found: dict[str, Estimate | None] = {}
    for name in dict.fromkeys(name for figures in every for name in figures):
        values = [value for figures in every if (value := figures.get(name)) is not None]
        found[name] = estimate(values) if len(values) == len(every) else None
    return found


def _rows(a: Mapping[str, Estimate | None], b: Mapping[str, Estimate | None]) -> dict[str, Row]:
    return {name: _row(a.get(name), b.get(name)) for name in {**dict.fromkeys(a), **dict.fromkeys(b)}}


def _row(a: Estimate | None, b: Estimate | None) -> Row:
    return Row(a, b, ratio(b, a) if a and b else None)
