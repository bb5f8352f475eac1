"""`run -f` of a file with runs: what is forecast, printed and written, and the exit code."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands import _experiment_file as module
from mlbench_cli.commands._experiment_file import (
    BUDGET_SPENT,
    How,
    Limits,
    _describe_forecast,
    _print_plan,
    _write_report,
    run_file,
)
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Experiment, Member
from mlbench_cli.results.analysis.experiment_table import Cell, Row, to_csv, to_document, to_markdown
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.runs.experiment import Candidate
from mlbench_cli.runs.forecast import Forecast, RunEstimate
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]
ROW = Row({"task": "x"}, "seconds", {1: Cell(1, Estimate(1, 10.0), ("demo-1",))})
FAILED_ROW = Row({"task": "x"}, "seconds", {1: Cell(1, None, (), ("it failed",))})


# --- what is forecast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (Forecast(3, 0, 0.0, 0.0, 0, 0.0), "0 of 3 runs to do."),
        (Forecast(3, 2, 90.0, 0.0, 0, 120.0), "2 of 3 runs to do; about 1 min 30 s for 2 of them."),
        (
            Forecast(5, 4, 90.0, 1.5, 1, 7200.0),
            "4 of 5 runs to do; about 1 min 30 s for 3 of them; no estimate for 1 of them (sum of their timeouts: "
            "2 h); about 1.50 at the clusters' prices.",
        ),
        (
            Forecast(1, 1, 0.0, None, 1, 60.0),
            "1 of 1 runs to do; no estimate for 1 of them (sum of their timeouts: 1 min).",
        ),
    ],
)
def test_a_forecast_says_what_is_known_and_what_is_not(ahead: Forecast, words: str) -> None:
    assert _describe_forecast(ahead) == words


class Launch:
    """Two runs, of which the first has ended and the second is expected to take 90 s."""

    def __init__(self, stopped: str | None = None, *codes: int, **limits: float) -> None:
        self.stopped, self.codes = stopped, codes
        self.max_hours, self.max_cost = limits.get("hours"), limits.get("cost")
        self.candidates = [
            Candidate(spec("demo-1", 1, task="mnist"), {"set.depth": "8"}),
            Candidate(spec("demo-2", 2, task="mnist", cluster="lab"), {"set.depth": "14"}),
        ]
        self.experiment = Experiment("e1", "demo", "2026-01-01T00:00:00Z", {"title": "A title"})
        self.told: list[Any] = []
        self.handle = "handle"

    @property
    def specs(self) -> list[Any]:
        return [candidate.spec for candidate in self.candidates]

    def plan(self, *, retry_failed: bool = False) -> Any:
        runs = [SimpleNamespace(id=f"id-{name}", name=name) for name in ("demo-1", "demo-2")]
        self.told.append(("planned", retry_failed))
        return SimpleNamespace(runs=runs, left=runs[1:], experiment=self.experiment)

    def estimates(self) -> list[RunEstimate]:
        return [RunEstimate(None, None), RunEstimate(90.0, 0.25)]

    def forecast(self, plan: Any) -> Forecast:
        return Forecast(2, len(plan.left), 90.0, 0.25, 0, 600.0)

    def render_one_each(self) -> None:
        self.told.append("rendered")

    def run_all(self, follow: Any, command_line: Any, *, retry_failed: bool) -> str | None:
        self.told.append((tuple(command_line), retry_failed))
        for number, code in enumerate(self.codes):
            follow("opened", SimpleNamespace(name=f"demo-{number}", code=code))
        return self.stopped

    @contextmanager
    def open(self, command_line: Any, *, retry_failed: bool) -> Iterator[Any]:
        self.told.append((tuple(command_line), retry_failed))
        yield SimpleNamespace(record=lambda: self.told.append("recorded"))


def test_a_plan_is_a_table_of_what_is_left(capsys: Captured) -> None:
    launch: Any = Launch()
    _print_plan(launch, Format.text)
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()] == [
        ["RUN", "CLUSTER", "WORKERS", "SETTINGS", "STATE", "ABOUT"],
        ["demo-1", "local", "1", "mnist,", "8", "done", "-"],
        ["demo-2", "lab", "2", "mnist,", "14", "left", "1", "min", "30", "s"],
    ]
    assert printed.err == "1 of 2 runs to do; about 1 min 30 s for 1 of them; about 0.25 at the clusters' prices.\n"
    assert "rendered" in launch.told  # a run that would be refused is refused now


def test_a_plan_as_a_document(capsys: Captured) -> None:
    launch: Any = Launch()
    _print_plan(launch, Format.json)
    hashes = [candidate.content_hash for candidate in launch.candidates]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "experiment": "demo",
        "runs": 2,
        "left": 1,
        "seconds": 90.0,
        "price": 0.25,
        "unknown": 0,
        "list": [
            {
                "run": "demo-1", "cluster": "local", "workers": 1, "settings": {"task": "mnist", "depth": "8"},
                "content_hash": hashes[0], "left": False, "seconds": None, "price": None,
            },
            {
                "run": "demo-2", "cluster": "lab", "workers": 2, "settings": {"task": "mnist", "depth": "14"},
                "content_hash": hashes[1], "left": True, "seconds": 90.0, "price": 0.25,
            },
        ],
    }  # fmt: skip


# --- what is done -----------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Lets `run_file` find a launch; the function returns what it asked for."""

    def prepare(launch: Launch, gpus: int = 0) -> dict[str, Any]:
        asked: dict[str, Any] = {"reports": []}

        class Client:
            def __init__(self, notice: Any) -> None:
                pass

            def prepare_file(self, file: str, **options: Any) -> Launch:
                asked.update(options, file=file)
                return launch

            def find_experiment(self, name: str) -> Any:
                return SimpleNamespace(name=name, title="A title", table=lambda: [ROW])

        def write_report(experiment: Any, rows: Any, folder: Path) -> Path:
            asked["reports"].append((experiment.name, rows, folder))
            return folder

        def follow_run(opened: Any, run: Any) -> Any:
            return SimpleNamespace(summary=f"{run.name} ended.", exit_code=lambda: run.code)

        launch.handle = SimpleNamespace(name="demo", title="A title", table=lambda: [FAILED_ROW])  # type: ignore[assignment]
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(module, "Client", Client)
        monkeypatch.setattr(module, "_write_report", write_report)
        monkeypatch.setattr(module, "follow_run", follow_run)
        monkeypatch.setattr(module, "local_machine", lambda: Machine(2, gpus))
        return asked

    return prepare


LINE = ("mlbench", "run")


def test_runs_are_followed_then_a_table_is_written(prepared: Any, tmp_path: Path, capsys: Captured) -> None:
    launch = Launch(None, 0, 7, 6)
    asked = prepared(launch)
    assert run_file("demo.yaml", Limits(("lab",), 1.0, 2.0), How(retry_failed=True), None, Format.text, LINE) == 7
    reports = asked.pop("reports")
    assert asked == {
        "file": "demo.yaml", "clusters": ("lab",), "max_hours": 1.0, "max_cost": 2.0, "most": MAX_MEMBERS,
        "only_list": False,
    }  # fmt: skip
    assert launch.told == [("planned", True), (LINE, True)]
    folder = tmp_path / "home" / "tables" / "demo"
    assert reports == [("demo", [ROW], folder)]
    printed = capsys.readouterr()
    assert printed.out == to_markdown("A title", [ROW]).rstrip() + "\n"
    assert printed.err.splitlines() == [
        "1 of 2 runs to do; about 1 min 30 s for 1 of them; about 0.25 at the clusters' prices.",
        "Run 1 of 1: demo-0",
        "Run 2 of 1: demo-1",
        "demo-1: demo-1 ended.",
        "Run 3 of 1: demo-2",
        "demo-2: demo-2 ended.",
        f"Table and figures: {folder}",
    ]


def test_a_limit_that_is_reached_is_told_with_how_to_resume(prepared: Any, tmp_path: Path, capsys: Captured) -> None:
    prepared(Launch("1 of 1 hours are used up", 7))
    code = run_file("demo.yaml", Limits(), How(yes=True), tmp_path / "out", Format.json, LINE)
    assert code == BUDGET_SPENT == 124
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema_version": 1,
        "experiment": "demo",
        "folder": str(tmp_path / "out"),
        "rows": to_document([ROW]),
    }
    assert printed.err.endswith(
        "Not all runs have started: 1 of 1 hours are used up. To resume: mlbench run -f demo.yaml, with a higher "
        "limit.\n"
    )


def test_a_report_alone_starts_nothing(prepared: Any, tmp_path: Path) -> None:
    launch = Launch("never", 7)
    asked = prepared(launch)
    assert run_file("demo.yaml", Limits(), How(only_report=True), tmp_path, Format.text, LINE) == 0
    assert launch.told == []
    assert asked["reports"] == [("demo", [FAILED_ROW], tmp_path)]


@pytest.mark.parametrize(
    ("how", "most"),
    [(How(), MAX_MEMBERS), (How(yes=True), MAX_CONFIRMED), (How(dry_run=True), MAX_CONFIRMED)],
)
def test_more_runs_need_a_yes(prepared: Any, how: How, most: int) -> None:
    asked = prepared(Launch())
    assert run_file("demo.yaml", Limits(), how, None, Format.text, LINE) == 0
    assert (asked["most"], asked["only_list"]) == (most, how.dry_run)


@pytest.mark.parametrize(
    ("device", "engine", "gpus", "is_warned"),
    [("gpu", "local", 0, True), ("gpu", "local", 1, False), ("cpu", "local", 0, False), ("gpu", "slurm", 0, False)],
)
def test_a_plan_that_needs_gpus_is_listed_without_any(
    prepared: Any, capsys: Captured, device: str, engine: str, gpus: int, is_warned: bool
) -> None:
    launch = Launch()
    launch.candidates[1] = Candidate(spec("demo-2", 2, device=device, engine=engine), {})
    asked = prepared(launch, gpus)
    assert run_file("demo.yaml", Limits(), How(dry_run=True), None, Format.text, LINE) == 0
    assert ("This machine has no GPU, so it cannot start these runs" in capsys.readouterr().err) == is_warned
    assert asked["reports"] == []


def test_a_file_can_be_left_to_the_background_unless_it_has_limits(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(module, "start_detached", lambda opened, output: 0)
    launch = Launch()
    prepared(launch)
    assert run_file("demo.yaml", Limits(), How(detach=True, retry_failed=True), None, Format.text, LINE) == 0
    assert launch.told == [(LINE, True), "recorded"]
    words = "Table and figures, once the runs have ended: mlbench run demo --only-report\n"
    assert capsys.readouterr().err == words
    for launch in (Launch(hours=0.0), Launch(cost=1.0)):
        prepared(launch)
        with pytest.raises(UsageError, match="A client must follow the runs to keep to max-hours and max-cost"):
            run_file("demo.yaml", Limits(), How(detach=True), None, Format.text, LINE)
        assert launch.told == []


# --- what is written --------------------------------------------------------------------------------------------------


def experiment(**request: Any) -> Any:
    runs = [SimpleNamespace(name=name, run=SimpleNamespace(id=f"id-{name}")) for name in ("demo-1", "demo-2")]
    members = tuple(Member(number, run.run.id, f"hash {run.name}") for number, run in enumerate(runs))
    record = Experiment("e1", "demo", "2026-01-01T00:00:00Z", request, members)
    return SimpleNamespace(name="demo", title="A title", experiment=record, runs=lambda: runs)


def test_the_table_is_written_in_three_forms_with_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "mlbench_cli.results.figures.experiment.draw_experiment", lambda *arguments: drawn.append(arguments)
    )
    folder = tmp_path / "a" / "b"
    assert _write_report(experiment(metric="seconds"), [ROW], folder) == folder
    assert json.loads((folder / "table.json").read_text()) == {
        "schema_version": 1,
        "experiment": "demo",
        "title": "A title",
        "metric": "seconds",
        "runs": [
            {"run": "demo-1", "id": "id-demo-1", "content_hash": "hash demo-1"},
            {"run": "demo-2", "id": "id-demo-2", "content_hash": "hash demo-2"},
        ],
        "rows": to_document([ROW]),
    }
    assert (folder / "table.csv").read_bytes().decode() == to_csv([ROW])
    assert (folder / "table.md").read_text() == to_markdown("A title", [ROW])
    assert drawn == [("A title", [ROW], folder)]
    _write_report(experiment(), [FAILED_ROW], tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())["metric"] is None
    assert len(drawn) == 1  # nothing to draw


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"cannot write to {tmp_path / 'file' / 'x'}: Not a directory") as caught:
        _write_report(experiment(), [], tmp_path / "file" / "x")
    assert caught.value.hint == "--to FOLDER"
