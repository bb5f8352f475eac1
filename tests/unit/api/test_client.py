"""The client of a data folder: which runs, clusters and archives a name or filter means, and what a run that is not
finished, or whose archive is complete, can do."""

import shutil
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.api import Client, RunHandle, repetition
from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.errors import CleanupError, DeadlineError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster, Experiment, Finding, Member, Outcome, RunState
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.runs import supervise
from mlbench_cli.runs.forecast import RunEstimate
from mlbench_cli.runs.launch import MAX_LOCAL_RANKS, Machine
from mlbench_cli.runs.matrix import MAX_MEMBERS
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.queue_folder import write_queued
from tests.unit.results.runs import new_run, observation_of, spec


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(tmp_path / "home" / "deep") as found:
        yield found


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sealed run with the name demo-2 and the id 00000000f00d."""
    folder = tmp_path_factory.mktemp("sealed") / "run"
    run = replace(new_run(folder, spec()), id="00000000f00d")
    write_run_document(run)
    seal(run, observation_of())
    return folder


def record(client: Client, name: str, state: RunState = RunState.CREATED, outcome: Any = None, **fields: Any) -> Any:
    run = client.store.record_run(spec(name, **fields))
    if state is not RunState.CREATED:
        client.store.update_run(run, state, outcome)
    return run


def record_sealed(client: Client, sealed: Path) -> RunHandle:
    run = client.store.record_run(spec(), run_id="00000000f00d")
    shutil.copytree(sealed, run.folder, dirs_exist_ok=True)
    client.store.update_run(run, RunState.FINISHED, Outcome.GOAL_REACHED)
    return client.find_run("demo-2")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def known(client: Client) -> Client:
    """Four runs: a failed, a running and two new ones, of which "d-1" is the newest."""
    record(client, "a-1", RunState.FINISHED, Outcome.FAILED)
    record(client, "b-1", RunState.RUNNING, task="other")
    record(client, "c-1")
    record(client, "d-1", task="other")
    return client


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["d-1", "c-1", "b-1", "a-1"]),
        ({"limit": 2}, ["d-1", "c-1"]),
        ({"limit": 2, "offset": 1}, ["c-1", "b-1"]),
        ({"offset": 3}, ["a-1"]),
        ({"limit": 0}, []),
        ({"states": ["created"]}, ["d-1", "c-1"]),
        ({"states": ["pending"]}, ["d-1", "c-1"]),
        ({"states": ["failed", "running"]}, ["b-1", "a-1"]),
        ({"states": ["finished"]}, ["a-1"]),
        ({"tasks": ["other"]}, ["d-1", "b-1"]),
        ({"tasks": ["other"], "states": ["running"]}, ["b-1"]),
        ({"contains": "b"}, ["b-1"]),
        ({"contains": "-1", "limit": 1}, ["d-1"]),
    ],
)
def test_runs_are_listed_newest_first(known: Client, options: dict[str, Any], names: list[str]) -> None:
    assert [run.name for run in known.runs(**options)] == names


def test_a_state_that_no_run_can_have_is_refused(known: Client) -> None:
    with pytest.raises(UsageError, match='Did you mean "failed"'):
        known.runs(states=["faild"])


def test_a_run_is_found_by_name_or_id(known: Client) -> None:
    run = known.find_run("b-1")
    assert known.find_run_by_id(run.run.id).name == "b-1"
    assert known.count_runs() == 4
    with pytest.raises(NotFoundError, match='There is no run with the id "x"'):
        known.find_run_by_id("x")
    with pytest.raises(NotFoundError):
        known.find_run("e-1")


def test_what_a_notebook_shows_of_a_client_and_of_a_run(client: Client) -> None:
    assert repr(client) == f"<mlbench client of {client.store.folder}: 0 runs>"
    record(client, "a-1", workers=1, network="1gbit", functional_only="it was emulated")
    record(client, "b-2", RunState.FINISHED, Outcome.FAILED)
    assert repr(client).endswith(": 2 runs>")
    first, second = (repr(client.find_run(name)) for name in ("a-1", "b-2"))
    assert first == "<run a-1: unknown-task, 1 worker, task's own, 1gbit, functional only, created>"
    assert second == "<run b-2: unknown-task, 2 workers, task's own, failed>"
    assert "a-1" in client._repr_html_()


def test_options_that_a_run_does_not_have_are_refused(client: Client) -> None:
    with pytest.raises(UsageError, match=r"bakend is not an option of a run\. Did you mean \"backend\""):
        client.run("x", bakend="gloo")


# --- experiments ------------------------------------------------------------------------------------------------------


def experiment(client: Client, name: str, /, *runs: Any, **request: Any) -> Experiment:
    members = tuple(Member(number, run.id, "hash") for number, run in enumerate(runs))
    made = Experiment(f"e-{name}", name, f"2026-01-0{len(client.store.experiments()) + 1}T00:00:00Z", request, members)
    client.store.record_experiment(made, ())
    return made


def test_experiments_are_listed_newest_first(client: Client) -> None:
    for name in ("a", "b", "c"):
        experiment(client, name, record(client, f"{name}-1"))
    assert [item.name for item in client.experiments()] == ["c", "b", "a"]
    assert [item.name for item in client.experiments(limit=2)] == ["c", "b"]
    assert client.find_experiment("b").experiment.id == "e-b"
    with pytest.raises(NotFoundError, match='There is no experiment "d"'):
        client.find_experiment("d")


def test_the_title_of_an_experiment_is_that_of_its_file(client: Client) -> None:
    experiment(client, "a", record(client, "a-1"), title="A title")
    experiment(client, "b", record(client, "b-1"), record(client, "b-2"))
    assert [client.find_experiment(name).title for name in ("a", "b")] == ["A title", "b"]
    assert repr(client.find_experiment("a")) == "<experiment a: 1 run>"
    assert repr(client.find_experiment("b")) == "<experiment b: 2 runs>"
    assert not client.find_experiment("a").is_under_way
    assert client.find_experiment("a").read_queue_log() == []


def test_a_name_alone_recalls_the_request_of_its_experiment(client: Client) -> None:
    experiment(client, "demo", record(client, "demo-2"), name="demo", workers=[2, 4], task="digits_resnet")
    recalled = client.recall(Request(name="demo", repeat=3))
    assert (recalled.workers, recalled.task, recalled.repeat) == ((2, 4), "digits_resnet", 3)
    for request in (
        Request(name="demo", workers=(1,)),
        Request(name="demo", task="allreduce"),
        Request(name="demo", command="true"),
        Request(name="other"),
        Request(),
    ):
        assert client.recall(request) is request


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_the_default_cluster_is_this_machine_until_another_is_chosen(client: Client) -> None:
    assert client.cluster().name == "local"
    lab = client.store.record_cluster(Cluster("lab", "kind"))
    assert client.cluster("lab").provider == "kind"
    assert sorted(cluster.name for cluster in client.clusters()) == ["lab", "local"]
    client.store.choose_cluster(lab)
    assert client.cluster().name == "lab"
    assert client.cluster("local").name == "local"
    assert client.find_cluster("lab").name == "lab"
    with pytest.raises(NotFoundError):
        client.find_cluster("far")


def test_clusters_of_archives_are_each_known_one_once(client: Client) -> None:
    client.store.record_cluster(Cluster("lab", "kind"))
    archives: Any = [SimpleNamespace(run={"spec": {"cluster": name}}) for name in ("local", "lab", "gone", "lab")]
    assert [cluster.name for cluster in client.clusters_of(archives)] == ["lab"]


# --- archives ---------------------------------------------------------------------------------------------------------


def test_archives_are_found_by_run_path_and_without_a_name(client: Client, sealed: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There are no finished runs"):
        client.find_archives()
    run = record_sealed(client, sealed)
    record(client, "open-1")
    file = tmp_path / "x.zip"
    file.touch()
    assert client.find_archives() == [run.folder]
    assert client.find_archives(["demo-2", str(sealed), "demo-2", str(file)]) == [run.folder, sealed, file]
    with pytest.raises(UsageError, match='The run "open-1" has no results yet') as caught:
        client.find_archives(["open-1"])
    assert caught.value.hint == "mlbench wait open-1"
    with pytest.raises(NotFoundError, match=r"There is no archive no\.zip"):
        client.find_archives(["no.zip"])
    with pytest.raises(NotFoundError, match="There is no archive a/b"):
        client.find_archives(["a/b"])


def test_runs_of_an_experiment_without_results_are_told(tmp_path: Path, sealed: Path) -> None:
    notices: list[str] = []
    with Client(tmp_path, notice=notices.append) as client:
        run = record_sealed(client, sealed)
        experiment(client, "demo", run.run, record(client, "demo-4"))
        experiment(client, "none", record(client, "x-1"), record(client, "x-2"))
        assert client.find_archives(["demo"]) == [run.folder]
        assert notices == ["1 of 2 runs of demo have no results yet and are omitted."]
        with pytest.raises(UsageError, match="No run of none has results yet"):
            client.find_archives(["none"])
        assert [archive.run["name"] for archive in client.find_experiment("demo").archives()] == ["demo-2"]


def test_archives_below_a_folder(client: Client, sealed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "below"
    folder.mkdir()
    with pytest.raises(NotFoundError, match="There is no archive in"):
        client.find_archives_below(folder)
    shutil.copytree(sealed, folder / "m")
    for name in ("z.zip", "a.zip", "notes.txt"):
        (folder / name).touch()
    assert [path.name for path in client.find_archives_below(folder)] == ["a.zip", "m", "z.zip"]
    assert client.find_archives_below(folder / "m") == [folder / "m"]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_complete_run_is_read_from_its_archive(client: Client, sealed: Path, tmp_path: Path) -> None:
    run = record_sealed(client, sealed)
    assert (run.is_sealed, run.is_finished, run.is_running, run.is_started) == (True, True, False, True)
    assert (run.outcome, run.results) == (Outcome.GOAL_REACHED, run.folder)
    assert [point.value for point in run.metrics(["val_Prec@1"])] == [40.0, 60.0, 80.5]
    assert [point.value for point in run.metrics(["val_Prec@1"], last=1)] == [80.5]
    assert {point.rank for point in run.metrics()} == {0, 1}
    assert {point.rank for point in run.metrics(ranks=[1])} == {1}
    assert [entry.text for entry in run.logs(1, tail=1)] == [b"epoch 2 of 3\n"]
    assert any(b"@mlbench" in entry.text for entry in run.logs(1, raw=True))
    assert run.list_log_gaps() == []
    assert run.complete() == run.cancel() == run.finished
    target = run.download_partial(tmp_path / "x.zip")  # nothing is partial any more
    assert "result.json" in zipfile.ZipFile(target).namelist()
    assert run.describe()["workers"] == 2
    assert run.status()["outcome"] == "goal_reached"


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_a_run_does_not_have(client: Client, sealed: Path, rank: int) -> None:
    with pytest.raises(NotFoundError, match=f'The run "demo-2" has no rank {rank}, only 0 to 1'):
        record_sealed(client, sealed).open_log(rank)


class Engine:
    """An engine that sees what it is told."""

    dies_with_client = False

    def __init__(self, *seen: Any) -> None:
        self.seen = list(seen)

    def look(self, run: Any) -> Any:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[RunHandle, list[str]]]:
    """A run of a cluster, and what is told about it."""
    notices: list[str] = []
    with Client(tmp_path, notice=notices.append) as client:
        record(client, "open-2", RunState.RUNNING, engine="kubernetes", cluster="lab")
        client.__dict__["engine_of"] = lambda run: Engine(observation_of(ended=None))
        yield client.find_run("open-2"), notices


def test_a_run_without_an_archive_has_no_results(running: tuple[RunHandle, list[str]], tmp_path: Path) -> None:
    run, _ = running
    assert (run.is_sealed, run.is_finished, run.is_running, run.outcome) == (False, False, True, None)
    with pytest.raises(UsageError, match='The run "open-2" has no results yet') as caught:
        run.download(tmp_path / "x.zip")
    assert caught.value.hint == "mlbench wait open-2"


def test_a_run_that_has_not_started_has_nothing_partial(running: tuple[RunHandle, list[str]], tmp_path: Path) -> None:
    run, _ = running
    waiting = replace(observation_of(ended=None), workers=())
    run.workspace.__dict__["engine_of"] = lambda _: Engine(waiting)
    with pytest.raises(UsageError, match='The run "open-2" has not started yet'):
        run.download_partial(tmp_path / "x.zip")


def test_a_run_that_has_not_ended_cannot_be_completed(
    running: tuple[RunHandle, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notices = running
    answers: list[Any] = [None, SimpleNamespace(result=None, findings=[Finding("x", "The disk is full.", "Free it.")])]
    monkeypatch.setattr("mlbench_cli.runs.finalize.finalize", lambda *_, **__: answers.pop(0))
    with pytest.raises(UsageError, match='The run "open-2" has not ended yet'):
        run.complete()
    assert notices == ["Fetching and sealing the results of open-2 ..."]
    with pytest.raises(CleanupError, match="The disk is full") as caught:
        run.complete()
    assert caught.value.hint == "Free it."


@pytest.mark.parametrize(("timeout", "seconds"), [(None, supervise.CANCEL_SECONDS), (2.5, 2.5), (0.0, 0.0)])
def test_canceling_waits_for_a_while(
    running: tuple[RunHandle, list[str]], monkeypatch: pytest.MonkeyPatch, timeout: float | None, seconds: float
) -> None:
    run, notices = running
    asked: list[float] = []

    def cancel(*_: Any, seconds: float, **__: Any) -> Any:
        asked.append(seconds)
        return "ended" if len(asked) > 1 else None

    monkeypatch.setattr(supervise, "cancel", cancel)
    with pytest.raises(DeadlineError, match='The run "open-2" is being stopped, but has not ended yet'):
        run.cancel(timeout)
    assert cast(Any, run.cancel(timeout)) == "ended"
    assert asked == [seconds, seconds]
    assert notices == [f"Stopping open-2; waiting up to {seconds:g} s for it to end."] * 2


def test_a_run_is_followed_until_it_has_ended(
    running: tuple[RunHandle, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = running
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("mlbench_cli.runs.progress.EventReader.poll", lambda self: [])
    engine = Engine(*[replace(observation_of(ended=None), time=float(n)) for n in (1, 2)], observation_of())
    run.workspace.__dict__["engine_of"] = lambda _: engine
    seen = list(run.follow(0.25))
    assert [progress.observation.ended is not None for progress in seen] == [False, False, True]
    assert slept == [0.25, 0.25]


# --- preparing runs ---------------------------------------------------------------------------------------------------


class Prepared:
    """A launch of two runs, of which one is expected to take 10 s."""

    def __init__(self, request: Request) -> None:
        self.request, self.told = request, list[Any]()
        self.specs = [spec("a-1", 1, timeout=60.0), spec("a-2", 2, timeout=60.0)]

    def render(self) -> None:
        self.told.append("rendered")

    def estimates(self) -> list[RunEstimate]:
        return [RunEstimate(10.0, 0.5), RunEstimate(None, None)]

    def start(self, command_line: Any) -> str:
        self.told.append(tuple(command_line))
        return "experiment"


@pytest.fixture
def prepared(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches that a client prepares, each with whether the goal is required."""
    made: list[Any] = []

    def prepare(self: Client, request: Request, *, require_goal: bool = False) -> Prepared:
        made.append((Prepared(request), require_goal))
        return cast(Prepared, made[-1][0])

    monkeypatch.setattr(Client, "prepare", prepare)
    return made


def test_runs_are_checked_before_any_starts(client: Client, prepared: list[Any]) -> None:
    found: Any = client.run("x", [1, 2], require_goal=True, task="mnist", seed=7)
    one: Any = client.run("x", 4)
    assert found == one == "experiment"
    ((first, is_required), (second, is_not)) = prepared
    assert first.request == Request(name="x", workers=(1, 2), task="mnist", seed=7)
    assert second.request == Request(name="x", workers=(4,))
    assert (is_required, is_not) == (True, False)
    assert first.told == ["rendered", ("mlbench.api",)]
    client.submit(Request(name="y"), command_line=("mlbench", "x"))
    assert prepared[-1][0].told == ["rendered", ("mlbench", "x")]


def test_what_would_start_is_described_with_an_estimate_if_asked(client: Client, prepared: list[Any]) -> None:
    request = Request(name="a", workers=(1, 2), task="mnist")
    plain = {"runs": ["a-1", "a-2"], "command": "mlbench run a 1 2 --task mnist"}
    assert client.plan(request) == plain
    assert client.plan(request, estimate=True) == {**plain, "seconds": 10.0, "price": 0.5, "unknown": 1}
    assert [launch.told for launch, _ in prepared] == [["rendered"], ["rendered"]]


def test_a_request_is_completed_for_its_cluster(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.runs.defaults.with_defaults", lambda request, cluster: replace(request, seed=9))
    lab = client.store.record_cluster(Cluster("lab", "kind"))
    request = Request(name="x", workers=(1,))
    assert client.complete(request) == (replace(request, seed=9), client.cluster("local"))
    client.store.choose_cluster(lab)
    assert client.complete(request) == (replace(request, seed=9, cluster="lab"), lab)
    named = replace(request, cluster="local")
    assert client.complete(named) == (replace(named, seed=9), client.cluster("local"))
    matrix = replace(request, matrix={"cluster": ("local", "lab")})
    assert client.complete(matrix) == (matrix, lab)  # each point is completed for its own


@pytest.mark.parametrize(("most", "limit"), [(None, MAX_MEMBERS), (3, 3), (0, 0)])
def test_only_so_many_runs_are_prepared(
    client: Client, monkeypatch: pytest.MonkeyPatch, most: int | None, limit: int
) -> None:
    asked: list[Any] = []

    def expand(request: Request, cluster: Cluster, **options: Any) -> tuple[()]:
        asked.append((request.name, cluster.name, options["most"], options["find_cluster"]("local").name))
        return ()

    monkeypatch.setattr("mlbench_cli.runs.experiment.expand", expand)
    launch = client.prepare(Request(name="x", workers=(1,)), most=most, require_goal=True)
    assert asked == [("x", "local", limit, "local")]
    assert (launch.specs, launch.experiment.require_goal) == ([], True)


FILE = "title: T\nclusters: [local]\nmax-hours: 2\nmax-cost: 3\nruns:\n  - {name: a, command: 'true', workers: [1]}\n"


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What runs of a file are expanded from: clusters, GPUs of this machine, and at most how many."""
    asked: list[Any] = []

    def expand_file(found: Any, clusters: Any, machine: Machine, *, with_defaults: Any, most: int) -> tuple[()]:
        asked.append(([cluster.name for cluster in clusters], machine.gpus, most))
        return ()

    monkeypatch.setattr("mlbench_cli.runs.experiment_file.expand_file", expand_file)
    monkeypatch.setattr("mlbench_cli.runs.launch.local_machine", lambda: Machine(2, 0))
    return asked


def test_what_is_given_goes_before_the_keys_of_a_file(client: Client, expanded: list[Any], tmp_path: Path) -> None:
    client.store.record_cluster(Cluster("lab", "kind"))
    file = tmp_path / "demo.yaml"
    file.write_text(FILE)
    launch = client.prepare_file(str(file))
    assert (launch.max_hours, launch.max_cost, launch.experiment.request["title"]) == (2, 3, "T")
    launch = client.prepare_file(str(file), clusters=["lab"], max_hours=0.0, max_cost=0.5, most=7, only_list=True)
    assert (launch.max_hours, launch.max_cost) == (0.0, 0.5)
    assert launch.experiment.request["clusters"] == ["lab"]
    assert expanded == [(["local"], 0, MAX_MEMBERS), (["lab"], MAX_LOCAL_RANKS, 7)]


def test_an_experiment_of_a_file_is_known_by_its_name(
    client: Client, expanded: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = client.store.record_cluster(Cluster("lab", "kind"))
    client.store.choose_cluster(lab)
    monkeypatch.chdir(tmp_path)
    entry = {"name": "a", "command": "true", "workers": [1]}
    experiment(client, "demo", record(client, "demo-a-1"), title="Recorded", runs=[entry])
    launch = client.prepare_file("demo")
    assert (launch.is_known, launch.experiment.request["title"], launch.max_hours) == (True, "Recorded", None)
    assert expanded == [(["lab"], 0, MAX_MEMBERS)]  # the default cluster
    (tmp_path / "demo").write_text(FILE)
    assert client.prepare_file("demo").experiment.request["title"] == "T"  # a file of that name is meant


def test_questions_are_about_what_this_machine_knows(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = client.store.record_cluster(Cluster("lab", "kind"))
    client.store.choose_cluster(lab)
    record(client, "a-1")
    asked: list[Any] = []

    def ask_questions(clusters: Any, default: str, taken: Any) -> str:
        asked.append((sorted(cluster.name for cluster in clusters), default, taken))
        return "questions"

    monkeypatch.setattr("mlbench_cli.runs.questions.ask_questions", ask_questions)
    found: Any = client.questions()
    assert (found, asked) == ("questions", [(["lab", "local"], "lab", ["a-1"])])


@pytest.mark.parametrize("problem", [None, "The disk is full."])
def test_answers_that_cannot_be_remembered_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    notices: list[str] = []
    monkeypatch.setattr("mlbench_cli.runs.questions.remember", lambda request: problem)
    with Client(tmp_path, notice=notices.append) as client:
        client.remember(Request(name="x"))
    assert notices == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("shown_as", "names"),
    [
        ("failed", ["d-1", "c-1", "b-1", "a-1"]),
        ("completed", ["d-1", "c-1", "b-1"]),
        (None, ["d-1", "c-1", "b-1", "a-1"]),
    ],
)
def test_runs_that_ended_otherwise_cannot_be_shown_with_a_state(
    known: Client, shown_as: str | None, names: list[str]
) -> None:
    """Of the others only a look at the run tells how it is now."""
    assert [run.name for run in known.iterate_runs(shown_as=shown_as)] == names


def test_archives_are_repeated_and_reproduced_as_asked(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def do(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> str:
            asked.append((name, arguments[1:], options))
            return name

        return call

    monkeypatch.setattr(repetition, "repeat_archive", do("repeated"))
    monkeypatch.setattr(repetition, "reproduce_archives", do("reproduced"))
    request, original = Request(name="x"), ["archive"]
    found: Any = [client.prepare_repetition("a.zip", request)]
    signers, agree = Path("signers"), cast(Any, "agree")
    found += [client.prepare_repetition("a.zip", request, require_goal=True, signers=signers, agree=agree)]
    found += [client.prepare_reproduction(cast(Any, original), repeats=3)]
    found += [client.prepare_reproduction(cast(Any, original), name="n", repeats=2, cluster="lab", data_dir="/d")]
    assert found == ["repeated", "repeated", "reproduced", "reproduced"]
    refuse = {"require_goal": False, "signers": None, "agree": repetition.refuse_program}
    assert asked == [
        ("repeated", ("a.zip", request), refuse),
        ("repeated", ("a.zip", request), {"require_goal": True, "signers": signers, "agree": agree}),
        ("reproduced", (original, None, 3, repetition.Place()), {}),
        ("reproduced", (original, "n", 2, repetition.Place("lab", "/d")), {}),
    ]


# --- a run in the queue of its experiment -----------------------------------------------------------------------------


def queued(client: Client, engine: str) -> RunHandle:
    """A run that waits in the queue of the experiment "demo"."""
    run = record(client, "wait-1", engine=engine, cluster="lab" if engine != "local" else "local")
    run.folder.mkdir(parents=True, exist_ok=True)
    write_queued(run.folder, "e1", "demo")
    return client.find_run("wait-1")


def test_a_run_that_is_queued_is_not_started(client: Client) -> None:
    run = queued(client, "kubernetes")
    assert (run.is_started, run.is_running, run.outcome, run.experiment) == (False, False, None, None)
    with pytest.raises(UsageError, match='The run "wait-1" has not been started') as caught:
        run.complete()
    assert caught.value.hint == "mlbench wait demo"
    write_queued(run.folder, "e1", "demo", is_starting=True)
    assert run.is_started


def test_a_run_that_is_queued_for_a_cluster_is_canceled_with_its_experiment(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "cancel", lambda *_, **__: "canceled")
    client.__dict__["engine_of"] = lambda run: Engine(observation_of(ended=None))
    run = queued(client, "kubernetes")
    with pytest.raises(
        UsageError, match='The run "wait-1" has not been started; its experiment decides when'
    ) as caught:
        run.cancel()
    assert caught.value.hint == "mlbench cancel demo, or: mlbench delete wait-1"


def test_a_run_that_is_queued_on_this_machine_can_be_canceled_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "cancel", lambda *_, **__: "canceled")
    client.__dict__["engine_of"] = lambda run: Engine(observation_of(ended=None))
    found: Any = queued(client, "local").cancel()
    assert found == "canceled"


def test_an_archive_is_downloaded_as_it_is_or_without_its_author(
    client: Client, sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    for name in ("pack.pack", "reseal.write_anonymous"):
        monkeypatch.setattr(
            f"mlbench_cli.results.archive.{name}",
            lambda folder, target, name=name: written.append((name, folder, target)),
        )
    run, target = record_sealed(client, sealed), tmp_path / "x.zip"
    assert run.download(target) == run.download(target, anonymous=True) == target
    assert written == [("pack.pack", run.folder, target), ("reseal.write_anonymous", run.folder, target)]


def test_a_run_is_deleted_by_force_only_if_asked(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "mlbench_cli.runs.removal.delete_run", lambda run, store, **options: asked.append((run.name, options["force"]))
    )
    run = queued(client, "local")
    run.delete()
    run.delete(force=True)
    assert asked == [("wait-1", False), ("wait-1", True)]


def test_waiting_and_watching_follow_the_run_on_its_engine(
    running: tuple[RunHandle, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notices = running
    asked: list[Any] = []

    def follow(found: Any, engine: Any, store: Any, *, timeout: Any, report: Any, notice: Any) -> str:
        notice("told")
        asked.append((found.name, type(engine).__name__, timeout, report))
        return "ended"

    monkeypatch.setattr(supervise, "follow", follow)
    monkeypatch.setattr(supervise, "watch", lambda found, engine, report: asked.append((found.name, report)))
    report: Any = "report"
    found: Any = run.wait(2.5, report=report)
    assert found == "ended"
    run.wait()
    run.watch(report)
    assert asked == [("open-2", "Engine", 2.5, "report"), ("open-2", "Engine", None, None), ("open-2", "report")]
    assert notices == ["told", "told"]


def test_gaps_of_a_log_are_told_by_the_engine_and_then_by_the_archive(
    running: tuple[RunHandle, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = running
    gap = Finding("log_gap", "10 lines are missing.")
    engine: Any = Engine(observation_of(ended=None))
    engine.log_gaps = lambda found: [gap]
    run.workspace.__dict__["engine_of"] = lambda _: engine
    assert run.list_log_gaps() == [gap.to_dict()]
    findings: list[Any] = [{"code": "other"}, {"code": LOG_GAP, "summary": "20 lines are missing."}]
    monkeypatch.setattr(RunHandle, "is_sealed", True)
    monkeypatch.setattr(RunHandle, "archive", lambda self, verify: nullcontext(SimpleNamespace(findings=findings)))
    assert run.list_log_gaps() == findings[1:]
