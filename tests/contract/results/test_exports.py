"""`mlbench export`, read back by the programs that the forms are for."""

import csv
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.api import Client
from mlbench_cli.app import run
from mlbench_cli.storage.store import Store
from task_images.methods.catalog import describe, find_class
from tests.needs import needs
from tests.unit.results.runs import START, event, record_sealed, sealed_run

SAMPLES = [
    {"time": 1_760_000_000 + second, "rank": rank, "cpu_seconds": second * 0.5, "rss_bytes": 1e6}
    for second in range(1, 4)
    for rank in (0, 1)
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return sealed_run(tmp_path / "demo", seconds=60.0, name="demo-2", samples=SAMPLES)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_same_archive_gives_the_same_bytes_without_secrets(tmp_path: Path, archive: Path, form: str) -> None:
    pytest.importorskip("pyarrow")
    written = []
    for name in ("one", "two"):
        target = tmp_path / name / f"all.{form}"
        assert run(["export", form, str(target), str(archive)]) == 0
        written.append([path.read_bytes() for path in sorted(target.parent.iterdir())])
    assert written[0] == written[1]
    assert len(written[0]) == 2
    assert not any(b"hush" in data for data in written[0])  # a variable of the environment


def test_csv_has_metrics_and_samples(tmp_path: Path, archive: Path) -> None:
    assert run(["export", "csv", str(tmp_path / "all.csv"), str(archive)]) == 0
    with open(tmp_path / "all.csv", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["name"] == "val_Prec@1")
    assert [row[name] for name in ("run", "task", "value", "unit")] == ["demo-2", "unknown-task", "40.0", "%"]
    with open(tmp_path / "all-resources.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 6


def test_zeros_are_values_and_what_is_missing_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sealed_run(folder, samples=[{"time": 1_760_000_001.0, "rank": 0, "cpu_seconds": 0.0, "rss_bytes": 5}])
    assert run(["export", "csv", str(tmp_path / "all.csv"), str(folder)]) == 0
    with open(tmp_path / "all-resources.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["rank"], row["cpu_seconds"], row["rss_bytes"], row["sent_bytes"]) == ("0", "0.0", "5.0", "")


def test_runs_that_people_named_alike_are_told_apart(tmp_path: Path) -> None:
    for person, seed in (("anna", 1), ("ben", 2)):
        sealed_run(tmp_path / "class" / person, seconds=60.0, name="first-2", seed=seed)
    assert run(["export", "csv", str(tmp_path / "class.csv"), str(tmp_path / "class")]) == 0
    with open(tmp_path / "class.csv", newline="") as file:
        assert {(row["run"], row["seed"]) for row in csv.DictReader(file)} == {
            ("first-2 (anna)", "1"),
            ("first-2 (ben)", "2"),
        }
    assert run(["report", str(tmp_path / "class.md"), str(tmp_path / "class")]) == 0
    page = (tmp_path / "class.md").read_text().replace("\\", "")
    assert "| first-2 (anna) |" in page
    assert "| first-2 (ben) |" in page


# --- Parquet --------------------------------------------------------------------------------------------------------


def test_parquet_has_metrics_and_samples_with_their_types(tmp_path: Path, archive: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "new" / "all.parquet"
    assert run(["export", "parquet", str(target), str(archive)]) == 0
    table = parquet.read_table(target)
    assert str(table.schema.field("time").type) == "timestamp[us, tz=UTC]"
    assert table.schema.metadata[b"mlbench_schema"] == b"1"
    row = next(row for row in table.to_pylist() if row["name"] == "val_Prec@1")
    assert [row[name] for name in ("run", "task", "value", "unit")] == ["demo-2", "unknown-task", 40.0, "%"]
    samples = parquet.read_table(tmp_path / "new" / "all-resources.parquet")
    assert samples.num_rows == 6


def test_metrics_of_ones_own_have_what_people_group_runs_by(home: Path, tmp_path: Path) -> None:
    """As a file of Parquet, and as frames of pandas that are joined by the name of the run."""
    parquet = pytest.importorskip("pyarrow.parquet")
    needs("pandas")
    store = Store()
    settings: dict[str, dict[str, Any]] = {
        "sparse": {"method": describe(find_class("eftopk")()), "network": "1gbit,1ms", "seed": 43, "preset": "tiny"},
        "small": {"method": describe(find_class("powersgd")()), "network": "10gbit", "seed": 44, "preset": "spec"},
    }
    rate = [event("metric", at=50.0, name="tokens_per_second", value=900.0)]
    for name, changes in settings.items():
        record_sealed(store, name, 2, 60.0, lines=rate, **changes)
    store.close()
    assert run(["export", "parquet", str(tmp_path / "all.parquet"), "sparse", "small"]) == 0
    wanted = {"sparse": ("eftopk", "1gbit,1ms", 43, "tiny", 900.0), "small": ("powersgd", "10gbit", 44, "spec", 900.0)}

    client = Client(tmp_path / "home")
    frames = [handle.metrics().to_pandas() for handle in client.runs()]
    own = [frame[frame["name"] == "tokens_per_second"] for frame in frames]
    runs = client.runs().to_pandas()
    joined = [frame.merge(runs, left_on="run", right_on="name", suffixes=("", "_of_run")) for frame in own]
    assert {(row["run"], row["method"].split()[0]) for frame in own for row in frame.to_dict("records")} == {
        (name, values[0]) for name, values in wanted.items()
    }
    for rows in (
        parquet.read_table(tmp_path / "all.parquet").to_pylist(),
        *(each.to_dict("records") for each in joined),
    ):
        mine = [row for row in rows if row["name"] == "tokens_per_second"]
        assert mine
        for row in mine:
            method, *others = wanted[row["run"]]
            assert [row[name] for name in ("network", "seed", "preset", "value")] == others
            assert row["method"].startswith(method)


# --- trackers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_and_biases_gets_a_run_in_a_folder(tmp_path: Path, archive: Path) -> None:
    """Without a login and without a network: what is written can be sent later by `wandb sync`."""
    pytest.importorskip("wandb")
    target = tmp_path / "wandb"
    code = "import sys; from mlbench_cli.app import run; sys.exit(run(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "export", "wandb", str(target), str(archive)]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "WANDB_API_KEY": "", "MLBENCH_HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    (written,) = target.rglob("*.wandb")
    data = written.read_bytes()
    assert b"val_Prec@1" in data
    assert b"hush" not in data


@pytest.mark.slow
def test_mlflow_gets_a_run_in_a_database(tmp_path: Path, archive: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert run(["export", "mlflow", address, str(archive)]) == 0
    client = mlflow.MlflowClient(tracking_uri=address)
    (found,) = client.search_runs([client.get_experiment_by_name("unknown-task").experiment_id])
    assert found.info.run_name == "demo-2"
    assert found.data.params["backend"] == "gloo"
    history = client.get_metric_history(found.info.run_id, "val_Prec_at_1")
    assert [(point.step, point.value) for point in history] == [(0, 40.0), (1, 60.0), (2, 80.5)]
    assert history[0].timestamp == pytest.approx((START + 20) * 1e3)
    failed = sealed_run(tmp_path / "bad", "failed", name="bad-2")
    assert run(["export", "mlflow", address, str(failed)]) == 0
    runs = client.search_runs([found.info.experiment_id])
    assert {each.info.run_name: each.info.status for each in runs} == {"demo-2": "FINISHED", "bad-2": "FAILED"}
    assert found.data.tags["mlbench.metric.val_Prec_at_1"] == "val_Prec@1"


def test_a_package_adds_a_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point: a function of the target, the facts of a run, its metrics and its samples."""
    written = []
    point = SimpleNamespace(name="mine", load=lambda: lambda target, facts, *tables: written.append((target, facts)))
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "mlbench.exporters" else [])
    method = describe(find_class("eftopk")(density="0.001"))
    archive = sealed_run(tmp_path / "demo", name="demo-2", method=method, parameters={"batch_size": 32})
    assert run(["export", "mine", "somewhere", str(archive)]) == 0
    [(target, facts)] = written
    assert (target, facts.name) == ("somewhere", "demo-2")
    # What tells runs apart, in the names by which people group them.
    wanted = {"workers": 2, "method.name": "eftopk", "method.density": "0.001", "parameters.batch_size": 32}
    assert wanted.items() <= facts.config.items()
    missed = sealed_run(tmp_path / "missed", "goal_missed", name="missed-2")
    assert run(["export", "mine", "somewhere", str(archive), str(missed)]) == 0
    assert [each.summary["goal_reached"] for _, each in written[1:]] == [1, 0]


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["mlflow", "folder"], "is not an MLflow URI"),
        (["parquet", "folder"], "is not the name of a parquet file"),
        (["tensorboard", "x"], "There is no export format"),
    ],
)
def test_bad_words_are_named(archive: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    assert run(["export", *words, str(archive)]) == 2
    assert reason in capsys.readouterr().err
