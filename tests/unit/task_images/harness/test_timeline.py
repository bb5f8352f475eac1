"""The two lanes of a few updates: which spans are kept, and when nothing is."""

from task_images.harness.timeline import FIRST_UPDATE, LAST_UPDATE, MAX_SPANS, MessageSpan, Timeline
from task_images.harness.tracker import Tracker


def train(tracker: Tracker, clock: list[float], updates: int) -> None:
    """Updates of two seconds forward and three seconds backward; a message is ready in between, and takes two."""
    for _ in range(updates):
        with tracker.step(samples=1):
            with tracker.section("forward"):
                clock[0] += 2
            ready = clock[0]
            with tracker.section("backward"):
                clock[0] += 3
            tracker.timeline.add_message(MessageSpan(0, 400, ready, ready + 1, ready + 2))


def test_the_spans_of_two_updates_are_kept_on_both_lanes() -> None:
    clock = [100.0]
    tracker = Tracker(clock=lambda: clock[0])
    train(tracker, clock, LAST_UPDATE + 3)
    assert tracker.timeline.to_dict() == {
        "updates": [FIRST_UPDATE, LAST_UPDATE],
        "training": [["forward", 0, 2], ["backward", 2, 5], ["forward", 5, 7], ["backward", 7, 10]],
        "communication": [[0, 400, 2, 3, 4], [0, 400, 7, 8, 9]],
    }


def test_nothing_is_kept_of_short_runs_nor_without_messages_nor_after_a_restart() -> None:
    clock = [0.0]
    tracker = Tracker(clock=lambda: clock[0])
    train(tracker, clock, FIRST_UPDATE - 1)
    assert tracker.timeline.to_dict() is None
    train(tracker, clock, 1)
    assert tracker.timeline.to_dict() is not None
    tracker.restart()
    assert tracker.timeline.to_dict() is None
    timeline = Timeline()
    for now in range(LAST_UPDATE + 2):
        timeline.begin_update(float(now))
    assert timeline.to_dict() is None


def test_lanes_are_bounded() -> None:
    timeline = Timeline()
    for _ in range(FIRST_UPDATE):
        timeline.begin_update(0.0)
    for number in range(MAX_SPANS + 10):
        timeline.add_section(f"section {number % 2}", float(number), number + 1.0)
        timeline.add_message(MessageSpan(number, 1, 0.0, 0.0, 1.0))
    found = timeline.to_dict()
    assert found is not None
    assert len(found["training"]) == len(found["communication"]) == MAX_SPANS
