"""MLflow: one run per archive, in a database file or on a server. The experiment is the task's name.

MLflow allows fewer characters in names; the tag "mlbench.metric.NAME" has the original one.
"""

import os
from collections.abc import Iterator
from typing import Any

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import UnreachableError, UsageError
from mlbench_cli.results.analysis.tables import MetricTable, ResourceTable
from mlbench_cli.results.exports.facts import RunFacts, list_values, name_with_rank

MAX_METRICS, MAX_PARAMETERS = 1000, 100  # in a request
MAX_NAME = 250  # characters
_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. /:")
_BAD_OUTCOMES = ("failed", "canceled", "deadline", "lost", "never_started")


def export_run(target: str, facts: RunFacts, metrics: MetricTable, samples: ResourceTable) -> None:
    """Write a run to `target`: sqlite:///FILE, or http(s)://HOST:PORT."""
    if not target.startswith(("sqlite:///", "http://", "https://")):
        raise UsageError(f'"{target}" is not an MLflow URI.', hint="sqlite:///mlflow.db, or http://HOST:PORT")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    mlflow = load_library("mlflow", "mlflow")
    error = load_library("mlflow.exceptions", "mlflow").MlflowException
    entities = load_library("mlflow.entities", "mlflow")
    names = _Names()
    try:
        client: Any = mlflow.MlflowClient(tracking_uri=target)
        known = client.get_experiment_by_name(facts.task)
        experiment = known.experiment_id if known else client.create_experiment(facts.task)
        tags = {"mlflow.runName": facts.name, "mlbench.id": facts.id, "mlbench.outcome": facts.outcome}
        run = client.create_run(experiment, start_time=round(facts.created * 1e3), tags=tags).info.run_id
        parameters = [entities.Param(plain_name(name), str(value)) for name, value in facts.config.items()]
        for some in _batches(parameters, MAX_PARAMETERS):
            client.log_batch(run, params=some)
        points = [
            entities.Metric(names.plain(name), value, round(time * 1e3), step)
            for name, value, time, step in _points(facts, metrics, samples)
        ]
        for some in _batches(points, MAX_METRICS):
            client.log_batch(run, metrics=some)
        for name, plain in names.known.items():
            if plain != name:
                client.set_tag(run, f"mlbench.metric.{plain}"[:MAX_NAME], name)
        client.set_terminated(run, "FAILED" if facts.outcome in _BAD_OUTCOMES else "FINISHED")
    except (error, OSError) as caught:
        raise UnreachableError(
            f"MLflow at {target}: {str(caught).splitlines()[0][:300]}", hint="sqlite:///FILE, or http://HOST:PORT"
        ) from None


def _points(facts: RunFacts, metrics: MetricTable, samples: ResourceTable) -> Iterator[tuple[str, float, float, int]]:
    """Name, value, time and step of everything numeric. The step is the task's, else a count."""
    steps: dict[tuple[str, int], int] = {}
    for point in metrics:
        key = (point.name, point.rank)
        following = steps.get(key, -1) + 1
        asked = following if point.step is None or point.step < 0 else max(following, round(point.step))
        steps[key] = asked
        yield name_with_rank(point.name, point.rank), point.value, point.time, asked
    for sample in samples:
        for name, value in list_values(sample):
            yield name_with_rank(name, sample.rank), value, sample.time, 0
    for name, value in facts.summary.items():
        yield f"result/{name}", value, facts.created, 0


def _batches(items: list[Any], count: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), count):
        yield items[start : start + count]


class _Names:
    """Names as MLflow allows them, different for different originals."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._taken: set[str] = set()

    def plain(self, name: str) -> str:
        if name not in self.known:
            base = plain = plain_name(name)
            number = 1
            while plain in self._taken:
                number += 1
                plain = f"{base[: MAX_NAME - len(str(number)) - 1]}_{number}"
            self.known[name] = plain
            self._taken.add(plain)
        return self.known[name]


def plain_name(name: str) -> str:
    """Prec@1 -> Prec_at_1; other characters that MLflow rejects become "_". It also wants normal relative paths."""
    text = name.replace("@", "_at_")
    allowed = "".join(letter if letter in _ALLOWED else "_" for letter in text)[:MAX_NAME].strip("/ ")
    path = "/".join(part for part in allowed.split("/") if part not in ("", ".", "..")) or "_"
    return f"_{path[1:]}" if path.startswith("..") else path
