"""The times of resources: what is recorded once, how waits add up, and where a stopped operation continues."""

from types import SimpleNamespace
from typing import Any

import pytest

from providers import timeline
from providers.timeline import Timeline
from tests.fakes.clock import Clock

POOL: Any = SimpleNamespace(kind="node pool", name="demo/workers")
PLANE: Any = SimpleNamespace(kind="cluster", name="demo")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timeline, "time", made)
    return made


def test_the_entry_of_a_creation(clock: Clock) -> None:
    times = Timeline([PLANE, POOL])
    line = times.of(POOL)
    for what, moment in (("began", 101.0), ("accepted", 102.5), ("ready", 110.0004), ("ready", 120.0)):
        clock.now = moment
        line.record_time(what)
    entry = {"kind": "node pool", "name": "demo/workers", "adopted": False, "began": 1.0, "accepted": 2.5}
    assert times.to_list() == [{**entry, "ready": 10.0, "waits": []}]
    line.reset()
    assert times.to_list() == [{**entry, "accepted": None, "ready": None, "waits": []}]


def test_the_entry_of_a_deletion(clock: Clock) -> None:
    times = Timeline([POOL], removing=True)
    for what in ("began", "gone"):
        clock.now += 2
        times.of(POOL).record_time(what)
    assert times.to_list() == [{"kind": "node pool", "name": "demo/workers", "began": 2.0, "gone": 4.0, "waits": []}]


def test_a_wait_for_the_same_reason_goes_on_and_another_reason_ends_it(clock: Clock) -> None:
    line = Timeline([POOL]).of(POOL)
    news = []
    for reason, seconds in (("busy", 2.0), ("busy", 3.0), ("stock", 1.0), ("stock", 0.5), ("busy", 4.0)):
        news.append(line.start_wait(reason))
        clock.now += seconds
    expected = [{"reason": "busy", "seconds": 5.0}, {"reason": "stock", "seconds": 1.5}]
    assert news == [True, False, True, False, True]
    assert line.to_dict()["waits"] == [*expected, {"reason": "busy", "seconds": 4.0}]
    line.end_wait()
    clock.now += 9
    assert line.start_wait("busy")
    clock.now += 1
    line.end_wait()
    line.end_wait()
    assert line.to_dict()["waits"] == [*expected, {"reason": "busy", "seconds": 5.0}]


def test_a_continued_operation_starts_at_its_last_time_and_keeps_what_was_recorded(clock: Clock) -> None:
    waits = [{"reason": "stock", "seconds": 30.0}]
    earlier: Any = [
        {"kind": "node pool", "name": "demo/workers", "began": 5.0, "accepted": 6.0, "ready": None, "waits": waits},
        {"kind": "network", "name": "gone", "began": 1.0, "ready": 20.0, "waits": []},
    ]
    times = Timeline([PLANE, POOL], earlier)
    assert times.now() == 35.0  # 5 s, and 30 s of waiting
    clock.now += 1
    times.of(POOL).record_time("began")
    times.of(POOL).record_time("ready")
    network, pool = times.to_list()
    assert network["name"] == "gone"
    assert (pool["began"], pool["accepted"], pool["ready"], pool["waits"]) == (5.0, 6.0, 36.0, waits)


def test_only_what_no_earlier_operation_of_ours_began_is_adopted(clock: Clock) -> None:
    earlier: Any = [{"kind": "node pool", "name": "demo/workers", "began": 5.0, "adopted": False, "waits": []}]
    times = Timeline([PLANE, POOL], earlier)
    for resource in (PLANE, POOL):
        times.of(resource).mark_adopted()
    assert (times.of(PLANE).entry["adopted"], times.of(POOL).entry["adopted"]) == (True, False)
    assert times.of(PLANE).entry["accepted"] == times.of(POOL).entry["accepted"] == 5.0


def test_times_of_a_creation_are_seconds_since_it_began(clock: Clock) -> None:
    times = Timeline([POOL, PLANE])
    line = times.of(POOL)
    line.record_time("began")
    clock.now += 1.5
    line.record_time("accepted")
    line.record_time("began")
    assert line.start_wait("no capacity")
    clock.now += 2
    assert not line.start_wait("no capacity")
    assert line.to_dict()["waits"] == [{"reason": "no capacity", "seconds": 2.0}]
    assert line.start_wait("starting")
    clock.now += 0.25
    line.end_wait()
    line.record_time("ready")
    assert times.to_list() == [
        {
            "kind": "node pool",
            "name": "demo/workers",
            "adopted": False,
            "began": 0.0,
            "accepted": 1.5,
            "ready": 3.75,
            "waits": [{"reason": "no capacity", "seconds": 2.0}, {"reason": "starting", "seconds": 0.25}],
        }
    ]


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ({"began": 3.0, "accepted": 5.0, "ready": 9.0, "waits": []}, 9.0),
        ({"began": 3.0, "accepted": 5.0, "ready": None, "waits": []}, 5.0),
        ({"began": 3.0, "accepted": 5.0, "waits": [{"reason": "x", "seconds": 4.0}]}, 7.0),
        ({"began": 3.0, "gone": 8.0}, 8.0),
        ({"began": None}, 0.0),
    ],
)
def test_an_operation_that_is_continued_resumes_at_its_last_time(
    clock: Clock, earlier: dict[str, Any], now: float
) -> None:
    times = Timeline([], [{"kind": "node pool", "name": "demo/workers", **earlier}])  # type: ignore[typeddict-item]
    assert times.now() == now
    clock.now += 2
    assert times.now() == now + 2


@pytest.mark.parametrize(
    ("earlier", "is_adopted"), [([], True), ([{"kind": "node pool", "name": "demo/workers"}], False)]
)
def test_only_what_this_cluster_had_not_begun_is_adopted(clock: Clock, earlier: list[Any], is_adopted: bool) -> None:
    line = Timeline([POOL], earlier).of(POOL)
    line.mark_adopted()
    assert (line.entry["adopted"], line.entry["accepted"]) == (is_adopted, 0.0)
    line.reset()
    assert (line.entry["accepted"], line.entry["ready"]) == (None, None)


def test_waits_after_the_twentieth_are_added_to_the_last_one(clock: Clock) -> None:
    line = Timeline([POOL]).of(POOL)
    for number in range(22):
        line.start_wait(f"reason {number}")
        clock.now += 1.0625
    line.end_wait()
    waits = line.to_dict()["waits"]
    assert [wait["reason"] for wait in waits] == [f"reason {number}" for number in range(20)]
    assert [wait["seconds"] for wait in waits[-2:]] == pytest.approx([1.0625, 3 * 1.0625], abs=0.002)
