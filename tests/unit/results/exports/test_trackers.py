"""MLflow's limits, against a recording client; its own client and server are in tests/contract/results."""

import os
import posixpath
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mlbench_cli.errors import UnreachableError, UsageError
from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports.facts import RunFacts
from mlbench_cli.results.exports.trackers import MlflowSink

# https://mlflow.org/docs/latest/api_reference/rest-api.html#request-limits
METRICS_PER_REQUEST, PARAMETERS_PER_REQUEST, NAME_CHARACTERS = 1000, 100, 250


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class MlflowError(Exception):
    pass


class Client:
    """Records requests, as MlflowClient takes them."""

    made: "list[Client]" = []  # noqa: RUF012 - emptied by the fixture
    experiments: Mapping[str, str] = {}
    error: Exception | None = None

    def __init__(self, tracking_uri: str) -> None:
        if self.error is not None:
            raise self.error
        self.address = tracking_uri
        self.batches: list[tuple[list[Metric], list[Param]]] = []
        self.tags: dict[str, str] = {}
        self.summary: dict[str, float] = {}
        self.created: list[str] = []
        self.status = ""
        self.made.append(self)

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return SimpleNamespace(experiment_id=known) if known else None

    def create_experiment(self, name: str) -> str:
        self.created.append(name)
        return "new"

    def create_run(self, experiment: str, start_time: int, tags: Mapping[str, str]) -> Any:
        self.experiment, self.start_time = experiment, start_time
        self.tags.update(tags)
        return SimpleNamespace(info=SimpleNamespace(run_id="id"))

    def log_batch(self, run: str, metrics: list[Metric] | None = None, params: list[Param] | None = None) -> None:
        self.batches.append((metrics or [], params or []))

    def log_metric(self, run: str, name: str, value: float) -> None:
        self.summary[name] = value

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.tags[name] = value

    def set_terminated(self, run: str, status: str) -> None:
        self.status = status


@pytest.fixture(autouse=True)
def _mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("mlflow", "mlflow.exceptions", "mlflow.entities")}
    vars(modules["mlflow"])["MlflowClient"] = Client
    vars(modules["mlflow.exceptions"])["MlflowException"] = MlflowError
    vars(modules["mlflow.entities"]).update(Metric=Metric, Param=Param)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Client, "made", [])


def facts(**config: Any) -> RunFacts:
    return RunFacts("demo-2", "7f", "mnist", 2, 1_760_000_000.25, config, {}, None)


def open_sink(**config: Any) -> tuple[MlflowSink, Client]:
    sink = MlflowSink("sqlite:///x.db", facts(**config))
    return sink, Client.made[-1]


def point(value: float = 1.0, name: str = "loss", rank: int = 0, step: float | None = None) -> MetricPoint:
    return MetricPoint("demo-2", 2, rank, 1_760_000_001.5, name, value, step=step)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (METRICS_PER_REQUEST - 1, [999]),
        (METRICS_PER_REQUEST, [1000]),
        (METRICS_PER_REQUEST + 1, [1000, 1]),
        (2 * METRICS_PER_REQUEST, [1000, 1000]),
        (0, []),
    ],
)
def test_a_request_has_at_most_a_thousand_metrics_and_none_is_lost(count: int, sizes: list[int]) -> None:
    sink, client = open_sink()
    sink.add([point(float(number)) for number in range(count)])
    assert [len(metrics) for metrics, _ in client.batches] == sizes
    assert [metric.value for metrics, _ in client.batches for metric in metrics] == list(range(count))


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (PARAMETERS_PER_REQUEST, [100]), (PARAMETERS_PER_REQUEST + 1, [100, 1])],
)
def test_a_request_has_at_most_a_hundred_parameters(count: int, sizes: list[int]) -> None:
    _, client = open_sink(**{f"p{number}": number for number in range(count)})
    assert [len(parameters) for _, parameters in client.batches] == sizes
    assert [parameter.value for _, parameters in client.batches for parameter in parameters] == [
        str(number) for number in range(count)
    ]


def test_names_have_only_characters_that_mlflow_allows() -> None:
    """Letters, digits, "_", "-", ".", " ", ":" and "/", at most 250; the tag keeps the original name."""
    sink, client = open_sink()
    sink.add([point(name="val_Prec@1"), point(name="a b-c.d:e/f"), point(name="größe(%)"), point(name="x" * 300)])
    ((metrics, _),) = client.batches
    assert [metric.key for metric in metrics] == ["val_Prec_at_1", "a b-c.d:e/f", "gr__e___", "x" * NAME_CHARACTERS]
    assert client.tags["mlbench.metric.val_Prec_at_1"] == "val_Prec@1"
    assert "mlbench.metric.a b-c.d:e/f" not in client.tags
    assert max(map(len, client.tags)) <= NAME_CHARACTERS


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a//b", "a/b"),
        ("a/./b", "a/b"),
        ("../a/..", "a"),
        ("..a", "_.a"),
        (".a", ".a"),
        (".", "_"),
        ("/", "_"),
        ("x" * 249 + "/y", "x" * 249),
    ],
)
def test_names_are_normal_relative_paths(name: str, key: str) -> None:
    """MLflow rejects names that would resolve to other names as files, with the whole request."""
    sink, client = open_sink()
    sink.add([point(name=name)])
    ((metrics, _),) = client.batches
    assert metrics[0].key == key
    assert posixpath.normpath(key) == key


def test_names_that_become_equal_stay_apart() -> None:
    sink, client = open_sink()
    sink.add([point(name="a%"), point(name="a#"), point(name="a_"), point(name="a%")])
    ((metrics, _),) = client.batches
    assert [metric.key for metric in metrics] == ["a_", "a__2", "a__3", "a_"]


def test_long_names_that_become_equal_stay_apart_within_the_limit() -> None:
    sink, client = open_sink()
    sink.add([point(name="x" * 300 + end) for end in "abc"])
    ((metrics, _),) = client.batches
    assert len({metric.key for metric in metrics}) == 3
    assert {len(metric.key) for metric in metrics} == {NAME_CHARACTERS}


def test_a_metric_names_its_rank_unless_it_is_rank_0() -> None:
    sink, client = open_sink()
    sample = ResourceSample(run="demo-2", rank=1, time=1_760_000_002.0, cpu_seconds=0.5)
    sink.add([point(rank=0, step=7), point(rank=1), point(rank=1)], [sample])
    ((metrics, _),) = client.batches
    assert [(metric.key, metric.step) for metric in metrics[:3]] == [
        ("loss", 7),
        ("loss/rank-1", 0),
        ("loss/rank-1", 1),
    ]
    assert metrics[0].timestamp == 1_760_000_001_500  # milliseconds
    assert metrics[3] == Metric("machine/cpu_seconds/rank-1", 0.5, 1_760_000_002_000, 0)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("goal_reached", "FINISHED"),
        ("goal_missed", "FINISHED"),
        ("completed", "FINISHED"),
        ("budget_spent", "FINISHED"),
        ("failed", "FAILED"),
        ("cancelled", "FAILED"),
        ("deadline", "FAILED"),
        ("lost", "FAILED"),
        ("never_started", "FAILED"),
        (None, "FINISHED"),
    ],
)
def test_the_status_in_mlflow_follows_the_outcome(outcome: str | None, status: str) -> None:
    sink, client = open_sink()
    sink.close({"task_seconds": 60.0}, outcome)
    assert client.status == status
    assert client.tags.get("mlbench.outcome") == outcome
    assert client.summary == {"result/task_seconds": 60.0}


def test_an_experiment_of_mlflow_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = open_sink()
    assert (client.created, client.experiment) == (["mnist"], "new")
    monkeypatch.setattr(Client, "experiments", {"mnist": "12"})
    _, client = open_sink()
    assert (client.created, client.experiment) == ([], "12")
    assert client.start_time == 1_760_000_000_250
    assert client.tags == {"mlflow.runName": "demo-2", "mlbench.id": "7f"}


@pytest.mark.parametrize("error", [MlflowError("no such host\nTraceback"), OSError("refused")])
def test_a_server_that_cannot_be_reached_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Client, "error", error)
    with pytest.raises(UnreachableError, match=r"MLflow at sqlite:///x\.db: ") as caught:
        open_sink()
    assert "\n" not in caught.value.message


def test_without_mlflow_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match="needs the package mlflow") as caught:
        open_sink()
    assert "mlflow" in str(caught.value.hint)


def test_mlflow_sends_no_statistics_unless_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://mlflow.org/docs/latest/community/usage-tracking names both variables."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    open_sink()
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("true", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "false")
    open_sink()
    assert os.environ["DO_NOT_TRACK"] == "false"


def test_a_long_error_of_a_server_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "error", MlflowError("x" * 301))
    with pytest.raises(UnreachableError) as caught:
        open_sink()
    assert caught.value.message == f"MLflow at sqlite:///x.db: {'x' * 300}"


def test_results_that_become_equal_names_stay_apart_and_are_named_in_full() -> None:
    sink, client = open_sink()
    sink.close({"phase@x": 1.0, "phase_at_x": 2.0}, None)
    assert client.summary == {"result/phase_at_x": 1.0, "result/phase_at_x_2": 2.0}
    assert client.tags["mlbench.metric.result/phase_at_x_2"] == "result/phase_at_x"
