"""The rules of the life-cycle on scripted resources and a clock of the test: steps, records, deadlines and patience."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import (
    CapacityError,
    CleanupError,
    CredentialError,
    DeadlineError,
    Interrupted,
    MlbenchError,
    Stopped,
    Terminated,
    UsageError,
)
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import BusyError, Readiness, Resource, ResourceStatus, TransientError
from providers.lifecycle import Step, down, find_deleted_cluster, up

CLUSTER = Cluster("demo", "toy", details={"owner": "me"})
THERE = ResourceStatus("there")


class Clock:
    """A monotonic clock that only sleeping moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds <= 10.001
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in ("lifecycle", "timeline"):
        monkeypatch.setattr(f"providers.{module}.time", found)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


class Scripted(Resource):
    """A resource whose answers are given in advance; the last one is given again and again."""

    kind = "thing"
    create_seconds = delete_seconds = 50.0

    def __init__(self, name: str = "a", needs: Sequence[Resource] = (), **answers: Any) -> None:
        self.name = name
        self.needs = needs
        self.remove_command = f"rm {name}"
        self.calls: list[str] = []
        self._answers = {
            verb: list(given) if isinstance(given, list) else [given]
            for verb, given in {"find": None, "create": None, "poll": True, "delete": None, **answers}.items()
        }

    def _answer(self, verb: str) -> Any:
        self.calls.append(verb)
        left = self._answers[verb]
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, BaseException):
            raise found
        return found

    def find(self) -> ResourceStatus | None:
        found: ResourceStatus | None = self._answer("find")
        return found

    def create(self) -> None:
        self._answer("create")

    def poll(self) -> Readiness:
        found = self._answer("poll")
        return found if isinstance(found, Readiness) else Readiness(found, "" if found else "it grows")

    def keep(self) -> None:
        self.calls.append("keep")

    def delete(self) -> None:
        self._answer("delete")


Work = Callable[..., Any]


def steps_of(work: Work, resources: Iterable[Resource], store: Store, **options: Any) -> list[tuple[str, str, str]]:
    """Name, action and reason of each step that was reported."""
    steps: list[Step] = []
    try:
        work(CLUSTER, list(resources), store, report=steps.append, **options)
    finally:
        assert {step.cluster for step in steps} <= {"demo"}
        assert {step.kind for step in steps} <= {"thing"}
    return [(step.name, step.action, step.reason) for step in steps]


def actions(store: Store) -> list[str]:
    return [entry.action for entry in store.journal_of("demo")]


# --- creation -------------------------------------------------------------------------------------------------------


def test_a_new_resource_is_reported_from_its_request_to_its_readiness(store: Store) -> None:
    resource = Scripted(poll=[False, True])
    assert steps_of(up, [resource], store) == [
        ("a", "creating", ""),
        ("a", "waiting", "it grows"),
        ("a", "ready", ""),
    ]
    assert resource.calls == ["find", "create", "poll", "poll"]
    assert actions(store) == ["intent", "created", "ready"]
    ready = store.journal_of("demo")[-1]
    assert ready.details == {"seconds": 0.02, "adopted": False}


def test_steps_tell_how_long_a_resource_may_take(store: Store) -> None:
    steps: list[Step] = []
    up(CLUSTER, [Scripted(poll=[False, False, True])], store, report=steps.append)
    assert [(step.action, step.seconds, step.deadline) for step in steps] == [
        ("creating", 0.0, 50.0),
        ("waiting", 0.0, 50.0),
        ("waiting", pytest.approx(0.02), 50.0),
        ("ready", pytest.approx(0.04), None),
    ]


def test_facts_of_ready_resources_are_in_the_record(store: Store) -> None:
    first = Scripted("a", poll=[Readiness(False, "it grows", {"x": 1}), Readiness(True, facts={"x": 2, "y": 3})])
    second = Scripted("b", [first], poll=Readiness(True, facts={"z": 4}))
    made = up(CLUSTER, [first, second], store)
    assert {key: made.details[key] for key in ("owner", "x", "y", "z")} == {"owner": "me", "x": 2, "y": 3, "z": 4}
    assert made.state == "ready"
    assert store.cluster("demo") == made
    lines = made.details["provisioning"]
    assert [(line["name"], line["began"], line["ready"]) for line in lines] == [("a", 0.0, 0.02), ("b", 0.02, 0.02)]


def test_the_record_shows_the_operation_from_its_first_question_on(store: Store) -> None:
    """Other commands tell by it that the cluster is being created, also after a kill."""
    seen: list[tuple[str, str, list[Any]]] = []

    class Watching(Scripted):
        def _answer(self, verb: str) -> Any:
            record = store.cluster("demo")
            lines = [line["ready"] for line in record.details["provisioning"]]
            seen.append((f"{verb} {self.name}", record.state, lines))
            return super()._answer(verb)

    first = Watching("a", find=THERE)
    second = Watching("b", [first])
    up(CLUSTER, [first, second], store)
    assert seen == [
        ("find a", "creating", []),
        ("poll a", "creating", []),
        ("find b", "creating", [0.0]),
        ("create b", "creating", [0.0, None]),
        ("poll b", "creating", [0.0, None]),
    ]


def test_the_times_of_another_operation_do_not_continue_those_of_the_creation(store: Store) -> None:
    first = up(CLUSTER, [Scripted()], store)
    scaled = up(first, [Scripted("size", poll=[False, True])], store, times="scaling")
    assert [line["name"] for line in scaled.details["scaling"]] == ["size"]
    assert scaled.details["provisioning"] == first.details["provisioning"]
    again = up(scaled, [Scripted("size")], store, times="scaling")
    assert [line["began"] for line in again.details["scaling"]] == [0.0]


def test_what_exists_is_adopted_and_awaited(store: Store) -> None:
    resource = Scripted(find=THERE, poll=[False, True])
    assert steps_of(up, [resource], store) == [
        ("a", "adopted", "there"),
        ("a", "waiting", "it grows"),
        ("a", "ready", ""),
    ]
    assert "create" not in resource.calls
    assert actions(store) == ["adopted", "ready"]
    assert store.journal_of("demo")[-1].details["adopted"] is True
    assert store.cluster("demo").details["provisioning"][0]["adopted"] is True


def test_what_is_being_deleted_is_awaited_before_it_is_created(store: Store) -> None:
    going = ResourceStatus("going", deleting=True)
    resource = Scripted(find=[going, going, None])
    assert steps_of(up, [resource], store) == [
        ("a", "waiting", "it has not been created yet"),
        ("a", "waiting", "it has not been created yet"),
        ("a", "creating", ""),
        ("a", "ready", ""),
    ]
    assert resource.calls == ["find", "find", "find", "create", "poll"]


def test_what_is_broken_is_deleted_and_created_again(store: Store) -> None:
    broken = ResourceStatus("error", broken="it failed")
    resource = Scripted(find=[broken, None])
    assert ("a", "recreating", "it failed") in steps_of(up, [resource], store)
    assert resource.calls == ["find", "delete", "find", "create", "poll"]
    assert actions(store) == ["deleting", "intent", "created", "ready"]
    assert store.journal_of("demo")[0].details == {"reason": "it failed"}


def test_other_settings_are_told_with_the_command_that_deletes(store: Store) -> None:
    with pytest.raises(UsageError, match='The thing "a" already exists with other settings: it is blue') as caught:
        up(CLUSTER, [Scripted(find=ResourceStatus("there", differs="it is blue"))], store)
    assert caught.value.hint == "Choose another name, or delete it first: mlbench delete-cluster toy demo"
    assert "demo" not in [cluster.name for cluster in store.clusters()]


def test_a_resource_is_created_after_those_that_it_needs_and_beside_the_others(store: Store) -> None:
    first = Scripted("a", poll=[False, False, True])
    second, third = Scripted("b", [first]), Scripted("c")
    names = [name for name, action, _ in steps_of(up, [first, second, third], store) if action == "ready"]
    assert names == ["c", "a", "b"]


@pytest.mark.parametrize(("answer", "is_created"), [(THERE, True), (None, False), (MlbenchError("gone"), None)])
def test_after_a_failed_request_the_resource_is_looked_for(store: Store, answer: Any, is_created: bool | None) -> None:
    resource = Scripted(find=[None, answer], create=CapacityError("no quota"))
    if is_created:
        assert up(CLUSTER, [resource], store).state == "ready"
        assert actions(store) == ["intent", "created", "ready"]
        return
    with pytest.raises(CapacityError, match="no quota") as caught:
        up(CLUSTER, [resource], store)
    exists = [{"kind": "thing", "name": "a", "state": "unconfirmed"}] if is_created is None else None
    assert caught.value.details.get("exists") == exists
    assert actions(store) == ["intent", "failed"]
    assert store.journal_of("demo")[-1].details == {"reason": "no quota"}


@pytest.mark.parametrize(
    "found",
    [
        ResourceStatus("there", ours=False),
        ResourceStatus("there", broken="it failed"),
        ResourceStatus("there", deleting=True),
    ],
)
def test_a_failed_request_has_not_created_what_is_foreign_broken_or_being_deleted(
    store: Store, found: ResourceStatus
) -> None:
    with pytest.raises(CapacityError, match="no quota"):
        up(CLUSTER, [Scripted(find=[None, found], create=CapacityError("no quota"))], store)


def test_a_request_that_may_have_arrived_is_not_repeated_before_another_look(store: Store) -> None:
    resource = Scripted(find=[None, THERE], create=TransientError("503"))
    assert steps_of(up, [resource], store) == [
        ("a", "creating", ""),
        ("a", "retrying", "503"),
        ("a", "adopted", "there"),
        ("a", "ready", ""),
    ]
    assert resource.calls == ["find", "create", "find", "poll"]


def failing(seconds: float, clock: Clock, error: MlbenchError) -> Any:
    """A poll that fails until so many seconds have passed."""
    end = clock.now + seconds

    def poll() -> Readiness:
        if clock.now < end:
            raise error
        return Readiness(True)

    return poll


@pytest.mark.parametrize(("seconds", "is_ready"), [(9.0, True), (12.0, False)])
def test_errors_may_last_as_long_as_patience(store: Store, clock: Clock, seconds: float, is_ready: bool) -> None:
    resource = Scripted()
    resource.poll = failing(seconds, clock, TransientError("503"))  # type: ignore[method-assign]
    if is_ready:
        assert up(CLUSTER, [resource], store, patience=10.0).state == "ready"
        return
    with pytest.raises(TransientError, match="503"):
        up(CLUSTER, [resource], store, patience=10.0)
    assert 110.0 <= clock.now < 111.0


def test_an_answer_between_two_errors_renews_the_patience(store: Store, clock: Clock) -> None:
    answers: list[Any] = [TransientError("503"), False] * 30 + [True]
    resource = Scripted(poll=answers)
    assert up(CLUSTER, [resource], store, patience=0.3).state == "ready"


def test_a_busy_cloud_is_awaited_until_the_deadline_of_the_resource(store: Store, clock: Clock) -> None:
    resource = Scripted(poll=BusyError("an upgrade"))
    with pytest.raises(DeadlineError, match=r'The thing "a" was not ready after 50 s: an upgrade\.'):
        up(CLUSTER, [resource], store, patience=1.0)
    assert 150.0 < clock.now <= 152.0


@pytest.mark.parametrize(
    ("poll", "says"),
    [(Readiness(False, "it grows"), "50 s: it grows."), (Readiness(False), "50 s: it is not ready.")],
)
def test_what_is_not_ready_in_time_says_what_it_waited_for(store: Store, poll: Readiness, says: str) -> None:
    with pytest.raises(DeadlineError) as caught:
        up(CLUSTER, [Scripted(poll=poll)], store)
    assert says in caught.value.message
    assert caught.value.details["exists"] == [{"kind": "thing", "name": "a", "state": "being created"}]
    assert store.cluster("demo").state == "failed"
    assert store.cluster("demo").details["failure"]["code"] == DeadlineError("").code


def test_a_resource_that_is_ready_at_its_deadline_is_ready(store: Store, clock: Clock) -> None:
    resource = Scripted()
    resource.poll = failing(50.5, clock, BusyError("an upgrade"))  # type: ignore[method-assign]
    assert up(CLUSTER, [resource], store).state == "ready"


def test_a_failure_after_nothing_was_requested_leaves_the_old_record(store: Store) -> None:
    before = up(CLUSTER, [Scripted()], store)
    foreign = Scripted("b", find=ResourceStatus("there", ours=False))
    with pytest.raises(UsageError, match="was not created by mlbench"):
        up(Cluster("demo", "toy", details={"owner": "you"}), [Scripted(find=THERE), foreign], store)
    assert store.cluster("demo") == before


def test_what_was_adopted_and_not_ready_keeps_its_record(store: Store) -> None:
    waiting = Scripted(find=THERE, poll=[False, CapacityError("no machines")])
    with pytest.raises(CapacityError) as caught:
        up(CLUSTER, [waiting], store)
    assert caught.value.details["exists"] == [{"kind": "thing", "name": "a", "state": "being created"}]
    assert store.cluster("demo").state == "failed"


def test_what_is_ready_when_another_resource_fails_is_told(store: Store) -> None:
    first = Scripted("a")
    with pytest.raises(CapacityError) as caught:
        up(CLUSTER, [first, Scripted("b", [first], create=CapacityError("no quota"))], store)
    assert caught.value.details["exists"] == [{"kind": "thing", "name": "a", "state": "ready"}]


def test_the_error_of_an_earlier_attempt_is_gone_after_a_success(store: Store) -> None:
    with pytest.raises(DeadlineError):
        up(CLUSTER, [Scripted(poll=False)], store)
    failed = store.cluster("demo")
    assert "failure" in failed.details
    assert "failure" not in up(failed, [Scripted(find=THERE)], store).details


def with_registry(registry: str | None) -> Cluster:
    return Cluster("demo", "toy", details={"options": {"registry": registry}})


@pytest.mark.parametrize(("registry", "is_kept"), [("a", True), ("b", False), (None, False)])
def test_digests_of_images_are_kept_only_with_their_registry(store: Store, registry: str | None, is_kept: bool) -> None:
    made = up(with_registry("a"), [Scripted()], store)
    store.record_cluster(Cluster("demo", "toy", "ready", made.created, {**made.details, "images": {"x:1": "sha256:1"}}))
    again = up(with_registry(registry), [Scripted(find=THERE)], store)
    assert ("images" in again.details) is is_kept


def test_a_stop_in_the_middle_is_told_with_what_exists(store: Store) -> None:
    with pytest.raises(Interrupted) as caught:
        up(CLUSTER, [Scripted(poll=KeyboardInterrupt())], store)
    assert "thing a (being created)" in caught.value.message
    assert store.cluster("demo").details["failure"]["message"] == "Interrupted."


# --- deletion -------------------------------------------------------------------------------------------------------


def test_a_deletion_is_requested_once_and_awaited(store: Store) -> None:
    going = ResourceStatus("going", deleting=True)
    resource = Scripted(find=[THERE, going, going, None])
    assert steps_of(down, [resource], store) == [
        ("a", "deleting", "there"),
        ("a", "deleting", "going"),
        ("a", "deleting", "going"),
        ("a", "deleted", ""),
    ]
    assert resource.calls == ["find", "delete", "find", "find", "find", "find"]  # the last look verifies
    assert actions(store) == ["deleting", "deleted", "removed"]


def test_what_does_not_exist_is_neither_recorded_nor_reported(store: Store) -> None:
    resource = Scripted()
    assert steps_of(down, [resource], store) == []
    assert actions(store) == []
    assert "delete" not in resource.calls
    assert find_deleted_cluster(store, "demo") is None


def test_the_times_of_a_deletion_are_kept_with_its_last_record(store: Store) -> None:
    going = ResourceStatus("going", deleting=True)
    up(CLUSTER, [Scripted()], store)
    down(store.cluster("demo"), [Scripted(find=[THERE, going, None])], store)
    gone = find_deleted_cluster(store, "demo")
    assert gone is not None
    assert (gone.name, gone.provider, gone.state) == ("demo", "toy", "removed")
    (line,) = gone.details["removal"]
    assert (line["name"], line["began"], line["gone"]) == ("a", 0.0, 0.04)
    assert [wait["reason"] for wait in line["waits"]] == ["going"]
    assert gone.details["removed"].endswith("Z")
    assert "demo" not in [cluster.name for cluster in store.clusters()]


GOING = ResourceStatus("going", deleting=True)


def test_resources_are_deleted_before_those_that_they_need(store: Store) -> None:
    first = Scripted("a", find=[THERE, None])
    second = Scripted("b", [first], find=[THERE, GOING, GOING, None])
    assert [(name, action) for name, action, _ in steps_of(down, [first, second], store)] == [
        *([("b", "deleting")] * 3),
        ("b", "deleted"),
        ("a", "deleting"),
        ("a", "deleted"),
    ]


def test_the_record_shows_what_a_deletion_waits_for(store: Store) -> None:
    up(CLUSTER, [Scripted()], store)
    seen: list[tuple[str, list[str]]] = []

    def report(step: Step) -> None:
        record = store.cluster("demo")
        lines = record.details.get("removal", [])
        seen.append((record.state, [wait["reason"] for line in lines for wait in line["waits"]]))

    upgrading = ResourceStatus("upgrading", busy="an upgrade")
    down(store.cluster("demo"), [Scripted(find=[upgrading, THERE, GOING, None])], store, report=report)
    assert seen == [
        ("ready", []),  # nothing was requested yet
        ("deleting", ["an upgrade"]),
        ("deleting", ["an upgrade", "going"]),
        ("deleting", ["an upgrade", "going"]),
    ]


def test_resources_that_nothing_needs_any_more_do_not_wait_for_others(store: Store) -> None:
    first = Scripted("a", find=[THERE, None])
    second = Scripted("b", [first], find=[THERE, None])
    slow = Scripted("c", find=[THERE, *[GOING] * 9, None])
    names = [name for name, action, _ in steps_of(down, [first, second, slow], store) if action == "deleted"]
    assert names == ["b", "a", "c"]


def test_what_goes_with_another_is_only_looked_for_at_the_end(store: Store) -> None:
    group = Scripted("group", find=[THERE, None])
    part = Scripted("part", [group])
    part.goes_with = group
    down(CLUSTER, [group, part], store)
    assert part.calls == ["find"]


def test_what_goes_with_a_resource_needs_what_that_needs(store: Store) -> None:
    """A node group goes with nothing else, but its add-on, which goes with it, needs the network."""
    network = Scripted("network", find=[THERE, None])
    group = Scripted("group", find=[THERE, None])
    addon = Scripted("addon", [network])
    addon.goes_with = group
    names = [name for name, action, _ in steps_of(down, [network, group, addon], store) if action == "deleted"]
    assert names == ["group", "network"]


def test_what_is_kept_is_marked_and_stays(store: Store) -> None:
    kept = Scripted(find=ResourceStatus("there", kept="its images are in use"))
    assert steps_of(down, [kept], store) == [("a", "kept", "its images are in use")]
    assert kept.calls == ["find", "keep", "find"]


def test_a_foreign_resource_stays_and_is_an_error_only_if_nothing_was_deleted(store: Store) -> None:
    foreign = Scripted("b", find=ResourceStatus("there", ours=False))
    with pytest.raises(UsageError, match='thing "b" exists, but was not created by mlbench'):
        down(CLUSTER, [foreign], store)
    again = Scripted("b", find=ResourceStatus("there", ours=False))
    assert steps_of(down, [again, Scripted("a", find=[THERE, None])], store) == [
        ("a", "deleting", "there"),
        ("b", "foreign", "there"),
        ("a", "deleted", ""),
    ]
    assert "delete" not in foreign.calls


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ResourceStatus("upgrading", busy="an upgrade"), "an upgrade"),
        (ResourceStatus("going", deleting=True), "going"),
    ],
)
def test_what_stays_until_its_deadline_is_listed_with_the_reason(
    store: Store, clock: Clock, status: ResourceStatus, reason: str
) -> None:
    resource = Scripted(find=status)
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [resource], store, patience=1.0)
    assert caught.value.details["leftovers"] == [
        {"kind": "thing", "name": "a", "reason": f"it still existed after 50 s: {reason}", "command": "rm a"}
    ]
    assert "delete" not in resource.calls
    assert 150.0 < clock.now <= 152.0


def test_a_deletion_that_is_refused_for_now_is_requested_again(store: Store) -> None:
    resource = Scripted(find=[THERE, THERE, THERE, None], delete=[BusyError("a card is attached"), None])
    assert ("a", "deleting", "a card is attached") in steps_of(down, [resource], store, patience=0.0)
    assert resource.calls.count("delete") == 2


def test_a_busy_deletion_ends_with_the_deadline(store: Store, clock: Clock) -> None:
    with pytest.raises(CleanupError, match="it still existed after 50 s: a card"):
        down(CLUSTER, [Scripted(find=THERE, delete=BusyError("a card"))], store, patience=1.0)
    assert 150.0 < clock.now <= 152.0


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (THERE, "it is not being deleted: there"),
        (ResourceStatus("error", broken="access denied"), "access denied"),
    ],
)
def test_a_request_without_effect_is_repeated_until_patience_ends(
    store: Store, clock: Clock, status: ResourceStatus, reason: str
) -> None:
    resource = Scripted(find=status)
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [resource], store, patience=5.0)
    assert caught.value.details["leftovers"][0]["reason"] == reason
    assert resource.calls.count("delete") > 2
    assert 105.0 <= clock.now < 106.0
    assert actions(store) == ["deleting", "failed"]


def test_errors_of_a_deletion_may_last_as_long_as_patience(store: Store, clock: Clock) -> None:
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [Scripted(find=THERE, delete=TransientError("503"))], store, patience=5.0)
    assert caught.value.details["leftovers"][0]["reason"] == "503"
    assert 105.0 <= clock.now < 106.0
    passing = Scripted("b", find=[TransientError("503"), THERE, None])
    assert steps_of(down, [passing], store, patience=5.0)[0] == ("b", "retrying", "503")


def test_an_error_of_one_resource_does_not_keep_the_others(store: Store) -> None:
    first = Scripted("a", find=THERE)
    second = Scripted("b", [first], find=THERE, delete=MlbenchError("denied by a policy"))
    third = Scripted("c", find=[THERE, None])
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [first, second, third], store)
    assert caught.value.details["leftovers"] == [
        {
            "kind": "thing",
            "name": "a",
            "reason": "not tried, because a resource that needs it remains",
            "command": "rm a",
        },
        {"kind": "thing", "name": "b", "reason": "denied by a policy", "command": "rm b"},
    ]
    assert "delete" not in first.calls
    assert store.cluster("demo").state == "deleting"
    assert store.cluster("demo").details["failure"]["code"] == CleanupError("").code


def test_credentials_that_are_refused_after_a_deletion_began_are_listed(store: Store) -> None:
    refused = Scripted("a", find=CredentialError("expired"))
    with pytest.raises(CredentialError, match="expired"):
        down(CLUSTER, [refused], store)
    assert actions(store) == []
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [Scripted("a", find=CredentialError("expired")), Scripted("b", find=[THERE, None])], store)
    assert [item["reason"] for item in caught.value.details["leftovers"]] == ["unknown: expired"]


def test_the_last_look_is_repeated_as_long_as_patience(store: Store, clock: Clock) -> None:
    passing = Scripted("a", find=[THERE, None, TransientError("503"), TransientError("503"), None])
    down(CLUSTER, [passing], store, patience=1.0)
    assert passing.calls.count("find") == 5
    lasting = Scripted("b", find=[THERE, None, TransientError("503")])
    begin = clock.now
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [lasting], store, patience=3.0)
    assert caught.value.details["leftovers"][0]["reason"] == "unknown: 503"
    assert begin + 3.0 <= clock.now < begin + 4.0


def test_what_reappears_is_found_by_the_last_look(store: Store) -> None:
    with pytest.raises(CleanupError) as caught:
        down(CLUSTER, [Scripted(find=[THERE, None, THERE])], store)
    assert [item["name"] for item in caught.value.details["leftovers"]] == ["a"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyboardInterrupt(), Interrupted), (Terminated("TERM"), Terminated), (Stopped("x"), Interrupted)],
)
def test_a_stop_of_a_deletion_says_how_to_continue(store: Store, error: BaseException, kind: type[Stopped]) -> None:
    with pytest.raises(kind, match='resources of the cluster "demo" may remain') as caught:
        down(CLUSTER, [Scripted(find=THERE, delete=error)], store)
    assert caught.value.hint == "mlbench delete-cluster toy demo   continues the deletion"


def test_the_newest_deletion_of_a_name_is_found(store: Store) -> None:
    for owner in ("first", "second"):
        cluster = Cluster("demo", "toy", details={"owner": owner})
        down(cluster, [Scripted(find=[THERE, None])], store)
    gone = find_deleted_cluster(store, "demo")
    assert gone is not None
    assert gone.details["owner"] == "second"
    assert find_deleted_cluster(store, "other") is None


def test_a_cluster_that_is_created_again_after_its_deletion_does_not_hide_it(store: Store) -> None:
    """The journal of some clouds has resources of the kind "cluster", too."""
    down(CLUSTER, [Scripted(find=[THERE, None])], store)
    again, part = Scripted("demo"), Scripted("part")
    again.kind = "cluster"
    up(CLUSTER, [again, part], store)
    store.journal(CLUSTER, "part", "part", "removed")
    gone = find_deleted_cluster(store, "demo")
    assert gone is not None
    assert gone.details["owner"] == "me"


def test_an_account_and_a_place_of_a_deleted_cluster_are_kept(store: Store) -> None:
    cluster = Cluster("demo", "toy", account="12", location="here")
    down(cluster, [Scripted(find=[THERE, None])], store)
    gone = find_deleted_cluster(store, "demo")
    assert gone is not None
    assert (gone.account, gone.location) == ("12", "here")
