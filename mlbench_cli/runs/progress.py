"""The progress of a run for people, derived from the events that its ranks report. Nothing is decided here."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.follow import LogReader
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.goals import Goal, is_finite_number
from mlbench_cli.model.run import Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.analysis.program_metrics import MetricSummary, MetricTally
from mlbench_cli.results.archive.evidence import find_events
from mlbench_cli.tasks.catalog import BUDGET, find_rules
from mlbench_cli.util.text import rough_duration, without_colors
from mlbench_cli.util.times import parse_timestamp
from task_images.contract import PREFIX

READ_SECONDS = 1.0  # between two reads of rank 0's log
ESTIMATING = "estimating time left"
TREND = 4  # values of the goal's metric for a linear trend; twice as many for a curved one


class Progress(Struct, frozen=True):
    """How far a run is. `value` is the goal's metric as last reported, `best` the best so far; `elapsed` and `eta` are
    seconds. `eta` follows the last linear trend of the goal's metric, which is too early while the curve flattens
    (None without a trend); `eta_high` follows its bend or the last epoch (None if neither bounds it). Everything except
    `observation` and `elapsed` may be None, because tasks need not report anything; `last_line` is what rank 0 printed
    last besides.
    """

    observation: Observation
    elapsed: float
    phase: str | None = None
    epoch: float | None = None
    epochs: float | None = None
    step: float | None = None
    steps: float | None = None
    loss: float | None = None
    metric: str | None = None
    value: float | None = None
    comparison: str | None = None
    threshold: float | None = None
    best: float | None = None
    eta: float | None = None
    eta_high: float | None = None
    last_line: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Without the observation and the last line."""
        return {key: value for key, value in asdict(self).items() if key not in ("observation", "last_line")}


class ProgressReader:
    """Reads the progress of a run from its engine's observations and the events in rank 0's log."""

    def __init__(self, engine: Engine, run: Run, *, seconds: float = READ_SECONDS) -> None:
        """`seconds`: minimum time between two reads of the log; the last read does not wait for it."""
        self.tracker = ProgressTracker.of(run.spec)
        self._log = LogReader(run, engine, (0,))
        self._last_line = b""  # that is not empty and has no event; a progress bar does not end it
        self._created = parse_timestamp(run.created)
        self._seconds = seconds
        self._next_read = 0.0

    def read(self, observation: Observation) -> Progress:
        """How far the run is at this observation, the newest one. A log that cannot be read now is read by the next
        call."""
        if observation.ended or time.monotonic() >= self._next_read:
            with suppress(MlbenchError):
                for line in self._log.read_new(0):
                    events = list(find_events(line))
                    for event in events:
                        self.tracker.take(event)
                    if not events and not line.isspace():
                        self._last_line = line
            begun = self._log.read_begun(0)
            if begun.strip() and PREFIX.encode() not in begun:
                self._last_line = begun
            self._next_read = time.monotonic() + self._seconds
        # Behind a carriage return is what a progress bar shows now.
        last = without_colors(self._last_line.decode("utf-8", "replace")).rstrip().rpartition("\r")[2].strip()
        return replace(self.tracker.progress(observation, self._created), last_line=last)


class ProgressTracker:
    """Derives progress and time left from events, one at a time."""

    def __init__(self, goal: Goal | None = None, *, budget: float = 0.0) -> None:
        """`budget`: seconds of training after which it ends, goal or not; 0: none."""
        self._budget = budget
        self.goal = goal
        self.metrics: dict[str, float | str] = {}  # last value by name
        self._tally = MetricTally()
        self._phase: dict[str, Any] = {}
        self._loss: float | None = None
        self._best: float | None = None
        self._trend: list[tuple[float, float]] = []  # time and value of the goal's metric
        self._training_since: float | None = None
        self._last = 0.0

    @classmethod
    def of(cls, spec: RunSpec) -> "ProgressTracker":
        """The tracker of a run, with the goal and budget (seconds) of its spec."""
        budget = spec.parameters.get(BUDGET)
        return cls(find_goal(spec), budget=float(budget) if is_finite_number(budget) else 0.0)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event of the contract. Values of the wrong type are ignored."""
        self._last = event["time"]
        if event["event"] == "phase":
            self._take_phase(event)
        elif event["event"] == "metric":
            self._take_metric(event.get("name"), event.get("value"), event.get("unit"), event["time"])

    def progress(self, observation: Observation, created: float) -> Progress:
        """`created` is the time of the run's submission, which counts while no worker has started yet."""
        starts = [worker.started for worker in observation.workers if worker.started is not None]
        ends = [worker.finished for worker in observation.workers if worker.finished is not None]
        until = max(ends, default=observation.time) if observation.ended else observation.time
        goal = self.goal
        eta, eta_high = (None, None) if observation.ended else self._eta()
        return Progress(
            observation=observation,
            elapsed=round(max(0.0, until - min(starts, default=created)), 3),
            phase=self._phase.get("phase"),
            epoch=self._phase.get("epoch"),
            epochs=self._phase.get("epochs"),
            step=self._phase.get("step"),
            steps=self._phase.get("steps"),
            loss=self._loss,
            metric=goal.metric if goal else None,
            value=self._trend[-1][1] if self._trend else None,
            comparison=goal.comparison if goal else None,
            threshold=goal.threshold if goal else None,
            best=self._best,
            eta=eta,
            eta_high=eta_high,
        )

    @property
    def metric_figures(self) -> dict[str, MetricSummary]:
        """Last, best and mean value of each metric so far."""
        return self._tally.summarize(self.goal)

    def _take_phase(self, event: Mapping[str, Any]) -> None:
        phase = event.get("phase")
        if not isinstance(phase, str) or not phase:
            return
        numbers = {key: event[key] for key in ("epoch", "epochs", "step", "steps") if is_finite_number(event.get(key))}
        # A step belongs to its epoch; what an event leaves out of these has not changed.
        kept: dict[str, Any] = {key: self._phase[key] for key in ("epoch", "epochs") if key in self._phase}
        self._phase = {**kept, **numbers, "phase": phase[:40]}
        if phase == "training" and self._training_since is None:
            self._training_since = event["time"]
        self._take_goal(event.get("goal"), event["time"])

    def _take_goal(self, goal: Any, moment: float) -> None:
        found = Goal.parse(goal)
        if found is None:
            return
        if found != self.goal:
            self.goal, self._best, self._trend = found, None, []
        if is_finite_number(goal.get("value")):
            self._take_value(goal["value"], moment)

    def _take_metric(self, name: Any, value: Any, unit: Any, moment: float) -> None:
        if not isinstance(name, str):
            return
        if not is_finite_number(value):
            if str(value) in ("nan", "inf", "-inf"):  # a training that diverged
                self.metrics[name[:100]] = str(value)
                self._tally.take(name, str(value), unit)
            return
        self.metrics[name[:100]] = value
        self._tally.take(name, value, unit)
        if name.endswith("loss") and not name.startswith("val"):
            self._loss = value
        if self.goal and name in self.goal.metric_names:
            self._take_value(value, moment)

    def _take_value(self, value: float, moment: float) -> None:
        if self.goal and (self._best is None or self.goal.better(value, self._best)):
            self._best = value
        self._trend = [*self._trend[1 - 2 * TREND :], (moment, value)]

    def _eta(self) -> tuple[float | None, float | None]:
        """Earliest and latest end in seconds from now; None for each that is unknown."""
        by_steps = self._eta_by_steps()
        if self._budget:
            known = [eta for eta in (self._eta_by_budget(), by_steps) if eta is not None]
            return (round(min(known), 1), round(min(known), 1)) if known else (None, None)
        early, late = self._eta_by_trend(), self._eta_by_bent_trend()
        if early is None and by_steps is not None and self.goal is not None and self._phase.get("epochs"):
            return None, round(by_steps, 1)  # the last epoch is far behind most goals
        lows = [eta for eta in (early, by_steps) if eta is not None]
        if not lows:
            return None, None
        low = min(lows)
        highs = [eta for eta in (late, by_steps) if eta is not None]
        return round(low, 1), round(max(low, min(highs)), 1) if highs else None

    def _eta_by_budget(self) -> float | None:
        if self._training_since is None:
            return None
        return max(0.0, self._budget - (self._last - self._training_since))

    def _eta_by_trend(self) -> float | None:
        """From a linear trend of the last values: too early if the curve flattens."""
        if self.goal is None or not self._trend:
            return None
        (begun, first), (now, value) = self._trend[-TREND:][0], self._trend[-1]
        gap = self.goal.distance(value)
        if gap == 0:
            return 0.0
        gained = self.goal.distance(first) - gap
        if gained <= 0 or now <= begun:
            return None
        return max(0.0, gap * (now - begun) / gained - (self._last - now))

    def _eta_by_bent_trend(self) -> float | None:
        """From a speed that falls exponentially, as between the two halves of the last values; None if the goal is out
        of reach at this rate, or should have been reached by now.

        With speeds s1 > s2 in the halves, whose middles are c apart, the speed falls at the rate k = ln(s1 / s2) / c.
        It is v now, and covers v / k (1 - exp(-k t)) in a time t.
        """
        if self.goal is None or len(self._trend) < 3:
            return None
        times, gaps = [time for time, _ in self._trend], [self.goal.distance(value) for _, value in self._trend]
        middle, gap = len(times) // 2, gaps[-1]
        if gap == 0:
            return 0.0
        if not times[0] < times[middle] < times[-1]:
            return None
        before = (gaps[0] - gaps[middle]) / (times[middle] - times[0])
        after = (gaps[middle] - gap) / (times[-1] - times[middle])
        if after <= 0:
            return None
        waited = self._last - times[-1]
        if before <= after:
            return gap / after - waited if gap / after > waited else None
        rate = math.log(before / after) / ((times[-1] - times[0]) / 2)
        speed = after * math.exp(-rate * (times[-1] - times[middle]) / 2)
        left = 1 - gap * rate / speed if speed > 0 else 0.0
        seconds = -math.log(left) / rate if left > 0 else 0.0
        return seconds - waited if seconds > waited else None

    def _eta_by_steps(self) -> float | None:
        """From the share of epochs that are done; for a measurement, which has no epochs, from the share of steps."""
        if self._training_since is None:
            return None
        place, is_training = self._phase, self._phase["phase"] == "training"
        epoch, epochs, steps = (place.get(name) for name in ("epoch", "epochs", "steps"))
        within = place.get("step", 0) / steps if steps and is_training else 0.0
        if epoch is None:
            done = within
        elif not epochs:
            return None
        else:
            done = (epoch - 1 + within if is_training else epoch) / epochs
        spent = self._last - self._training_since
        if not 0 < done <= 1 or spent <= 0:
            return None
        return float(spent * (1 - done) / done)


def format_eta(low: float | None, high: float | None) -> str | None:
    """ "about 40 s left" or "40 s to 1 min 5 s left"; "estimating time left" without a lower bound, or if the bounds
    are a factor of two or more apart; None if both are unknown.
    """
    if low is None:
        return None if high is None else ESTIMATING
    if high is not None and high < 1:
        return "almost done"
    if high is None or high >= 2 * low:
        return ESTIMATING
    if high <= 1.25 * low:
        return f"about {rough_duration(low)} left"
    return f"{rough_duration(low)} to {rough_duration(high)} left"


def find_goal(spec: RunSpec) -> Goal | None:
    """The goal that a task of the catalog has under this spec; None for a custom command or a task without one."""
    rules = find_rules(spec.task, spec.preset)
    return None if rules is None else rules.find_goal(spec.parameters, spec.goal)
