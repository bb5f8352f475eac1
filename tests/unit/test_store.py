"""The store: what it remembers, for several clients, and across kills."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbench_cli import settings
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.files import write_atomically
from mlbench_cli.model import LOCAL, Cluster
from mlbench_cli.spec import RunSpec
from mlbench_cli.store import Store
from mlbench_cli.times import timestamp


def spec(name: str, cluster: str = "local") -> RunSpec:
    return RunSpec(name, cluster, "local", "custom", "custom", ("true",), "gloo", 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_runs(store: Store) -> None:
    first = store.record_run(spec("a-1"))
    store.record_run(spec("b-1"))
    store.update_run(first, "finished", "failed")
    rows = store.runs()
    assert [(row.run.name, row.state, row.outcome) for row in rows] == [
        ("a-1", "finished", "failed"),
        ("b-1", "created", None),
    ]
    assert store.run("a-1").run == first
    assert first.folder == store.folder / "runs" / first.id
    store.forget_run(first)
    assert [row.run.name for row in store.runs()] == ["b-1"]


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


def test_local_is_always_there(store: Store) -> None:
    assert store.clusters() == [LOCAL]
    assert store.current_cluster == LOCAL


def test_clusters(store: Store) -> None:
    made = store.record_cluster(Cluster("far-2", "gke", "creating", details={"zone": "x"}))
    store.record_cluster(Cluster("far-2", "gke", "ready", details={"zone": "y"}))
    again = store.cluster("far-2")
    assert (again.state, again.details, again.created) == ("ready", {"zone": "y"}, made.created)
    store.choose_cluster("far-2")
    assert store.current_cluster.name == "far-2"


def test_only_known_clusters_are_chosen(store: Store) -> None:
    store.record_cluster(Cluster("far-2", "gke"))
    with pytest.raises(NotFoundError, match='Did you mean "far-2"'):
        store.choose_cluster("far2")
    assert store.current_cluster == LOCAL


def test_forgetting_one_cluster_leaves_the_choice_of_another(store: Store) -> None:
    for name in ("far-2", "near-2"):
        store.record_cluster(Cluster(name, "gke"))
    store.choose_cluster("far-2")
    store.forget_cluster("near-2")
    assert store.current_cluster.name == "far-2"
    store.forget_cluster("far-2")
    assert store.current_cluster == LOCAL


def test_the_journal_keeps_its_order(store: Store) -> None:
    store.journal("far-2", "node pool", "p", "intent", size=3)
    store.journal("far-2", "node pool", "p", "ready")
    store.journal("other", "vpc", "v", "intent")
    entries = store.journal_of("far-2")
    assert [(entry.action, entry.details) for entry in entries] == [("intent", {"size": 3}), ("ready", {})]


# --- several clients, and kills ---------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from mlbench_cli.spec import RunSpec
from mlbench_cli.store import Store
home, prefix, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(count):
    store = Store(home)
    spec = RunSpec(f"{prefix}-{number}", "local", "local", "custom", "custom", ("true",), "gloo", 1)
    run = store.record_run(spec)
    store.journal("local", "run", run.name, "intent")
    print(run.name, flush=True)
    store.close()
"""


def writer(home: Path, prefix: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(home), prefix, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_clients_at_once(tmp_path: Path) -> None:
    clients = [writer(tmp_path, prefix, 15) for prefix in ("a", "b", "c")]
    for client in clients:
        _, err = client.communicate(timeout=60)
        assert (client.returncode, err) == (0, "")
    assert len(Store(tmp_path).runs()) == 45


def test_two_clients_want_one_name(tmp_path: Path) -> None:
    clients = [writer(tmp_path, "same", 1) for _ in range(3)]
    errors = [client.communicate(timeout=60)[1] for client in clients]
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
    with pytest.raises(UsageError, match="cannot be used") as caught:
        Store(tmp_path)
    assert "MLBENCH_HOME" in str(caught.value.hint)


def test_a_store_of_the_future(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "mlbench.sqlite") as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(UsageError, match="newer mlbench"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(UsageError, match="cannot be made"):
        settings.data_dir()


def test_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "\udcff"))
    with pytest.raises(UsageError, match="not UTF-8"):
        settings.data_dir()


def test_the_store_is_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
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


def test_a_store_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "mlbench.sqlite")
    db.executescript(
        "CREATE TABLE clusters (name TEXT PRIMARY KEY, provider TEXT NOT NULL, created TEXT NOT NULL, "
        "state TEXT NOT NULL, details TEXT NOT NULL);"
        "CREATE TABLE journal (id INTEGER PRIMARY KEY, cluster TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, "
        "action TEXT NOT NULL, time REAL NOT NULL, details TEXT NOT NULL);"
        "CREATE TABLE runs (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, cluster TEXT NOT NULL, "
        "created TEXT NOT NULL, state TEXT NOT NULL, outcome TEXT, spec TEXT NOT NULL, folder TEXT NOT NULL);"
        "CREATE TABLE choices (key TEXT PRIMARY KEY, value TEXT NOT NULL); PRAGMA user_version=1;"
    )
    values = ("id", "a-1", "local", "2026-01-01T00:00:00.000Z", "created", None)
    db.execute("INSERT INTO runs VALUES (?,?,?,?,?,?,?,?)", (*values, json.dumps(spec("a-1").to_dict()), "folder"))
    db.commit()
    db.close()
    for _ in range(2):
        store = Store(tmp_path)
        assert store.run("a-1").run.id == "id"
        assert store.experiments() == []
        assert store.find_experiment_of(store.run("a-1").run) is None
        store.close()
