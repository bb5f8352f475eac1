"""Members of experiments: what is started at once or queued, what a stopped client says, and which images they need."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.clusters import registry_login
from mlbench_cli.commands import _images, _members
from mlbench_cli.commands._experiment_file import How, Limits, _describe_forecast, run_file
from mlbench_cli.commands._images import platform_of, require_images, require_registry
from mlbench_cli.commands._members import follow_all, follow_run, start_detached, wait_for_queue
from mlbench_cli.commands.images import _choose_platforms, _find_registry
from mlbench_cli.console import Format
from mlbench_cli.errors import DeadlineError, Interrupted, NotFoundError, Terminated, UsageError
from mlbench_cli.model.run import Cluster, Outcome
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.runs.forecast import Forecast
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.registries import FoundImage, Presence
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]


class Run:
    """A run that ends with an outcome, or raises when it is waited for."""

    def __init__(self, name: str, ends: Any = Outcome.COMPLETED, *, is_finished: bool = False, **fields: Any) -> None:
        self.name, self.folder, self.is_finished = name, Path("/data", name), is_finished
        self.run = SimpleNamespace(id=f"id-{name}", name=name, spec=spec(name, **fields))
        self.ends = ends
        self.dies_with_client = fields.get("engine", "local") == "local"
        self.finished = self.end(ends) if is_finished else None
        self.cancels: Any = Outcome.CANCELLED
        self.patience: list[float] = []

    def end(self, outcome: Outcome) -> Any:
        return SimpleNamespace(
            run=self.run, outcome=outcome, summary=f"{self.name} {outcome}.",
            exit_code=lambda require_goal: (7 if require_goal else 0) if outcome is Outcome.GOAL_MISSED else 0,
        )  # fmt: skip

    def open_log(self, rank: int) -> None: ...

    def wait(self, report: Any) -> Any:
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.end(self.ends)

    def cancel(self, seconds: float) -> Any:
        self.patience.append(seconds)
        if isinstance(self.cancels, Exception):
            raise self.cancels
        return self.end(self.cancels)


class Experiment:
    """An open experiment named demo; its unfinished runs are still to be done."""

    name = "demo"

    def __init__(self, *runs: Run, parallel: int = 1, dies_with_client: bool = True, holder: str | None = None) -> None:
        self.runs, self.dies_with_client = list(runs), dies_with_client
        self.left = [run for run in runs if not run.is_finished]
        self.plan = SimpleNamespace(experiment=SimpleNamespace(name="demo", parallel=parallel), runs=self.runs)
        self.started: list[tuple[str, bool]] = []
        self.handed = 0
        self._holder = holder

    def start_run(self, run: Run, *, detach: bool) -> None:
        if run.name.startswith("bad"):
            raise NotFoundError("No cluster.")
        self.started.append((run.name, detach))

    def hand_over(self) -> int:
        self.handed += 1
        return 77

    def find_machine_holder(self, run: Run) -> str | None:
        return self._holder


def detach(experiment: Experiment, output: Format = Format.text) -> int:
    return start_detached(cast(Any, experiment), output)


# --- detached ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "parallel", "dies", "holder", "at_once"),
    [
        (1, 1, True, None, True),
        (1, 1, True, "in use by x", False),
        (2, 1, True, None, False),
        (2, 2, True, None, False),  # on this machine a queue starts them
        (2, 1, False, None, False),
        (2, 2, False, None, True),
        (3, 2, False, None, False),
    ],
)
def test_runs_are_started_at_once_or_left_to_a_queue(
    count: int, parallel: int, dies: bool, holder: str | None, at_once: bool
) -> None:
    runs = [Run(f"demo-{size}") for size in range(1, count + 1)]
    experiment = Experiment(*runs, parallel=parallel, dies_with_client=dies, holder=holder)
    assert detach(experiment) == 0
    assert experiment.started == ([(run.name, True) for run in runs] if at_once else [])
    assert experiment.handed == (0 if at_once else 1)


def test_a_detached_run_says_what_to_do_next(capsys: Captured) -> None:
    detach(Experiment(Run("demo-1")))
    printed = capsys.readouterr()
    assert printed.out == "demo-1\n"
    assert printed.err.splitlines() == [
        "Started demo-1.",
        "Next: mlbench status demo-1, mlbench logs demo-1, mlbench wait demo-1, mlbench cancel demo-1",
    ]


@pytest.mark.parametrize(("parallel", "words"), [(1, "them one after the other"), (3, "3 at a time")])
def test_queued_runs_name_the_process_that_starts_them(capsys: Captured, parallel: int, words: str) -> None:
    detach(Experiment(Run("demo-1"), Run("demo-2"), Run("demo-4", is_finished=True), parallel=parallel))
    printed = capsys.readouterr()
    assert printed.out == "demo-1\ndemo-2\n"
    assert printed.err.splitlines() == [
        f"Queued demo-1, demo-2. Background process 77 starts {words}; if it dies, repeat the command to resume.",
        "Next: mlbench status demo, mlbench logs demo, mlbench wait demo, mlbench cancel demo",
    ]


def test_a_machine_that_is_in_use_is_named(capsys: Captured) -> None:
    detach(Experiment(Run("demo-1"), holder="in use by other-2 (eva)"))
    assert capsys.readouterr().err.startswith(
        "demo-1 is waiting for this machine: in use by other-2 (eva).\nQueued demo-1."
    )


def test_detached_runs_as_a_document(capsys: Captured) -> None:
    detach(Experiment(Run("demo-1"), Run("demo-2")), Format.json)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "experiment": "demo",
        "runs": [{"name": name, "id": f"id-{name}", "folder": f"/data/{name}"} for name in ("demo-1", "demo-2")],
    }


def test_nothing_is_left_of_a_finished_experiment(capsys: Captured) -> None:
    experiment = Experiment(Run("demo-1", is_finished=True))
    assert detach(experiment) == 0
    assert (experiment.started, experiment.handed) == ([], 0)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Next: mlbench status demo, ")


def test_a_run_that_cannot_be_started_is_kept(capsys: Captured) -> None:
    with pytest.raises(NotFoundError, match="No cluster"):
        detach(Experiment(Run("bad-1")))
    assert capsys.readouterr().err == (
        "bad-1 and its partial results are kept. Repeat the command to try again, or run mlbench delete bad-1.\n"
    )


# --- followed ---------------------------------------------------------------------------------------------------------


def test_runs_are_followed_in_order_and_finished_ones_are_kept(capsys: Captured) -> None:
    runs = (Run("demo-1", is_finished=True), Run("demo-2", Outcome.GOAL_MISSED), Run("demo-4"))
    experiment = Experiment(*runs)
    ended = follow_all(cast(Any, experiment), require_goal=True)
    assert [(item.finished.run.name, item.exit_code) for item in ended] == [("demo-1", 0), ("demo-2", 7), ("demo-4", 0)]
    assert experiment.started == [("demo-2", False), ("demo-4", False)]
    lines = capsys.readouterr().err.splitlines()
    assert "demo-2 goal_missed." in lines  # told at once, as others follow
    assert "demo-4 completed." not in lines


def test_a_run_is_announced_with_its_timeout(capsys: Captured) -> None:
    def announced(**fields: Any) -> list[str]:
        follow_run(cast(Any, Experiment()), cast(Any, Run("demo-2", **fields)))
        return capsys.readouterr().err.splitlines()

    assert announced(timeout=90.0) == [
        "Started demo-2: unknown-task on local, 2 workers, gloo, cpu.",
        "Timeout 1 min 30 s; Ctrl-C cancels it and keeps partial results.",
    ]
    keeping = {"engine": "kubernetes", "functional_only": "it was emulated"}
    assert announced(**keeping, kubernetes=KubernetesOptions(keep_seconds=7200))[1:] == [
        "The result is functional, not a performance measurement: it was emulated.",
        "Timeout 24 h; Ctrl-C leaves it running.",
        "The cluster keeps the results for 2 h after the run.",
    ]
    holding = KubernetesOptions(keep_seconds=0, hold_seconds=900)
    assert announced(engine="kubernetes", kubernetes=holding)[-1] == (
        "The workers hold the results for 15 min after the run."
    )


def stop(run: Run, *later: Run, stopped: BaseException | None = None) -> Any:
    run.ends = KeyboardInterrupt() if stopped is None else stopped
    with pytest.raises(Interrupted if stopped is None else type(stopped)) as caught:
        follow_run(cast(Any, Experiment()), cast(Any, run), cast(Any, later))
    return caught.value


def test_a_stopped_client_cancels_a_run_that_cannot_live_without_it() -> None:
    run = Run("demo-2")
    error = stop(run, Run("demo-4"), Run("demo-8"))
    assert error.message == (
        'Canceled the run "demo-2"; partial results are in /data/demo-2. Not started: demo-4, demo-8; to resume: '
        "mlbench run demo"
    )
    assert error.hint == "mlbench logs demo-2, or mlbench delete demo-2"
    assert run.patience == [_members.STOP_SECONDS]
    assert stop(Run("demo-2"), stopped=Terminated("x")).message.endswith("partial results are in /data/demo-2.")


def test_a_stopped_client_leaves_a_run_of_a_cluster() -> None:
    run = Run("demo-2", engine="kubernetes")
    error = stop(run)
    assert error.message == 'The run "demo-2" continues without this client.'
    assert error.hint == "mlbench wait demo-2, mlbench status demo-2, or mlbench cancel demo-2"
    assert run.patience == []


def test_a_run_that_ended_before_it_could_be_canceled_is_complete() -> None:
    run = Run("demo-2")
    run.cancels = Outcome.COMPLETED
    assert stop(run).message == "demo-2 completed. Its archive is complete."
    run = Run("demo-2", is_finished=True)
    assert stop(run).message == "demo-2 completed. Its archive is complete."
    run = Run("demo-2")
    run.cancels = DeadlineError("It takes long.")
    assert stop(run).message == 'Canceling the run "demo-2"; its archive follows.'


def test_a_queue_is_waited_for(capsys: Captured) -> None:
    experiment: Any = Experiment(Run("demo-1"), Run("demo-2", Outcome.GOAL_MISSED), parallel=2)
    ended = wait_for_queue(experiment, require_goal=True)
    assert [(item.finished.run.name, item.exit_code) for item in ended] == [("demo-1", 0), ("demo-2", 7)]
    assert capsys.readouterr().err.startswith(
        "Background process 77 starts 2 runs, 2 at a time. Ctrl-C stops waiting, not the runs.\n"
    )
    stopped: Any = Experiment(Run("demo-1", KeyboardInterrupt()))
    with pytest.raises(Interrupted, match='The experiment "demo" continues without this client') as caught:
        wait_for_queue(stopped, require_goal=False)
    assert caught.value.hint == "mlbench wait demo, or mlbench cancel demo"


# --- a file of runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        ((8, 3, 3600.0, 0.0, 0, None), "3 of 8 runs to do; about 1 h for 3 of them."),
        (
            (8, 8, 3600.0, 7200.0, 2, 4.5),
            "8 of 8 runs to do; about 1 h for 6 of them; no estimate for 2 of them (sum of their timeouts: 2 h); "
            "about 4.50 at the clusters' prices.",
        ),
        ((8, 0, 0.0, 0.0, 0, 0.0), "0 of 8 runs to do."),
    ],
)
def test_what_lies_ahead(ahead: tuple[Any, ...], words: str) -> None:
    names = ("runs", "left", "seconds", "ceiling", "unknown", "price")
    assert _describe_forecast(cast(Forecast, SimpleNamespace(**dict(zip(names, ahead, strict=True))))) == words


@pytest.mark.parametrize("limits", [{"max_hours": 1.0}, {"max_cost": 0.0}])
def test_limits_need_a_client_that_follows(monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]) -> None:
    launch = SimpleNamespace(**{"max_hours": None, "max_cost": None, **limits})
    asked: list[Any] = []

    def prepare(file: str, **options: Any) -> Any:
        asked.append((file, options))
        return launch

    monkeypatch.setattr(
        "mlbench_cli.commands._experiment_file.Client", lambda **_: SimpleNamespace(prepare_file=prepare)
    )
    with pytest.raises(UsageError, match="A client must follow the runs"):
        run_file("x.yaml", Limits(["lab"], 2.0, 3.0), How(detach=True), None, Format.text, ())
    ((file, options),) = asked
    assert (file, options["clusters"], options["max_hours"], options["max_cost"]) == ("x.yaml", ["lab"], 2.0, 3.0)
    assert options["only_list"] is False


# --- images -----------------------------------------------------------------------------------------------------------


class Registry:
    """Finds every image in the same way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = FoundImage(Presence.PRESENT)
        self.asked: list[str] = []
        monkeypatch.setattr(_images, "find_image", self.find)
        monkeypatch.setattr(registry_login, "find_registry_login", lambda cluster, place: None)

    def find(self, image: Any, login: Any = None) -> FoundImage:
        self.asked.append(str(image))
        return self.found


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(monkeypatch)


def member(image: str | None = "ghcr.io/me/digits:1", **fields: Any) -> RunSpec:
    return spec(engine="kubernetes", cluster="lab", image=image, **{"task": "digits_resnet", **fields})


def require(*specs: RunSpec, **details: Any) -> None:
    require_images(specs, lambda name: Cluster(name, "gke", details=details))


def test_each_image_is_looked_for_once(registry: Registry) -> None:
    require(member(), member(name="other-2"), member("ghcr.io/me/other:1"), member(None), spec(image="x"))
    assert len(registry.asked) == 2
    require(member("localhost/x:1"), member("localhost:5000/x:1"), member("127.0.0.1:5000/x:1"), member(task="custom"))
    assert len(registry.asked) == 2


@pytest.mark.parametrize(
    ("image", "options"),
    [
        ("ghcr.io/me/digits:1", " --registry ghcr.io/me"),
        ("ghcr.io/me/digits@sha256:" + "0" * 64, " --registry ghcr.io/me"),
        ("own.example/r/digits:1", " --cluster lab"),
    ],
)
def test_a_missing_image_says_how_to_push_it(registry: Registry, image: str, options: str) -> None:
    registry.found = FoundImage(Presence.ABSENT, words="manifest unknown")
    with pytest.raises(UsageError) as caught:
        require(member(image), registry="own.example/r")
    assert caught.value.message == f"The image {image} does not exist. The registry says: manifest unknown."
    assert caught.value.hint == f"mlbench images push digits_resnet{options}"
    assert caught.value.details == {"image": image}


@pytest.mark.parametrize(
    ("presence", "words", "warning"),
    [
        (Presence.HIDDEN, "", "the registry requires a login."),
        (Presence.HIDDEN, "denied", "the registry requires a login: denied."),
        (Presence.UNKNOWN, "timeout", "the registry does not respond: timeout."),
    ],
)
def test_an_image_that_cannot_be_checked_is_a_warning(
    registry: Registry, capsys: Captured, presence: Presence, words: str, warning: str
) -> None:
    registry.found = FoundImage(presence, words=words)
    require(member())
    assert capsys.readouterr().err == (
        f"Warning: Cannot check whether the image ghcr.io/me/digits:1 exists: {warning}\n"
    )


@pytest.mark.parametrize(
    ("platforms", "details", "is_refused"),
    [
        (("linux/arm64",), {"arm": False}, True),
        (("linux/amd64", "linux/arm64"), {"arm": False}, False),
        (("linux/amd64",), {"arm": True}, True),
        (("linux/arm64",), {"arm": True}, False),
        ((), {"arm": True}, False),
        (("linux/arm64",), {}, False),  # nobody knows what its workers are
    ],
)
def test_an_image_must_be_for_the_processors_of_the_workers(
    registry: Registry, platforms: tuple[str, ...], details: dict[str, Any], is_refused: bool
) -> None:
    registry.found = FoundImage(Presence.PRESENT, platforms=platforms)
    if not is_refused:
        require(member(), **details)
        return
    with pytest.raises(UsageError, match=r"The image ghcr\.io/me/digits:1 is for linux/") as caught:
        require(member(), **details)
    needed = "linux/arm64" if details["arm"] else "linux/amd64"
    assert (caught.value.hint or "").endswith(f" --platform {needed}")


def test_a_registry_must_have_an_image_of_this_version(registry: Registry, capsys: Captured) -> None:
    require_registry("ghcr.io/me")
    assert len(registry.asked) == 1
    registry.found = FoundImage(Presence.HIDDEN)
    require_registry("ghcr.io/me")
    assert "the registry requires a login" in capsys.readouterr().err
    registry.found = FoundImage(Presence.ABSENT)
    with pytest.raises(UsageError, match=r"ghcr\.io/me has no task images for version") as caught:
        require_registry("ghcr.io/me")
    assert "mlbench images push --registry ghcr.io/me" in (caught.value.hint or "")
    assert len(registry.asked) > 5


@pytest.mark.parametrize(
    ("given", "provider", "arm", "here", "platforms"),
    [
        ("linux/arm64,linux/amd64", "gke", False, "x86_64", ("linux/arm64", "linux/amd64")),
        (None, "gke", False, "x86_64", ()),
        (None, "gke", False, "AMD64", ()),
        (None, "gke", False, "arm64", ("linux/amd64",)),
        (None, "eks", True, "aarch64", ()),
        (None, "eks", True, "x86_64", ("linux/arm64",)),
        (None, "gke", False, "riscv64", ("linux/amd64",)),
        (None, "kind", False, "arm64", ()),
        (None, None, False, "arm64", ()),
    ],
)
def test_images_are_built_for_the_machines_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, given: str | None, provider: str | None, arm: bool, here: str, platforms: Any
) -> None:
    monkeypatch.setattr("mlbench_cli.commands.images.machine", lambda: here)
    cluster = None if provider is None else Cluster("lab", provider, details={"arm": arm})
    assert _choose_platforms(given, cluster) == platforms
    assert cluster is None or platform_of(cluster) == ("linux/arm64" if arm else "linux/amd64")


@pytest.mark.parametrize(
    ("given", "own", "default", "place"),
    [
        ("ghcr.io/me/", "own/r", "mine", "ghcr.io/me"),
        (None, "own/r", "mine", "own/r"),
        (None, None, "mine/", "mine"),
        (None, None, None, None),
        (None, "localhost/mlbench", "mine", None),  # of images that are loaded onto nodes and never pushed
        ("localhost/mlbench/", "own/r", None, None),
        ("localhost/mlbench/x", "own/r", None, None),
        ("localhost/mlbench2", "own/r", None, "localhost/mlbench2"),
    ],
)
def test_the_registry_of_images(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str | None,
    own: str | None,
    default: str | None,
    place: str | None,
) -> None:
    store = Store(tmp_path)
    store.record_cluster(Cluster("lab", "gke", details={} if own is None else {"registry": own}))
    found = None if default is None else SimpleNamespace(value=default)
    monkeypatch.setattr("mlbench_cli.commands.images.find_default", lambda key: found)
    if place is None:
        with pytest.raises(UsageError, match='The cluster "lab" has no registry'):
            _find_registry(store, given, "lab")
        return
    assert _find_registry(store, given, "lab")[0] == place
