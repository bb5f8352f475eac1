"""What an agent reads of disks, processes and ports, and what it gives up; system calls are the test's own."""

import errno
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import load, lock, machine, processes, storage, streams
from mlbench_cli.agent.lock import LockHolder
from mlbench_cli.agent.machine import PAGE, Sampler
from tests.fakes.clock import Clock

Open = Callable[..., Any]


def open_from(files: Mapping[str, str]) -> Open:
    """`open` for a file system of these files."""

    def open_one(path: str, *_: object, **__: object) -> Any:
        if path not in files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return io.StringIO(files[path])

    return open_one


# --- disks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with the disk 8:0, its partition 8:1, and files on both; its /sys is a folder."""
    disk = tmp_path / "sys/devices/sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1/dev").write_text("8:1\n")
    (disk / "sda1/partition").write_text("1\n")
    blocks = tmp_path / "sys/dev/block"
    blocks.mkdir(parents=True)
    (blocks / "8:0").symlink_to(disk)
    (blocks / "8:1").symlink_to(disk / "sda1")
    devices = {
        "/whole": os.makedev(8, 0),
        "/part": os.makedev(8, 1),
        "/memory": os.makedev(0, 42),
        "/": os.makedev(8, 0),
    }

    def move(path: str) -> str:
        return f"{tmp_path}{path}" if path.startswith("/sys/") else path

    def open_moved(path: str, **more: Any) -> Any:
        return io.StringIO(Path(move(path)).read_text())

    paths = SimpleNamespace(
        exists=lambda path: path in devices or os.path.exists(move(path)),
        realpath=lambda path: os.path.realpath(move(path)),
        dirname=os.path.dirname,
    )
    stat = {path: SimpleNamespace(st_dev=device) for path, device in devices.items()}
    own = SimpleNamespace(path=paths, stat=stat.__getitem__, major=os.major, minor=os.minor)
    monkeypatch.setattr(storage, "os", own)
    monkeypatch.setattr(storage, "open", open_moved, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "disk"), [("/whole", "8:0"), ("/part", "8:0"), ("/part/not/there/yet", "8:0"), ("/none", "8:0")]
)
def test_the_disk_of_a_file_is_the_whole_one(system: Path, path: str, disk: str) -> None:
    """The kernel limits disks and not partitions."""
    assert storage.find_disk(path) == disk


def test_a_file_in_memory_is_on_no_disk(system: Path) -> None:
    with pytest.raises(OSError, match=r"^/memory is on no disk of this machine$"):
        storage.find_disk("/memory/file")


class Group:
    """A control group of processes in a folder of the test, with its version."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        monkeypatch.setattr(storage, "find_hierarchy", lambda: (version, str(folder)))
        self.group = storage.SlowGroup("slow", [], 1e6)


@pytest.mark.parametrize(
    ("version", "text", "found"),
    [
        (2, "0::/user/me\n", "user/me"),
        (2, "0::/\n", ""),
        (2, "0::/gone\n", ""),
        (2, "3:blkio:/user/me\n", ""),
        (1, "0::/other\n3:cpu,blkio:/user/me\n", "user/me"),
        (1, "0::/user/me\n", ""),
        (1, "3:blkio2:/user/me\n", ""),
    ],
)
def test_a_process_goes_back_to_the_group_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, text: str, found: str
) -> None:
    (tmp_path / "user/me").mkdir(parents=True)
    group = Group(tmp_path, monkeypatch, version).group

    def open_other(path: str, *words: Any, **more: Any) -> Any:
        return io.StringIO(text) if path == "/proc/77/cgroup" else open(path, *words, **more)

    monkeypatch.setattr(storage, "open", open_other, raising=False)
    group.add(77)
    place = f"{tmp_path}/{found}".rstrip("/")
    assert group._before == place
    assert (tmp_path / "slow/cgroup.procs").read_text() == "77"


def test_a_group_is_removed_once_its_processes_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("mlbench_cli.agent.storage.time", clock)
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/cgroup.procs").write_text("11\n12\n")
    moved: list[Any] = []
    tries = iter([True, True, False])

    def remove(folder: str) -> None:
        moved.append((tmp_path / "cgroup.procs").read_text())
        if next(tries):
            raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "rmdir", remove)
    storage.remove_group(str(tmp_path / "slow"), str(tmp_path))
    assert moved == ["12"] * 3  # each process in turn
    assert clock.now == pytest.approx(100.1)
    storage.remove_group(str(tmp_path / "none"), str(tmp_path))
    assert len(moved) == 3


def test_a_group_that_stays_busy_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("mlbench_cli.agent.storage.time", clock)
    (tmp_path / "file").touch()
    storage.remove_group(str(tmp_path))
    assert 105.0 <= clock.now < 105.1
    assert os.listdir(tmp_path) == ["file"]


def test_whether_a_disk_can_be_slowed_is_tried_with_an_empty_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Slow:
        def __init__(self, name: str, disks: list[str], rate: float) -> None:
            made.append((name, disks, rate))

        def remove(self) -> None:
            made.append("removed")

    monkeypatch.setattr(storage, "SlowGroup", Slow)
    monkeypatch.setattr(storage, "find_disk", lambda path: f"of {path}")
    storage.try_to_slow("/data")
    assert made == [(f"mlbench-try-{os.getpid()}", ["of /data"], 1e9), "removed"]


# --- samples --------------------------------------------------------------------------------------------------------


def stat(
    state: str = "R", user: int = 0, system: int = 0, children: tuple[int, int] = (0, 0), pages: int = 0
) -> list[str]:
    """Fields of /proc/PID/stat from the third one on: 14 to 17 are CPU times in ticks, 24 resident pages (proc(5))."""
    fields = ["7"] * 50
    fields[0] = state
    for number, value in zip((14, 15, 16, 17, 24), (user, system, *children, pages), strict=True):
        fields[number - 3] = str(value)
    return fields


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """Processes and their fields: 11 is a rank with the child 21, 12 a rank, 31 an orphan."""
    found = {
        11: stat(user=100, system=50, children=(20, 30), pages=3),
        21: stat(user=10, pages=2),
        12: stat(user=400, pages=1),
        31: stat(user=1000),
    }
    children = {os.getpid(): [11, 12, 31], 11: [21]}
    files = {
        "/proc/11/io": "rchar: 9\nread_bytes: 5\nwrite_bytes: 6\n",
        "/proc/21/io": "rchar: 9\nread_bytes: 50\nwrite_bytes: 60\n",
    }
    monkeypatch.setattr(processes, "stat_fields", found.get)
    monkeypatch.setattr(processes, "process_tree", lambda: children)
    monkeypatch.setattr(processes, "HAS_PROC", True)
    monkeypatch.setattr(machine, "open", open_from(files), raising=False)
    monkeypatch.setattr(machine, "TICKS", 100)
    return found


def test_a_sample_is_of_the_whole_tree_of_a_rank(tree: dict[int, list[str]]) -> None:
    sampler = Sampler()
    first, second = sampler.lines({0: 11, 1: 12})
    moment = first.pop("time")
    assert first == {
        "rank": 0,
        "cpu_seconds": 2.1,  # with that of children who have ended
        "rss_bytes": 5 * PAGE,
        "read_bytes": 55,
        "write_bytes": 66,
    }
    assert second == {
        "time": moment,
        "rank": 1,
        "cpu_seconds": 4.0,
        "rss_bytes": PAGE,
        "read_bytes": 0,  # its counters may not be read
        "write_bytes": 0,
    }
    assert sampler.running_seconds == pytest.approx(2.1 + 4.0 + 10.0)  # with what belongs to no rank any more


def test_time_that_was_seen_once_does_not_get_lost(tree: dict[int, list[str]]) -> None:
    sampler = Sampler()
    sampler.lines({0: 11, 1: 12})
    del tree[21], tree[12]
    first, second = sampler.lines({0: 11, 1: 12})
    assert (first["cpu_seconds"], second["cpu_seconds"], second["rss_bytes"]) == (2.1, 4.0, 0)
    assert sampler.running_seconds == pytest.approx(2.0 + 10.0)


def test_without_ranks_or_proc_there_are_no_samples(
    tree: dict[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler()
    sampler.lines({0: 11})
    assert (sampler.lines({}), sampler.running_seconds) == ([], 0.0)
    monkeypatch.setattr(processes, "HAS_PROC", False)
    assert sampler.lines({0: 11}) == []


# --- ports and descriptors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("range_text", "random", "port"),
    [
        ("32768\t60999\n", 0, 15000),
        ("32768\t60999\n", 17767, 32767),
        ("32768\t60999\n", 17768, 15000),
        ("20000 60999\n", 4999, 19999),
        ("20000 60999\n", 5000, 15000),
        ("1024 60999\n", 999, 15999),  # the system uses all of them for itself
        ("1024 60999\n", 1000, 15000),
        (None, 17767, 32767),
        ("nonsense", 17767, 32767),
    ],
)
def test_a_port_is_below_those_that_the_system_gives_to_connections(
    monkeypatch: pytest.MonkeyPatch, range_text: str | None, random: int, port: int
) -> None:
    files = {} if range_text is None else {"/proc/sys/net/ipv4/ip_local_port_range": range_text}
    monkeypatch.setattr(machine, "open", open_from(files), raising=False)
    monkeypatch.setattr(os, "urandom", lambda count: random.to_bytes(count, "big"))

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            """Every port is free."""

    monkeypatch.setattr(socket, "socket", Probe)
    assert machine.free_port() == port


def test_a_port_that_is_in_use_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            tried.append(address)
            if len(tried) < 3:
                raise OSError(errno.EADDRINUSE, "in use")

    numbers = iter(range(7, 2000))
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(os, "urandom", lambda count: next(numbers).to_bytes(count, "big"))
    assert machine.free_port() == 15009
    assert tried == [("", 15007), ("", 15008), ("", 15009)]


def test_a_machine_without_a_free_port_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError(errno.EADDRINUSE, "in use")

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(OSError, match="no free port") as caught:
        machine.free_port()
    assert caught.value.errno == errno.EADDRINUSE


def test_an_agent_keeps_the_descriptors_that_it_is_given_and_passes_none_on(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    passed: list[Any] = []

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        if descriptor == 9:
            raise OSError(errno.EBADF, "the one through which the list was read")

    monkeypatch.setattr(os, "listdir", lambda place: ["0", "1", "2", "3", "7", "9", "12"])
    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(os, "set_inheritable", lambda *words: passed.append(words))
    machine.keep_only(7, -1, 3)
    monkeypatch.undo()
    assert (closed, passed) == ([9, 12], [(7, False), (3, False)])


def test_a_pipe_is_drained_to_its_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.write(writer, bytes(10_000))
    machine.drain(reader)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(writer)
    machine.drain(reader)
    os.close(reader)


class Exited(BaseException):
    """A child ends with this code."""


def test_a_guard_is_a_child_that_holds_the_other_end_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: 4711)
    writer = machine.start_guard(lambda reader: pytest.fail("the parent does not do the work"))
    with pytest.raises(BrokenPipeError):  # the end that is read from is the child's
        os.write(writer, b"x")
    os.close(writer)


@pytest.mark.parametrize("fails", [False, True])
def test_only_kill_ends_a_guard_before_its_work_is_done(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    done: list[Any] = []

    def leave(code: int) -> None:
        raise Exited(code)

    def work(reader: int) -> None:
        done.append(os.read(reader, 10))  # its end, since the child holds no other end
        os.close(reader)
        if fails:
            raise ValueError("a mistake")

    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "setsid", lambda: done.append("session"))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signal, "signal", lambda number, what: done.append((number, what)))
    with pytest.raises(Exited) as caught:
        machine.start_guard(work)
    assert caught.value.args == (0,)
    ignored = [(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert done == ["session", *ignored, b""]


@pytest.mark.parametrize(("is_durable", "syncs"), [(True, 1), (False, 0)])
def test_only_a_document_that_must_survive_a_crash_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool, syncs: int
) -> None:
    """A state is written with each change, and syncing takes milliseconds."""
    called: list[int] = []
    monkeypatch.setattr(os, "fsync", called.append)
    machine.replace_file(str(tmp_path / "state"), {"a": 1}, is_durable=is_durable)
    assert len(called) == syncs


@pytest.mark.parametrize(("platform", "peak"), [("linux", 2048 * 1024), ("darwin", 2048)])
def test_the_largest_size_of_a_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch, platform: str, peak: int) -> None:
    """getrusage(2): kibibytes on Linux, bytes on macOS."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("mlbench_cli.agent.machine.time", SimpleNamespace(time=lambda: 1000.12345))
    usage = SimpleNamespace(ru_utime=0.0, ru_stime=0.0, ru_maxrss=2048)
    assert Sampler().last(3, usage) == {
        "time": 1000.123,
        "rank": 3,
        "cpu_seconds": 0.0,
        "rss_bytes": 0,
        "peak_rss_bytes": peak,
    }


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[streams.ErrorPipe]:
    for name in ("logs", ".state"):
        (tmp_path / name).mkdir()
    made = streams.ErrorPipe(str(tmp_path), 3)
    yield made
    made.close()


def test_a_rank_that_complains_without_end_leaves_the_agent_time_for_others(
    pipe: streams.ErrorPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(descriptor: int, size: int) -> bytes:
        reads.append(size)
        return b"x"

    monkeypatch.setattr(os, "read", read)
    assert pipe.copy() is True
    monkeypatch.undo()
    assert reads == [64 * 1024] * 16
    pipe.begin()


def test_a_piece_that_is_written_in_parts_is_noted_in_parts(
    pipe: streams.ErrorPipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    os.write(pipe.writer, b"abcde")
    monkeypatch.setattr(
        os, "write", lambda descriptor, data: write(descriptor, data[:2] if descriptor == pipe._log else data)
    )
    assert pipe.copy() is True
    monkeypatch.undo()
    assert (tmp_path / "logs/rank-3.log").read_bytes() == b"abcde"
    assert (tmp_path / ".state/stderr-3").read_bytes() == b"0 2\n2 2\n4 1\n"
    pipe.begin()


# --- processes ------------------------------------------------------------------------------------------------------


def test_what_is_found_is_killed_until_three_looks_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may start another one while it is looked for."""
    clock = Clock(100.0)
    looks = iter([[11, 12], [], [13], [], [], []])
    killed: list[Any] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 12:
            raise PermissionError

    monkeypatch.setattr("mlbench_cli.agent.processes.time", clock)
    monkeypatch.setattr(processes, "find_processes", lambda folder, arguments: next(looks))
    monkeypatch.setattr(os, "kill", kill)
    assert processes.kill_processes("/run", arguments=True) == ([11, 12, 13], [])
    assert killed == [(pid, signal.SIGKILL) for pid in (11, 12, 13)]
    assert next(looks, None) is None


def test_what_cannot_be_killed_is_left_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("mlbench_cli.agent.processes.time", clock)
    monkeypatch.setattr(processes, "find_processes", lambda folder, arguments: [11])
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert processes.kill_processes("/run") == ([11], [11])
    assert 105.0 <= clock.now < 105.1


def test_all_descendants_are_killed_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    killed: list[Any] = []
    ends = iter([21, 0, 22, 0])

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        assert (pid, options) == (-1, os.WNOHANG)
        for end in ends:
            return end, 0
        raise ChildProcessError

    monkeypatch.setattr("mlbench_cli.agent.processes.time", clock)
    monkeypatch.setattr(processes, "HAS_PROC", True)
    monkeypatch.setattr(processes, "process_tree", lambda: {os.getpid(): [11], 11: [12]})
    monkeypatch.setattr(os, "waitpid", waitpid)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    processes.kill_descendants()
    assert killed == [(11, signal.SIGKILL), (12, signal.SIGKILL)] * 2


def test_descendants_that_do_not_end_are_given_up_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("mlbench_cli.agent.processes.time", clock)
    monkeypatch.setattr(processes, "HAS_PROC", False)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    processes.kill_descendants()
    assert 105.0 <= clock.now < 105.1


# --- locks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5.0, "0 s"),
        (99.4, "99 s"),
        (100.0, "2 min"),
        (5999.0, "100 min"),
        (6000.0, "1.67 h"),
        (86_400.0, "24 h"),
    ],
)
def test_durations_are_told_as_people_do(seconds: float, text: str) -> None:
    assert lock._format_duration(seconds) == text


def test_the_holder_of_a_machine_is_written_for_those_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.agent.lock.time", SimpleNamespace(time=lambda: 1000.12345))
    monkeypatch.setattr(lock, "_user_name", lambda: "ann")
    path = tmp_path / "lock"
    path.write_text("x" * 1000)
    descriptor = os.open(path, os.O_RDWR)
    lock.write_holder(descriptor, "x-2", 600.0)
    assert json.loads(path.read_text()) == {"run": "x-2", "user": "ann", "since": 1000.123, "deadline": 1600.123}
    assert lock.read_holder(descriptor) == LockHolder("x-2", "ann", 1000.123, 1600.123)
    os.close(descriptor)
    holder = LockHolder("x-2", "ann", 820.12345, 8200.12345)
    assert lock.describe_holder(holder) == "x-2 of user ann, running for 3 min, at most 2 h more"


# --- energy ---------------------------------------------------------------------------------------------------------


def test_energy_is_that_of_all_zones_and_counters_begin_again(tmp_path: Path) -> None:
    for number, (name, counter) in enumerate((("package-0", 1_000_000), ("dram", 5_000_000), ("psys", 1), ("core", 1))):
        zone = tmp_path / f"sys/class/powercap/intel-rapl:{number}"
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text(f"{counter}\n")
        (zone / "max_energy_range_uj").write_text("10000000\n")
    meter = load.LoadMeter("held", root=str(tmp_path))
    zone = tmp_path / "sys/class/powercap"
    (zone / "intel-rapl:0/energy_uj").write_text("3500000\n")
    (zone / "intel-rapl:1/energy_uj").write_text("1000000\n")  # it began again
    assert meter.row(0.0)["cpu_joules"] == pytest.approx(2.5 + 6.0)
    (zone / "intel-rapl:1/energy_uj").unlink()
    (zone / "intel-rapl:0/energy_uj").write_text("3600000\n")
    assert meter.row(0.0)["cpu_joules"] == pytest.approx(8.6)


def test_a_death_of_the_parent_is_asked_for_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    library = SimpleNamespace(prctl=lambda *words: calls.append(words))
    monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: library)
    monkeypatch.setattr(sys, "platform", "darwin")
    machine.prctl(machine.PR_SET_PDEATHSIG, 9)
    assert calls == []
    monkeypatch.setattr(sys, "platform", "linux")
    machine.prctl(machine.PR_SET_PDEATHSIG, 9)
    machine.prctl(machine.PR_SET_CHILD_SUBREAPER, 1)
    assert calls == [(1, 9, 0, 0, 0), (36, 1, 0, 0, 0)]  # by linux/prctl.h
