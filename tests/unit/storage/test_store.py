"""The store: what it remembers, for several clients, and across kills."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import astuple

from mlbench_cli.config import settings
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import LOCAL, Cluster, Experiment, Outcome, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store
from mlbench_cli.storage.store_schema import MIGRATIONS
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.times import timestamp


def spec(name: str, cluster: str = "local") -> RunSpec:
    return RunSpec(name, cluster, "local", "custom", "custom", ("true",), "gloo", 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_names_to_suggest_are_few_and_those_that_begin_alike_come_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_cli.storage.store.MAX_NEAR", 3)
    for name in ("abc-1", "abd-1", "xyz-1", "x-1", "x-2", "x-3", "x-4"):
        store.record_run(spec(name))
    assert store.near_names("abc-2") == ["abc-1", "abd-1", "x-4", "x-3", "x-2"]
    assert store.near_names("q") == store.near_names("é") == ["x-4", "x-3", "x-2"]


def test_a_family_is_what_begins_with_the_name_and_a_hyphen(store: Store) -> None:
    for name in ("a-1-r2", "a-1-r1", "a-10-r1", "a-1", "b-1-r1"):
        store.record_run(spec(name))
    assert {row.run.name for row in store.run_family("a-1")} == {"a-1-r1", "a-1-r2"}
    assert store.run_family("é") == []


def test_runs(store: Store) -> None:
    first = store.record_run(spec("a-1"))
    store.record_run(spec("b-1"))
    store.advance(first, RunState.FINISHED, Outcome.FAILED)
    rows = store.runs()
    assert [(row.run.name, row.state, row.outcome) for row in rows] == [
        ("a-1", "finished", "failed"),
        ("b-1", "submitted", None),
    ]
    assert store.run("a-1").run == first
    assert first.folder == store.folder / "runs" / first.id
    store.forget_run(first)
    assert [row.run.name for row in store.runs()] == ["b-1"]


def test_a_run_never_goes_back(store: Store) -> None:
    run = store.record_run(spec("a-1"))
    store.advance(run, RunState.FINISHED)
    store.advance(run, RunState.FINISHED, Outcome.COMPLETED)
    for earlier in (RunState.QUEUED, RunState.SUBMITTED, RunState.RUNNING):
        store.advance(run, earlier)
    row = store.run("a-1")
    assert (row.state, row.outcome) == (RunState.FINISHED, Outcome.COMPLETED)


def test_a_name_is_taken_once(store: Store) -> None:
    store.record_run(spec("a-1"))
    with pytest.raises(UsageError, match='already a run "a-1"') as caught:
        store.record_run(spec("a-1"))
    assert "mlbench delete a-1" in str(caught.value.hint)


def test_an_unknown_run(store: Store) -> None:
    store.record_run(spec("demo-1"))
    with pytest.raises(NotFoundError, match='Did you mean "demo-1"'):
        store.run("dmeo-1")
    with pytest.raises(NotFoundError, match="no run"):
        store.run("\udcff")


# --- clusters --------------------------------------------------------------------------------------------------------


def test_clusters(store: Store) -> None:
    made = store.record_cluster(Cluster("far-2", "gke", "creating", details={"zone": "x"}))
    store.record_cluster(Cluster("far-2", "gke", "ready", details={"zone": "y"}))
    again = store.cluster("far-2")
    assert (again.state, again.details, again.created) == ("ready", {"zone": "y"}, made.created)
    store.choose_cluster(again)
    assert store.current_cluster.name == "far-2"


def test_only_known_clusters_are_chosen(store: Store) -> None:
    store.record_cluster(Cluster("far-2", "gke"))
    with pytest.raises(NotFoundError, match='Did you mean "far-2"'):
        store.choose_cluster(store.cluster("far2"))
    assert store.current_cluster == LOCAL


def test_forgetting_one_cluster_leaves_the_choice_of_another(store: Store) -> None:
    for name in ("far-2", "near-2"):
        store.record_cluster(Cluster(name, "gke"))
    store.choose_cluster(store.cluster("far-2"))
    store.forget_cluster(store.cluster("near-2"))
    assert store.current_cluster.name == "far-2"
    store.forget_cluster(store.cluster("far-2"))
    assert store.current_cluster == LOCAL


def test_the_journal_keeps_its_order(store: Store) -> None:
    far = Cluster("far-2", "gke", account="demo", location="europe-west1")
    store.journal(far, "node pool", "p", "intent", size=3)
    store.journal(far, "node pool", "p", "ready")
    store.journal(Cluster("other", "eks"), "vpc", "v", "intent")
    entries = store.journal_of("far-2")
    assert [(entry.action, entry.details) for entry in entries] == [("intent", {"size": 3}), ("ready", {})]
    assert {entry.cluster for entry in entries} == {far.identity}


def test_clusters_of_one_name_in_two_locations_are_two_records(store: Store) -> None:
    west = store.record_cluster(Cluster("x-2", "eks", account="1", location="us-west-2"))
    east = store.record_cluster(Cluster("x-2", "eks", account="1", location="us-east-1"))
    assert [cluster.location for cluster in store.clusters()] == ["", "us-west-2", "us-east-1"]
    with pytest.raises(UsageError, match="2 clusters are called"):
        store.cluster("x-2")
    assert store.cluster("x-2@us-east-1") == east
    store.choose_cluster(east)
    store.forget_cluster(west)
    assert store.current_cluster == store.cluster("x-2") == east


def test_a_cluster_that_can_be_used_goes_before_a_deletion_of_the_same_name(store: Store) -> None:
    store.record_cluster(Cluster("x-2", "eks", "deleting", account="1", location="us-west-2"))
    mine = store.record_cluster(Cluster("x-2", "eks", account="1", location="us-east-1"))
    assert store.cluster("x-2") == mine


def test_a_record_without_an_account_takes_the_account_when_it_is_known(store: Store) -> None:
    old = store.record_cluster(Cluster("x-2", "eks", location="us-west-2"))
    store.choose_cluster(old)
    store.record_cluster(Cluster("x-2", "eks", "failed", account="1", location="us-west-2"))
    (_, found) = store.clusters()
    assert (found.account, found.state, found.created) == ("1", "failed", old.created)
    assert store.current_cluster == found


# A store as the first edition (schema 1) wrote it.
FIRST_EDITION = """
CREATE TABLE clusters (
  name TEXT PRIMARY KEY, provider TEXT NOT NULL, created TEXT NOT NULL, state TEXT NOT NULL, details TEXT NOT NULL);
CREATE TABLE journal (
  id INTEGER PRIMARY KEY, cluster TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
  action TEXT NOT NULL, time REAL NOT NULL, details TEXT NOT NULL);
CREATE TABLE runs (
  id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, cluster TEXT NOT NULL, created TEXT NOT NULL,
  state TEXT NOT NULL, outcome TEXT, spec TEXT NOT NULL, folder TEXT NOT NULL);
CREATE TABLE choices (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO clusters VALUES ('e-2', 'eks', '2026-11-01T00:00:00.000Z', 'ready', '{"region": "eu-west-1", "nodes": 2}');
INSERT INTO clusters VALUES ('g-2', 'gke', '2026-11-02T00:00:00.000Z', 'failed',
  '{"project": "demo", "location": "europe-west1-b"}');
INSERT INTO clusters VALUES ('k-2', 'kind', '2026-11-03T00:00:00.000Z', 'ready', '{}');
INSERT INTO journal VALUES (1, 'e-2', 'EKS cluster', 'e-2', 'intent', 1.5, '{}');
INSERT INTO journal VALUES (2, 'gone-1', 'cluster', 'gone-1', 'removed', 2.5,
  '{"provider": "kind", "created": "c", "details": {}}');
INSERT INTO choices VALUES ('cluster', 'e-2');
PRAGMA user_version = 1;
"""


def _write_first_edition(home: Path) -> None:
    db = sqlite3.connect(home / "mlbench.sqlite")
    db.executescript(FIRST_EDITION)
    values = ("id", "old-1", "local", "2026-01-01T00:00:00.000Z", "created", None)
    db.execute("INSERT INTO runs VALUES (?,?,?,?,?,?,?,?)", (*values, json.dumps(spec("old-1").to_dict()), "folder"))
    db.commit()
    db.close()


def test_a_store_of_the_first_edition_is_opened(tmp_path: Path) -> None:
    _write_first_edition(tmp_path)
    store = Store(tmp_path)
    assert [astuple(cluster.identity) for cluster in store.clusters()[1:]] == [
        ("eks", "", "eu-west-1", "e-2"), ("gke", "demo", "europe-west1-b", "g-2"), ("kind", "", "", "k-2"),
    ]  # fmt: skip
    assert store.cluster("e-2").details == {"region": "eu-west-1", "nodes": 2}
    assert store.current_cluster.name == "e-2"
    (entry,) = store.journal_of("e-2")
    assert (entry.cluster, entry.action, entry.time) == (store.cluster("e-2").identity, "intent", 1.5)
    assert store.journal_of("gone-1")[0].action == "removed"
    assert (store.run("old-1").run.id, store.run("old-1").state, store.experiments()) == ("id", "submitted", [])
    run = store.record_run(spec("demo-1"))
    store.close()
    assert Store(tmp_path).run("demo-1").run == run


def test_a_killed_migration_leaves_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_first_edition(tmp_path)

    def fail(db: sqlite3.Connection) -> None:
        db.execute("DROP TABLE runs")
        raise KeyboardInterrupt

    monkeypatch.setattr("mlbench_cli.storage.store.MIGRATIONS", (fail, fail))
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path)
    monkeypatch.undo()
    assert len(Store(tmp_path).clusters()) == 4


# --- several clients, and kills ---------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from mlbench_cli.model.run import LOCAL
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store
home, prefix, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(count):
    store = Store(home)
    spec = RunSpec(f"{prefix}-{number}", "local", "local", "custom", "custom", ("true",), "gloo", 1)
    run = store.record_run(spec)
    store.journal(LOCAL, "run", run.name, "intent")
    print(run.name, flush=True)
    store.close()
"""


def writer(home: Path, prefix: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(home), prefix, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("known", [0, 3], ids=["a new store", "a store of the first edition"])
def test_several_clients_open_a_store_and_write_at_once(tmp_path: Path, known: int) -> None:
    if known:
        _write_first_edition(tmp_path)
    clients = [writer(tmp_path, prefix, 15) for prefix in ("a", "b", "c")]
    for client in clients:
        _, err = client.communicate(timeout=180)
        assert (client.returncode, err) == (0, "")
    store = Store(tmp_path)
    assert (len(store.clusters()), len(store.runs())) == (1 + known, 45 + bool(known))


def test_two_clients_want_one_name(tmp_path: Path) -> None:
    clients = [writer(tmp_path, "same", 1) for _ in range(3)]
    errors = [client.communicate(timeout=180)[1] for client in clients]
    assert sorted(client.returncode for client in clients) == [0, 1, 1]
    assert sum('already a run "same-0"' in error for error in errors) == 2


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03])
def test_a_killed_writer_leaves_a_sound_store(tmp_path: Path, delay: float) -> None:
    client = writer(tmp_path, "a", 100_000)
    assert client.stdout is not None
    told = [client.stdout.readline().strip() for _ in range(3)]
    time.sleep(delay)
    client.send_signal(signal.SIGKILL)
    told += client.stdout.read().split("\n")[:-1]
    client.wait()
    check = sqlite3.connect(tmp_path / "mlbench.sqlite").execute("PRAGMA integrity_check").fetchone()
    assert check == ("ok",)
    store = Store(tmp_path)
    names = [row.run.name for row in store.runs()]
    # What was said to be written is there; at most one more was under way.
    assert names[: len(told)] == told
    assert len(names) <= len(told) + 1
    assert store.record_run(spec("b-0")).name == "b-0"


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_a_damaged_store(tmp_path: Path) -> None:
    (tmp_path / "mlbench.sqlite").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(UsageError, match="is damaged") as caught:
        Store(tmp_path)
    assert "mlbench status --refresh" in str(caught.value.hint)


def test_a_store_of_the_future(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "mlbench.sqlite") as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(UsageError, match="newer mlbench"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(UsageError, match="cannot be created"):
        settings.data_dir()


def test_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "\udcff"))
    with pytest.raises(UsageError, match="not UTF-8"):
        settings.data_dir()


def test_the_store_is_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLBENCH_HOME", "home")
    assert Store().folder == tmp_path / "home" == settings.config_dir()
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(OSError, match="No such file"):
        write_atomically(tmp_path / "none" / "a.json", b"x")


def test_times_are_rfc_3339() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert timestamp(1.9996) == "1970-01-01T00:00:01.999Z"


def test_experiments_stay_when_clusters_get_their_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlbench_cli.storage import store as module

    with monkeypatch.context() as older:  # a store of schema 2, with an experiment of two runs
        older.setattr(module, "MIGRATIONS", MIGRATIONS[:2])
        older.setattr(module, "SCHEMA_VERSION", 2)
        store = Store(tmp_path)
        store.close()
    db = sqlite3.connect(tmp_path / "mlbench.sqlite")
    db.execute("INSERT INTO experiments VALUES ('x', 'exp', '2026-01-01T00:00:00.000Z', '{}', 0, 1)")
    db.execute("INSERT INTO clusters VALUES ('e-2', 'eks', '2026', 'ready', '{\"region\": \"eu-west-1\"}')")
    for number, name in enumerate(("exp-1", "exp-2")):
        row = (f"r{number}", name, "e-2", "2026-01-01T00:00:00.000Z", "finished", "completed")
        document = json.dumps(spec(name, "e-2").to_dict())
        db.execute("INSERT INTO runs VALUES (?,?,?,?,?,?,?,?)", (*row, document, "folder"))
        db.execute("INSERT INTO members VALUES ('x', ?, ?, 'hash', '{}')", (number, f"r{number}"))
    db.commit()
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()
    store = Store(tmp_path)
    (experiment,) = store.experiments()
    assert [member.run_id for member in experiment.members] == ["r0", "r1"]
    assert store.cluster("e-2").identity.location == "eu-west-1"
    assert store.run("exp-2").outcome == "completed"


def test_all_runs_are_listed_newest_first_page_by_page(store: Store) -> None:
    names = [store.record_run(spec(f"r-{number}")).name for number in range(150)]
    listing = store.iterate_runs()
    listed = [next(listing).run.name for _ in range(70)]
    store.forget_run(store.run("r-149").run)  # listed already: the rest stays as it is
    listed += [row.run.name for row in listing]
    assert listed == names[::-1]


def test_a_listing_can_be_limited_to_names_and_states(store: Store) -> None:
    for number in range(80):
        run = store.record_run(spec(f"r-{number}"))
        if number % 40 == 0:
            store.advance(run, RunState.FINISHED, Outcome.FAILED)
    assert [row.run.name for row in store.iterate_runs(contains="-7")][:2] == ["r-79", "r-78"]
    assert [row.run.name for row in store.iterate_runs(words=["failed"])] == ["r-40", "r-0"]
    assert [row.run.name for row in store.iterate_runs(contains="4", words=["finished"])] == ["r-40"]
    assert list(store.iterate_runs(contains="%")) == list(store.iterate_runs(contains="\udcff")) == []


def test_the_newest_experiments_come_oldest_first(store: Store) -> None:
    for number in (2, 1, 3):
        created = f"2026-01-0{number}T00:00:00.000Z"
        store.record_experiment(Experiment(f"id{number}", f"exp-{number}", created, {}), [])
    assert [each.name for each in store.newest_experiments(2)] == ["exp-2", "exp-3"]


def test_no_memory_is_shared_between_clients_since_those_of_a_network_file_system_cannot(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mlbench.sqlite")) as older:
        older.execute("PRAGMA journal_mode=WAL")
        older.execute("CREATE TABLE log (line)")
    with closing(Store(tmp_path)) as store:
        store.record_run(spec("a"))
        assert not {path.name for path in tmp_path.iterdir()} & {"mlbench.sqlite-wal", "mlbench.sqlite-shm"}
