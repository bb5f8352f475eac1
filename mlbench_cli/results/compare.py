"""Two archives side by side: what differs, whether they may be compared, and how their times relate."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlbench_cli.results.archive import Archive

_SPEC_FIELDS = (
    *(
        "task",
        "preset",
        "backend",
        "device",
        "workers",
        "processes_per_worker",
        "gpus_per_worker",
        "cpus",
        "goal",
        "seed",
    ),
    *("engine", "cluster", "image"),
)


@dataclass(frozen=True)
class Comparison:
    """`ratios` are B's seconds over A's: below 1, B was faster. `obstacles` say why the times mean little together."""

    a: str
    b: str
    differences: Mapping[str, tuple[Any, Any]]
    obstacles: tuple[str, ...]
    seconds: Mapping[str, tuple[float | None, float | None]]
    ratios: Mapping[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def compare(a: Archive, b: Archive) -> Comparison:
    """Compare two verified archives: settings, outcomes, and seconds in total and by category (rank 0's)."""
    seconds = {
        name: (first, _seconds(b.result).get(name))
        for name, first in {**dict.fromkeys(_seconds(b.result)), **_seconds(a.result)}.items()
    }
    return Comparison(
        a.run["name"],
        b.run["name"],
        _differences(_settings(a), _settings(b)),
        tuple(_obstacles(a.result, b.result)),
        seconds,
        {name: _ratio(*pair) for name, pair in seconds.items()},
    )


def _settings(archive: Archive) -> dict[str, Any]:
    spec = archive.run["spec"]
    parameters = spec.get("parameters") or {}
    return {
        **{name: spec.get(name) for name in _SPEC_FIELDS},
        **{f"parameters.{name}": value for name, value in parameters.items()},
        "data": archive.result["data"],
        "synthetic": archive.result["synthetic"],
        "outcome": archive.result["outcome"],
        "mlbench": archive.run.get("mlbench"),
    }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _obstacles(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    found = []
    if a["task"] != b["task"]:
        found.append(f"The tasks differ: {a['task']} and {b['task']}.")
    if _goal(a) != _goal(b):
        found.append(f"The goals differ: {_goal(a) or 'none'} and {_goal(b) or 'none'}.")
    if (a["data"], a["synthetic"]) != (b["data"], b["synthetic"]):
        found.append(f"The data differ: {_data(a)} and {_data(b)}.")
    for result in (a, b):
        if result["label"]["word"] == "functional":
            found.append(f"{result['run']} is functional, no measure of performance: {result['label']['reason']}.")
        if result["outcome"] not in ("goal_reached", "completed"):
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


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or a == 0 else b / a
