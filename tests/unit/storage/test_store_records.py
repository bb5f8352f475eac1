"""Records of experiments, runs and clusters in the store: order, replacement, filters and errors."""

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError, StoreError, StoreLockedError, UsageError
from mlbench_cli.model.run import LOCAL, Cluster, Experiment, Member, Outcome, Run, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage import store as module
from mlbench_cli.storage.store import Store
from mlbench_cli.storage.store_schema import MIGRATIONS, SCHEMA_VERSION

FINISHED, RUNNING, CREATED = RunState.FINISHED, RunState.RUNNING, RunState.CREATED


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path)
    yield opened
    opened.close()


def spec(name: str, task: str = "custom", cluster: str = "local") -> RunSpec:
    return RunSpec(name, cluster, "local", task, "spec", ("true",), "gloo", 1)


def record(store: Store, name: str, minute: int = 0, **more: Any) -> Run:
    return store.record_run(spec(name, **more), created=f"2026-01-01T00:{minute:02}:00.000Z")


def experiment(store: Store, name: str, *runs: str, minute: int = 0, **changes: Any) -> Experiment:
    """An experiment with new runs of these names."""
    created = f"2026-01-01T00:{minute:02}:00.000Z"
    made = [Run(f"id-{run}", spec(run), store.folder / "runs" / run, created) for run in runs]
    members = tuple(Member(index, run.id, f"hash-{run.name}", {"backend": "gloo"}) for index, run in enumerate(made))
    one = Experiment(
        **{"id": f"e-{name}", "name": name, "created": created, "request": {}, "members": members, **changes}
    )
    store.record_experiment(one, made)
    return one


# --- experiments ------------------------------------------------------------------------------------------------------


def test_an_experiment_is_kept_with_its_request_and_members(store: Store) -> None:
    one = experiment(store, "a", "a-1", "a-2", request={"task": "mnist", "n": [1, 2]}, require_goal=True, parallel=3)
    assert store.find_experiment("a") == one
    assert store.find_experiment("b") is None
    assert store.experiments() == [one]
    assert store.find_experiment_of(store.run("a-2").run) == one
    assert [row.run.name for row in store.runs()] == ["a-1", "a-2"]
    assert {row.state for row in store.runs()} == {CREATED}


def test_an_experiment_of_the_same_id_is_replaced(store: Store) -> None:
    one = experiment(store, "a", "a-1", "a-2")
    again = replace(one, members=one.members[::-1], parallel=2, request={"more": 1})
    reordered = replace(again, members=tuple(replace(item, index=index) for index, item in enumerate(again.members)))
    store.record_experiment(reordered, [])
    assert store.experiments() == [reordered]
    assert [member.run_id for member in reordered.members] == ["id-a-2", "id-a-1"]


def test_experiments_are_listed_oldest_first_and_the_newest_can_be_counted(store: Store) -> None:
    for name, minute in (("b", 2), ("a", 1), ("c", 3)):
        experiment(store, name, f"{name}-1", minute=minute)
    assert [one.name for one in store.experiments()] == ["a", "b", "c"]
    assert [one.name for one in store.newest_experiments(2)] == ["b", "c"]
    assert [one.name for one in store.newest_experiments(9)] == ["a", "b", "c"]
    assert [len(one.members) for one in store.newest_experiments(2)] == [1, 1]


def test_members_of_many_experiments_are_complete(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMED", 1)
    for name in ("a", "b"):
        experiment(store, name, f"{name}-1", f"{name}-2")
    assert [[member.run_id for member in one.members] for one in store.experiments()] == [
        ["id-a-1", "id-a-2"],
        ["id-b-1", "id-b-2"],
    ]


def test_experiments_of_many_runs_are_distinct_and_oldest_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, minute in (("b", 2), ("a", 1), ("c", 3)):
        experiment(store, name, f"{name}-1", f"{name}-2", minute=minute)
    ids = ["id-b-1", "id-c-2", "id-a-1", "id-b-2", "no-such-run"]
    assert [one.name for one in store.experiments_of(ids)] == ["a", "b", "c"]
    monkeypatch.setattr(module, "MAX_NAMED", 2)  # several queries
    assert [one.name for one in store.experiments_of(ids)] == ["a", "b", "c"]
    assert [one.name for one in store.experiments_of(ids[:1])] == ["b"]
    assert store.experiments_of([]) == []


@pytest.mark.parametrize(
    ("name", "runs", "message"),
    [
        ("a", ("x-1",), 'There is already an experiment "a".'),
        ("single-1", ("x-1",), 'There is already a run "single-1".'),
        ("new", ("single-1",), 'There is already a run "single-1".'),
        ("new", ("a",), 'There is already an experiment "a".'),
        ("new", ("x-1", "a-1"), 'There is already a run "a-1".'),
    ],
)
def test_names_of_runs_and_experiments_are_taken_once(
    store: Store, name: str, runs: tuple[str, ...], message: str
) -> None:
    experiment(store, "a", "a-1")
    record(store, "single-1")
    with pytest.raises(UsageError) as caught:
        experiment(store, name, *runs, id="other")
    assert caught.value.message == message
    assert str(caught.value.hint) == f"Choose another name, or: mlbench delete {message.split(chr(34))[1]}"
    assert [row.run.name for row in store.runs()] == ["a-1", "single-1"]  # all or nothing
    assert [one.name for one in store.experiments()] == ["a"]


def test_a_single_run_cannot_be_called_like_an_experiment(store: Store) -> None:
    experiment(store, "a", "a-1")
    with pytest.raises(UsageError, match='already an experiment "a"'):
        record(store, "a")


def test_an_experiment_ends_with_its_last_member(store: Store) -> None:
    experiment(store, "a", "a-1", "a-2")
    store.forget_run(store.run("a-1").run)
    (left,) = store.experiments()
    assert [member.run_id for member in left.members] == ["id-a-2"]
    store.forget_run(store.run("a-2").run)
    assert store.experiments() == []


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_have_an_id_a_folder_and_a_time(store: Store) -> None:
    run = store.record_run(spec("a-1"))
    assert (len(run.id), run.folder) == (12, store.folder / "runs" / run.id)
    assert run.created.endswith("Z")
    chosen = store.record_run(spec("b-1"), run_id="7f", created="2020-01-01T00:00:00.000Z")
    assert (chosen.id, chosen.folder.name, chosen.created) == ("7f", "7f", "2020-01-01T00:00:00.000Z")
    found = store.find_run("7f")
    assert found is not None
    assert (found.run, found.state, found.outcome, found.problem) == (chosen, CREATED, None, None)
    assert store.find_run("80") is None
    assert [row.run.name for row in store.runs()] == ["b-1", "a-1"]
    assert store.count_runs() == 2


@pytest.fixture
def listed(store: Store) -> Store:
    for minute, (name, task, state, outcome) in enumerate(
        [
            ("a-1", "mnist", FINISHED, Outcome.FAILED),
            ("a-2", "bert", FINISHED, Outcome.COMPLETED),
            ("b-1", "mnist", RUNNING, None),
            ("b-2", "custom", CREATED, None),
        ]
    ):
        store.update_run(record(store, name, minute, task=task), state, outcome)
    return store


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({}, ["b-2", "b-1", "a-2", "a-1"]),
        ({"contains": "a-"}, ["a-2", "a-1"]),
        ({"contains": "-1"}, ["b-1", "a-1"]),
        ({"words": ["failed"]}, ["a-1"]),
        ({"words": ["failed", "completed"]}, ["a-2", "a-1"]),
        ({"words": ["finished"]}, ["a-2", "a-1"]),
        ({"words": ["running", "created"]}, ["b-2", "b-1"]),
        ({"words": ["failed"], "live": True}, ["b-2", "b-1", "a-1"]),
        ({"live": True}, ["b-2", "b-1", "a-2", "a-1"]),
        ({"tasks": ["mnist"]}, ["b-1", "a-1"]),
        ({"tasks": ["mnist", "bert"]}, ["b-1", "a-2", "a-1"]),
        ({"tasks": ["mnist"], "words": ["failed"]}, ["a-1"]),
        ({"tasks": ["mnist"], "words": ["failed"], "live": True}, ["b-1", "a-1"]),
        ({"tasks": ["mnist"], "contains": "a"}, ["a-1"]),
        ({"tasks": ["no"]}, []),
        ({"contains": "%"}, []),
        ({"contains": "A-"}, []),
        ({"contains": "ä"}, []),
    ],
)
def test_runs_are_listed_newest_first_by_name_state_and_task(
    listed: Store, filters: dict[str, Any], names: list[str]
) -> None:
    assert [row.run.name for row in listed.iterate_runs(**filters)] == names


def damage(store: Store, name: str, text: str) -> None:
    with sqlite3.connect(store.folder / "mlbench.sqlite") as db:
        db.execute("UPDATE runs SET spec = ?, state = 'odd', outcome = 'odder' WHERE name = ?", (text, name))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no JSON", "its spec is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (json.dumps({"spec_version": 9}), "The run spec has version 9; this mlbench reads 1."),
    ],
)
def test_a_run_with_an_unreadable_spec_can_be_shown_and_deleted(store: Store, text: str, problem: str) -> None:
    run = record(store, "a-1", cluster="far")
    damage(store, "a-1", text)
    with pytest.raises(UsageError) as caught:
        store.run("a-1")
    assert caught.value.message == f'The run "a-1" cannot be read: {problem}'
    assert caught.value.hint == "Upgrade mlbench, or: mlbench delete a-1"
    row = store.run("a-1", readable=False)
    assert (row.problem, row.state, row.outcome) == (problem, CREATED, None)
    assert (row.run.name, row.run.spec.cluster, row.run.spec.workers, row.run.folder) == ("a-1", "far", 1, run.folder)
    assert list(store.iterate_runs(tasks=["custom"])) == []
    store.forget_run(row.run)
    assert store.count_runs() == 0


def test_an_unknown_run_comes_with_the_nearest_name(store: Store) -> None:
    record(store, "resnet-16")
    with pytest.raises(NotFoundError) as caught:
        store.run("resnet-17")
    assert caught.value.message == 'There is no run "resnet-17". Did you mean "resnet-16"?'
    assert caught.value.hint == "mlbench status"


# --- clusters ---------------------------------------------------------------------------------------------------------

GKE = Cluster("c", "gke", "creating", details={"nodes": 2, "images": {"a:1": "x"}}, account="p", location="z")


def test_a_cluster_keeps_its_time_and_the_details_that_are_to_stay(store: Store) -> None:
    first = store.record_cluster(GKE)
    assert first.created.endswith("Z")
    changed = replace(GKE, state="ready", details={"nodes": 4, "owner": "me"}, created="2020")
    second = store.record_cluster(changed, keep=("images", "no-such-key"))
    assert second == replace(
        GKE, state="ready", created=first.created, details={"nodes": 4, "owner": "me", "images": {"a:1": "x"}}
    )
    assert store.record_cluster(changed).details == {"nodes": 4, "owner": "me"}
    assert store.clusters() == [LOCAL, store.find_cluster(GKE.identity)]


def test_a_time_that_is_known_is_recorded(store: Store) -> None:
    assert store.record_cluster(replace(GKE, created="2020-01-01T00:00:00.000Z")).created == "2020-01-01T00:00:00.000Z"


def test_digests_of_images_are_added_to_a_cluster(store: Store) -> None:
    assert not store.record_images(GKE.identity, {"b:1": "y"})
    store.record_cluster(GKE)
    assert store.record_images(GKE.identity, {"b:1": "y", "a:1": "z"})
    found = store.find_cluster(GKE.identity)
    assert found is not None
    assert found.details == {"nodes": 2, "images": {"a:1": "z", "b:1": "y"}}
    store.record_cluster(replace(GKE, details={"images": None}))
    assert store.record_images(replace(GKE.identity, account=""), {"c:1": "z"})  # the account need not be known
    found = store.find_cluster(GKE.identity)
    assert found is not None
    assert found.details == {"images": {"c:1": "z"}}


def test_an_exact_account_counts_before_an_unknown_one(store: Store) -> None:
    without = replace(GKE, account="")
    for cluster in (without, GKE):
        with store._transaction() as db:  # as two versions of mlbench would have left it
            row = (*module._key(cluster.identity), "2026", "ready", "{}")
            db.execute("INSERT INTO clusters VALUES (?,?,?,?,?,?,?)", row)
    for identity in (GKE.identity, without.identity):
        found = store.find_cluster(identity)
        assert found is not None
        assert found.identity == identity
    other = store.find_cluster(replace(GKE.identity, account="q"))
    assert other is not None
    assert other.account == ""
    assert store.find_cluster(replace(GKE.identity, location="y")) is None


def test_a_name_in_two_places_needs_its_location(store: Store) -> None:
    store.record_cluster(GKE)
    store.record_cluster(Cluster("c", "kind"))
    with pytest.raises(UsageError) as caught:
        store.cluster("c")
    assert caught.value.message == '2 clusters are called "c": c@z, c@kind.'
    assert store.cluster("c@z").provider == "gke"
    with pytest.raises(NotFoundError, match='There is no cluster "c@y"'):
        store.cluster("c@y")


def test_a_cluster_that_is_being_deleted_can_still_be_named(store: Store) -> None:
    store.record_cluster(replace(GKE, state="deleting"))
    assert store.cluster("c").state == "deleting"
    store.record_cluster(replace(GKE, state="failed"))
    assert store.cluster("c").state == "failed"


def test_the_choice_of_a_cluster_survives_a_change_of_its_record(store: Store) -> None:
    store.choose_cluster(store.record_cluster(replace(GKE, account="")))
    store.record_cluster(GKE)
    assert store.current_cluster.account == "p"
    store.choose_cluster(LOCAL)
    assert store.current_cluster == LOCAL
    store.choose_cluster(GKE)
    store.forget_cluster(GKE)
    assert store.current_cluster == LOCAL
    store.choose_cluster(GKE)  # chosen, and deleted by another command meanwhile
    with pytest.raises(NotFoundError):
        _ = store.current_cluster


def test_the_journal_is_kept_by_cluster_with_its_times(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.journal(GKE, "node pool", "p", "intent", size=3, zone="z")
    (entry,) = store.journal_of("c")
    assert (entry.cluster, entry.kind, entry.name, entry.action) == (GKE.identity, "node pool", "p", "intent")
    assert entry.details == {"size": 3, "zone": "z"}
    assert entry.time > 1.7e9
    assert store.journal_of("other") == []


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_locked_store_is_waited_for_and_then_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).close()
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.001)
    said: list[str] = []
    patient, hasty = Store(tmp_path, notice=said.append, patience=0.002), Store(tmp_path, patience=0.0)
    other = sqlite3.connect(tmp_path / "mlbench.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for client in (patient, hasty):
        with pytest.raises(StoreLockedError, match="is locked: another process has not released it within") as caught:
            client.record_run(spec("a-1"))
        assert "MLBENCH_STORE_PATIENCE" in str(caught.value.hint)
    path = tmp_path / "mlbench.sqlite"
    assert said == [f"Waiting for the store {path}, which another process has locked; at most 0.002 s."]
    assert patient.runs() == []  # WAL: reading is never blocked
    other.execute("ROLLBACK")
    assert patient.record_run(spec("a-1")).name == "a-1"
    assert len(said) == 1


def test_the_time_that_is_left_is_waited_for_and_the_first_moment_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.25)
    store = Store(tmp_path, patience=1.0)
    times: list[float] = []

    class Busy(sqlite3.OperationalError):
        sqlite_errorcode = sqlite3.SQLITE_BUSY | 2 << 8  # SQLITE_BUSY_SNAPSHOT, an extended code

    class Database:
        def execute(self, statement: str, values: Any = ()) -> str:
            if statement == "BEGIN" and not times:
                raise Busy
            if statement.startswith("PRAGMA busy_timeout="):
                times.append(int(statement.partition("=")[2]))
            return statement

    monkeypatch.setattr(store, "_db", Database())
    assert str(store._execute("BEGIN")) == "BEGIN"
    assert times == [750, 250]


def test_other_errors_of_the_database_name_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "mlbench.sqlite").mkdir()
    with pytest.raises(StoreError, match=r"mlbench\.sqlite cannot be used: ") as caught:
        Store(tmp_path)
    assert "set MLBENCH_HOME to another folder" in str(caught.value.hint)


def test_a_store_of_a_newer_version_is_told_with_both_versions(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with sqlite3.connect(tmp_path / "mlbench.sqlite") as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    store.require_readable()
    with sqlite3.connect(tmp_path / "mlbench.sqlite") as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError) as caught:
        store.require_readable()
    assert f"(schema {SCHEMA_VERSION + 1}; this one knows {SCHEMA_VERSION})" in caught.value.message


def test_only_a_lock_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    store = Store(tmp_path, notice=said.append, patience=5.0)
    with pytest.raises(StoreError, match="cannot be used: no such table: others"):
        store._query("SELECT * FROM others")
    assert said == []


def test_a_store_that_breaks_while_it_is_open_is_explained(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise sqlite3.DatabaseError("disk I/O error")

    monkeypatch.setattr(store, "_schema_version", fail)
    with pytest.raises(StoreError, match="cannot be used: disk I/O error"):
        store.require_readable()


def test_a_violated_constraint_is_told_to_the_caller(store: Store) -> None:
    def insert_twice() -> None:
        with store._transaction() as db:
            for _ in range(2):
                db.execute("INSERT INTO choices VALUES ('a', 'b')")

    with pytest.raises(sqlite3.IntegrityError):
        insert_twice()
    assert store._query("SELECT * FROM choices") == []


def test_a_failed_transaction_changes_nothing(store: Store) -> None:
    def interrupt() -> None:
        with store._transaction() as db:
            db.execute("INSERT INTO choices VALUES ('a', 'b')")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert store._query("SELECT * FROM choices") == []
    assert store.record_run(spec("a-1")).name == "a-1"


@pytest.mark.parametrize(
    ("provider", "details", "place"),
    [
        ("eks", {"region": "eu-west-1", "project": "p"}, ("", "eu-west-1")),
        ("eks", {}, ("", "")),
        ("gke", {"project": "p", "location": "z", "region": "r"}, ("p", "z")),
        ("gke", {"project": None}, ("", "")),
        ("kind", {"region": "r", "project": "p", "location": "z"}, ("", "")),
    ],
)
def test_old_records_get_account_and_location_from_their_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, details: dict[str, Any], place: tuple[str, str]
) -> None:
    with monkeypatch.context() as older:
        older.setattr(module, "MIGRATIONS", MIGRATIONS[:2])
        older.setattr(module, "SCHEMA_VERSION", 2)
        Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "mlbench.sqlite") as db:
        db.execute("INSERT INTO clusters VALUES ('c', ?, '2026', 'ready', ?)", (provider, json.dumps(details)))
        db.execute("INSERT INTO choices VALUES ('cluster', 'gone')")
    store = Store(tmp_path)
    (_, cluster) = store.clusters()
    assert (cluster.account, cluster.location, cluster.details) == (*place, details)
    assert store.current_cluster == LOCAL  # the chosen one is not known any more
