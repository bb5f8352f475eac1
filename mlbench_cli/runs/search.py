"""`mlbench run --search`: which values of a task's parameters are tried, for how long, and which of them is chosen.

Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) by thirds: all points train briefly, the better third
of them three times as long, and so on to the budget. A trial is a run with its own archive. Where the task can
hold out a part of its training samples, trials train on 80 % of them and are scored on the rest, so that the validation
set is not what chooses. Pure.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.goals import HOLD_OUT, Goal, is_finite_number
from mlbench_cli.runs.matrix import Point, point_text
from mlbench_cli.runs.request import Request, given_value, parse_duration
from mlbench_cli.tasks.catalog import BUDGET, Parameter, Task
from mlbench_cli.util.text import shorten

THIRD = 3  # of the points of a round, one in three is kept, for three times as long
SHARE = 0.2  # of the training samples, held out by tasks that can
LENGTHS = ("epochs", "steps")  # parameters that say how long a training takes, at most
DEFAULT_EPOCHS = 9
MAX_POINTS = 1000
_RANGE = re.compile(r"\s*([^\s.]\S*?)\.\.(\S+)(?:\s+(log|linear))?\s+(\d{1,6})\s*")
_FORM = "--search 'set.learning_rate=1e-4..1 log 5; set.batch_size=32,64'"


@dataclass(frozen=True)
class Round:
    """One round of a search: how many points are tried, each for `length` epochs, steps or seconds."""

    number: int
    count: int
    length: int


@dataclass(frozen=True)
class Search:
    """What is tried. `unit`: the parameter that limits a trial (epochs, steps, or budget_seconds)."""

    text: str
    points: tuple[Point, ...]
    unit: str
    rounds: tuple[Round, ...]
    holds_out: bool

    @property
    def runs(self) -> int:
        """The number of trials of all rounds."""
        return sum(each.count for each in self.rounds)


@dataclass(frozen=True)
class Trial:
    """A point that was tried in a round. `value`: the goal's metric, best of the trial; None: it reported none.

    `seconds`: until the goal, if the trial reached it.
    """

    round: int
    point: Point
    length: int
    run: str
    id: str
    outcome: str
    value: float | None
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**vars(self), "point": point_text(self.point)}


def parse_search(request: Request, task: Task) -> Search:
    """The search of a request for a task of the catalog. Raises UsageError that says what is wrong with it."""
    text = request.search or ""
    if request.matrix or request.include:
        raise UsageError("--search and --matrix exclude each other.", hint="Run a search for each setting.")
    if task.goal is None:
        raise UsageError(f"{task.name} has no goal to rank trials by.")
    axes: dict[str, tuple[Any, ...]] = {}
    for entry in text.split(";"):
        key, values = _parse_axis(entry, task)
        if key in axes:
            raise UsageError(f'--search has "{key}" twice.')
        if key.removeprefix("set.") in request.set:
            raise UsageError(
                f"--set {key.removeprefix('set.')} sets a parameter that --search varies.", hint="Give it once."
            )
        axes[key] = values
    unit, length = _parse_budget(request, task)
    if f"set.{unit}" in axes or f"set.{HOLD_OUT}" in axes:
        raise UsageError(f"--search sets {unit} and {HOLD_OUT} for its trials.", hint="--search-budget")
    count = math.prod(map(len, axes.values()))
    if not 2 <= count <= MAX_POINTS:
        raise UsageError(f"--search has {count} points; it needs 2 to {MAX_POINTS}.", hint=_FORM)
    points = tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return Search(text, points, unit, make_rounds(count, length), HOLD_OUT in task.parameters)


def make_rounds(count: int, length: int) -> tuple[Round, ...]:
    """Rounds of `count` points: as many as have three of them or more, and as a last trial of `length` has thirds."""
    found, left = [], length
    sizes = [count]
    while sizes[-1] > THIRD and left >= THIRD:
        sizes.append(-(-sizes[-1] // THIRD))
        left //= THIRD
    for number, size in enumerate(sizes, 1):
        found.append(Round(number, size, max(1, length // THIRD ** (len(sizes) - number))))
    return tuple(found)


def trial_request(request: Request, search: Search, of: Round, points: Sequence[Point]) -> Request:
    """The request of a round: each point once, on the first number of workers."""
    changes: dict[str, Any] = {HOLD_OUT: SHARE} if search.holds_out else {}
    budget = request.budget
    if search.unit == BUDGET:
        budget = f"{of.length}s"
    else:
        changes[search.unit] = of.length
    return replace(
        request,
        name=f"{request.name}-search{of.number}",
        workers=request.workers[:1],
        set={**request.set, **changes},
        budget=budget,
        include=tuple(points),
        **_OF_RESULTS,
    )


def chosen_request(request: Request, point: Point) -> Request:
    """The request of the measured runs, at the chosen point."""
    settings = {key.removeprefix("set."): value for key, value in point.items()}
    return replace(request, set={**request.set, **settings}, search=None, search_budget=None)


# What a trial does not have of its request.
_OF_RESULTS: Mapping[str, Any] = {"search": None, "search_budget": None, "repeat": None, "calibrate": None}


def rank(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """Trials from the best on: first those that reached the goal, by time, then by the goal's metric."""
    sign = -1.0 if goal.comparison.startswith(">") else 1.0

    def order(trial: Trial) -> tuple[bool, float, bool, float]:
        seconds = math.inf if trial.seconds is None else trial.seconds
        value = math.inf if trial.value is None else sign * trial.value
        return trial.seconds is None, seconds, trial.value is None, value

    return sorted(trials, key=order)


def read_trial(of: Round, point: Point, run: Any, result: Mapping[str, Any] | None) -> Trial:
    """What a run that has ended says of its point. `run`: its name and id; without a result it says nothing."""
    goal = (result or {}).get("goal") or {}
    value, seconds = goal.get("value"), (goal.get("seconds") or {}).get("wall")
    return Trial(
        *(of.number, point, of.length, run.name, run.id),
        str((result or {}).get("outcome", "unknown")),
        float(value) if is_finite_number(value) else None,
        float(seconds) if is_finite_number(seconds) else None,
    )


# --- grammar ----------------------------------------------------------------------------------------------------------


def _parse_axis(entry: str, task: Task) -> tuple[str, tuple[Any, ...]]:
    """KEY=LOW..HIGH [log|linear] COUNT, or KEY=VALUE,VALUE."""
    key, equals, text = (part.strip() for part in entry.partition("="))
    name = key.removeprefix("set.")
    if not equals or not name or not text:
        raise UsageError(f'--search "{shorten(entry.strip())}" is not of the form set.KEY=VALUES.', hint=_FORM)
    if not key.startswith("set."):
        raise UsageError(f'--search tunes parameters of the task, as set.KEY, not "{shorten(key)}".', hint=_FORM)
    if name not in task.parameters:
        near = did_you_mean(name, list(task.parameters))
        raise UsageError(f'{task.name} has no parameter "{shorten(name)}".{near}', hint=f"mlbench tasks {task.name}")
    parameter = task.parameters[name]
    texts = _parse_range(text, parameter) if ".." in text else [word.strip() for word in text.split(",")]
    for value in texts:
        parameter.check(value)
    return key, given_value("matrix", [f"{key}={','.join(texts)}"])[key]


def _parse_range(text: str, parameter: Parameter) -> list[str]:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise UsageError(
            f'--search: "{shorten(text)}" is not of the form LOW..HIGH [log|linear] COUNT.', hint="1e-6..1e-2 log 8"
        )
    try:
        low, high = float(found[1]), float(found[2])
    except ValueError:
        raise UsageError(f'--search: "{shorten(text)}" is not between two numbers.', hint="1e-6..1e-2 log 8") from None
    count, is_log = int(found[4]), found[3] == "log"
    if parameter.type not in ("int", "float"):
        raise UsageError(f"--search: {parameter.name} is not a number.", hint=f"set.{parameter.name}=VALUE,VALUE")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or not 2 <= count <= MAX_POINTS:
        raise UsageError(f'--search: "{shorten(text)}" needs LOW below HIGH and 2 to {MAX_POINTS} values.', hint=_FORM)
    if is_log and low <= 0:
        raise UsageError(f'--search: "{shorten(text)}" begins at {low:g}, but a logarithmic range must begin above 0.')
    shares = [number / (count - 1) for number in range(count)]
    values = [low * (high / low) ** share if is_log else low + (high - low) * share for share in shares]
    if parameter.type == "int":
        return list(dict.fromkeys(f"{value:.0f}" for value in values))
    return [f"{value:.4g}" for value in values]


def _parse_budget(request: Request, task: Task) -> tuple[str, int]:
    """The parameter that limits a trial, and the longest trial in it."""
    text, unit = request.search_budget, next((name for name in LENGTHS if name in task.parameters), None)
    if request.budget is not None and text is not None:
        raise UsageError(
            "--budget and --search-budget exclude each other.", hint="With --budget, trials use that budget."
        )
    text = text or request.budget
    if text is None:
        if unit != "epochs":
            raise UsageError(
                f"The length of a trial of {task.name} is missing.", hint="--search-budget 500 (steps), or 10m"
            )
        return unit, DEFAULT_EPOCHS
    if text.isascii() and text.isdecimal():
        if unit is None:
            raise UsageError(f"{task.name} does not count in epochs or steps.", hint="--search-budget 10m")
        return unit, task.parameters[unit].check(int(text[:18]))
    if BUDGET not in task.parameters:
        raise UsageError(f"{task.name} cannot train for a fixed time.", hint=f"--search-budget 9 ({unit})")
    seconds = parse_duration(text, "--search-budget")
    if seconds < 1:
        raise UsageError(f'--search-budget "{shorten(text)}" is less than a second.')
    return BUDGET, int(seconds)
