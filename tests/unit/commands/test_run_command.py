"""`mlbench run` from its options to its exit code: what is prepared, started, printed and refused."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from mlbench_cli.commands import _experiment_file, _images, _search
from mlbench_cli.commands import run as module
from mlbench_cli.commands._experiment_file import How, Limits
from mlbench_cli.commands.run import _parameter, _report, run
from mlbench_cli.config import settings
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.runs.matrix import MAX_CONFIRMED, MAX_MEMBERS
from mlbench_cli.runs.request import ADVANCED, OPTIONS, Request
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]


class Launch:
    """The run "demo-1", which is known already if `is_known`."""

    def __init__(self, request: Request, told: list[Any], *specs: Any) -> None:
        self.request, self.told, self.specs, self.is_known = request, told, list(specs), False
        self.experiment = SimpleNamespace(name=request.name)

    def render(self, *, offline: bool = False) -> list[Any]:
        self.told.append("rendered offline" if offline else "rendered")
        return ["submission"]

    @contextmanager
    def open(self, command_line: tuple[str, ...], *, retry_failed: bool) -> Iterator[Any]:
        self.told.append(("opened", command_line, retry_failed))
        yield SimpleNamespace(record=lambda searched: self.told.append(("recorded", searched)))
        self.told.append("closed")


class World:
    """A client whose launches start nothing; `told` is what happened in its order."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.specs: list[Any] = []
        self.store = SimpleNamespace(find_experiment=lambda name: None)
        self.cluster = "clusters"

    def recall(self, request: Request) -> Request:
        return request

    def prepare(self, request: Request, *, require_goal: bool, most: int) -> Launch:
        self.told.append(("prepared", request, require_goal, most))
        return Launch(request, self.told, *self.specs)

    def prepare_repetition(self, source: str, request: Request, **options: Any) -> Launch:
        agree = options.pop("agree")
        self.told.append(("repeated", source, request, options, agree.keywords))
        return Launch(request, self.told, *self.specs)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()

    def note(name: str, answer: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found.told.append((name, *arguments[1:], *options.values()))
            return answer

        return call

    monkeypatch.setattr(module, "Client", lambda notice: found)
    monkeypatch.setattr(module, "use_task_folder", lambda folder: None)
    monkeypatch.setattr(module, "start_detached", note("detached", 3))
    monkeypatch.setattr(module, "_follow", note("followed", ["ended"]))
    monkeypatch.setattr(module, "_report", note("reported", 7))
    monkeypatch.setattr(module, "_print_submissions", note("printed", None))
    monkeypatch.setattr(module, "_warn", lambda specs: found.told.append("warned"))
    monkeypatch.setattr(module, "set_unreachable_timeout", lambda text: None)
    monkeypatch.setattr(_images, "require_images", lambda specs, cluster: found.told.append(("images", cluster)))
    return found


def line(**sources: Any) -> Any:
    """The context of a command line: each option with its value."""
    params = {
        **dict.fromkeys(("file", "cluster", "max_hours", "max_cost", "to", "name", "workers", "require_goal")),
        **dict.fromkeys(How._fields, False),
        "output": Format.text,
        **sources,
    }

    def source_of(name: str) -> Any:
        return SimpleNamespace(name="COMMANDLINE" if name in sources else "DEFAULT")

    return SimpleNamespace(
        params=params, get_parameter_source=source_of, obj=("run", "demo"), command=SimpleNamespace(params=[])
    )  # fmt: skip


REQUEST = Request(name="demo", workers=(1,), task="digits_resnet")
PREPARED = ("prepared", REQUEST, False, MAX_MEMBERS)


def test_a_run_is_prepared_rendered_recorded_followed_and_reported(world: World, capsys: Captured) -> None:
    assert run(line(), "demo", [1], task="digits_resnet") == 7
    assert world.told == [
        PREPARED,
        "rendered",
        "warned",
        ("opened", ("mlbench", "run", "demo"), False),
        ("recorded", None),
        ("followed", False),
        "closed",
        ("reported", ["ended"], Format.text),
    ]
    assert capsys.readouterr().err == "Repeat: mlbench run demo 1 --task digits_resnet\n"


def test_options_of_following_are_passed_on(world: World) -> None:
    assert (
        run(line(), "demo", [1], task="digits_resnet", yes=True, logs=True, retry_failed=True, require_goal=True) == 7
    )
    assert world.told[0] == ("prepared", REQUEST, True, MAX_CONFIRMED)
    assert ("opened", ("mlbench", "run", "demo"), True) in world.told
    assert ("followed", True) in world.told


def test_a_detached_run_is_not_followed(world: World) -> None:
    assert run(line(), "demo", [1], task="digits_resnet", detach=True, output=Format.json) == 3
    assert world.told[-3:] == [("recorded", None), ("detached", Format.json), "closed"]


def test_a_dry_run_reaches_nothing_and_starts_nothing(world: World, capsys: Captured) -> None:
    assert run(line(), "demo", [1], task="digits_resnet", dry_run=True, output=Format.json) == 0
    assert world.told == [PREPARED, "rendered offline", ("printed", Format.json)]
    assert capsys.readouterr().err == ""


def test_images_are_looked_for_if_a_run_is_on_kubernetes(world: World) -> None:
    world.specs = [spec("demo-1", 1)]
    run(line(), "demo", [1], task="digits_resnet")
    assert ("images", "clusters") not in world.told
    world.specs.append(spec("demo-2", 2, engine="kubernetes"))
    run(line(), "demo", [1], task="digits_resnet")
    assert world.told.index(("images", "clusters")) < world.told.index(("recorded", None), 10)


def test_options_are_saved_before_anything_starts(world: World, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "demo.yaml"
    run(line(), "demo", [1], task="digits_resnet", save=path, dry_run=True)
    assert "task: digits_resnet" in path.read_text()
    assert capsys.readouterr().err == f"Repeat: mlbench run -f {path}\n"
    path.write_text("other")
    with pytest.raises(UsageError, match="already exists"):
        run(line(), "demo", [1], task="digits_resnet", save=path)
    assert not [event for event in world.told if event[0] == "opened"]


def test_an_archive_is_repeated_as_its_author_chose(world: World, capsys: Captured) -> None:
    trusted: dict[str, Any] = {"signers": Path("signers"), "run_foreign_command": True}
    code = run(line(), "demo", source="a.zip", require_goal=True, yes=True, **trusted)
    assert code == 7
    options = {"require_goal": True, "signers": Path("signers")}
    agreed = {"yes": True, "is_trusted": True, "is_dry": False}
    assert world.told[0] == ("repeated", "a.zip", Request(name="demo"), options, agreed)
    assert "Repeat:" not in capsys.readouterr().err
    run(line(), source="a.zip", dry_run=True)
    agreed = {"yes": False, "is_trusted": False, "is_dry": True}
    options = {"require_goal": False, "signers": None}
    assert ("repeated", "a.zip", Request(), options, agreed) in world.told


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"signers": Path("x")}, "--signers"),
        ({"run_foreign_command": True}, "--run-foreign-command"),
        ({"signers": Path("x"), "run_foreign_command": True}, "--run-foreign-command"),
    ],
)
def test_options_of_an_archive_need_one(world: World, options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=f"^{word} works only with --from") as caught:
        run(line(), "demo", [1], task="digits_resnet", **options)
    assert caught.value.hint == f"mlbench run --from ARCHIVE {word} ..."
    assert world.told == []


@pytest.mark.parametrize("name", ["to", "only_report", "max_hours", "max_cost"])
def test_options_of_a_file_with_runs_need_one(world: World, name: str) -> None:
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')}: only for a file with runs"):
        run(line(**{name: 1}), "demo", [1], task="digits_resnet")
    assert world.told == []


# --- a search ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def searched(world: World, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request with a search, which chooses the value 0.1."""
    request = Request(name="demo", workers=(1,), task="digits_resnet", search="set.learning_rate=0.1,0.2")
    chosen = Request(name="demo", workers=(1,), task="digits_resnet", set={"learning_rate": "0.1"})

    def plan(request: Request, client: Any) -> Any:
        world.told.append("planned")
        return "search", Launch(request, world.told)

    def do(request: Request, search: str, launch: Any, client: Any, words: Any, **options: Any) -> Any:
        world.told.append(("searched", search, words, options))
        return _search.Found(chosen, {"tried": 2})

    monkeypatch.setattr(_search, "plan_search", plan)
    monkeypatch.setattr(_search, "run_search", do)
    monkeypatch.setattr(_search, "describe_search", lambda request, search: "Two trials.")
    return request


def test_the_chosen_point_runs_after_the_search_and_records_it(world: World, searched: Request) -> None:
    run(line(), "demo", [1], task="digits_resnet", search=searched.search, logs=True, retry_failed=True)
    assert world.told[:2] == [
        "planned",
        ("searched", "search", ("mlbench", "run", "demo"), {"logs": True, "retry_failed": True}),
    ]
    assert world.told[2][1].set == {"learning_rate": "0.1"}
    assert ("recorded", {"tried": 2}) in world.told


def test_a_dry_search_shows_the_first_round(world: World, searched: Request, capsys: Captured) -> None:
    assert run(line(), "demo", [1], task="digits_resnet", search=searched.search, dry_run=True) == 0
    assert world.told == ["planned", "rendered offline", ("printed", Format.text)]
    assert capsys.readouterr().err == "Two trials. This is the first round.\n"


def test_a_search_needs_a_client(world: World, searched: Request) -> None:
    with pytest.raises(UsageError, match="--search chooses points as trials end, so it does not work with --detach"):
        run(line(), "demo", [1], task="digits_resnet", search=searched.search, detach=True)
    assert world.told == []


# --- a file with runs, and a dashboard --------------------------------------------------------------------------------


def test_a_file_with_runs_has_options_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "several.yaml"
    file.write_text("title: x\nruns:\n  - {name: a, task: allreduce, workers: [1]}\n")
    asked: list[Any] = []

    def run_file(*arguments: Any) -> int:
        asked.append(arguments)
        return 124

    monkeypatch.setattr(_experiment_file, "run_file", run_file)
    words = ("mlbench", "run", "demo")
    context = line(
        file=file, cluster="lab", max_hours=2.0, max_cost=3.0, to="out", dry_run=True, detach=True, output=Format.json
    )  # fmt: skip
    assert run(context, file=file) == 124
    assert run(line(file=file), file=file) == 124
    how = How(dry_run=True, detach=True)
    assert asked == [
        (str(file), Limits(["lab"], 2.0, 3.0), how, Path("out"), Format.json, words),
        (str(file), Limits((), None, None), How(), None, Format.text, words),
    ]
    with pytest.raises(UsageError) as caught:
        run(line(file=file, name="demo", workers=[1], require_goal=True), "demo", [1], file)
    assert caught.value.message == f"{file} describes several runs, so NAME, N, --require-goal cannot be given here."
    world.store.find_experiment = lambda name: SimpleNamespace(request={"runs": []})
    assert run(line(name="demo", yes=True), "demo") == 124
    assert asked[-1][:3] == ("demo", Limits(), How(yes=True))
    with pytest.raises(UsageError, match="demo describes several runs, so --require-goal cannot be given here"):
        run(line(name="demo", require_goal=True), "demo")


def test_a_dashboard_gets_a_complete_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def start_run(there: Any, request: Request, output: Format, **options: Any) -> int:
        asked.append((there, request, output, options))
        return 0

    monkeypatch.setattr(module, "connect", lambda context, url, *known: (url, known))
    monkeypatch.setattr(module, "start_run", start_run)
    url = "http://x/?token=t"
    code = run(line(), "demo", [1], task="digits_resnet", dashboard=url, detach=True, require_goal=True)
    assert code == 0
    ((there, request, output, options),) = asked
    assert (there[0], request, output) == (url, REQUEST, Format.text)
    assert {"name", "workers", "file", "detach", "dry_run", "require_goal", "yes", "task", "seed"} <= set(there[1])
    assert not {"logs", "save", "source", "retry_failed"} & set(there[1])
    assert options == {"detach": True, "dry_run": False, "require_goal": True}
    with pytest.raises(UsageError, match=r"No name, no number of workers, no task or command given\.") as caught:
        run(line(), dashboard=url)
    assert caught.value.hint == "mlbench run NAME 1 2 --task TASK --dashboard-url URL"
    assert world.told == []


# --- its options ------------------------------------------------------------------------------------------------------


def option_of(name: str) -> tuple[Any, Any]:
    """Type and option that Typer gets for a field of a request."""
    (field,) = [item for item in OPTIONS if item.name == name]
    parameter = _parameter(field)
    assert (parameter.default, parameter.kind) == (None, inspect.Parameter.KEYWORD_ONLY)
    return get_args(parameter.annotation)[:2]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("task", str, ["--task"]),
        ("gpu", bool, ["--gpu/--no-gpu", "-g"]),
        ("seed", int, ["--seed"]),
        ("data_dir", str, ["--data-dir"]),
    ],
)
def test_fields_of_a_request_are_options(name: str, kind: type, words: list[str]) -> None:
    found, option = option_of(name)
    assert found == kind | None
    assert [option.default, *option.param_decls] == words  # the first of them is where Typer expects a default


def test_repeatable_options_are_lists_and_some_are_completed() -> None:
    assert option_of("set")[0] == list[str] | None
    completed = {item.name for item in OPTIONS if option_of(item.name)[1].autocompletion is not None}
    assert completed == {"task", "preset", "backend", "cluster"}
    assert ADVANCED in {option_of(item.name)[1].rich_help_panel for item in OPTIONS}
    assert set(inspect.signature(run).parameters) >= {item.name for item in OPTIONS}
    assert "options" not in inspect.signature(run).parameters


# --- its end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seeds", "codes", "code", "has_repeats"),
    [((42, 42), (0, 7), 7, False), ((42, 43), (6, 0), 6, True), ((42,), (), 0, False)],
)
def test_the_highest_exit_code_counts_and_repeats_are_shown_together(
    monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, ...], codes: tuple[int, ...], code: int, has_repeats: bool
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(module, "report_ended", lambda ended, output, repeats: shown.append((ended, output, repeats)))
    monkeypatch.setattr(module, "repeats_in", lambda store, rows: [store, *rows])
    runs = [SimpleNamespace(id=number, spec=SimpleNamespace(seed=seed)) for number, seed in enumerate(seeds)]
    handles = [SimpleNamespace(run=run, row=f"row {run.id}") for run in runs]
    handles.append(SimpleNamespace(run=SimpleNamespace(id=99), row="row of an earlier command"))
    handle = SimpleNamespace(runs=lambda: handles, workspace=SimpleNamespace(store="store"))
    opened: Any = SimpleNamespace(plan=SimpleNamespace(runs=runs), handle=handle)
    ended: Any = [SimpleNamespace(exit_code=each) for each in codes]
    assert _report(opened, ended, Format.json) == code
    repeats = ["store", "row 0", "row 1"] if has_repeats else []
    assert shown == [(ended, Format.json, repeats)]


def test_the_timeout_for_a_cluster_is_set_for_all_that_follows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "set_unreachable_timeout", settings.set_unreachable_timeout)
    with pytest.raises(UsageError, match="--unreachable-timeout"):
        run(line(), "demo", [1], task="digits_resnet", unreachable="soon")
    assert world.told == []


def test_tasks_of_a_folder_are_known_before_the_request_is_completed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Any] = []
    monkeypatch.setattr(module, "use_task_folder", folders.append)
    run(line(), "demo", [1], task="mine", task_path="/tasks", dry_run=True)
    assert folders == ["/tasks"]
