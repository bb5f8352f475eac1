"""The life-cycle on a toy cloud: killed with SIGKILL before and after every request, it never leaks anything."""

import os
import traceback
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from pathlib import Path

import pytest

from mlbench_cli.errors import (
    CapacityError,
    CleanupError,
    CredentialError,
    DeadlineError,
    Interrupted,
    MlbenchError,
    UsageError,
)
from mlbench_cli.model.cluster_details import TimesRecord
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import Readiness, TransientError
from providers.lifecycle import Step, Timeline, down, is_operation_running, up
from tests import NIGHTLY
from tests.fakes.clock import Clock
from tests.fakes.toycloud import Thing, ToyCloud, toy_resources

CLUSTER = Cluster("demo", "toy", details={"plan": {"price_per_hour": 1.5, "currency": "USD"}})
# By day after every third request. A kill before a request leaves what one after the request before it has left.
KILLS = pytest.mark.parametrize(
    ("kill", "stride"),
    [
        pytest.param("kill-before", 1, marks=pytest.mark.nightly),
        pytest.param("kill-after", 1, marks=pytest.mark.nightly),
        ("kill-after", 3),
    ],
    ids=["before", "after", "sample"],
)


@pytest.fixture
def cloud(tmp_path: Path) -> ToyCloud:
    return ToyCloud(tmp_path / "cloud.json")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return _store(tmp_path / "home")


def _store(folder: Path) -> Store:
    folder.mkdir()
    return Store(folder)


def _together(works: Sequence[Callable[[], object]]) -> list[str]:
    """How each of `works` ended, all running at once in processes of their own: done, killed or failed."""
    children = [start_process(work) for work in works]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return ["killed" if os.WIFSIGNALED(status) else "failed" if status else "done" for status in statuses]


def start_process(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def _make(cloud: ToyCloud, home: Path) -> Cluster:
    return up(CLUSTER, toy_resources(cloud, "demo"), _store(home))


def _remove(cloud: ToyCloud, home: Path) -> None:
    """Remove the cluster from an empty data folder."""
    down(Cluster("demo", "toy"), toy_resources(cloud, "demo"), _store(home))


class Case:
    """A cloud of its own, with trouble ordered at one request."""

    def __init__(self, folder: Path, number: int, trouble: str, world: str | None = None) -> None:
        folder.mkdir()
        if world:
            (folder / "cloud.json").write_text(world)
        self.number = number
        self.cloud = ToyCloud(folder / "cloud.json")
        self.cloud.calm()
        self.cloud.order(number, trouble)
        self.home = folder / "home"
        self.empty = folder / "empty"


def _cases(folder: Path, trouble: str, requests: int, world: str | None = None, stride: int = 1) -> list[Case]:
    return [Case(folder / f"{trouble}-{number}", number, trouble, world) for number in range(0, requests, stride)]


@pytest.fixture
def finished_cloud(tmp_path: Path) -> tuple[str, int, int]:
    """A cloud with the cluster in it, and how many requests its making and its removal took."""
    cloud = ToyCloud(tmp_path / "made.json")
    _make(cloud, tmp_path / "made-home")
    world, making = cloud.path.read_text(), len(cloud.log)
    cloud.calm()
    _remove(cloud, tmp_path / "made-empty")
    assert cloud.things == {}
    return world, making, len(cloud.log)


def test_up_makes_all_in_order_and_times_it(cloud: ToyCloud, store: Store) -> None:
    ready = up(CLUSTER, toy_resources(cloud, "demo"), store)
    assert {thing["state"] for thing in cloud.things.values()} == {"ready"}
    assert ready.state == store.cluster("demo").state == "ready"
    created = [line.split("-")[1] for line in cloud.log if line.startswith("create")]
    assert created == ["network", "plane", "small", "large", "addon"]
    times = {entry["name"]: entry for entry in ready.details["provisioning"]}
    assert len(times) == 5
    assert all(entry["began"] <= entry["accepted"] <= entry["ready"] for entry in times.values())
    # Independent resources are made at the same time.
    assert times["demo-large"]["began"] < times["demo-small"]["ready"]
    actions = [(entry.name, entry.action) for entry in store.journal_of("demo") if entry.name == "demo-plane"]
    assert [action for _, action in actions] == ["intent", "created", "ready"]


def test_up_again_changes_nothing(cloud: ToyCloud, store: Store) -> None:
    first = up(CLUSTER, toy_resources(cloud, "demo"), store)
    cloud.calm()
    second = up(CLUSTER, toy_resources(cloud, "demo"), store)
    assert not [line for line in cloud.log if not line.startswith("find")]
    assert second.details["provisioning"] == first.details["provisioning"]


@KILLS
def test_killed_at_every_request_of_up_nothing_leaks(
    tmp_path: Path, finished_cloud: tuple[str, int, int], kill: str, stride: int
) -> None:
    cases = _cases(tmp_path, kill, finished_cloud[1], stride=stride)
    ends = _together([partial(_make, case.cloud, case.home) for case in cases])
    assert set(ends) == {"killed"}
    for case in cases:
        asked = {line.split()[1] for line in case.cloud.log if line.startswith("create")}
        noted = {entry.name for entry in Store(case.home).journal_of("demo") if entry.action == "intent"}
        assert asked <= noted, "a request was sent before it was noted"
        case.cloud.calm()
    assert set(_together([partial(_remove, case.cloud, case.empty) for case in cases])) == {"done"}
    assert {case.number: case.cloud.things for case in cases if case.cloud.things} == {}


@KILLS
def test_killed_at_every_request_of_up_it_goes_on(
    tmp_path: Path, finished_cloud: tuple[str, int, int], kill: str, stride: int
) -> None:
    cases = _cases(tmp_path, kill, finished_cloud[1], stride=stride)
    _together([partial(_make, case.cloud, case.home) for case in cases])
    for case in cases:
        case.cloud.calm()
    again = [partial(up, CLUSTER, toy_resources(case.cloud, "demo"), Store(case.home)) for case in cases]
    assert set(_together(again)) == {"done"}
    assert {len(case.cloud.things) for case in cases} == {5}
    assert {Store(case.home).cluster("demo").state for case in cases} == {"ready"}


@KILLS
def test_killed_at_every_request_of_down_nothing_leaks(
    tmp_path: Path, finished_cloud: tuple[str, int, int], kill: str, stride: int
) -> None:
    cases = _cases(tmp_path, kill, finished_cloud[2], finished_cloud[0], stride)
    ends = _together([partial(_remove, case.cloud, case.home) for case in cases])
    assert set(ends) == {"killed"}
    for case in cases:
        case.cloud.calm()
    assert set(_together([partial(_remove, case.cloud, case.empty) for case in cases])) == {"done"}
    assert {case.number: case.cloud.things for case in cases if case.cloud.things} == {}


@pytest.mark.parametrize(
    ("trouble", "stride"),
    [("busy-before", 1), ("busy-after", 1), ("busy-after", 3)] if NIGHTLY else [("busy-after", 3)],
)
def test_passing_trouble_at_any_request_is_overcome(
    tmp_path: Path, finished_cloud: tuple[str, int, int], trouble: str, stride: int
) -> None:
    cases = _cases(tmp_path, trouble, finished_cloud[1], stride=stride)
    assert set(_together([partial(_make, case.cloud, case.home) for case in cases])) == {"done"}
    for case in cases:
        assert len(case.cloud.things) == 5
        case.cloud.calm()
        case.cloud.order(case.number, trouble)
    assert set(_together([partial(_remove, case.cloud, case.empty) for case in cases])) == {"done"}
    assert {case.number: case.cloud.things for case in cases if case.cloud.things} == {}


def test_a_refusal_at_any_request_says_what_there_is_and_down_removes_it(tmp_path: Path) -> None:
    for case in _cases(tmp_path, "refuse", 12):
        cloud, store = case.cloud, _store(case.home)
        with pytest.raises(CapacityError) as caught:
            up(CLUSTER, toy_resources(cloud, "demo"), store)
        assert "quota of things exceeded" in caught.value.message
        there = {item["name"] for item in caught.value.details.get("exists", [])}
        assert there == set(cloud.things)
        if there:
            assert "1.50 USD an hour" in caught.value.message
            assert "mlbench delete-cluster toy demo" in (caught.value.hint or "")
        # Only what exists leaves a record.
        assert ("demo" in {cluster.name for cluster in store.clusters()}) == bool(there)
        cloud.calm()
        _remove(cloud, case.empty)
        assert cloud.things == {}


def test_a_request_that_failed_and_yet_was_done_is_taken_as_done(cloud: ToyCloud, store: Store) -> None:
    cloud.order("create", "lie")
    assert up(CLUSTER, toy_resources(cloud, "demo"), store).state == "ready"


def test_a_failed_request_of_which_nobody_can_tell_whether_it_was_done_stays_in_the_record(
    cloud: ToyCloud, store: Store
) -> None:
    class Blind(Thing):
        def create(self) -> None:
            self.cloud.order("find", "refuse")
            self.cloud.order("create", "lie")
            super().create()

    with pytest.raises(MlbenchError, match="it failed") as caught:
        up(CLUSTER, [Blind(cloud, "demo", "network")], store)
    assert [item["name"] for item in caught.value.details["exists"]] == list(cloud.things) == ["demo-network"]
    assert store.cluster("demo").state == "failed"


def test_trouble_without_end_ends_with_patience(cloud: ToyCloud, store: Store) -> None:
    cloud.order("create", "busy-before")
    with pytest.raises(DeadlineError, match="try again") as caught:
        up(CLUSTER, toy_resources(cloud, "demo"), store, patience=0.3)
    assert caught.value.details["exists"] == [{"kind": "thing", "name": "demo-network", "state": "unconfirmed"}]
    assert store.cluster("demo").state == "failed"


def test_what_is_never_ready_ends_with_its_deadline(cloud: ToyCloud, store: Store) -> None:
    network = Thing(cloud, "demo", "network")
    network.create_seconds = 0.3
    cloud.request("create", network.name, owner="demo", on=[])
    _set_state(cloud, network.name, "stuck")
    with pytest.raises(DeadlineError, match=r"not ready after 0 s: it is stuck"):
        up(CLUSTER, [network], store)


def test_ctrl_c_stops_and_says_what_there_is(cloud: ToyCloud, store: Store) -> None:
    cloud.order("create demo-plane", "stop-after")
    with pytest.raises(Interrupted) as caught:
        up(CLUSTER, toy_resources(cloud, "demo"), store)
    assert "thing demo-network (ready), thing demo-plane (unconfirmed)" in caught.value.message
    assert "to resume, repeat the command" in (caught.value.hint or "")
    assert store.cluster("demo").state == "failed"


def test_foreign_things_are_never_touched(cloud: ToyCloud, store: Store) -> None:
    cloud.request("create", "demo-network", owner="somebody", on=[])
    with pytest.raises(UsageError, match="not created by mlbench"):
        up(CLUSTER, toy_resources(cloud, "demo"), store)
    with pytest.raises(UsageError, match="not created by mlbench"):
        down(CLUSTER, toy_resources(cloud, "demo"), store)
    assert list(cloud.things) == ["demo-network"]
    assert [cluster.name for cluster in store.clusters()] == ["local"]


def test_what_exists_with_other_settings_is_refused_and_the_old_record_stays(cloud: ToyCloud, store: Store) -> None:
    before = up(CLUSTER, toy_resources(cloud, "demo"), store)
    _set_state(cloud, "demo-plane", "blue")
    with pytest.raises(UsageError, match="it is blue"):
        up(Cluster("demo", "toy", details={"color": "red"}), toy_resources(cloud, "demo"), store)
    assert store.cluster("demo") == before


def test_what_is_broken_is_made_anew(cloud: ToyCloud, store: Store) -> None:
    cloud.request("create", "demo-network", owner="demo", on=[])
    _set_state(cloud, "demo-network", "broken")
    up(CLUSTER, toy_resources(cloud, "demo"), store)
    assert cloud.things["demo-network"]["state"] == "ready"


def test_what_others_use_is_kept(cloud: ToyCloud, store: Store) -> None:
    up(CLUSTER, toy_resources(cloud, "demo"), store)
    _set_state(cloud, "demo-network", "shared")
    steps: list[Step] = []
    down(CLUSTER, toy_resources(cloud, "demo"), store, report=steps.append)
    assert list(cloud.things) == ["demo-network"]
    assert [step.reason for step in steps if step.action == "kept"] == ["others use it"]


def test_what_cannot_be_removed_is_listed_and_the_rest_is_removed(cloud: ToyCloud, store: Store) -> None:
    up(CLUSTER, toy_resources(cloud, "demo"), store)
    # Something of another's stands on one of the pools.
    _set_state(cloud, "demo-large", "ready")
    cloud.request("create", "other", owner="somebody", on=["demo-large"])
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, toy_resources(cloud, "demo"), store, patience=0.3)
    left = {item["name"]: item for item in caught.value.details["leftovers"]}
    assert set(left) == {"demo-large", "demo-plane", "demo-network"}
    assert "something stands on demo-large" in left["demo-large"]["reason"]
    assert "not tried" in left["demo-plane"]["reason"]
    assert left["demo-plane"]["command"] == "toy remove demo-plane"
    assert "toy remove demo-large" in caught.value.message
    record = store.cluster("demo")
    assert (record.state, record.details["failure"]["code"]) == ("deleting", "cleanup_failed")
    assert {line["name"]: line["gone"] is None for line in record.details["removal"]}["demo-large"]
    # The obstacle is removed; the same command goes on.
    with cloud._state() as world:
        del world["things"]["other"]
    down(store.cluster("demo"), toy_resources(cloud, "demo"), store)
    assert cloud.things == {}
    assert "demo" not in {cluster.name for cluster in store.clusters()}
    gone = store.find_deleted_cluster("demo")
    assert gone is not None
    assert {line["name"] for line in gone.details["removal"]} == set(cloud_names())


def test_without_credentials_nothing_is_recorded(cloud: ToyCloud, store: Store) -> None:
    class Locked(Thing):
        def find(self) -> None:
            raise CredentialError("no token")

    with pytest.raises(CredentialError):
        down(CLUSTER, [Locked(cloud, "demo", "network")], store)
    with pytest.raises(CredentialError):
        up(CLUSTER, [Locked(cloud, "demo", "network")], store)
    assert [cluster.name for cluster in store.clusters()] == ["local"]


def test_two_processes_do_not_work_on_one_cluster(cloud: ToyCloud, store: Store) -> None:
    def while_at_work(step: Step) -> None:
        with pytest.raises(UsageError, match=f"process {os.getpid()}"):
            Context().run(down, CLUSTER, [], store)  # as from another thread
        up(Cluster("other", "toy"), [], store)

    up(CLUSTER, [Thing(cloud, "demo", "network")], store, report=while_at_work)


def test_an_unexpected_error_also_says_what_there_is(cloud: ToyCloud, store: Store) -> None:
    class Odd(Thing):
        def create(self) -> None:
            raise ZeroDivisionError("a bug")

    network = Thing(cloud, "demo", "network")
    with pytest.raises(
        MlbenchError, match=r"ZeroDivisionError: a bug(.|\n)*demo-network \(ready\).*demo-odd \(unconfirmed\)"
    ):
        up(CLUSTER, [network, Odd(cloud, "demo", "odd", [network])], store)


def _set_state(cloud: ToyCloud, name: str, state: str) -> None:
    with cloud._state() as world:
        world["things"][name]["state"] = state


# --- the times ------------------------------------------------------------------------------------------------------


def test_waits_are_noted_and_shown_to_others_meanwhile(cloud: ToyCloud, store: Store) -> None:
    seen: list[tuple[str, int]] = []

    def look(step: Step) -> None:
        if step.action == "waiting":
            record = Store(store.folder).cluster("demo")
            seen.append((record.state, len(record.details["provisioning"])))
            [line] = [line for line in record.details["provisioning"] if line["name"] == step.name]
            assert [wait["reason"] for wait in line["waits"]] == [step.reason]

    ready = up(CLUSTER, toy_resources(cloud, "demo"), store, report=look)
    assert set(seen) <= {("creating", count) for count in range(1, 6)}
    assert max(count for _, count in seen) == 5
    for line in ready.details["provisioning"]:
        assert [wait["reason"] for wait in line["waits"]] == ["it is making"]
        # Each of the three is rounded to a millisecond.
        assert 0 < line["waits"][0]["seconds"] <= line["ready"] - line["began"] + 0.002
        assert not line["adopted"]


def test_what_was_stopped_keeps_its_times_and_its_reason(cloud: ToyCloud, store: Store) -> None:
    cloud.order("create demo-large", "refuse")
    with pytest.raises(CapacityError):
        up(CLUSTER, toy_resources(cloud, "demo"), store)
    failed = store.cluster("demo").details
    assert failed["failure"]["code"] == "capacity"
    assert "quota of things exceeded" in failed["failure"]["message"]
    first = {line["name"]: line for line in failed["provisioning"]}
    cloud.calm()
    made = up(CLUSTER, toy_resources(cloud, "demo"), store)
    again = {line["name"]: line for line in made.details["provisioning"]}
    assert again["demo-network"] == first["demo-network"]
    assert again["demo-plane"] == first["demo-plane"]
    assert first["demo-large"]["ready"] is None
    assert again["demo-large"]["ready"] > again["demo-plane"]["ready"]
    assert not any(line["adopted"] for line in again.values())
    assert "failure" not in made.details


def test_work_that_is_taken_up_again_goes_on_where_its_last_time_was(cloud: ToyCloud) -> None:
    network = Thing(cloud, "demo", "network")
    earlier: TimesRecord = {
        "kind": "thing", "name": "demo-plane", "adopted": False, "began": 50.0, "accepted": 51.0, "ready": None,
        "waits": [{"reason": "it is making", "seconds": 49.5}],
    }  # fmt: skip
    timeline = Timeline([network], [earlier])
    timeline.of(network).record_time("began")
    assert 99.5 <= timeline.of(network).entry["began"] < 110
    assert [line["name"] for line in timeline.to_list()] == ["demo-plane", "demo-network"]
    line = Timeline([network], [{**earlier, "name": network.name}]).of(network)
    line.start_wait("it is making")
    line.end_wait()
    [wait] = line.to_dict()["waits"]  # one wait with all of its seconds
    assert 49.5 <= wait["seconds"] < 60


def test_what_another_machine_has_made_was_there(cloud: ToyCloud, store: Store, tmp_path: Path) -> None:
    up(CLUSTER, toy_resources(cloud, "demo"), store)
    other = up(CLUSTER, toy_resources(cloud, "demo"), _store(tmp_path / "other"))
    assert all(line["adopted"] for line in other.details["provisioning"])


def test_the_times_of_a_removed_cluster_stay(cloud: ToyCloud, store: Store) -> None:
    up(CLUSTER, toy_resources(cloud, "demo"), store)
    assert store.find_deleted_cluster("demo") is None
    assert not is_operation_running(store, "demo")
    cloud.request("delete", "demo-large")
    while cloud.request("find", "demo-large"):
        pass
    down(store.cluster("demo"), toy_resources(cloud, "demo"), store)
    gone = store.find_deleted_cluster("demo")
    assert gone is not None
    assert (gone.provider, gone.state) == ("toy", "removed")
    assert gone.created
    assert {line["name"] for line in gone.details["provisioning"]} == set(cloud_names())
    ended = {line["name"]: line["gone"] for line in gone.details["removal"]}
    assert "demo-large" not in ended  # it was gone before
    assert ended["demo-addon"] < ended["demo-small"] < ended["demo-plane"] < ended["demo-network"]
    up(CLUSTER, toy_resources(cloud, "demo"), store)
    down(store.cluster("demo"), toy_resources(cloud, "demo"), store)
    again = store.find_deleted_cluster("demo")
    assert again is not None
    assert again.details["removed"] > gone.details["removed"]
    # What was never there leaves no result.
    down(Cluster("never", "toy"), toy_resources(cloud, "never"), store)
    assert store.find_deleted_cluster("never") is None


def cloud_names() -> list[str]:
    return [f"demo-{part}" for part in ("network", "plane", "small", "large", "addon")]


# --- times ----------------------------------------------------------------------------------------------------------


def test_what_is_to_be_created_is_written_down_before_the_request(tmp_path: Path, cloud: ToyCloud) -> None:
    cloud.order("create demo-plane", "kill-after")
    assert _together([partial(_make, cloud, tmp_path / "home")]) == ["killed"]
    assert [entry.action for entry in Store(tmp_path / "home").journal_of("demo") if entry.name == "demo-plane"] == [
        "intent"
    ]


class Flaky(Thing):
    """The cloud answers every second look only."""

    looks = 0

    def poll(self) -> Readiness:
        self.looks += 1
        if self.looks % 2 and self.looks < 20:
            raise TransientError("the cloud says: 503 try again")
        return Readiness(self.looks >= 20, "it is making")


def test_patience_begins_anew_with_every_answer(cloud: ToyCloud, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.lifecycle.time", Clock())
    thing = Flaky(cloud, "demo", "network")
    assert up(CLUSTER, [thing], store, patience=0.1).state == "ready"
    assert thing.looks == 20


def test_what_should_have_gone_with_something_else_is_looked_for(cloud: ToyCloud, store: Store) -> None:
    network, disk = Thing(cloud, "demo", "network"), Thing(cloud, "demo", "disk")
    up(CLUSTER, [network, disk], store)
    disk.goes_with = network  # and this time it does not
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [network, disk], store)
    assert "demo-disk" in str(caught.value.to_dict())
    assert [*cloud.things] == ["demo-disk"]
