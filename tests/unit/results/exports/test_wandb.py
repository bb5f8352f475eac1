"""Weights & Biases: which rows its library is given, against a recording one; Parquet files, against another."""

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import UnreachableError, UsageError
from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports.facts import RunFacts
from mlbench_cli.results.exports.trackers import WandbSink

AT = 1_760_000_000.0
TIME = "seconds since 1970"


class WandbError(Exception):
    pass


class Recorder:
    """Stands for the module wandb and for its run."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.rows: list[Mapping[str, float]] = []
        self.summary: dict[str, Any] = {}
        self.axes: dict[str, Any] = {}
        self.is_finished = False
        self.error: Exception | None = None

    def make_settings(self, **settings: Any) -> dict[str, Any]:
        self.settings = settings
        return settings

    def init(self, **options: Any) -> "Recorder":
        if self.error is not None:
            raise self.error
        self.options = options
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.axes[name] = options

    def log(self, row: Mapping[str, float]) -> None:
        self.rows.append(dict(row))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder, module = Recorder(), ModuleType("wandb")
    vars(module).update(init=recorder.init, Settings=recorder.make_settings, errors=SimpleNamespace(Error=WandbError))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return recorder


def facts(**config: Any) -> RunFacts:
    return RunFacts("demo-2", "7f", "mnist", 2, AT, config, {}, None)


def point(name: str = "loss", value: float = 0.5, rank: int = 0, at: float = 1.0, **more: Any) -> MetricPoint:
    return MetricPoint("demo-2", 2, rank, AT + at, name, value, **more)


def test_a_run_is_created_under_its_name_and_group_without_a_login(wandb: Recorder, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "wandb"
    WandbSink(folder, facts(backend="gloo"))
    assert folder.is_dir()
    assert wandb.options == {
        "project": "mlbench",
        "name": "demo-2",
        "id": "7f",
        "group": "mnist",
        "config": {"backend": "gloo"},
        "dir": str(folder),
        "mode": "offline",
        "settings": wandb.settings,
        "reinit": "create_new",
    }
    assert wandb.axes == {"*": {"step_metric": TIME}}


def test_what_wandb_would_record_of_the_machine_is_switched_off(wandb: Recorder, tmp_path: Path) -> None:
    """Its own statistics, requirements, git repository and console would tell of the machine that exports."""
    WandbSink(tmp_path, facts())
    on = {name for name, value in wandb.settings.items() if value is True}
    assert on == {"disable_git", "x_disable_stats", "x_disable_meta", "silent"}
    assert (wandb.settings["x_save_requirements"], wandb.settings["console"]) == (False, "off")


def test_a_server_gets_the_run_only_on_request(wandb: Recorder, tmp_path: Path) -> None:
    WandbSink(tmp_path, facts(), is_online=True)
    assert wandb.options["mode"] == "online"


@pytest.mark.parametrize("error", [WandbError("not logged in"), OSError("no route")])
def test_a_server_that_cannot_be_reached_is_named(wandb: Recorder, tmp_path: Path, error: Exception) -> None:
    wandb.error = error
    with pytest.raises(UnreachableError, match=f"Weights & Biases: {error}") as caught:
        WandbSink(tmp_path, facts(), is_online=True)
    assert "wandb login" in str(caught.value.hint)


def test_without_wandb_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="This export needs the package wandb") as caught:
        WandbSink(tmp_path / "new", facts())
    assert "[wandb]" in str(caught.value.hint)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("points", "rows"),
    [
        ([point(step=10.0, epoch=1.0)], [{TIME: AT + 1, "loss": 0.5, "step": 10.0, "epoch": 1.0}]),
        ([point()], [{TIME: AT + 1, "loss": 0.5}]),
        # One row per moment of a rank, in the order of time.
        ([point(), point("acc", 80.0)], [{TIME: AT + 1, "loss": 0.5, "acc": 80.0}]),
        ([point(at=2.0), point(at=1.0)], [{TIME: AT + 1, "loss": 0.5}, {TIME: AT + 2, "loss": 0.5}]),
        ([point(rank=1), point()], [{TIME: AT + 1, "loss": 0.5}, {TIME: AT + 1, "loss/rank-1": 0.5}]),
        # Two values of a metric at one moment are two rows, and neither is lost.
        (
            [point(value=1.0), point("acc", 80.0), point(value=2.0)],
            [{TIME: AT + 1, "loss": 1.0, "acc": 80.0}, {TIME: AT + 1, "loss": 2.0}],
        ),
        (
            [point(value=1.0), point(value=2.0), point(value=3.0), point("acc", 4.0), point("acc", 5.0)],
            [
                {TIME: AT + 1, "loss": 1.0, "acc": 4.0},
                {TIME: AT + 1, "loss": 2.0, "acc": 5.0},
                {TIME: AT + 1, "loss": 3.0},
            ],
        ),
        ([point(step=0.0), point("acc", 1.0, step=5.0)], [{TIME: AT + 1, "loss": 0.5, "acc": 1.0, "step": 5.0}]),
    ],
)
def test_values_of_a_moment_are_a_row(
    wandb: Recorder, tmp_path: Path, points: list[MetricPoint], rows: list[Mapping[str, float]]
) -> None:
    WandbSink(tmp_path, facts()).add(points)
    assert wandb.rows == rows


def test_samples_of_the_machine_join_the_row_of_their_moment(wandb: Recorder, tmp_path: Path) -> None:
    samples = [
        ResourceSample("demo-2", 0, AT + 1, cpu_seconds=1.5, gpu_percent=90.0),
        ResourceSample("demo-2", 1, AT + 1, rss_bytes=4096.0),
        ResourceSample("demo-2", 0, AT + 2, sent_bytes=1.0, received_bytes=2.0),
    ]
    WandbSink(tmp_path, facts()).add([point(), point(value=0.25)], samples)
    assert wandb.rows == [
        {TIME: AT + 1, "loss": 0.5, "machine/cpu_seconds": 1.5, "machine/gpu_percent": 90.0},
        {TIME: AT + 1, "loss": 0.25},
        {TIME: AT + 1, "machine/rss_bytes/rank-1": 4096.0},
        {TIME: AT + 2, "machine/sent_bytes": 1.0, "machine/received_bytes": 2.0},
    ]


@pytest.mark.parametrize(
    ("outcome", "summary"), [("failed", {"seconds": 60.0, "outcome": "failed"}), (None, {"seconds": 60.0})]
)
def test_the_end_of_a_run_has_its_results(
    wandb: Recorder, tmp_path: Path, outcome: str | None, summary: dict[str, Any]
) -> None:
    WandbSink(tmp_path, facts()).close({"seconds": 60.0}, outcome)
    assert (wandb.summary, wandb.is_finished) == (summary, True)


# --- Parquet ----------------------------------------------------------------------------------------------------------


class ArrowTable:
    """A table as far as the export uses it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.columns: dict[str, Any] = {}
        self.metadata: Mapping[bytes, bytes] = {}

    def append_column(self, name: str, values: Any) -> "ArrowTable":
        self.columns[name] = values
        return self

    def replace_schema_metadata(self, metadata: Mapping[bytes, bytes]) -> "ArrowTable":
        self.metadata = metadata
        return self


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ArrowTable, str]]:
    """The tables that were written, with their compression."""
    tables: list[tuple[ArrowTable, str]] = []

    def write_table(table: ArrowTable, file: io.BufferedWriter, compression: str) -> None:
        tables.append((table, compression))
        file.write(b"PAR1")

    arrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    vars(parquet)["write_table"] = write_table
    vars(arrow).update(parquet=parquet, string=lambda: "string", array=lambda values, kind: (list(values), kind))
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    return tables


def table_of(rows: list[Any]) -> Any:
    class Rows(list[Any]):
        def to_arrow(self) -> ArrowTable:
            return ArrowTable(len(self))

    return Rows(rows)


def test_metrics_and_samples_are_two_files_side_by_side(tmp_path: Path, written: list[tuple[ArrowTable, str]]) -> None:
    from mlbench_cli.results.exports.parquet import write_parquet

    metrics = table_of([SimpleNamespace(run="b-1"), SimpleNamespace(run="a-1")])
    samples = table_of([SimpleNamespace(run="a-1")])
    tasks = {"a-1": "mnist", "b-1": "bert"}
    target = tmp_path / "all.v2.parquet"
    assert write_parquet(target, metrics, samples, tasks) == [target, tmp_path / "all.v2-resources.parquet"]
    assert [table.columns for table, _ in written] == [
        {"task": (["bert", "mnist"], "string")},
        {"task": (["mnist"], "string")},
    ]
    assert [table.metadata for table, _ in written] == [{b"mlbench_schema": b"1"}] * 2
    assert [compression for _, compression in written] == ["zstd", "zstd"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.v2-resources.parquet", "all.v2.parquet"]


def test_runs_without_samples_have_one_file(tmp_path: Path, written: list[tuple[ArrowTable, str]]) -> None:
    from mlbench_cli.results.exports.parquet import write_parquet

    assert write_parquet(tmp_path / "x.parquet", table_of([]), table_of([]), {}) == [tmp_path / "x.parquet"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]
