"""The content of all exports: facts about a run without secrets, and metrics in order of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mlbench_cli.model.goals import BEST, MEAN
from mlbench_cli.results.analysis.figures import figures
from mlbench_cli.results.analysis.tables import ResourceSample
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.times import parse_timestamp

Plain = str | int | float | bool
# Fields of the spec that cannot contain secrets; variables and commands are left out.
_SPEC = (
    *("task", "preset", "backend", "device", "workers", "processes_per_worker", "seed", "goal"),
    *("cluster", "engine", "cpus", "network"),
)
MAX_TEXT = 500


@dataclass(frozen=True)
class RunFacts:
    """A run for a tracker. `created` is in seconds since 1970; `config` are settings, `summary` numeric results."""

    name: str
    id: str
    task: str
    workers: int
    created: float
    config: Mapping[str, Plain]
    summary: Mapping[str, float]
    outcome: str


def describe_settings(spec: Mapping[str, object]) -> dict[str, Plain]:
    """The settings in a spec's document, with the task's parameters as "parameters.NAME"."""
    found: dict[str, Plain] = {}
    for name in _SPEC:
        value = spec.get(name)
        if isinstance(value, str | int | float) and value != "":
            found[name] = _clip(value)
    for part in ("method", "parameters"):
        inner = spec.get(part)
        for key, value in sorted(inner.items()) if isinstance(inner, Mapping) else ():
            if isinstance(value, str | int | float):
                found[f"{part}.{key}"] = _clip(value)
    return found


def read_facts(archive: "Archive") -> RunFacts:
    """The facts of a verified archive."""
    run, result = archive.run, archive.result
    return RunFacts(
        archive.name,
        str(run["id"]),
        str(result["task"]),
        int(result["workers"]),
        parse_timestamp(str(run["created"])),
        describe_settings(run["spec"]),
        summarize(archive),
        str(result["outcome"]),
    )


def summarize(archive: "Archive") -> dict[str, float]:
    """The figures of a run by name. The last values of the program's metrics are left out: they are its last points."""
    kept = {
        name: one.value for name, one in figures(archive).items() if not one.is_metric or name.endswith((BEST, MEAN))
    }
    goal = archive.result["goal"]
    reached = {"goal_threshold": float(goal["threshold"]), "goal_reached": float(bool(goal["reached"]))} if goal else {}
    return {**kept, **reached}


def list_values(sample: "ResourceSample") -> "Iterator[tuple[str, float]]":
    """The names and values of what a sample of the machine has."""
    for name in ("cpu_seconds", "rss_bytes", "sent_bytes", "received_bytes", "gpu_percent"):
        if (value := getattr(sample, name)) is not None:
            yield f"machine/{name}", value


def name_with_rank(name: str, rank: int) -> str:
    """The name of a metric of one rank, for trackers that know only names."""
    return name if rank == 0 else f"{name}/rank-{rank}"


def _clip(value: Plain) -> Plain:
    return value[:MAX_TEXT] if isinstance(value, str) else value
