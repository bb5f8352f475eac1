"""`mlbench run --search`: rounds of trials, each an experiment; then the request with the best point."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mlbench_cli import console
from mlbench_cli.api import Client, Launch, OpenExperiment
from mlbench_cli.commands._members import follow_all
from mlbench_cli.errors import Stopped, TaskFailedError, UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.runs.matrix import Point, point_text
from mlbench_cli.runs.request import Request
from mlbench_cli.runs.search import (
    SHARE,
    Round,
    Search,
    Trial,
    chosen_request,
    parse_search,
    rank,
    read_trial,
    trial_request,
)
from mlbench_cli.tasks.catalog import load_catalog

if TYPE_CHECKING:
    from mlbench_cli.model.goals import Goal


class Found(NamedTuple):
    """The result of a search: the request of the measured runs, and the record of the search for their archives."""

    request: Request
    document: JsonObject


def plan_search(request: Request, client: Client) -> tuple[Search, Launch]:
    """The search of a request, and the launch of its first round. Raises UsageError for what cannot be searched."""
    if request.command is not None or request.task is None:
        raise UsageError("--search tunes parameters of built-in tasks.", hint="mlbench tasks")
    known = load_catalog()
    if request.task not in known:
        raise UsageError(f'There is no task "{request.task[:60]}".', hint="mlbench tasks")
    search = parse_search(request, known[request.task])
    client.prepare(chosen_request(request, search.points[0])).render(offline=True)  # refused now rather than afterwards
    return search, client.prepare(trial_request(request, search, search.rounds[0], search.points))


def describe_search(request: Request, search: Search) -> str:
    """A sentence about what the search will do."""
    rounds = ", ".join(f"{each.count} for {_length(search, each)}" for each in search.rounds)
    scored = f"{SHARE:.0%} of the training samples, held out" if search.holds_out else "the validation set itself"
    return (
        f"Search: {search.runs} trials on {request.workers[0]} worker{'s' * (request.workers[0] != 1)} ({rounds}), "
        f"scored on {scored}. All sizes then run with the best point."
    )


def run_search(
    request: Request,
    search: Search,
    first: Launch,
    client: Client,
    command_line: Sequence[str],
    *,
    logs: bool = False,
    retry_failed: bool = False,
) -> Found:
    """Run or resume all rounds; finished trials are kept. Raises TaskFailedError if no trial has a result."""
    console.note(describe_search(request, search))
    if not search.holds_out:
        console.warn(
            f"{request.task} cannot hold out training samples, so the point is chosen on the data that measures "
            "the goal."
        )
    points, trials = list(search.points), list[Trial]()
    launch = first
    for each in search.rounds:
        if each.number > 1:
            launch = client.prepare(trial_request(request, search, each, points))
            launch.render()
        console.note(f"Round {each.number} of {len(search.rounds)}: {each.count} trials of {_length(search, each)}")
        with launch.open(command_line, retry_failed=retry_failed) as opened:
            ended, goal = _run_round(opened, launch, each, points, logs)
        trials += ended
        ranked = [trial for trial in rank(ended, goal) if trial.value is not None]
        if not ranked:
            raise TaskFailedError(
                f"No trial of {launch.experiment.name} reported {goal.metric}.",
                hint=f"mlbench status {launch.experiment.name}, mlbench logs {ended[0].run}",
            )
        following = search.rounds[each.number].count if each.number < len(search.rounds) else 1
        points = [trial.point for trial in ranked[:following]]
    _print_trials(search, trials, points[0], goal)
    return Found(chosen_request(request, points[0]), _document(request, search, trials, points[0]))


def _run_round(
    opened: OpenExperiment, launch: Launch, each: Round, points: Sequence[Point], logs: bool
) -> "tuple[list[Trial], Goal]":
    opened.record()
    try:
        follow_all(opened, require_goal=False, logs=logs)
    except Stopped as stopped:
        console.note(f"The search was stopped in round {each.number}; repeat the command to resume.")
        raise stopped from None
    goal = opened.runs[0].goal
    assert goal is not None  # parse_search refuses tasks without one
    by_text = {tuple(point_text(point).items()): point for point in points}
    trials = []
    for candidate, run in zip(launch.candidates, opened.runs, strict=True):
        finished = run.finished
        result = finished.result if finished else None
        trials.append(read_trial(each, by_text[tuple(candidate.point.items())], run.run, result))
    return trials, goal


def _length(search: Search, each: Round) -> str:
    if search.unit in ("epochs", "steps"):
        return f"{each.length} {search.unit if each.length > 1 else search.unit[:-1]}"
    return console.duration(each.length)


def _print_trials(search: Search, trials: Sequence[Trial], chosen: Point, goal: "Goal") -> None:
    """The table of all trials goes to stderr: the answer of `run` is its measured runs."""
    keys = [key.removeprefix("set.") for key in search.points[0]]
    rows = []
    for each in search.rounds:
        for trial in rank([item for item in trials if item.round == each.number], goal):
            texts = point_text(trial.point)
            value = "-" if trial.value is None else f"{trial.value:.2f}"
            reached = "-" if trial.seconds is None else console.duration(trial.seconds)
            rows.append([each.number, *(texts[key] for key in trial.point), value, reached, trial.outcome, trial.run])
    headers = ["ROUND", *(key.upper() for key in keys), f"BEST {goal.metric}", "TO GOAL", "OUTCOME", "RUN"]
    console.note(console.format_table(headers, rows))
    console.note(f"Chosen: {', '.join(f'{k}={v}' for k, v in point_text(chosen).items())}")


def _document(request: Request, search: Search, trials: Sequence[Trial], chosen: Point) -> JsonObject:
    return {
        "grammar": search.text,
        "workers": request.workers[0],
        "limited_by": search.unit,
        "hold_out": SHARE if search.holds_out else None,
        "rounds": [vars(each) for each in search.rounds],
        "chosen": point_text(chosen),
        "tried": [trial.to_dict() for trial in trials],
    }
