"""Weights & Biases and MLflow, by their own libraries: files on this machine, or a server."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import UnreachableError, UsageError
from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports.facts import RunFacts, count_steps, list_values

MAX_BATCH = 1000  # metrics in a request to MLflow
MAX_PARAMETERS = 100
MAX_NAME = 250  # characters
_MLFLOW_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. /:")


class WandbSink:
    """A run of Weights & Biases in `folder`: offline, for `wandb sync`, or online with the login of this machine.

    Its own recording of machine, packages, git repository and console is switched off.
    """

    def __init__(self, folder: Path, facts: RunFacts, *, is_online: bool = False) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        folder.mkdir(parents=True, exist_ok=True)
        switched_off = {"disable_git": True, "x_disable_stats": True, "x_disable_meta": True}
        options = wandb.Settings(**switched_off, x_save_requirements=False, console="off", silent=True)
        try:
            self._run: Any = wandb.init(
                project="mlbench",
                name=facts.name,
                id=facts.id,
                group=facts.task,
                config=dict(facts.config),
                dir=str(folder),
                mode="online" if is_online else "offline",
                settings=options,
                reinit="create_new",
            )
        except (wandb.errors.Error, OSError) as error:
            raise UnreachableError(f"Weights & Biases: {error}", hint="wandb login, or leave out --online") from None
        self._run.define_metric("*", step_metric="seconds since 1970")

    def add(self, points: Sequence[MetricPoint], samples: Sequence[ResourceSample] = ()) -> None:
        """Log a row per time of a rank, because W&B rejects rows that are older than the previous one.

        Several values of a metric in the same millisecond become separate rows.
        """
        rows: dict[tuple[float, int, int], dict[str, float]] = {}
        counts: Counter[tuple[float, int, str]] = Counter()
        for point in points:
            at = (point.time, point.rank, point.name)
            row = rows.setdefault((point.time, point.rank, counts[at]), {"seconds since 1970": point.time})
            counts[at] += 1
            row[_name_with_rank(point.name, point.rank)] = point.value
            row |= {name: value for name in ("epoch", "step") if (value := getattr(point, name)) is not None}
        for sample in samples:
            row = rows.setdefault((sample.time, sample.rank, 0), {"seconds since 1970": sample.time})
            row |= {_name_with_rank(name, sample.rank): value for name, value in list_values(sample)}
        for key in sorted(rows):
            self._run.log(rows[key])

    def close(self, summary: Mapping[str, float], outcome: str | None) -> None:
        self._run.summary.update({**summary, **({"outcome": outcome} if outcome else {})})
        self._run.finish()


class MlflowSink:
    """A run of MLflow at `address`: sqlite:///FILE, or http(s)://HOST:PORT. The experiment is the task's name.

    MLflow allows fewer characters in names; the tag "mlbench.metric.NAME" has the original name.
    """

    def __init__(self, address: str, facts: RunFacts) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _missing("mlflow") from None
        self._error: type[Exception] = MlflowException
        self._names: dict[str, str] = {}
        self._counts: dict[tuple[str, int], int] = {}
        try:
            self._client: Any = MlflowClient(tracking_uri=address)
            known = self._client.get_experiment_by_name(facts.task)
            experiment = known.experiment_id if known else self._client.create_experiment(facts.task)
            tags = {"mlflow.runName": facts.name, "mlbench.id": facts.id}
            made = self._client.create_run(experiment, start_time=round(facts.created * 1e3), tags=tags)
            self._id: str = made.info.run_id
            self._log_parameters(facts.config)
        except (MlflowException, OSError) as error:
            raise UnreachableError(
                f"MLflow at {address}: {str(error).splitlines()[0][:300]}", hint="sqlite:///FILE, or http://HOST:PORT"
            ) from None

    def _log_parameters(self, config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        found = [Param(_mlflow_name(name), str(value)) for name, value in config.items()]
        for start in range(0, len(found), MAX_PARAMETERS):
            self._client.log_batch(self._id, params=found[start : start + MAX_PARAMETERS])

    def add(self, points: Sequence[MetricPoint], samples: Sequence[ResourceSample] = ()) -> None:
        from mlflow.entities import Metric

        rows = [
            Metric(
                self._name(_name_with_rank(point.name, point.rank)),
                point.value,
                round(point.time * 1e3),
                count_steps(point, self._counts),
            )
            for point in points
        ]
        for sample in samples:
            rows += [
                Metric(self._name(_name_with_rank(name, sample.rank)), value, round(sample.time * 1e3), 0)
                for name, value in list_values(sample)
            ]
        for start in range(0, len(rows), MAX_BATCH):
            self._client.log_batch(self._id, metrics=rows[start : start + MAX_BATCH])

    def close(self, summary: Mapping[str, float], outcome: str | None) -> None:
        for name, value in summary.items():
            self._client.log_metric(self._id, self._name(f"result/{name}"), value)
        if outcome:
            self._client.set_tag(self._id, "mlbench.outcome", outcome)
        is_bad = outcome in ("failed", "cancelled", "deadline", "lost", "never_started")
        self._client.set_terminated(self._id, "FAILED" if is_bad else "FINISHED")

    def _name(self, name: str) -> str:
        if name not in self._names:
            base = plain = _mlflow_name(name)
            number = 1
            while plain in self._names.values():
                number += 1
                plain = f"{base[: MAX_NAME - len(str(number)) - 1]}_{number}"
            self._names[name] = plain
            if plain != name:
                self._client.set_tag(self._id, f"mlbench.metric.{plain}"[:MAX_NAME], name)
        return self._names[name]


def _mlflow_name(name: str) -> str:
    """Prec@1 -> Prec_at_1; other characters that MLflow rejects become "_". It also wants normal relative paths."""
    text = name.replace("@", "_at_")
    allowed = "".join(letter if letter in _MLFLOW_NAME else "_" for letter in text)[:MAX_NAME].strip("/ ")
    path = "/".join(part for part in allowed.split("/") if part not in ("", ".", "..")) or "_"
    return f"_{path[1:]}" if path.startswith("..") else path


def _name_with_rank(name: str, rank: int) -> str:
    return name if rank == 0 else f"{name}/rank-{rank}"


def _missing(name: str) -> UsageError:
    return UsageError(f"This export needs the package {name}.", hint=install_hint(name))
