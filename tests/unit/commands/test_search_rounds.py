"""`run --search`: what is said before, the rounds with the better third of the points, the choice, and its record."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands import _search as module
from mlbench_cli.commands._search import describe_search, plan_search, run_search
from mlbench_cli.errors import Interrupted, TaskFailedError, UsageError
from mlbench_cli.model.goals import Goal
from mlbench_cli.runs.matrix import point_text
from mlbench_cli.runs.request import Request
from mlbench_cli.runs.search import Round, Search

Captured = pytest.CaptureFixture[str]
RATES = (1, 0.1, 0.01, 0.001)
POINTS: tuple[dict[str, Any], ...] = tuple({"set.learning_rate": rate} for rate in RATES)
ROUNDS = (Round(1, 4, 3), Round(2, 2, 9))
SEARCH = Search("set.learning_rate=1,0.1,0.01,0.001", POINTS, "epochs", ROUNDS, holds_out=True)
REQUEST = Request(name="s", workers=(2, 4), task="digits_resnet", search=SEARCH.text, set={"depth": "8"})


# --- what is said before ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "workers", "words"),
    [
        (
            SEARCH,
            (2, 4),
            "Search: 6 trials on 2 workers (4 for 3 epochs, 2 for 9 epochs), scored on 20% of the training samples, "
            "held out. All sizes then run with the best point.",
        ),
        (
            Search("x", POINTS[:2], "steps", (Round(1, 2, 1),), holds_out=False),
            (1,),
            "Search: 2 trials on 1 worker (2 for 1 step), scored on the validation set itself. All sizes then run "
            "with the best point.",
        ),
        (
            Search("x", POINTS[:2], "budget_seconds", (Round(1, 2, 90),), holds_out=True),
            (4,),
            "Search: 2 trials on 4 workers (2 for 1 min 30 s), scored on 20% of the training samples, held out. All "
            "sizes then run with the best point.",
        ),
    ],
)
def test_a_search_is_described_by_its_rounds(search: Search, workers: tuple[int, ...], words: str) -> None:
    assert describe_search(Request(name="s", workers=workers), search) == words


class Launch:
    """A round that keeps the values that it has for each point: the metric, and seconds to the goal."""

    def __init__(self, request: Request, world: "World") -> None:
        self.request, self.world = request, world
        self.experiment = SimpleNamespace(name=request.name)
        self.candidates = [SimpleNamespace(point=point_text(point)) for point in request.include]

    def render(self, *, offline: bool = False) -> None:
        self.world.told.append(f"rendered {self.request.name}{' offline' if offline else ''}")

    @contextmanager
    def open(self, command_line: Sequence[str], *, retry_failed: bool) -> Iterator[Any]:
        self.world.told.append(f"opened {self.request.name} {' '.join(command_line)} {retry_failed}")
        runs = []
        for number, candidate in enumerate(self.candidates):
            name = f"{self.request.name}-{number}"
            value, seconds = self.world.values[candidate.point["set.learning_rate"]]
            goal = None if value is None else {"value": value, "seconds": {"wall": seconds}}
            result = {"outcome": "goal_reached" if seconds else "goal_missed", "goal": goal}
            finished = SimpleNamespace(result=result if value != "lost" else None)
            run = SimpleNamespace(name=name, id=f"id-{name}")
            runs.append(SimpleNamespace(run=run, finished=finished, goal=self.world.goal))
        yield SimpleNamespace(runs=runs, record=lambda: self.world.told.append("recorded"))


class World:
    """A client whose launches are doubles, and what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **values: tuple[Any, float | None]) -> None:
        self.values = {str(rate): values.get(f"r{number}", (None, None)) for number, rate in enumerate(RATES)}
        self.goal = Goal("Prec@1", ">=", 80.0)
        self.told: list[str] = []
        self.requests: list[Request] = []
        self.options: list[Any] = []
        monkeypatch.setattr(module, "follow_all", self.follow)

    def prepare(self, request: Request) -> Launch:
        self.requests.append(request)
        return Launch(request, self)

    def follow(self, opened: Any, *, require_goal: bool, logs: bool) -> None:
        self.options.append((require_goal, logs))


def test_a_search_is_checked_with_the_request_of_its_results_before_any_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    request = Request(name="s", workers=(1, 2), task="digits_resnet", search="set.learning_rate=0.1,0.2", repeat=3)
    search, launch = plan_search(request, world)  # type: ignore[arg-type]
    assert [point["set.learning_rate"] for point in search.points] == ["0.1", "0.2"]
    final, first = world.requests
    assert (final.name, final.workers, final.repeat, final.search, final.set) == (
        "s", (1, 2), 3, None, {"learning_rate": "0.1"}
    )  # fmt: skip
    assert (first.name, first.workers, first.repeat, first.search) == ("s-search1", (1,), None, None)
    assert launch.request is first
    assert world.told == ["rendered s offline"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": None}, "--search tunes parameters of built-in tasks."),
        ({"command": "true"}, "--search tunes parameters of built-in tasks."),
        ({"task": "digit_resnet"}, 'There is no task "digit_resnet".'),
    ],
)
def test_only_tasks_of_the_catalog_are_searched(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    world = World(monkeypatch)
    fields: dict[str, Any] = {"task": "digits_resnet", "search": "set.learning_rate=0.1,0.2", **changes}
    with pytest.raises(UsageError) as caught:
        plan_search(Request(name="s", workers=(1,), **fields), world)  # type: ignore[arg-type]
    assert (caught.value.message, caught.value.hint) == (message, "mlbench tasks")
    assert world.requests == []


# --- its rounds -------------------------------------------------------------------------------------------------------


def run_it(world: World, search: Search = SEARCH, **options: Any) -> Any:
    first: Any = Launch(Request(name="s-search1", workers=(2,), include=search.points), world)
    client: Any = world
    return run_search(REQUEST, search, first, client, ("mlbench", "run"), **options)


def test_the_better_points_of_a_round_are_tried_for_longer(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Of four points two reach the goal: the quicker one is the best, whatever its metric."""
    world = World(monkeypatch, r0=(40.0, None), r1=(85.0, 20.0), r2=(81.0, 10.0), r3=(None, None))
    found = run_it(world, logs=True, retry_failed=True)
    assert world.told == [
        "opened s-search1 mlbench run True",
        "recorded",
        "rendered s-search2",
        "opened s-search2 mlbench run True",
        "recorded",
    ]
    assert world.options == [(False, True), (False, True)]
    (second,) = world.requests
    assert [point["set.learning_rate"] for point in second.include] == [0.01, 0.1]
    assert (second.set["epochs"], second.set["hold_out"]) == (9, 0.2)
    assert found.request == Request(
        name="s", workers=(2, 4), task="digits_resnet", set={"depth": "8", "learning_rate": 0.01}
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Search: 6 trials on 2 workers")
    assert lines[1:3] == ["Round 1 of 2: 4 trials of 3 epochs", "Round 2 of 2: 2 trials of 9 epochs"]
    assert [line.split() for line in lines[3:]] == [
        ["ROUND", "LEARNING_RATE", "BEST", "Prec@1", "TO", "GOAL", "OUTCOME", "RUN"],
        ["1", "0.01", "81.00", "10.0", "s", "goal_reached", "s-search1-2"],
        ["1", "0.1", "85.00", "20.0", "s", "goal_reached", "s-search1-1"],
        ["1", "1", "40.00", "-", "goal_missed", "s-search1-0"],
        ["1", "0.001", "-", "-", "goal_missed", "s-search1-3"],
        ["2", "0.01", "81.00", "10.0", "s", "goal_reached", "s-search2-0"],
        ["2", "0.1", "85.00", "20.0", "s", "goal_reached", "s-search2-1"],
        ["Chosen:", "set.learning_rate=0.01"],
    ]


def test_a_search_is_recorded_with_everything_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, r0=(40.0, None), r1=(85.0, 20.0))
    search = Search("set.learning_rate=1,0.1", POINTS[:2], "epochs", (Round(1, 2, 3),), holds_out=True)
    tried = {"round": 1, "length": 3}
    document = run_it(world, search).document
    assert (world.told[0], world.options) == ("opened s-search1 mlbench run False", [(False, False)])
    assert document == {
        "grammar": "set.learning_rate=1,0.1",
        "workers": 2,
        "limited_by": "epochs",
        "hold_out": 0.2,
        "rounds": [{"number": 1, "count": 2, "length": 3}],
        "chosen": {"set.learning_rate": "0.1"},
        "tried": [
            {
                **tried, "point": {"set.learning_rate": "1"}, "run": "s-search1-0", "id": "id-s-search1-0",
                "outcome": "goal_missed", "value": 40.0, "seconds": None,
            },
            {
                **tried, "point": {"set.learning_rate": "0.1"}, "run": "s-search1-1", "id": "id-s-search1-1",
                "outcome": "goal_reached", "value": 85.0, "seconds": 20.0,
            },
        ],
    }  # fmt: skip


def test_a_task_that_cannot_hold_out_samples_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    world = World(monkeypatch, r0=(40.0, None))
    search = Search("x", POINTS[:2], "epochs", (Round(1, 2, 1),), holds_out=False)
    assert run_it(world, search).document["hold_out"] is None
    warning = "Warning: digits_resnet cannot hold out training samples, so the point is chosen on the data that"
    assert warning in capsys.readouterr().err
    run_it(World(monkeypatch, r0=(40.0, None)))
    assert "cannot hold out" not in capsys.readouterr().err


def test_trials_without_a_result_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, r0=("lost", None))
    with pytest.raises(TaskFailedError, match=r"No trial of s-search1 reported Prec@1\.") as caught:
        run_it(world)
    assert caught.value.hint == "mlbench status s-search1, mlbench logs s-search1-0"
    assert world.requests == []


def test_a_search_that_is_stopped_says_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    world = World(monkeypatch, r0=(40.0, None))

    def stop(*_: Any, **__: Any) -> None:
        raise Interrupted("Ctrl-C")

    monkeypatch.setattr(module, "follow_all", stop)
    with pytest.raises(Interrupted, match="Ctrl-C"):
        run_it(world)
    assert capsys.readouterr().err.endswith("The search was stopped in round 1; repeat the command to resume.\n")
