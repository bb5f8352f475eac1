"""What `--search` tries, for how long, and what it chooses."""

from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import Goal
from mlbench_cli.runs.request import Request
from mlbench_cli.runs.search import (
    Trial,
    chosen_request,
    make_rounds,
    parse_search,
    rank,
    trial_request,
)
from mlbench_cli.tasks.catalog import load_catalog

GOAL = Goal("Prec@1", ">=", 80.0)


def request(text: str, **more: Any) -> Request:
    return Request(name="x", workers=(2, 1), task="epsilon_logistic_regression", search=text, repeat=3, **more)


def parse(text: str, **more: Any) -> Any:
    return parse_search(request(text, **more), load_catalog()["epsilon_logistic_regression"])


def test_ranges_and_lists_span_points() -> None:
    found = parse("set.alpha=1e-6..1e-2 log 5; set.batch_size=32,64")
    assert [point["set.alpha"] for point in found.points[::2]] == ["1e-06", "1e-05", "0.0001", "0.001", "0.01"]
    assert [point["set.batch_size"] for point in found.points[:2]] == ["32", "64"]
    (axis,) = {tuple(point) for point in parse("set.batch_size=10..40 linear 4").points}
    assert axis == ("set.batch_size",)
    assert [point["set.batch_size"] for point in parse("set.batch_size=1..4 log 9").points] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("count", "length", "rounds"),
    [
        (24, 9, [(24, 1), (8, 3), (3, 9)]),
        (24, 3, [(24, 1), (8, 3)]),
        (24, 1, [(24, 1)]),
        (3, 9, [(3, 9)]),
        (2, 1, [(2, 1)]),
        (100, 30, [(100, 1), (34, 3), (12, 10), (4, 30)]),
    ],
)
def test_each_round_has_a_third_of_the_points_for_three_times_as_long(
    count: int, length: int, rounds: list[tuple[int, int]]
) -> None:
    assert [(each.count, each.length) for each in make_rounds(count, length)] == rounds


def test_trials_have_one_size_one_seed_and_held_out_samples() -> None:
    asked = request("set.alpha=1,2", set={"schedule": "sqrt"}, calibrate=True)
    found = parse_search(asked, load_catalog()["epsilon_logistic_regression"])
    trial = trial_request(asked, found, found.rounds[0], found.points)
    assert (trial.workers, trial.repeat, trial.calibrate, trial.search) == ((2,), None, None, None)
    assert trial.set == {"schedule": "sqrt", "hold_out": 0.2, "epochs": 9}
    chosen = chosen_request(asked, found.points[1])
    assert (chosen.workers, chosen.repeat, chosen.search) == ((2, 1), 3, None)
    assert chosen.set == {"schedule": "sqrt", "alpha": "2"}


def test_time_as_budget_is_the_budget_of_trials() -> None:
    found = parse("set.alpha=1,2,3,4", search_budget="1m")
    assert [(each.count, each.length) for each in found.rounds] == [(4, 20), (2, 60)]
    trial = trial_request(request("set.alpha=1,2,3,4"), found, found.rounds[0], found.points)
    assert (trial.budget, trial.set) == ("20s", {"hold_out": 0.2})


def trial(name: str, value: float | None, seconds: float | None = None) -> Trial:
    return Trial(1, {"set.alpha": name}, 3, name, name, "goal_missed", value, seconds)


def test_the_best_trial_reached_the_goal_first_or_came_closest() -> None:
    trials = [trial("none", None), trial("far", 60.0), trial("slow", 81.0, 9.0), trial("near", 79.0), trial("a", 80, 2)]
    assert [each.run for each in rank(trials, GOAL)] == ["a", "slow", "near", "far", "none"]
    lower = [trial("far", 9.0), trial("near", 4.0), trial("none", None)]
    assert [each.run for each in rank(lower, Goal("loss", "<=", 3.0))] == ["near", "far", "none"]


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("", {}, "not of the form"),
        ("set.alpha", {}, "not of the form"),
        ("set.alpha=", {}, "not of the form"),
        (";", {}, "not of the form"),
        ("alpha=1,2", {}, "as set.KEY"),
        ("method=bsp,dear", {}, "as set.KEY"),
        ("set.alpah=1,2", {}, "no parameter"),
        ("set.alpha=1..2", {}, "LOW..HIGH"),
        ("set.alpha=a..b log 3", {}, "between two numbers"),
        ("set.alpha=2..1 log 3", {}, "LOW below HIGH"),
        ("set.alpha=0..1 log 3", {}, "above 0"),
        ("set.alpha=1..1e999 log 3", {}, "LOW below HIGH"),
        ("set.alpha=nan..1 3", {}, "LOW below HIGH"),
        ("set.alpha=1..2 log 1", {}, "LOW below HIGH"),
        ("set.alpha=1..2 cubic 3", {}, "LOW..HIGH"),
        ("set.alpha=1,x", {}, "not of type float"),
        ("set.alpha=-1..1 3", {}, "the least is 0"),
        ("set.alpha=1,1", {}, "twice"),
        ("set.alpha=1,2;set.alpha=3,4", {}, "twice"),
        ("set.alpha=1", {}, "1 points"),
        ("set.alpha=1..100 1000; set.batch_size=1,2", {}, "2000 points"),
        ("set.epochs=1,2", {}, "--search sets"),
        ("set.hold_out=0.1,0.2", {}, "--search sets"),
        ("set.average=a..b 3", {}, "between two numbers"),
        ("set.average=1..2 3", {}, "is not a number"),
        ("set.alpha=1,2", {"set": {"alpha": "3"}}, "sets a parameter that"),
        ("set.alpha=1,2", {"matrix": {"method": ("bsp",)}}, "exclude each other"),
        ("set.alpha=1,2", {"search_budget": "soon"}, "not a duration"),
        ("set.alpha=1,2", {"search_budget": "0"}, "the least is 1"),
        ("set.alpha=1,2", {"search_budget": "0.1s"}, "less than a second"),
        ("set.alpha=1,2", {"search_budget": "3", "budget": "2m"}, "exclude each other"),
    ],
)
def test_what_cannot_be_searched_is_said(text: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text, **more)


def test_tasks_that_count_in_steps_or_have_no_goal() -> None:
    catalog = load_catalog()
    steps = Request(name="x", workers=(1,), task="gpt_pretraining", search="set.learning_rate=1e-4,1e-3")
    with pytest.raises(UsageError, match="length of a trial"):
        parse_search(steps, catalog["gpt_pretraining"])
    found = parse_search(
        Request(**{**vars(steps), "search_budget": "90"}),
        catalog["gpt_pretraining"],
    )
    assert (found.unit, found.holds_out, [each.length for each in found.rounds]) == ("steps", False, [90])
    with pytest.raises(UsageError, match="no goal"):
        parse_search(Request(name="x", task="allreduce", search="set.a=1,2"), catalog["allreduce"])


# --- values and rounds -----------------------------------------------------------------------------------------------
