"""The lock of a machine: who gets it, what it says of its holder, and the order in which a run takes several.

The order is the same for all runs, or two of them wait for ever.
"""

import json
import os
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from mlbench_cli.agent import lock
from mlbench_cli.agent.lock import LockHolder, MachineLock, order_nodes

MACHINES = ("boot-a:1:7", "boot-b:1:7", "boot-c:1:7")


def test_all_runs_take_the_locks_of_the_same_machines_in_the_same_order() -> None:
    """Whatever numbers the machines have in a run. By number, A, B of one run would meet B, A of another."""
    for machines in permutations(MACHINES):
        taken = [machines[node] for node in order_nodes(dict(enumerate(machines)))]
        assert taken == sorted(MACHINES)


def test_of_several_nodes_of_one_machine_the_first_takes_the_lock() -> None:
    assert order_nodes({2: "b", 0: "c", 1: "b", 3: "a"}) == [3, 1, 0]


def test_a_node_with_nothing_to_lock_has_no_turn() -> None:
    assert order_nodes({0: None, 1: "a", 2: None}) == [1]
    assert order_nodes({}) == []


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(lock.VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setattr("mlbench_cli.agent.lock.time.time", lambda: 1000.0)
    return tmp_path / "lock"


@pytest.fixture
def locks(path: Path) -> Iterator[dict[str, MachineLock]]:
    """Two locks of runs that want the machine for themselves, and two that share it."""
    modes = {"a": lock.TAKE, "b": lock.TAKE, "s": lock.SHARE, "t": lock.SHARE}
    found = {name: MachineLock(mode, f"{name}-1", 60.0) for name, mode in modes.items()}
    yield found
    for item in found.values():
        item.close()


def test_a_machine_is_given_to_one_run_until_it_ends(locks: dict[str, MachineLock], path: Path) -> None:
    first, second = locks["a"], locks["b"]
    assert (first.state, first.reason) == ("unavailable", "not taken yet")
    assert first.acquire()
    assert first.acquire()  # it has it already
    assert (first.state, first.reason) == ("held", None)
    assert not second.acquire()
    assert (second.state, second.reason, second.descriptor) == ("unavailable", "not taken yet", -1)
    holder = second.read_holder()
    assert holder == LockHolder("a-1", lock._user_name(), 1000.0, 1060.0)
    assert lock.find_holder() == holder
    first.close()
    assert lock.find_holder() is None
    assert second.acquire()
    assert path.stat().st_mode & 0o777 == 0o666


def test_runs_that_share_a_machine_never_wait(locks: dict[str, MachineLock]) -> None:
    assert locks["s"].acquire()
    assert locks["t"].acquire()
    assert [(locks[name].state, locks[name].reason) for name in "st"] == [("shared", None)] * 2
    assert lock.find_holder() is None  # nobody has it alone
    assert not locks["a"].acquire()


def test_a_run_that_shares_says_so_if_another_has_the_machine_alone(locks: dict[str, MachineLock]) -> None:
    assert locks["a"].acquire()
    assert locks["s"].acquire()
    assert (locks["s"].state, locks["s"].reason) == ("shared", "another run is using this machine")
    locks["s"].mark_taken()
    assert locks["s"].reason == "another run is using this machine"


@pytest.mark.parametrize(
    ("mode", "variable", "state", "reason"),
    [
        (lock.WHOLE_NODES, "", "held", "the batch system allocates whole nodes"),
        (lock.NO_PROMISE, "", "unavailable", "attached with --share-nodes"),
        (lock.TAKE, "none", "unavailable", "MLBENCH_MACHINE_LOCK=none"),
        (lock.SHARE, "none", "unavailable", "MLBENCH_MACHINE_LOCK=none"),
    ],
)
def test_without_a_lock_nobody_waits_and_the_reason_is_kept(
    mode: str, variable: str, state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lock.VARIABLE, variable)
    found = MachineLock(mode, "a-1", 60.0)
    assert found.find_identity() is None
    assert found.acquire()
    found.mark_taken()
    assert (found.state, found.reason, found.descriptor) == (state, reason, -1)
    assert found.read_holder() is None


def test_a_lock_that_is_no_file_is_not_waited_for(path: Path) -> None:
    path.mkdir()
    found = MachineLock(lock.TAKE, "a-1", 60.0)
    assert found.acquire()
    assert (found.state, found.reason) == ("unavailable", f"{path}: Is a directory")
    assert lock.probe_lock() == (str(path), f"{path}: Is a directory")
    assert lock.find_holder() is None


def test_links_are_not_followed_and_files_with_two_names_not_locked(path: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        lock.open_lock(str(path))
    path.unlink()
    os.link(tmp_path / "precious", path)
    with pytest.raises(OSError, match="not a regular file"):
        lock.open_lock(str(path))
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_lock_whose_file_was_replaced_is_not_held(path: Path) -> None:
    descriptor = lock.open_lock(str(path))
    try:
        path.rename(f"{path}.old")
        assert not lock.try_lock(descriptor, str(path), shared=False)
        path.write_text("")
        assert not lock.try_lock(descriptor, str(path), shared=False)
        path.unlink()
        Path(f"{path}.old").rename(path)
        assert lock.try_lock(descriptor, str(path), shared=False)
    finally:
        os.close(descriptor)


def test_agents_on_one_machine_have_the_identity_of_its_file(path: Path, locks: dict[str, MachineLock]) -> None:
    found = locks["a"].find_identity()
    assert found is not None
    assert found == locks["s"].find_identity()
    status = path.stat()
    assert found.endswith(f":{status.st_dev}:{status.st_ino}")


GOOD = {"run": "x-2", "user": "ann", "since": 1.0, "deadline": 2.0}


@pytest.mark.parametrize(
    ("document", "found"),
    [
        (GOOD, LockHolder("x-2", "ann", 1.0, 2.0)),
        ({**GOOD, "run": "r" * 64, "user": "a.b@c_d"}, LockHolder("r" * 64, "a.b@c_d", 1.0, 2.0)),
        ({**GOOD, "run": "r" * 65}, None),
        ({**GOOD, "run": ""}, None),
        ({**GOOD, "user": "\x1b[2J"}, None),
        ({**GOOD, "user": "ann\n"}, None),
        ({**GOOD, "since": 0}, LockHolder("x-2", "ann", 0.0, 2.0)),
        ({**GOOD, "since": -1}, None),
        ({**GOOD, "deadline": 1e11}, None),
        ({**GOOD, "deadline": None}, None),
        ({"run": "x-2", "user": "ann", "since": 1.0}, None),
        ([], None),
        ("", None),
    ],
)
def test_what_a_stranger_wrote_into_the_lock_is_checked(document: object, found: LockHolder | None, path: Path) -> None:
    path.write_text(json.dumps(document))
    assert MachineLock(lock.TAKE, "a-1", 1.0).read_holder() == found


@pytest.mark.parametrize(
    ("running", "left", "words"),
    [
        (0, 99, "running for 0 s, at most 99 s more"),
        (100, 180, "running for 2 min, at most 3 min more"),
        (5990, 6000, "running for 100 min, at most 1.67 h more"),
        (9000, -5, "running for 2.5 h, at most 0 s more"),
    ],
)
def test_a_holder_is_described_with_its_times(
    running: float, left: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_cli.agent.lock.time.time", lambda: 50_000.0)
    holder = LockHolder("x-2", "ann", 50_000.0 - running, 50_000.0 + left)
    assert lock.describe_holder(holder) == f"x-2 of user ann, {words}"


def test_an_unreadable_holder_is_another_run() -> None:
    assert lock.describe_holder(None) == "another run is using it"


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (0o041777, "/run/lock/mlbench-machine.lock"),  # Debian
        (0o040755, "/tmp/mlbench-machine.lock"),  # Fedora: for root only
        (0o040777, "/tmp/mlbench-machine.lock"),  # not sticky: anybody could remove the file
        (0o041775, "/tmp/mlbench-machine.lock"),
        (0o101777, "/tmp/mlbench-machine.lock"),  # no folder
        (None, "/tmp/mlbench-machine.lock"),  # macOS
    ],
)
def test_the_folder_of_the_lock_is_one_that_all_users_may_write_to(
    mode: int | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: str) -> os.stat_result:
        assert path == "/run/lock"
        if mode is None:
            raise FileNotFoundError(path)
        return os.stat_result((mode, *[0] * 9))

    monkeypatch.delenv(lock.VARIABLE, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr("mlbench_cli.agent.lock.os.stat", stat)
        chosen = lock.lock_path()
    assert chosen == found


def test_a_holder_replaces_a_longer_one_before_it(path: Path) -> None:
    path.write_text(" " * 1000 + "left by another run")
    found = MachineLock(lock.TAKE, "a-1", 60.0)
    assert found.acquire()
    found.close()
    assert json.loads(path.read_text()) == {
        "run": "a-1",
        "user": lock._user_name(),
        "since": 1000.0,
        "deadline": 1060.0,
    }


def test_a_run_that_must_wait_keeps_no_file_open(
    locks: dict[str, MachineLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locks["a"].acquire()
    opened: list[int] = []
    original = lock.open_lock

    def open_and_note(path: str) -> int:
        opened.append(original(path))
        return opened[-1]

    monkeypatch.setattr(lock, "open_lock", open_and_note)
    assert not locks["b"].acquire()
    assert locks["b"].read_holder() is not None
    assert locks["b"].find_identity() is not None
    assert len(opened) == 3
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_closed_lock_is_closed_once(locks: dict[str, MachineLock]) -> None:
    assert locks["a"].acquire()
    locks["a"].close()
    assert locks["a"].descriptor == -1
    locks["a"].close()
    assert locks["b"].acquire()


def test_a_probe_finds_the_lock_or_why_there_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock.probe_lock() == (str(path), None)
    monkeypatch.setenv(lock.VARIABLE, "none")
    assert lock.probe_lock() == (None, "MLBENCH_MACHINE_LOCK=none")
    assert lock.find_holder() is None


def test_a_holder_that_cannot_be_read_is_still_a_holder(locks: dict[str, MachineLock], path: Path) -> None:
    assert locks["a"].acquire()
    path.write_text("damaged")
    assert lock.find_holder() == LockHolder("a run", "unknown", 1000.0, 1000.0)
