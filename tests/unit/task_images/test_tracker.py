"""The categories add up to the wall time, whatever is nested in what, and misuse is refused."""

import math
import threading
from collections.abc import Callable, Iterator

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
    with tracker.step(samples=32):
        for name in ("preprocessing", "forward", "loss", "backward", "communication", "optimizer", "metrics"):
            with tracker.section(name):
                clock.work(0.5)
        clock.work(0.5)
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
    for item in tracker.waiting(loader()):
        with tracker.step(samples=1):
            clock.work(0.25)
            seen.append(item)
    after = tracker.snapshot()

    assert seen == [0, 1, 2]
    assert after.seconds["data_wait"] == 7.0
    assert (after.training, after.wall) == (0.75, 7.75)


def test_waiting_inside_a_step_is_no_training_either(tracker: Tracker, clock: Clock) -> None:
    with tracker.step():
        clock.work(1.0)
        with tracker.section("data_wait"):
            clock.work(10.0)

    assert tracker.snapshot().training == 1.0


def test_an_inner_section_pauses_the_outer_one(tracker: Tracker, clock: Clock) -> None:
    with tracker.section("optimizer"):
        clock.work(1.0)
        with tracker.section("communication"):
            clock.work(10.0)
            with tracker.section("optimizer"):
                clock.work(100.0)
        clock.work(2.0)

    assert tracker.snapshot().seconds["optimizer"] == 103.0
    assert tracker.snapshot().seconds["communication"] == 10.0


def test_validation_keeps_what_is_inside_it_and_is_no_training(tracker: Tracker, clock: Clock) -> None:
    with tracker.step(), tracker.section("validation"):
        clock.work(1.0)
        with tracker.section("forward"), tracker.section("communication"):
            clock.work(2.0)
        clock.work(4.0)

    assert tracker.snapshot().seconds["validation"] == 7.0
    assert tracker.snapshot().training == 0.0


def test_an_exception_leaves_nothing_open_and_its_step_uncounted(tracker: Tracker, clock: Clock) -> None:
    def fail() -> None:
        with tracker.step(samples=8), tracker.section("forward"):
            clock.work(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.work(3.0)
    after = tracker.snapshot()

    assert (after.seconds["forward"], after.seconds["other"]) == (1.0, 3.0)
    assert (after.updates, after.samples) == (0, 0)


def test_what_is_paused_counts_nowhere(tracker: Tracker, clock: Clock) -> None:
    clock.work(1)
    with tracker.paused():
        clock.work(10)
    with tracker.section("validation"):
        clock.work(2)
        with pytest.raises(RuntimeError, match="cannot pause inside"), tracker.paused():
            pass
    after = tracker.snapshot()
    assert (after.wall, after.seconds["other"], after.seconds["validation"]) == (3.0, 1.0, 2.0)


def test_restart_forgets_what_was_before(tracker: Tracker, clock: Clock) -> None:
    clock.work(5.0)
    with tracker.step(samples=3), tracker.section("loss"):
        clock.work(5.0)
    tracker.restart()
    clock.work(1.0)

    assert tracker.snapshot().wall == 1.0
    assert tracker.snapshot().seconds["loss"] == 0.0
    assert tracker.snapshot().updates == 0


def test_a_snapshot_stays_as_it_was(tracker: Tracker, clock: Clock) -> None:
    clock.work(1.0)
    before = tracker.snapshot()
    clock.work(1.0)
    tracker.snapshot()

    assert before.wall == before.seconds["other"] == 1.0


def test_the_device_is_awaited_at_every_border() -> None:
    borders = []
    tracker = Tracker(synchronize=lambda: borders.append(1))
    at_start = len(borders)
    with tracker.section("forward"):
        pass
    assert len(borders) == at_start + 2


def _unknown(tracker: Tracker) -> None:
    tracker.section("backprop")


def _restart_inside(tracker: Tracker) -> None:
    with tracker.section("forward"):
        tracker.restart()


def _step_in_step(tracker: Tracker) -> None:
    with tracker.step(), tracker.step():
        pass


def cross_sections(tracker: Tracker) -> None:
    outer, inner = tracker.section("forward"), tracker.section("loss")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)


@pytest.mark.parametrize("misuse", [_unknown, _restart_inside, _step_in_step, cross_sections])
def test_misuse_is_refused(tracker: Tracker, misuse: Callable[[Tracker], None]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        misuse(tracker)


def test_another_thread_is_refused(tracker: Tracker) -> None:
    refused = []

    def use() -> None:
        try:
            tracker.section("forward").__enter__()
        except RuntimeError:
            refused.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert refused


@given(
    st.recursive(st.floats(0, 10), lambda inner: st.lists(st.tuples(st.sampled_from(CATEGORIES), inner)), max_leaves=30)
)
def test_the_categories_add_up_to_the_wall_time(plan: object) -> None:
    clock = Clock()
    tracker = Tracker(clock=clock)

    def follow(part: object) -> None:
        if isinstance(part, float):
            clock.work(part)
            return
        assert isinstance(part, list)
        for name, inner in part:
            with tracker.section(name):
                follow(inner)
            clock.work(0.125)

    follow(plan)
    after = tracker.snapshot()
    assert math.isclose(sum(after.seconds.values()), after.wall, abs_tol=1e-9)
    assert math.isclose(after.wall, clock.now - 1000.0, abs_tol=1e-9)
