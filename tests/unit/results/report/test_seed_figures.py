"""The table of the documentation that says which figure here stands for which of the original's: each is drawn."""

import re
from collections.abc import Sequence
from csv import DictReader
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.published import read_published
from mlbench_cli.results.analysis.series import collect
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.charts import list_sheets
from mlbench_cli.results.figures.curves import RunData
from mlbench_cli.results.figures.svg import render_svg
from tests.unit.results.analysis.test_collectives import measured_run
from tests.unit.results.runs import event, new_run, observation_of, result_event, sealed_run, spec, training_log

PAGE = Path(__file__).parents[4] / "docs" / "development" / "original-figures.md"
COUNTERS = ("cpu_seconds", "received_bytes", "sent_bytes", "read_bytes", "write_bytes")
SAMPLES = [
    {"time": 1_760_000_000.0 + second, "rank": rank, "rss_bytes": 1e9, "gpu_percent": 50.0 + second}
    | dict.fromkeys(COUNTERS, float(second))
    for second in range(4)
    for rank in (0, 1)
]
PRICE = {"per_hour": 1.5, "currency": "USD", "source": "a table"}


def seal_training(folder: Path, workers: int, seconds: float) -> Archive:
    """A run that reports its learning rate and its steps, on a cluster with a price."""
    logs = {rank: training_log(rank, seconds) for rank in range(workers)}
    extra = [event("metric", at=5.0 + step, name="learning_rate", value=0.1 * step, step=step) for step in range(3)]
    extra += [event("phase", at=5.0 + step, phase="training", epoch=0, epochs=3, step=step) for step in range(1, 16)]
    logs[0][4:4] = extra
    made = new_run(folder, spec(f"run-{workers}", workers, price=PRICE, task="cifar10_resnet20"), logs)
    (folder / "resources.jsonl").write_text("".join(f"{sample}\n".replace("'", '"') for sample in SAMPLES))
    write_run_document(made)
    seal(made, observation_of(workers, seconds + 3))
    return Archive.open(folder)


def seal_budget(folder: Path, workers: int) -> Archive:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5, "last": 80.5}
    logs = {rank: training_log(rank, 60.0) for rank in range(workers)}
    logs[0][-1] = result_event(60.0, "budget_spent", goal=goal, budget_seconds=60.0)
    made = new_run(folder, spec(f"budget-{workers}", workers, parameters={"budget_seconds": 60.0}), logs)
    write_run_document(made)
    seal(made, observation_of(workers, 63.0))
    return Archive.open(folder)


def draw_all(archives: Sequence[Archive]) -> dict[str, list[Chart]]:
    """The charts of `mlbench charts --published` by the names of their files."""
    curves = collectives.label_curves(curve for archive in archives for curve in collectives.read(archive))
    runs = [RunData(archive) for archive in archives]
    found = list_sheets(collect(archives), runs, curves, published=True)
    return {sheet.name: [*sheet.charts] for sheet in found}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Chart]]:
    folder = tmp_path_factory.mktemp("runs")
    archives = [seal_training(folder / f"run-{k}", k, 100.0 / k) for k in (1, 2, 4)]
    archives += [seal_budget(folder / f"budget-{k}", k) for k in (1, 2)]
    archives.append(Archive.open(measured_run(folder / "allreduce")))
    return draw_all(archives)


def read_table() -> list[tuple[str, list[str], list[str]]]:
    """Rows: the original's figure, files here, and variants of published series."""
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return [(row[0], re.findall(r"`([\w.-]+)`", row[1]), re.findall(r"`([^`]+)`", row[2])) for row in rows[2:]]


def test_every_figure_of_the_table_is_drawn_with_a_name(drawn: dict[str, list[Chart]]) -> None:
    wanted = {keys[0] for _, keys, _ in read_table() if not keys[-1].endswith("csv")}
    assert wanted == drawn.keys()
    for key in wanted:
        assert 'role="img"' in render_svg(drawn[key][0])


def test_the_table_has_every_published_series_that_is_shipped() -> None:
    named = {text for _, _, series in read_table() for text in series}
    assert named == {f"{item.task} {item.metric}" for item in read_published()}


def seal_translation(folder: Path, workers: int) -> str:
    goal = {"metric": "BLEU-Score", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5}
    seconds = 3600.0 / workers
    logs = {rank: training_log(rank, seconds, goal=goal) for rank in range(workers)}
    logs[0].insert(-1, event("metric", at=seconds, name="val_BLEU-Score", value=80.5, seconds=seconds))
    made = new_run(folder, spec(f"run-{workers}", workers, price=PRICE, task="wmt16_gnmt"), logs)
    write_run_document(made)
    seal(made, observation_of(workers, seconds + 3))
    return str(folder)


@pytest.mark.slow
def test_costs_that_were_published_stay_beside_those_that_follow_from_published_times(tmp_path: Path) -> None:
    """Both are in the file, for the same workers, and both are drawn, each under its own name."""
    values = {(item.task, item.metric, item.workers): item.value for item in read_published()}
    printed = {(task, workers): cost for (task, metric, workers), cost in values.items() if metric == "published_cost"}
    assert printed == {
        ("wmt16_gnmt", 1): 10.0,
        ("wmt16_gnmt", 4): 18.0,
        ("wmt17_transformer", 1): 5.5,
        ("wmt17_transformer", 8): 9.3,
    }
    for (task, workers), cost in printed.items():
        follows = values[task, "seconds", workers] / 3600 * 0.5592 * workers
        assert values[task, "cost", workers] == pytest.approx(follows, rel=0.02)
        assert cost == pytest.approx(follows, rel=0.12)

    archives = [seal_translation(tmp_path / f"run-{workers}", workers) for workers in (1, 2)]
    assert run(["charts", str(tmp_path / "figures"), *archives, "--published"]) == 0
    with open(tmp_path / "figures" / "cost.csv", newline="") as file:
        drawn = {(row["series"], row["workers"]): row["US dollars"] for row in DictReader(file)}
    name = "published: NCCL, T4, 2020"
    assert [float(drawn[series, "4"]) for series in (name, f"{name}, as printed")] == [17.2, 18.0]


@pytest.mark.slow
def test_the_target_loss_of_the_original_is_a_line_and_its_two_goals_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    details = {"best": 80.5, "target_loss": 0.2828}
    archive = sealed_run(tmp_path / "run", task="epsilon_logistic_regression", details=details)
    assert run(["charts", str(tmp_path / "figures"), str(archive)]) == 0
    with open(tmp_path / "figures" / "metrics.csv", newline="") as file:
        rows = [row for row in DictReader(file) if row["series"] == "target: 0.2828"]
    charts = {row["chart"] for row in rows}
    assert charts == {"Training loss", "Validation loss"}
    capsys.readouterr()
    assert run(["tasks", "epsilon_logistic_regression"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "text asks for 80 % accuracy and its figure for 89 %" in told
    assert "89 %, and 80 % for --light" in told
    assert "training loss 0.2828" in told
