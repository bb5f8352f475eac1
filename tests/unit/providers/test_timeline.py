"""The times of resources: what is recorded once, how waits add up, and where a stopped operation continues."""

from types import SimpleNamespace
from typing import Any

import pytest

from providers import timeline
from providers.timeline import Timeline

POOL: Any = SimpleNamespace(kind="node pool", name="demo/workers")
PLANE: Any = SimpleNamespace(kind="cluster", name="demo")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still; `seconds` moves it."""
    moment = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(timeline, "time", SimpleNamespace(monotonic=lambda: moment.seconds))
    return moment


def test_the_entry_of_a_creation(clock: SimpleNamespace) -> None:
    times = Timeline([PLANE, POOL])
    line = times.of(POOL)
    for what, moment in (("began", 101.0), ("accepted", 102.5), ("ready", 110.0004), ("ready", 120.0)):
        clock.seconds = moment
        line.record_time(what)
    entry = {"kind": "node pool", "name": "demo/workers", "adopted": False, "began": 1.0, "accepted": 2.5}
    assert times.to_list() == [{**entry, "ready": 10.0, "waits": []}]
    line.reset()
    assert times.to_list() == [{**entry, "accepted": None, "ready": None, "waits": []}]


def test_the_entry_of_a_deletion(clock: SimpleNamespace) -> None:
    times = Timeline([POOL], removing=True)
    for what in ("began", "gone"):
        clock.seconds += 2
        times.of(POOL).record_time(what)
    assert times.to_list() == [{"kind": "node pool", "name": "demo/workers", "began": 2.0, "gone": 4.0, "waits": []}]


def test_a_wait_for_the_same_reason_goes_on_and_another_reason_ends_it(clock: SimpleNamespace) -> None:
    line = Timeline([POOL]).of(POOL)
    news = []
    for reason, seconds in (("busy", 2.0), ("busy", 3.0), ("stock", 1.0), ("stock", 0.5), ("busy", 4.0)):
        news.append(line.start_wait(reason))
        clock.seconds += seconds
    expected = [{"reason": "busy", "seconds": 5.0}, {"reason": "stock", "seconds": 1.5}]
    assert news == [True, False, True, False, True]
    assert line.to_dict()["waits"] == [*expected, {"reason": "busy", "seconds": 4.0}]
    line.end_wait()
    clock.seconds += 9
    assert line.start_wait("busy")
    clock.seconds += 1
    line.end_wait()
    line.end_wait()
    assert line.to_dict()["waits"] == [*expected, {"reason": "busy", "seconds": 5.0}]


def test_the_twenty_first_wait_is_added_to_the_last(clock: SimpleNamespace) -> None:
    line = Timeline([POOL]).of(POOL)
    for number in range(21):
        line.start_wait(f"reason {number}")
        clock.seconds += 1
    line.end_wait()
    waits = line.to_dict()["waits"]
    assert (len(waits), waits[-1]) == (20, {"reason": "reason 19", "seconds": 2.0})


def test_a_continued_operation_starts_at_its_last_time_and_keeps_what_was_recorded(clock: SimpleNamespace) -> None:
    waits = [{"reason": "stock", "seconds": 30.0}]
    earlier: Any = [
        {"kind": "node pool", "name": "demo/workers", "began": 5.0, "accepted": 6.0, "ready": None, "waits": waits},
        {"kind": "network", "name": "gone", "began": 1.0, "ready": 20.0, "waits": []},
    ]
    times = Timeline([PLANE, POOL], earlier)
    assert times.now() == 35.0  # 5 s, and 30 s of waiting
    clock.seconds += 1
    times.of(POOL).record_time("began")
    times.of(POOL).record_time("ready")
    network, pool = times.to_list()
    assert network["name"] == "gone"
    assert (pool["began"], pool["accepted"], pool["ready"], pool["waits"]) == (5.0, 6.0, 36.0, waits)


def test_only_what_no_earlier_operation_of_ours_began_is_adopted(clock: SimpleNamespace) -> None:
    earlier: Any = [{"kind": "node pool", "name": "demo/workers", "began": 5.0, "adopted": False, "waits": []}]
    times = Timeline([PLANE, POOL], earlier)
    for resource in (PLANE, POOL):
        times.of(resource).mark_adopted()
    assert (times.of(PLANE).entry["adopted"], times.of(POOL).entry["adopted"]) == (True, False)
    assert times.of(PLANE).entry["accepted"] == times.of(POOL).entry["accepted"] == 5.0
