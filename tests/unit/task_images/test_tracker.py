"""The categories add up to the wall time, in whatever order they are entered."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_images.clock import Tracker
from task_images.contract import CATEGORIES


class Clock:
    """Stands still until a test moves it: times in tests are exact."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> Tracker:
    return Tracker(clock=clock)


def test_eight_half_seconds_as_the_original_tracker_was_tested(tracker: Tracker, clock: Clock) -> None:
    for _ in tracker.steps(range(1)):
        clock.work(0.5)
        for name in ("preprocessing", "forward", "loss", "backward", "communication", "optimizer", "metrics"):
            tracker.enter(name)
            clock.work(0.5)
        tracker.end_step(32)
    after = tracker.snapshot()

    compute = sum(after.seconds[name] for name in ("forward", "loss", "backward", "optimizer"))
    assert (compute, after.seconds["communication"], after.seconds["metrics"]) == (2.0, 0.5, 0.5)
    assert (after.seconds["preprocessing"], after.seconds["other"]) == (0.5, 0.5)
    assert (after.wall, after.training, after.updates, after.samples) == (4.0, 4.0, 1, 32)


def test_waiting_for_data_is_measured_and_is_no_training(tracker: Tracker, clock: Clock) -> None:
    def loader() -> Iterator[int]:
        for item in range(3):
            clock.work(2.0)
            yield item
        clock.work(1.0)

    seen = []
    for item in tracker.steps(loader()):
        clock.work(0.25)
        seen.append(item)
        tracker.end_step(1)
    after = tracker.snapshot()

    assert seen == [0, 1, 2]
    assert after.seconds["data_wait"] == 7.0
    assert (after.training, after.wall) == (0.75, 7.75)


def test_waiting_and_validation_inside_a_step_are_no_training(tracker: Tracker, clock: Clock) -> None:
    for _ in tracker.steps(range(1)):
        clock.work(1.0)
        for name in ("data_wait", "validation"):
            tracker.enter(name)
            clock.work(10.0)
        tracker.end_step()

    assert tracker.snapshot().training == 1.0


def test_whoever_interrupts_a_category_can_return_to_it(tracker: Tracker, clock: Clock) -> None:
    tracker.enter("forward")
    clock.work(1.0)
    before = tracker.enter("communication")
    clock.work(10.0)
    tracker.enter(before)
    clock.work(2.0)

    assert tracker.snapshot().seconds["forward"] == 3.0
    assert tracker.snapshot().seconds["communication"] == 10.0


def test_what_is_paused_counts_nowhere(tracker: Tracker, clock: Clock) -> None:
    clock.work(1)
    with tracker.paused():
        clock.work(10)
    tracker.enter("validation")
    clock.work(2)
    after = tracker.snapshot()
    assert (after.wall, after.seconds["other"], after.seconds["validation"]) == (3.0, 1.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from(CATEGORIES), st.floats(0, 10))))
def test_the_categories_add_up_to_the_wall_time(plan: list[tuple[str, float]]) -> None:
    clock = Clock()
    tracker = Tracker(clock=clock)
    for name, seconds in plan:
        tracker.enter(name)
        clock.work(seconds)
    after = tracker.snapshot()
    assert math.isclose(sum(after.seconds.values()), after.wall, abs_tol=1e-9)
    assert math.isclose(after.wall, clock.now - 1000.0, abs_tol=1e-9)
