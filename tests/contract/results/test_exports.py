"""`mlbench export`, read back by the programs that the forms are for."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.commands._export_live import follow_runs
from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports.facts import RunFacts
from mlbench_cli.results.exports.mllog import DEMANDED
from tests.contract.results.test_live_exports import need
from tests.needs import needs
from tests.unit.results.runs import event, new_run, observation_of, result_event, sealed_run, spec

SAMPLES = [
    {"time": 1_760_000_000 + second, "rank": rank, "cpu_seconds": second * 0.5, "rss_bytes": 1e6}
    for second in range(1, 4)
    for rank in (0, 1)
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return sealed_run(tmp_path / "demo", seconds=60.0, name="demo-2", samples=SAMPLES)


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- TensorBoard ----------------------------------------------------------------------------------------------------


def test_tensorboard_reads_every_value(tmp_path: Path, archive: Path) -> None:
    events = needs("tensorboard.backend.event_processing.event_accumulator")
    target = tmp_path / "logs"
    assert run(["export", "tensorboard", str(target), str(archive)]) == 0
    reader = events.EventAccumulator(str(target / "demo-2" / "rank-0"))
    reader.Reload()
    points = reader.Scalars("val_Prec@1")
    assert [point.value for point in points] == [40.0, 60.0, 80.5]
    assert [round(point.wall_time - 1_760_000_000) for point in points] == [20, 40, 60]
    assert [point.step for point in reader.Scalars("train_loss")] == [0, 10, 20]
    assert [point.value for point in reader.Scalars("machine/cpu_seconds")] == [0.5, 1.0, 1.5]
    assert reader.Scalars("result/task_seconds")[0].value == 60.0
    text = reader.Tensors("settings/text_summary") if "settings/text_summary" in reader.Tags()["tensors"] else None
    found = (text or reader.Tensors("settings"))[0].tensor_proto.string_val[0].decode()
    assert "| backend | gloo |" in found
    other = events.EventAccumulator(str(target / "demo-2" / "rank-1"))
    other.Reload()
    assert len(other.Scalars("train_loss")) == 3


def test_the_same_archive_gives_the_same_bytes(tmp_path: Path, archive: Path) -> None:
    needs("pyarrow")
    for folder in ("one", "two"):
        base = tmp_path / folder
        assert run(["export", "tensorboard", str(base / "tb"), str(archive)]) == 0
        assert run(["export", "parquet", str(base / "all.parquet"), str(archive)]) == 0
        assert run(["export", "mllog", str(base / "mllog"), str(archive)]) == 0
    one = read_tree(tmp_path / "one")
    assert one == read_tree(tmp_path / "two")
    assert len(one) == 5
    assert not [name for name, data in one.items() if b"hush" in data]  # a variable of the environment


def test_numbers_that_a_float_of_tensorboard_cannot_hold_are_cut(tmp_path: Path) -> None:
    events = needs("tensorboard.backend.event_processing.event_accumulator")
    from mlbench_cli.results.exports.tensorboard import EventFile

    file = EventFile(tmp_path / "events.out.tfevents.1.mlbench", 1.0)
    for step, value in enumerate((1e300, math.nan, -math.inf, 0.0)):
        file.add_scalar("x", value, step, 1.0)
    file.close()
    reader = events.EventAccumulator(str(tmp_path))
    reader.Reload()
    large, nothing, least, zero = (point.value for point in reader.Scalars("x"))
    assert large > 3e38
    assert math.isnan(nothing)
    assert (least, zero) == (-math.inf, 0.0)


# --- Parquet --------------------------------------------------------------------------------------------------------


def test_parquet_has_metrics_and_samples_with_their_types(tmp_path: Path, archive: Path) -> None:
    parquet = needs("pyarrow.parquet")
    target = tmp_path / "new" / "all.parquet"
    assert run(["export", "parquet", str(target), str(archive)]) == 0
    table = parquet.read_table(target)
    assert str(table.schema.field("time").type) == "timestamp[us, tz=UTC]"
    assert table.schema.metadata[b"mlbench_schema"] == b"1"
    row = next(row for row in table.to_pylist() if row["name"] == "val_Prec@1")
    assert [row[name] for name in ("run", "task", "value", "unit")] == ["demo-2", "unknown-task", 40.0, "%"]
    samples = parquet.read_table(tmp_path / "new" / "all-resources.parquet")
    assert samples.num_rows == 6


# --- MLPerf ---------------------------------------------------------------------------------------------------------


def sealed_training(folder: Path, task: str, accuracy: float) -> Path:
    """A run whose log has epochs, validations and numbers of samples."""
    from mlbench_cli.results.archive.documents import write_run_document
    from mlbench_cli.results.archive.seal import seal

    lines = []
    for epoch in (1, 2):
        at = 10.0 * epoch
        lines.append(event("phase", at=at - 9, phase="training", epoch=epoch, epochs=2, step=0))
        lines.append(event("phase", at=at - 5, phase="training", epoch=epoch, epochs=2, step=5))
        lines.append(event("phase", at=at - 2, phase="validation", epoch=epoch, epochs=2))
        value = accuracy * epoch / 2
        lines.append(event("metric", at=at - 1, name="val_global_Prec@1", value=value, epoch=epoch, seconds=at - 2))
    reached = accuracy >= 75.9
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 75.9, "kind": "full", "value": accuracy}
    identity = {"counts": {"train": 1281167, "validation": 50000}, "digest": None, "official": None, "reason": None}
    outcome = "goal_reached" if reached else "goal_missed"
    lines.append(result_event(19.0, outcome, goal=goal, data_identity=identity))
    parameters = {"batch_size": 64, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 5e-5, "goal_full": 75.9}
    made = new_run(folder, spec("train-1", 1, task=task, parameters=parameters), {0: lines})
    write_run_document(made)
    seal(made, observation_of(1, 22.0))
    return folder


def check_compliance(path: Path) -> subprocess.CompletedProcess[str]:
    words = ["--usage", "training", "--ruleset", "4.0.0", "--log_output", str(path.with_suffix(".checked"))]
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", *words, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("accuracy", "status"), [(76.5, "success"), (61.0, "aborted")])
def test_mlperfs_own_checker_accepts_a_run_in_the_open_division(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accuracy: float, status: str
) -> None:
    needs("mlperf_logging")
    path = sealed_training(tmp_path / "train-1", "imagenet_resnet", accuracy)
    assert run(["export", "mllog", str(tmp_path / "log"), str(path), "--organization", "me"]) == 0
    assert "report as missing" not in capsys.readouterr().err
    log = tmp_path / "log" / "result_0.txt"
    done = check_compliance(log)
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    (stop,) = [line for line in lines if line["key"] == "run_stop"]
    assert stop["metadata"]["status"] == status
    assert [line["value"] for line in lines if line["key"] == "eval_accuracy"] == [accuracy / 200, accuracy / 100]
    assert next(line["value"] for line in lines if line["key"] == "global_batch_size") == 64


def test_what_mlperfs_checker_will_miss_is_named(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "mllog", str(tmp_path / "log"), str(archive)]) == 0
    note = capsys.readouterr().err
    assert "report as missing: train_samples, eval_samples" in note
    assert "epoch_start" in DEMANDED


def shorten_number(value: float) -> str:
    return f"{value:.9g}"


# --- nccl-tests -----------------------------------------------------------------------------------------------------


def test_collectives_in_the_json_of_nccl_tests_are_read_as_the_same_curves(tmp_path: Path) -> None:
    from mlbench_cli.results.analysis.collectives import read
    from mlbench_cli.results.analysis.foreign_collectives import read_foreign_curves
    from mlbench_cli.results.archive.reader import Archive
    from tests.unit.results.analysis.test_collectives import measured_run

    kinds = [("all_reduce", "fp32", "in_place"), ("all_reduce", "fp16", "out_of_place")]
    folder = measured_run(tmp_path / "run", series=kinds, environment={"env": {"NCCL_TOKEN": "hush"}})
    assert run(["export", "nccl", str(tmp_path / "out"), str(folder)]) == 0
    path = tmp_path / "out" / "run-2.json"
    document = json.loads(path.read_text())
    assert (document["version"], document["env"], document["results"][0]["redop"]) == (3, [], "sum")
    assert "hush" not in path.read_text()
    own, foreign = read(Archive.open(folder)), read_foreign_curves(path)
    for curve in own:
        (same,) = [each for each in foreign if (each.dtype, each.place) == (curve.dtype, curve.place)]
        assert (same.collective, same.facts["ranks"]) == ("all_reduce", "2 ranks")
        assert [tuple(map(shorten_number, point)) for point in same.points] == [
            tuple(map(shorten_number, point)) for point in curve.points
        ]


def test_runs_without_collectives_have_no_json_of_nccl_tests(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "nccl", str(tmp_path / "out"), str(archive)]) == 2
    assert "did not measure collectives" in capsys.readouterr().err


# --- trackers -------------------------------------------------------------------------------------------------------


def test_weights_and_biases_gets_a_run_in_a_folder(tmp_path: Path, archive: Path) -> None:
    """Without a login and without a network: what is written can be sent later by `wandb sync`."""
    need("wandb")
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
    mlflow = needs("mlflow")
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert run(["export", "mlflow", address, str(archive)]) == 0
    client = mlflow.MlflowClient(tracking_uri=address)
    (found,) = client.search_runs([client.get_experiment_by_name("unknown-task").experiment_id])
    assert found.info.run_name == "demo-2"
    assert found.data.params["backend"] == "gloo"
    history = client.get_metric_history(found.info.run_id, "val_Prec_at_1")
    assert [(point.step, point.value) for point in history] == [(0, 40.0), (1, 60.0), (2, 80.5)]
    assert found.data.tags["mlbench.metric.val_Prec_at_1"] == "val_Prec@1"


class Recorder:
    """A sink that remembers how it was closed, and that Ctrl-C meets if the run is called b-1."""

    def __init__(self, facts: RunFacts) -> None:
        self.name = facts.name
        self.closed: list[tuple[Mapping[str, float], str | None]] = []

    def add(self, points: Sequence[MetricPoint], samples: Sequence[ResourceSample] = ()) -> None:
        if self.name == "b-1":
            raise KeyboardInterrupt

    def close(self, summary: Mapping[str, float], outcome: str | None) -> None:
        self.closed.append((summary, outcome))


def test_what_is_followed_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the round in which the first run has ended must not take its outcome away."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    for name, command in (("a", "false"), ("b", "true")):
        run(["run", name, "1", "--command", command, "--share-machine"])
    sinks: list[Recorder] = []

    def make_sink(facts: RunFacts) -> Recorder:
        sinks.append(Recorder(facts))
        return sinks[-1]

    with pytest.raises(KeyboardInterrupt):
        follow_runs(["a-1", "b-1"], make_sink)
    assert [outcome for sink in sinks for _, outcome in sink.closed] == ["failed", None]
    assert follow_runs(["a-1"], make_sink) == ["a-1"]
    assert len(sinks[-1].closed) == 1


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["mlflow", "folder"], "is not an MLflow URI"),
        (["parquet", "folder"], "is not the name of a Parquet file"),
        (["tensorboard", "/proc/none"], "cannot be created"),
        (["tensorboard", "x", "--online"], "--online works only with wandb"),
        (["parquet", "x.parquet", "--follow"], "--follow needs a tracker"),
        (["tensorboard", "x", "--follow"], "--follow needs run or experiment names"),
        (["mllog", "x", "--status", "ready"], "not one of cloud, onprem"),
    ],
)
def test_bad_words_are_named(
    tmp_path: Path,
    archive: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [] if "--follow" in words else [str(archive)]
    assert run(["export", *words[:2], *sources, *words[2:]]) == 2
    assert reason in capsys.readouterr().err


def test_a_broken_archive_is_not_exported(tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(archive / "metrics.jsonl", "a") as file:
        file.write('{"rank": 0}\n')
    assert run(["export", "tensorboard", str(tmp_path / "tb"), str(archive)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert not list((tmp_path / "tb").glob("demo-2"))
