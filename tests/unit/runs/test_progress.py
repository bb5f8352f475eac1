"""Progress of a run: a pure function of its events, and reading those through an engine."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlbench_cli.commands._report import describe
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.goals import Goal
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.progress import Progress, ProgressReader, ProgressTracker, find_goal, format_eta
from task_images.contract import format_event
from tests.fakes.engine import FakeEngine

SPEC = RunSpec("r-2", "local", "local", "custom", "custom", ("prog",), "gloo", 2)

# --- progress -----------------------------------------------------------------------------------------------------

ACCURACY = Goal("Prec@1", ">=", 80.0)
RUNNING = Observation(100.0, (WorkerState(0, "running", started=40.0),))


def event(kind: str, time: float, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "event": kind, "rank": rank, "time": time, **fields}


def track(*events: dict[str, Any], goal: Goal | None = ACCURACY) -> ProgressTracker:
    tracker = ProgressTracker(goal)
    for one in events:
        tracker.take(one)
    return tracker


def test_progress_knows_the_last_of_everything() -> None:
    tracker = track(
        event("phase", 41, phase="loading"),
        event("phase", 50, phase="training", epoch=1, epochs=10),
        event("metric", 55, name="train_loss", value=2.5),
        event("metric", 59, name="val_global_loss", value=9.0),
        event("metric", 60, name="val_global_Prec@1", value=55.0),
        event("metric", 70, name="val_global_Prec@1", value=50.0),
        event("phase", 71, phase="training", epoch=2, epochs=10, step=3, steps=4),
    )
    progress = tracker.progress(RUNNING, created=1.0)
    assert (progress.phase, progress.epoch, progress.epochs, progress.step, progress.steps) == ("training", 2, 10, 3, 4)
    assert (progress.loss, progress.metric, progress.value, progress.best) == (2.5, "Prec@1", 50.0, 55.0)
    assert (progress.comparison, progress.threshold, progress.elapsed) == (">=", 80.0, 60.0)
    tracker.take(event("phase", 80, phase="training", epoch=3))
    progress = tracker.progress(RUNNING, created=1.0)
    assert (progress.epoch, progress.epochs, progress.step) == (3, 10, None)


def test_eta_is_the_earlier_of_trend_and_epochs() -> None:
    begun = event("phase", 0, phase="training", epoch=1, epochs=10)
    half = event("phase", 50, phase="training", epoch=6, epochs=10, step=0, steps=10)
    assert track(begun, half, goal=None).progress(RUNNING, 0.0).eta == 50.0
    rising = [event("metric", 10 + at, name="val_Prec@1", value=50.0 + at) for at in (0, 10, 20)]
    assert track(*rising).progress(RUNNING, 0.0).eta == 10.0
    soon = event("phase", 34, phase="training", epoch=4, epochs=10)
    assert track(begun, *rising, soon).progress(RUNNING, 0.0).eta == 6.0
    falling = [event("metric", 10 + at, name="val_Prec@1", value=50.0 - at) for at in (0, 10)]
    assert track(*falling).progress(RUNNING, 0.0).eta is None
    assert track().progress(RUNNING, 0.0).eta is None
    assert track(begun, half).progress(replace(RUNNING, ended=Ending.EXITED), 0.0).eta is None


def test_without_a_trend_to_the_goal_the_last_epoch_is_only_an_upper_bound() -> None:
    """It was "about 3 h 45 min left" before the first validation, and reached the goal after 7 minutes."""
    begun = event("phase", 0, phase="training", epoch=1, epochs=10)
    later = event("phase", 50, phase="training", epoch=6, epochs=10, step=0, steps=10)
    falling = [event("metric", 10 + at, name="val_Prec@1", value=50.0 - at) for at in (0, 10)]
    for events in ((begun, later), (begun, *falling, later)):
        progress = track(*events).progress(RUNNING, 0.0)
        assert (progress.eta, progress.eta_high) == (None, 50.0)


def test_an_overdue_estimate_does_not_stand_still() -> None:
    """ "about 43 s left" was shown for 100 s."""
    rising = [event("metric", at, name="val_Prec@1", value=40.0 + at) for at in (0, 10, 20, 30)]
    begun, late = (event("phase", at, phase="training", epoch=1 + at // 10, epochs=100) for at in (0, 50))
    progress = track(begun, *rising, late).progress(RUNNING, 0.0)
    assert progress.eta == 0.0
    assert progress.eta_high is not None
    assert progress.eta_high > 500


def test_a_measurement_has_steps_and_no_epochs() -> None:
    """It was in epoch 3 of 3 with most of its steps to go: "about 10 s left" for a minute."""
    begun, quarter = event("phase", 10, phase="training"), event("phase", 40, phase="training", step=25, steps=100)
    progress = track(begun, quarter).progress(RUNNING, 0.0)
    assert (progress.epoch, progress.step, progress.steps, progress.eta) == (None, 25, 100, 90.0)


def test_a_flattening_curve_takes_longer_than_its_last_slope_says() -> None:
    # 80 - 60 exp(-t / 50): the distance to a goal of 75 falls from 55 by an exponential whose end is known exactly.
    values = [event("metric", at, name="val_Prec@1", value=80 - 60 * math.exp(-at / 50)) for at in range(0, 80, 10)]
    progress = track(*values, goal=Goal("Prec@1", ">=", 75.0)).progress(RUNNING, 0.0)
    truth = 50 * math.log(60 / 5) - 70
    assert progress.eta is not None
    assert progress.eta_high is not None
    assert progress.eta < truth
    assert progress.eta_high == pytest.approx(truth, rel=0.1)
    # A goal above where it flattens out: only the last epoch bounds it.
    high = Goal("Prec@1", ">=", 81.0)
    assert track(*values, goal=high).progress(RUNNING, 0.0).eta_high is None
    begun, half = (event("phase", at, phase="training", epoch=1 + at // 14, epochs=10) for at in (0, 70))
    bounded = track(begun, *values, half, goal=high).progress(RUNNING, 0.0)
    assert bounded.eta is not None
    assert bounded.eta < 70 == bounded.eta_high


def test_under_a_budget_the_budget_is_what_is_left() -> None:
    events = [event("phase", 10, phase="training", epoch=1), event("metric", 30, name="val_Prec@1", value=79.0)]
    spec = replace(SPEC, task="digits_resnet", parameters={"budget_seconds": 60.0, "goal_full": 80.0})
    tracker = ProgressTracker.of(spec)
    for one in events:
        tracker.take(one)
    progress = tracker.progress(RUNNING, 0.0)
    assert (progress.eta, progress.eta_high) == (40.0, 40.0)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (None, None, None),
        (40.0, 45.0, "about 40 s left"),
        (40.0, 65.0, "40 s to 1 min 5 s left"),
        (40.0, 180.0, "estimating time left"),
        (40.0, None, "estimating time left"),
        (None, 180.0, "estimating time left"),
        (0.0, 0.0, "almost done"),
    ],
)
def test_what_is_left_in_words(low: float | None, high: float | None, words: str | None) -> None:
    assert format_eta(low, high) == words


def test_a_terminal_shows_a_bar_when_the_time_left_is_known() -> None:
    known = Progress(RUNNING, 60.0, phase="training", eta=55.0, eta_high=65.0)
    assert describe(known, "x", 100).endswith("about 55 s left, [==========>          ]")
    assert "[" not in describe(known, "x")
    assert "[" not in describe(replace(known, eta_high=200.0), "x", 100)


def test_a_run_that_writes_its_results_has_no_time_left() -> None:
    ended = Progress(RUNNING, 60.0, phase="finished", epoch=6, epochs=164, eta=1.0, eta_high=90.0)
    assert describe(ended, "x") == "x: finishing, elapsed 1 min"


def test_a_goal_may_come_from_the_task_itself() -> None:
    goal = {"metric": "Perplexity", "comparison": "<=", "threshold": 70, "value": 90}
    tracker = track(event("phase", 1, phase="training", goal=goal), goal=None)
    tracker.take(event("metric", 2, name="val_global_Perplexity", value=75))
    progress = tracker.progress(RUNNING, 0.0)
    assert (progress.metric, progress.threshold, progress.value, progress.best) == ("Perplexity", 70, 75, 75)
    assert progress.eta is not None
    assert round(progress.eta, 2) == round(5 / 15, 1)
    tracker.take(event("phase", 3, phase="fine-tuning", goal={**goal, "metric": "Loss", "value": None}))
    assert tracker.progress(RUNNING, 0.0).best is None


def test_elapsed_ends_with_the_run_and_begins_with_the_first_worker() -> None:
    done = WorkerState(0, "succeeded", exit_code=0, started=40.0, finished=45.0)
    workers = (done, replace(done, rank=1, finished=44.0))
    assert track().progress(Observation(100.0, workers, ended=Ending.EXITED), created=1.0).elapsed == 5.0
    assert track().progress(Observation(100.0, (WorkerState(0),)), created=30.0).elapsed == 70.0
    late = WorkerState(1, "running", started=90.0)
    assert track().progress(Observation(100.0, (late, *RUNNING.workers)), created=1.0).elapsed == 60.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["Prec@1", "train_loss", ">=", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["metric", "comparison", "threshold", "value"]), inner)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(["name", "value", "phase", "epoch", "epochs", "step", "steps", "goal", "outcome"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["metric", "phase", "result"]), st.floats(0, 1e9), st.dictionaries(FIELDS, JSON)),
        max_size=8,
    )
)
def test_no_event_of_a_task_can_break_the_tracker(events: list[tuple[str, float, dict[str, Any]]]) -> None:
    tracker = track(*(event(kind, time, **fields) for kind, time, fields in events))
    progress = tracker.progress(RUNNING, 0.0)
    assert progress.eta is None or progress.eta >= 0


def test_the_goal_of_a_custom_command_is_not_looked_for() -> None:
    assert find_goal(SPEC) is None
    assert find_goal(replace(SPEC, task="of-another-version", parameters={"goal_full": 80.0})) is None


def test_a_run_that_times_blocks_has_no_goal() -> None:
    spec = replace(SPEC, task="digits_resnet", parameters={"goal_full": 98.0, "blocks": 10})
    assert find_goal(spec) is None
    assert find_goal(replace(spec, parameters={"goal_full": 98.0, "blocks": 0})) is not None


# --- reading events through an engine -------------------------------------------------------------------------------


def test_events_are_read_once_and_in_order_however_often_the_log_fails(tmp_path: Path) -> None:
    engine = FakeEngine()
    reader = ProgressReader(engine, Run("id", SPEC, tmp_path, "2026-01-01T00:00:00Z"), seconds=0.0)
    lines = [format_event(event("metric", at, name="loss", value=at)).encode() + b"\n" for at in (1, 2, 6)]
    engine.lines[0] = [b"hello\n", lines[0], b"\xff\n"]
    assert reader.read(RUNNING).loss == 1
    engine.lines[0].append(b"50%\r" + lines[1])
    engine.error = NotFoundError("The pod is gone.")
    assert reader.read(RUNNING).loss == 1
    engine.error = None
    engine.lines[0].append(lines[2])
    assert reader.read(RUNNING).loss == 6
    assert reader.read(RUNNING).loss == 6
    assert reader.tracker.metric_figures["loss"].mean == 3
