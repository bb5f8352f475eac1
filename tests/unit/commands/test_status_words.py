"""What `mlbench status` shows of one run, of several, and of an experiment."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.commands import _status as module
from mlbench_cli.commands._status import (
    MAX_SHOWN,
    Choice,
    _explain_empty_store,
    is_queue_problem,
    show_experiment,
    show_one,
    show_rows,
    show_runs,
)
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.model.methods import OWN
from mlbench_cli.model.run import Experiment, ExperimentState, Run, RunRow, RunState
from mlbench_cli.runs.experiment_status import ExperimentStatus
from mlbench_cli.runs.snapshot import RunStatus
from mlbench_cli.storage.queue_folder import QueueState
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]
NO_PROGRESS: dict[str, Any] = dict.fromkeys(("phase", "epoch", "epochs", "elapsed", "eta", "eta_high"))


def finding(**changes: Any) -> dict[str, Any]:
    plain = {"code": "rank_crashed", "summary": "Rank 1 crashed.", "hint": None, "retryable": False}
    return {**plain, "permanent": False, "evidence": {}, **changes}


def document(**changes: Any) -> dict[str, Any]:
    """A run as `status NAME -o json` describes it."""
    return {
        "name": "demo-2",
        "task": "digits_resnet",
        "preset": "spec",
        "cluster": "local",
        "backend": "gloo",
        "device": "cpu",
        "workers": 2,
        "world_size": 2,
        "state": "running",
        "outcome": None,
        "progress": NO_PROGRESS,
        "goal": None,
        "functional_only": None,
        "method": OWN,
        "pin": False,
        "network": None,
        "folder": "/data/demo-2",
        "metrics": {},
        "ranks": [{"rank": 1, "phase": "running", "exit_code": None, "node": "here", "reason": None}],
        "findings": [],
        **changes,
    }


def one(captured: Captured, metric: str | None = None, verbose: bool = False, **changes: Any) -> list[str]:
    show_one(document(**changes), metric, verbose)
    return captured.readouterr().out.splitlines()


def facts(lines: list[str]) -> dict[str, str]:
    """The facts above the first empty line."""
    return {title: text.strip() for title, _, text in (line.partition(":") for line in lines[: lines.index("")])}


def test_a_running_run_without_reports(capsys: Captured) -> None:
    assert one(capsys) == [
        "Run:       demo-2: digits_resnet on local, 2 workers, gloo, cpu",
        "State:     running",
        f"Method:    {OWN}",
        "Folder:    /data/demo-2",
        "",
        "RANK  PHASE    EXIT  NODE  REASON",
        "   1  running  -     here  -",
    ]


def test_a_finished_run_has_all_facts_in_order(capsys: Captured) -> None:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "value": 79.0, "best": 80.5, "distance": 0.0}
    lines = one(
        capsys,
        state="finished",
        outcome="budget_spent",
        summary="It has spent its time.",
        progress={**NO_PROGRESS, "phase": "training", "epoch": 2.5, "epochs": 3.0, "elapsed": 65.0},
        goal=goal,
        functional_only="it was emulated",
        pin=True,
        network="1gbit",
        measured_network="emulated 1gbit (got 970 Mbit/s)",
        conditions=["crowded: 4 threads", "shared-machine: a browser"],
        kept_until="2026-01-01T00:00:00.000Z",
    )
    assert lines[: lines.index("")] == [
        "Run:       demo-2: digits_resnet on local, 2 workers, gloo, cpu",
        "State:     finished, budget_spent",
        "Result:    It has spent its time.",
        "Progress:  training, epoch 2.5 of 3, elapsed 1 min 5 s",
        "Goal:      Prec@1 >= 80, best 80.5 %, 79.0 % at the end",
        "Label:     functional, not a performance measurement: it was emulated",
        f"Method:    {OWN}, pinned to CPUs",
        "Network:   emulated 1gbit (got 970 Mbit/s)",
        "Condition: crowded: 4 threads",
        "Condition: shared-machine: a browser",
        "Kept:      on the cluster until 2026-01-01T00:00:00.000Z",
        "Folder:    /data/demo-2",
    ]


@pytest.mark.parametrize(
    ("changes", "fact", "text"),
    [
        ({"network": "1gbit"}, "Network", "1gbit"),
        ({"outcome": "failed"}, "State", "running, failed"),
        ({"progress": {**NO_PROGRESS, "phase": "loading", "elapsed": 2.0}}, "Progress", "loading, elapsed 2.0 s"),
        (
            {"progress": {**NO_PROGRESS, "phase": "training", "epoch": 0.0, "elapsed": 2.0}},
            "Progress",
            "training, epoch 0, elapsed 2.0 s",
        ),
        (
            {"progress": {**NO_PROGRESS, "phase": "training", "elapsed": 2.0, "eta": 30.0, "eta_high": 33.0}},
            "Progress",
            "training, elapsed 2.0 s, about 30 s left",
        ),
        (
            {
                "outcome": "goal_reached",
                "goal": {"metric": "loss", "comparison": "<=", "threshold": 0.25, "value": 0.3, "best": 0.2},
            },
            "Goal",
            "loss <= 0.25, best 0.200",
        ),
    ],
)
def test_a_fact_of_a_run(capsys: Captured, changes: dict[str, Any], fact: str, text: str) -> None:
    assert facts(one(capsys, **changes))[fact] == text


def test_metrics_have_their_units(capsys: Captured) -> None:
    lines = one(capsys, metrics={"val_Prec@1": 80.54, "train_loss": 0.2149})
    assert lines[4:8] == ["", "METRIC      LAST VALUE", "val_Prec@1  80.5 %", "train_loss  0.215"]


@pytest.mark.parametrize(("metric", "row"), [("loss", "loss    0.215"), ("Prec@1", "Prec@1  80.5 %")])
def test_one_metric_is_shown_by_the_name_that_was_asked_for(capsys: Captured, metric: str, row: str) -> None:
    lines = one(capsys, metric, metrics={"val_global_Prec@1": 80.54, "train_loss": 0.2149})
    assert lines[6] == row
    assert lines[7] == ""


@pytest.mark.parametrize(
    ("metrics", "more"),
    [({}, ""), ({"a": 1.0, "b": 2.0}, " Reported so far: a, b."), ({"a": 1.0}, " Reported so far: a.")],
)
def test_a_metric_that_was_not_reported_names_those_that_were(
    capsys: Captured, metrics: dict[str, float], more: str
) -> None:
    show_one(document(metrics=metrics), "loss", False)
    assert capsys.readouterr().err == f"No loss has been reported yet.{more}\n"


def test_a_finding_has_its_hint_and_its_evidence_only_if_asked(capsys: Captured) -> None:
    evidence = {
        "exit_code": 137,
        "log": ["one", "two"],
        "message": "just one",
        "trace": "first\nsecond",
        "nodes": ["a"],
    }
    found = finding(hint="mlbench logs demo-2", retryable=True, permanent=True, evidence=evidence)
    show_one(document(findings=[found, finding(code="slow", summary="Rank 0 is slow.")]), None, False)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[7:] == ["", "Rank 1 crashed.", "Next: mlbench logs demo-2", "", "Rank 0 is slow."]
    assert printed.err == "\nEvidence: mlbench status demo-2 --verbose\n"
    show_one(document(findings=[found, finding(code="slow", summary="Rank 0 is slow.")]), None, True)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[9:] == [
        "Next: mlbench logs demo-2",
        "  rank_crashed, retryable, permanent",
        "  exit_code: 137",
        *("  log:", "    one", "    two"),
        "  message: just one",
        *("  trace:", "    first", "    second"),
        *("  nodes:", "    a"),
        *("", "Rank 0 is slow.", "  slow"),
    ]
    assert printed.err == ""


# --- several runs -----------------------------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    hours = datetime.now(UTC) - timedelta(hours=2, minutes=1)
    return {
        "name": "demo-2",
        "workers": 2,
        "state": "finished",
        "outcome": "completed",
        "goal": None,
        "seconds": None,
        "method": OWN,
        "network": None,
        "functional_only": None,
        "conditions": None,
        "task": "digits_resnet",
        "backend": "gloo",
        "cluster": "local",
        "created": timestamp(hours.timestamp()),
        **changes,
    }


def table(captured: Captured, *rows: dict[str, Any]) -> list[list[str]]:
    show_rows(rows)
    lines = captured.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


PLAIN = ["RUN", "WORKERS", "STATE", "OUTCOME", "GOAL", "TIME"]
PLACE = ["TASK", "BACKEND", "CLUSTER", "CREATED"]


def test_a_row_has_only_columns_in_which_a_run_says_something(capsys: Captured) -> None:
    assert table(capsys, row()) == [
        [*PLAIN, *PLACE],
        ["demo-2", "2", "finished", "completed", "-", "-", "digits_resnet", "gloo", "local", "2 h ago"],
    ]


@pytest.mark.parametrize(
    ("changes", "column", "cell"),
    [
        ({"method": "fusion"}, "METHOD", "fusion"),
        ({"network": "1gbit"}, "NETWORK", "1gbit"),
        ({"functional_only": "it was emulated"}, "LABEL", "functional"),
        ({"conditions": ["crowded: 4 threads", "shared-machine"]}, "CONDITIONS", "crowded, shared-machine"),
    ],
)
def test_a_special_column_appears_with_the_run_that_needs_it(
    capsys: Captured, changes: dict[str, Any], column: str, cell: str
) -> None:
    heads, first, second = table(capsys, row(**changes), row(name="plain-1"))
    assert heads == [*PLAIN, column, *PLACE]
    assert first[6] == cell
    assert second[6] == (OWN if column == "METHOD" else "-")


def test_conditions_without_any_leave_no_column(capsys: Captured) -> None:
    assert table(capsys, row(conditions=[]))[0] == [*PLAIN, *PLACE]


def test_the_time_and_the_goal_of_a_row_have_units(capsys: Captured) -> None:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "value": 80.5, "last": 79.0}
    spent = table(capsys, row(goal=goal, seconds=0.0, outcome="budget_spent"))[1]
    assert spent[4:6] == ["Prec@1 79.0 % (>= 80)", "0 s"]
    reached = table(capsys, row(goal=goal, seconds=372.0, outcome="goal_reached"))[1]
    assert reached[4:6] == ["Prec@1 80.5 % (>= 80)", "6 min 12 s"]


# --- an experiment ----------------------------------------------------------------------------------------------------

EXPERIMENT = Experiment("e1", "demo", "2026-01-01T00:00:00.000Z", {})


def status(**changes: Any) -> ExperimentStatus:
    plain = ExperimentStatus(EXPERIMENT, ExperimentState.RUNNING, 3, 0, 8, QueueState.ENDED, None, None, ("one", "two"))
    return replace(plain, **changes)


def test_an_experiment_in_a_few_lines(capsys: Captured) -> None:
    show_experiment(status(), False)
    assert capsys.readouterr().out == "Experiment: demo\nState:      running, 3 of 8 runs finished\n\n"
    required = replace(EXPERIMENT, require_goal=True)
    show_experiment(status(failed=2, eta=90.0, queue_text="process 7", experiment=required), True)
    assert capsys.readouterr().out.splitlines() == [
        "Experiment: demo",
        "State:      running, 3 of 8 runs finished, 2 failed, about 1 min 30 s left",
        "Queue:      process 7",
        "Goal:       required of every run",
        "  | one",
        "  | two",
        "",
    ]


def test_a_stopped_experiment_says_how_to_resume_it(capsys: Captured) -> None:
    show_experiment(status(state=ExperimentState.STOPPED), False)
    assert "mlbench run demo" in capsys.readouterr().err
    show_experiment(status(state=ExperimentState.COMPLETED), False)
    assert capsys.readouterr().err == ""


# --- which runs -------------------------------------------------------------------------------------------------------


class Runs:
    """A client whose runs are finished, or "ended" if their name begins with "e"."""

    def __init__(self, *names: str) -> None:
        days = [f"2026-01-0{day}T00:00:00Z" for day in range(9, 0, -1)]
        self._rows = [
            RunRow(Run(name, spec(name, task=f"task_{name[0]}"), Path("/none", name), time), RunState.FINISHED, None)
            for name, time in zip(names, days, strict=False)
        ]

    @property
    def handles(self) -> Any:
        return [SimpleNamespace(run=each.run, row=each) for each in self._rows]

    def read_states(self, handles: Any) -> Any:
        return (
            RunStatus(
                each.row,
                "ended" if each.run.name[0] == "e" else "finished",
                "failed" if each.run.name[0] == "f" else None,
            )
            for each in handles
        )


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (Choice(), ["a-1", "f-3", "e-2", "a-4"]),
        (Choice(limit=2), ["e-2", "a-4"]),
        (Choice(limit=0), ["a-1", "f-3", "e-2", "a-4"]),
        (Choice(task="task_a"), ["a-1", "a-4"]),
        (Choice(task="task_a", limit=1), ["a-4"]),
        (Choice(state="ended"), ["e-2"]),
        (Choice(state="failed"), ["f-3"]),
        (Choice(state="finished"), ["a-1", "f-3", "a-4"]),
        (Choice(state="damaged"), []),
        (Choice(since=datetime(2026, 1, 8, tzinfo=UTC).timestamp()), ["e-2", "a-4"]),
        (Choice(since=datetime(2026, 1, 8, tzinfo=UTC).timestamp() + 0.1), ["a-4"]),
    ],
)
def test_the_newest_runs_that_match_are_chosen_oldest_first(choice: Choice, names: list[str]) -> None:
    client = Runs("a-4", "e-2", "f-3", "a-1")
    chosen = choice.select(client.handles, cast(Any, client))
    assert [each.row.run.name for each in chosen] == names


@pytest.mark.parametrize(
    ("choice", "is_filter"),
    [
        (Choice(), False),
        (Choice(limit=3), False),
        (Choice(state="failed"), True),
        (Choice(task="x"), True),
        (Choice(since=0.0), True),
    ],
)
def test_a_number_of_runs_is_no_filter(choice: Choice, is_filter: bool) -> None:
    assert choice.is_filter is is_filter


def test_a_plain_status_shows_a_page_of_runs() -> None:
    client = Runs("a-1")
    client._rows = Runs("a-1")._rows * (MAX_SHOWN + 1)
    assert len(Choice().select(client.handles, cast(Any, client))) == MAX_SHOWN


@pytest.mark.parametrize("options", [{"metric": "loss"}, {"watch": True}])
def test_options_about_one_run_need_its_name(options: dict[str, Any]) -> None:
    nobody: list[str] = []
    for names in (None, nobody):
        with pytest.raises(UsageError, match="--metric and --watch need one run"):
            show_runs(cast(Any, None), names, Choice(), **options)


@pytest.mark.parametrize(
    ("folders", "text"),
    [
        ([], "No runs yet.\nNext: mlbench tasks, then mlbench run NAME 1 2 --task TASK\n"),
        (
            ["a"],
            "The store has no runs, but /data contains 1 sealed run folder.\nNext: mlbench discover local\n",
        ),
        (
            ["a", "b"],
            "The store has no runs, but /data contains 2 sealed run folders.\nNext: mlbench discover local\n",
        ),
    ],
)
def test_an_empty_store_says_where_runs_may_come_from(capsys: Captured, folders: list[str], text: str) -> None:
    client: Any = SimpleNamespace(list_unknown_folders=lambda: [Path("/data", name) for name in folders])
    _explain_empty_store(client)
    assert capsys.readouterr().err == text


def test_a_run_that_is_in_no_queue_has_a_problem_of_its_own(tmp_path: Path) -> None:
    run = Run("f00d", spec(), tmp_path, "2026-01-01T00:00:00Z")
    assert not is_queue_problem(RunStatus(RunRow(run, RunState.CREATED, None), "created", None))


# --- the command ------------------------------------------------------------------------------------------------------


class Known(Runs):
    """A client with runs, experiments and states, and what it was asked for."""

    def __init__(self, *names: str, experiments: tuple[Any, ...] = ()) -> None:
        super().__init__(*names)
        self.store: Any = None
        self.asked: list[Any] = []
        self._experiments = experiments

    def handle(self, name: str) -> Any:
        found = next(each for each in self.handles if each.run.name == name)
        found.is_finished = name[0] != "e"
        found.watch = lambda report: self.asked.append("watched")
        found.status = lambda: document(name=name, metrics={"val_loss": 0.5})
        found.open_log, found.name = (lambda rank: None), name
        return found

    def select(self, names: list[str], *, readable: bool = True) -> Any:
        self.asked.append((list(names), readable))
        runs = [self.handle(each.run.name) for each in self.handles if each.run.name.startswith(tuple(names))]
        return SimpleNamespace(runs=runs, names=[each.run.name for each in runs], experiments=self._experiments)

    def iterate_runs(self, *, tasks: Any, shown_as: Any) -> Any:
        self.asked.append((tasks, shown_as))
        return self.handles

    def count_runs(self) -> int:
        return len(self._rows)

    def list_unknown_folders(self) -> list[Path]:
        return []


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names in each table of runs that is shown."""
    shown: list[list[str]] = []
    monkeypatch.setattr(module, "repeats_in", lambda store, found: [])
    monkeypatch.setattr(module, "show_rows", lambda found: shown.append([each["name"] for each in found]))
    return shown


def show(client: Known, *names: str, choice: Choice | None = None, **options: Any) -> None:
    show_runs(cast(Any, client), list(names), choice or Choice(), **options)


def test_the_newest_runs_are_shown_and_how_many_are_hidden(rows: list[list[str]], capsys: Captured) -> None:
    client = Known("a-4", "a-3", "a-2")
    show(client, choice=Choice(limit=2))
    assert rows == [["a-3", "a-4"]]
    assert client.asked == [((), None)]
    assert capsys.readouterr().err == "1 older runs are hidden; --limit 0 shows all.\n"
    show(client, choice=Choice(limit=3))
    show(client, choice=Choice(limit=2, task="task_a"))
    assert capsys.readouterr().err == ""
    assert client.asked[-1] == (("task_a",), None)
    show(Known())
    assert capsys.readouterr().err.startswith("No runs yet.")


@pytest.mark.parametrize(
    ("state", "shown_as"), [("failed", "failed"), ("unknown", None), ("damaged", None), (None, None)]
)
def test_runs_that_may_have_a_state_are_looked_at(
    rows: list[list[str]], capsys: Captured, state: str | None, shown_as: str | None
) -> None:
    client = Known("a-4")
    show(client, choice=Choice(state=state))
    assert client.asked == [((), shown_as)]
    assert (capsys.readouterr().err == "No run matches.\nNext: mlbench status\n") == (state is not None)


def test_a_run_whose_archive_is_not_complete_can_be_waited_for(rows: list[list[str]], capsys: Captured) -> None:
    show(Known("a-4", "e-3", "e-2"))
    assert capsys.readouterr().err == "Ended, archive not complete yet: e-2, e-3. Next: mlbench wait e-2\n"


def test_one_run_is_shown_in_detail_by_its_name(rows: list[list[str]], capsys: Captured) -> None:
    client = Known("a-4", "e-3")
    show(client, "a-4")
    assert capsys.readouterr().out.startswith("Run:       a-4: ")
    assert client.asked == [(["a-4"], False), (["a-4"], True)]
    show(client, "a")  # the only run of an experiment
    assert rows == [["a-4"]]
    show(client, "a", metric="loss")
    assert "loss    0.500" in capsys.readouterr().out
    show(client, "a-4", choice=Choice(task="task_a"))
    assert rows == [["a-4"], ["a-4"]]


def test_only_a_run_that_has_not_ended_is_watched(rows: list[list[str]]) -> None:
    client = Known("a-4", "e-3")
    show(client, "a-4", watch=True)
    show(client, "e-3")
    assert "watched" not in client.asked
    show(client, "e-3", watch=True)
    assert client.asked.count("watched") == 1


def test_a_metric_is_in_the_document(rows: list[list[str]], capsys: Captured) -> None:
    show(Known("a-4"), "a-4", metric="loss", output=Format.json)
    assert json.loads(capsys.readouterr().out)["metric"] == {"name": "loss", "value": 0.5}


@pytest.mark.parametrize("options", [{"metric": "loss"}, {"watch": True}])
def test_several_runs_have_no_metric_to_watch(rows: list[list[str]], options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--metric and --watch need one run, not 2") as caught:
        show(Known("a-4", "a-3"), "a", **options)
    assert caught.value.hint == "mlbench status a-4 --watch"
    with pytest.raises(UsageError, match="not 0") as caught:
        show(Known(), "a", **options)
    assert caught.value.hint == "mlbench status"


def test_an_experiment_is_shown_above_its_runs(rows: list[list[str]], capsys: Captured) -> None:
    item = SimpleNamespace(read_status=lambda states: status(finished=len(states)))
    show(Known("a-4", "a-3", experiments=(item,)), "a")
    printed = capsys.readouterr()
    assert printed.out.startswith("Experiment: demo\nState:      running, 2 of 8 runs finished")
    assert rows == [["a-4", "a-3"]]
    show(Known("a-4", "a-3", experiments=(item,)), "a", choice=Choice(state="failed"))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "No run matches.\nNext: mlbench status\n")


def test_a_problem_is_a_warning_unless_the_experiment_says_it(
    rows: list[list[str]], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_queue_problem", lambda found: True)
    item = SimpleNamespace(read_status=lambda states: status())
    for experiments, warning in (((), "Warning: a-4: Nobody starts it.\n"), ((item,), "")):
        client = Known("a-4", experiments=experiments)
        client.read_states = lambda handles: iter(  # type: ignore[method-assign]
            [RunStatus(each.row, "created", None, "Nobody starts it.") for each in handles]
        )
        show(client, "a")
        assert capsys.readouterr().err == warning
