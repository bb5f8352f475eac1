"""What Prometheus reads of runs, and the HTTP status of each kind of error."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.errors import (
    CannotTellError,
    CapacityError,
    CleanupError,
    CredentialError,
    DamagedArchive,
    DeadlineError,
    MlbenchError,
    NotFoundError,
    StoreError,
    StoreLockedError,
    TaskFailedError,
    UnreachableError,
    UsageError,
)
from mlbench_cli.model.run import Outcome
from mlbench_cli.server import prometheus
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import TooManyFollowers
from mlbench_cli.server.statuses import status_of

CONFIG = ServerConfig(Path("/none"), 8080, token="t")
LABELS = 'run="a-2",task="mnist",backend="gloo",workers="2"'
INFO = f'mlbench_run_info{{{LABELS},preset="spec",cluster="local",outcome="%s"}} 1.0'
GOAL = {"reached": True, "value": 81.5, "metric": "Prec@1"}


class Handle:
    def __init__(self, outcome: Outcome | None = None, result: Mapping[str, Any] | None = None) -> None:
        self.name = "a-2"
        spec = SimpleNamespace(task="mnist", backend="gloo", workers=2, preset="spec", cluster="local")
        self.run = SimpleNamespace(spec=spec)
        self.finished = outcome and SimpleNamespace(outcome=outcome, result=result)


class Damaged(Handle):
    @property
    def finished(self) -> Any:
        raise DamagedArchive("damaged", "run.json", "changed")

    @finished.setter
    def finished(self, _: Any) -> None:
        pass


def metrics(monkeypatch: pytest.MonkeyPatch, *handles: Handle) -> list[str]:
    """The samples, without the lines of help and type."""
    monkeypatch.setattr(prometheus, "count_runs", lambda _: 7)
    monkeypatch.setattr(prometheus, "list_runs", lambda _, limit: list(handles)[:limit])
    text = prometheus.render_metrics(CONFIG)
    assert text.endswith("\n")
    return [line for line in text.splitlines() if not line.startswith("#")]


def result(**changes: Any) -> dict[str, Any]:
    return {"task_seconds": {"wall": 12.5}, "goal": GOAL, "timings": {"compute": {"rank0": 3.5}}, **changes}


def test_without_runs_their_number_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics(monkeypatch) == ["mlbench_runs_total 7.0"]


def test_a_finished_run_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics(monkeypatch, Handle(Outcome.GOAL_REACHED, result())) == [
        "mlbench_runs_total 7.0",
        INFO % "goal_reached",
        f"mlbench_run_task_seconds{{{LABELS}}} 12.5",
        f'mlbench_run_goal_value{{{LABELS},metric="Prec@1"}} 81.5',
        f"mlbench_run_goal_reached{{{LABELS}}} 1.0",
        f'mlbench_run_phase_seconds{{{LABELS},phase="compute"}} 3.5',
    ]


@pytest.mark.parametrize(
    ("handle", "outcome"),
    [(Handle(), ""), (Damaged(), "damaged"), (Handle(Outcome.LOST), "lost")],
)
def test_a_run_without_a_result_has_its_outcome_alone(
    monkeypatch: pytest.MonkeyPatch, handle: Handle, outcome: str
) -> None:
    assert metrics(monkeypatch, handle) == ["mlbench_runs_total 7.0", INFO % outcome]


def test_what_a_result_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = result(task_seconds={"wall": None}, goal=None, timings={})
    assert metrics(monkeypatch, Handle(Outcome.COMPLETED, unknown))[2:] == []
    missed = result(task_seconds={"wall": 0.0}, goal={**GOAL, "reached": False, "value": None}, timings={})
    assert metrics(monkeypatch, Handle(Outcome.GOAL_MISSED, missed))[2:] == [
        f"mlbench_run_task_seconds{{{LABELS}}} 0.0",
        f"mlbench_run_goal_reached{{{LABELS}}} 0.0",
    ]


def test_samples_of_a_metric_follow_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text format 0.0.4 wants all lines of a metric as one group, after one TYPE line."""
    monkeypatch.setattr(prometheus, "count_runs", lambda _: 2)
    monkeypatch.setattr(prometheus, "list_runs", lambda _, limit: [Handle(Outcome.COMPLETED, result())] * 2)
    rows = [
        line.replace("{", " ").removeprefix("# ").split() for line in prometheus.render_metrics(CONFIG).splitlines()
    ]
    names = [(row[1], row[0]) if row[0] in ("HELP", "TYPE") else (row[0], "") for row in rows]
    order = [name for name, kind in names if kind == "TYPE"]
    assert order == [name for name, kind in names if kind == "HELP"]
    assert len({*order}) == len(order) == 6
    assert [name for name, _ in names] == sorted((name for name, _ in names), key=order.index)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (UsageError, 400),
        (NotFoundError, 404),
        (CannotTellError, 409),
        (CleanupError, 500),
        (TaskFailedError, 500),
        (MlbenchError, 500),
        (CredentialError, 502),
        (UnreachableError, 502),
        (CapacityError, 503),
        (StoreError, 503),
        (StoreLockedError, 503),
        (TooManyFollowers, 503),
        (DeadlineError, 504),
    ],
)
def test_errors_have_statuses(kind: type[MlbenchError], status: int) -> None:
    assert status_of(kind("x")) == status
