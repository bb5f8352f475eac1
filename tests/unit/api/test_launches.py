"""From a request to its runs: what is recorded and rendered, in which order runs start, and when a limit stops them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.api import launches
from mlbench_cli.api.launches import Launch, OpenExperiment, make_launch
from mlbench_cli.api.workspace import API_COMMAND, Workspace
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Cluster, Experiment, Member, Outcome, Run, RunState
from mlbench_cli.runs import queue, recording
from mlbench_cli.runs.experiment import Candidate
from mlbench_cli.runs.forecast import Forecast, RunEstimate
from mlbench_cli.runs.request import Request
from tests.unit.results.runs import spec

CREATED = "2026-01-01T00:00:00Z"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = Workspace(tmp_path / "home")
    yield found
    found.close()


def candidate(name: str, point: dict[str, str] | None = None, **fields: Any) -> Candidate:
    return Candidate(spec(name, 1, **fields), point or {})


def launch_of(workspace: Workspace, *candidates: Candidate, **request: Any) -> Launch:
    asked = Request(**{"name": "demo", "workers": (1,), "task": "digits_resnet", **request})
    return make_launch(workspace, asked, candidates)


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_new_experiment_records_its_request(workspace: Workspace, tmp_path: Path) -> None:
    request = Request(name="demo", workers=(1, 2), task="digits_resnet", data_dir="data")
    found = make_launch(workspace, request, [candidate("demo-1"), candidate("demo-2")])
    experiment = found.experiment
    assert (len(experiment.id), int(experiment.id, 16) >= 0) == (12, True)
    assert experiment == Experiment(
        experiment.id,
        "demo",
        experiment.created,
        {"name": "demo", "workers": [1, 2], "task": "digits_resnet", "data-dir": str(Path("data").absolute())},
        (),
        require_goal=False,
        parallel=1,
    )
    assert (found.is_known, found.request, found.max_hours, found.max_cost) == (False, request, None, None)
    assert [each.name for each in found.specs] == ["demo-1", "demo-2"]
    assert found.handle.experiment is experiment
    assert make_launch(workspace, request, []).experiment.id != experiment.id


def test_an_experiment_that_exists_keeps_what_only_it_knows(workspace: Workspace) -> None:
    run = workspace.store.record_run(spec("demo-1", 1))
    known = Experiment(
        "e1", "demo", CREATED, {"name": "demo"}, (Member(0, run.id, "h"),), require_goal=True, parallel=3
    )
    workspace.store.record_experiment(known, ())
    found = make_launch(workspace, Request(name="demo"), [], {"title": "x"})
    assert found.is_known
    assert found.experiment == replace(known, request={"title": "x"})
    more = make_launch(workspace, Request(name="demo", parallel=2), [])
    assert (more.experiment.parallel, more.experiment.request) == (2, {"name": "demo", "parallel": 2})


@pytest.mark.parametrize(
    ("known", "asked", "required"), [(False, True, True), (True, False, True), (False, False, False)]
)
def test_a_goal_that_was_required_once_stays_required(
    workspace: Workspace, known: bool, asked: bool, required: bool
) -> None:
    run = workspace.store.record_run(spec("demo-1", 1))
    experiment = Experiment("e1", "demo", CREATED, {}, (Member(0, run.id, "h"),), require_goal=known)
    workspace.store.record_experiment(experiment, ())
    found = make_launch(workspace, Request(name="demo"), [], require_goal=asked)
    assert found.experiment.require_goal is required


# --- what is rendered -------------------------------------------------------------------------------------------------


class Engine:
    """An engine that renders a run as its name, and keeps what it is asked to start."""

    def __init__(self, name: str = "engine", dies: bool = False) -> None:
        self.name, self.dies_with_client = name, dies

    def render(self, run_spec: Any) -> str:
        return f"{self.name}: {run_spec.name}"


def use_engines(workspace: Workspace, engines: dict[str, Engine]) -> None:
    """Let these engines execute the runs of their clusters."""

    class Engines:
        def __call__(self, run: Run) -> Engine:
            return engines[run.spec.cluster]

        def of_cluster(self, name: str) -> Engine:
            return engines[name]

    workspace.__dict__["engine_of"] = Engines()


def test_each_run_is_rendered_by_the_engine_of_its_cluster(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.store.record_cluster(Cluster("lab", "kind"))
    use_engines(workspace, {"local": Engine("here"), "lab": Engine("there")})
    launch = launch_of(workspace, candidate("a-1"), candidate("b-1", cluster="lab"), candidate("c-1"))
    found: Any = launch.render()
    assert found == ["here: a-1", "there: b-1", "here: c-1"]
    asked: list[str] = []

    def connect(cluster: Cluster, notice: Any) -> Engine:
        asked.append(cluster.name)
        return Engine(f"offline {cluster.provider}")

    monkeypatch.setattr(launches, "connect_renderer", connect)
    found = launch.render(offline=True)
    assert found == ["offline local: a-1", "offline kind: b-1", "offline local: c-1"]
    assert asked == ["local", "lab"]  # one engine for each cluster


def test_a_preview_of_a_file_has_one_run_of_each_entry_and_cluster(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.store.record_cluster(Cluster("lab", "kind"))
    monkeypatch.setattr(launches, "connect_renderer", lambda cluster, notice: Engine("offline"))
    launch = launch_of(
        workspace,
        candidate("a-1", {"runs": "first"}),
        candidate("a-2", {"runs": "first"}),
        candidate("b-1", {"runs": "second"}),
        candidate("c-1", {"runs": "first"}, cluster="lab"),
    )
    found: Any = launch.render_one_each()
    assert found == ["offline: a-2", "offline: b-1", "offline: c-1"]


# --- what is left -----------------------------------------------------------------------------------------------------


def test_new_runs_have_new_ids_with_every_plan(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(workspace, candidate("demo-1"))
    first, second = launch.plan(), launch.plan()
    assert [run.name for run in first.left] == ["demo-1"] == [run.name for run in first.new]
    assert first.runs[0].id != second.runs[0].id
    asked: list[Any] = []
    monkeypatch.setattr(recording, "plan_experiment", lambda *_, retry_failed: asked.append(retry_failed))
    launch.plan()
    launch.plan(retry_failed=True)
    assert asked == [False, True]


class History:
    """What runs take: a task's seconds and price; and what it is told."""

    def __init__(self, **known: RunEstimate) -> None:
        self.known = known
        self.asked: list[tuple[str, str]] = []
        self.added: list[tuple[str, float]] = []

    def estimate(self, run_spec: Any, cluster: Cluster) -> RunEstimate:
        self.asked.append((run_spec.name, cluster.name))
        return self.known.get(run_spec.task, RunEstimate(None, None))

    def add(self, run_spec: Any, seconds: float) -> None:
        self.added.append((run_spec.name, seconds))


def with_history(launch: Launch, history: History) -> Launch:
    launch.__dict__["history"] = history
    return launch


def test_the_forecast_is_of_the_runs_that_are_left(workspace: Workspace) -> None:
    workspace.store.record_cluster(Cluster("lab", "kind"))
    launch = launch_of(
        workspace,
        candidate("a-1", task="short", timeout=60.0),
        candidate("b-1", task="long", cluster="lab", timeout=600.0),
        candidate("c-1", task="other", timeout=6.0),
    )
    history = History(short=RunEstimate(10.0, 1.0), long=RunEstimate(100.0, 2.5))
    with_history(launch, history)
    assert launch.estimates() == [RunEstimate(10.0, 1.0), RunEstimate(100.0, 2.5), RunEstimate(None, None)]
    assert history.asked == [("a-1", "local"), ("b-1", "lab"), ("c-1", "local")]
    runs = [SimpleNamespace(id=name) for name in "abc"]
    plan: Any = SimpleNamespace(runs=runs, left=runs[1:])
    assert launch.forecast(plan) == Forecast(runs=3, left=2, seconds=100.0, price=2.5, unknown=1, ceiling=606.0)


def test_a_history_knows_the_runs_of_the_store(workspace: Workspace) -> None:
    launch = launch_of(workspace)
    assert launch.history.estimate(spec(), Cluster("local", "local")) == RunEstimate(None, None)
    assert launch.history is launch.history


# --- running ----------------------------------------------------------------------------------------------------------


class Handle:
    """A run that ends after these seconds, at this price."""

    def __init__(
        self,
        name: str,
        seconds: float | None,
        cost: float | None = None,
        outcome: Outcome = Outcome.COMPLETED,
        *,
        finished: bool = False,
    ) -> None:
        self.run = SimpleNamespace(spec=spec(name, 1))
        self.name, self.is_finished = name, finished
        price = None if cost is None else {"amount": cost}
        result = None if seconds is None else {"wall_seconds": seconds, "price": price}
        self.end = SimpleNamespace(result=result, outcome=outcome)

    def wait(self) -> Any:
        return self.end


class Opened:
    """An experiment whose queue this process is; it keeps what is done."""

    def __init__(self, left: Sequence[Handle]) -> None:
        self.left, self.done = list(left), list[str]()
        self.plan, self.handle = SimpleNamespace(left=self.left), "handle"
        self.options: Any = None

    def record(self) -> None:
        self.done.append("recorded")

    def start_run(self, run: Handle, *, detach: bool) -> None:
        self.done.append(f"started {run.name}{' detached' if detach else ''}")

    def hand_over(self) -> None:
        self.done.append("handed over")


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    """The experiment that every launch opens, with these runs left."""

    def prepare(*left: Handle) -> Opened:
        opened = Opened(left)

        @contextmanager
        def open_it(self: Launch, command_line: Sequence[str] = API_COMMAND, *, retry_failed: bool = False) -> Any:
            opened.options = (tuple(command_line), retry_failed)
            yield opened

        monkeypatch.setattr(Launch, "open", open_it)
        return opened

    return prepare


def test_all_runs_are_started_and_followed_in_their_order(workspace: Workspace, opening: Callable[..., Opened]) -> None:
    opened = opening(Handle("a-1", 10.0), Handle("b-1", 20.0, finished=True), Handle("c-1", 30.0))
    launch = with_history(launch_of(workspace), history := History())
    assert launch.run_all() is None
    assert opened.done == ["recorded", "started a-1", "started c-1"]
    assert opened.options == (API_COMMAND, False)
    assert history.added == [("a-1", 10.0), ("b-1", 20.0), ("c-1", 30.0)]
    launch.run_all(command_line=("mlbench", "run"), retry_failed=True)
    assert opened.options == (("mlbench", "run"), True)


def test_only_successful_runs_tell_how_long_others_take(workspace: Workspace, opening: Callable[..., Opened]) -> None:
    opening(
        Handle("a-1", 10.0, outcome=Outcome.FAILED),
        Handle("b-1", None, outcome=Outcome.COMPLETED),
        Handle("c-1", 0.0),
        Handle("d-1", 5.0, outcome=Outcome.GOAL_REACHED),
    )
    launch = with_history(launch_of(workspace), history := History())
    launch.run_all()
    assert history.added == [("d-1", 5.0)]


def test_no_run_starts_that_would_end_after_the_hours(workspace: Workspace, opening: Callable[..., Opened]) -> None:
    """Each is expected to take 1,000 s and takes 2,000 s, failed or not."""
    opening(Handle("a-1", 2000.0, outcome=Outcome.FAILED), Handle("b-1", 2000.0), Handle("c-1", 2000.0))
    launch = replace(launch_of(workspace), max_hours=1.0)
    with_history(launch, History(**{"unknown-task": RunEstimate(1000.0, 9.0)}))
    followed: list[str] = []

    def follow(opened: Any, run: Any) -> Any:
        followed.append(run.name)
        return run.wait()

    assert launch.run_all(follow) == "1.11 of 1 hours are used up"
    assert followed == ["a-1", "b-1"]


def test_no_run_starts_beyond_the_cost(workspace: Workspace, opening: Callable[..., Opened]) -> None:
    opened = opening(Handle("a-1", 10.0, 0.5), Handle("b-1", 10.0), Handle("c-1", None), Handle("d-1", 10.0, 0.25))
    opened.left.append(Handle("e-1", 10.0))
    launch = replace(launch_of(workspace), max_cost=1.0)
    with_history(launch, History(**{"unknown-task": RunEstimate(7200.0, 0.25)}))
    assert launch.run_all() == "0.75 of a budget of 1 is used up"  # the next one would use up all of it
    assert opened.done == ["recorded", "started a-1", "started b-1", "started c-1", "started d-1"]


def test_a_background_process_gets_what_is_left(workspace: Workspace, opening: Callable[..., Opened]) -> None:
    opened = opening(Handle("a-1", 1.0))
    found: Any = launch_of(workspace).start(("mlbench", "run"))
    assert (found, opened.done) == ("handle", ["recorded", "handed over"])
    assert opened.options == (("mlbench", "run"), False)
    opened = opening()
    launch_of(workspace).start()
    assert (opened.done, opened.options) == (["recorded"], (API_COMMAND, False))


# --- an experiment whose queue this process is ------------------------------------------------------------------------


def test_opening_holds_the_queue_and_plans(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(workspace, candidate("demo-1"))
    asked: list[bool] = []
    plan = Launch.plan

    def ask(self: Launch, *, retry_failed: bool) -> Any:
        asked.append(retry_failed)
        return plan(self, retry_failed=retry_failed)

    monkeypatch.setattr(Launch, "plan", ask)
    with launch.open(("mlbench", "run"), retry_failed=True) as opened:
        assert (opened.name, opened.command_line, asked) == ("demo", ("mlbench", "run"), [True])
        assert opened.held.folder.path == workspace.store.folder / "experiments" / launch.experiment.id
        (run,) = opened.left
        assert (run.name, run.row.state) == ("demo-1", RunState.CREATED)
        assert [each.name for each in opened.runs] == ["demo-1"]
        assert opened.handle.experiment == opened.plan.experiment
        with pytest.raises(NotFoundError):
            workspace.store.run("demo-1")  # nothing is recorded yet
    with launch.open() as opened:
        assert (opened.command_line, asked) == (API_COMMAND, [True, False])


def test_recorded_runs_are_as_the_store_knows_them(workspace: Workspace) -> None:
    done, new = workspace.store.record_run(spec("a-1", 1)), Run("bb", spec("b-1", 1), Path("/nowhere"), CREATED)
    workspace.store.update_run(done, RunState.FINISHED, Outcome.FAILED)
    plan: Any = SimpleNamespace(runs=(done, new), left=(new,))
    opened = OpenExperiment(workspace, plan, held=None)  # type: ignore[arg-type]
    assert [(run.name, run.row.state, run.row.outcome) for run in opened.runs] == [
        ("a-1", RunState.FINISHED, Outcome.FAILED),
        ("b-1", RunState.CREATED, None),
    ]
    assert [run.name for run in opened.left] == ["b-1"]


@pytest.mark.parametrize(("clusters", "dies"), [(("local", "lab"), True), (("lab",), False), ((), False)])
def test_an_experiment_ends_with_its_client_if_any_of_its_runs_does(
    workspace: Workspace, clusters: tuple[str, ...], dies: bool
) -> None:
    use_engines(workspace, {"local": Engine(dies=True), "lab": Engine()})
    left = [Run(name, spec(f"{name}-1", 1, cluster=name), Path("/nowhere"), CREATED) for name in clusters]
    opened = OpenExperiment(workspace, SimpleNamespace(left=left), held=None)  # type: ignore[arg-type]
    assert opened.dies_with_client is dies


def test_what_an_open_experiment_does_is_done_to_its_own_runs(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment: Any = SimpleNamespace(name="demo")
    run = Run("aa", spec("a-1", 1), Path("/nowhere"), CREATED)
    plan: Any = SimpleNamespace(experiment=experiment, new=("new",), left=("left",))
    held: Any = "held"
    opened = OpenExperiment(workspace, plan, held, ("mlbench", "run"))
    engine = Engine()
    use_engines(workspace, {"local": engine})
    calls: list[Any] = []

    def start(*arguments: Any) -> int:
        calls.append(arguments)
        return 4321

    monkeypatch.setattr(recording, "document_writer", lambda command_line, search: (command_line, search))
    monkeypatch.setattr(recording, "record", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(queue, "start_member", lambda *arguments, detach: calls.append((*arguments, detach)))
    monkeypatch.setattr(queue, "start", start)
    monkeypatch.setattr(launches, "find_machine_holder", lambda run_spec: f"holder of {run_spec.name}")
    handle: Any = SimpleNamespace(run=run)
    opened.record({"trials": 3})
    opened.record()
    opened.start_run(handle, detach=True)
    opened.start_run(handle, detach=False)
    assert opened.hand_over() == 4321
    assert opened.find_machine_holder(handle) == "holder of a-1"
    store = workspace.store
    assert calls == [
        (experiment, ("new",), store, (("mlbench", "run"), {"trials": 3})),
        (experiment, ("new",), store, (("mlbench", "run"), None)),
        (experiment, run, engine, store, True),
        (experiment, run, engine, store, False),
        (experiment, ("left",), store.folder, "held"),
    ]
