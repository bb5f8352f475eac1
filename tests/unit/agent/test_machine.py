"""What an agent reads of its machine: devices, memory, clocks, interfaces, streams and control groups."""

import errno
import json
import os
import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import clock, interfaces, machine, processes, storage
from mlbench_cli.agent.clock import ClockWatch, read_clocks
from mlbench_cli.agent.interfaces import find_interface, list_addresses
from mlbench_cli.agent.machine import Sampler, gpus_of_worker, is_full, replace_file, risen, visible_gpus
from mlbench_cli.agent.messages import fill_in, pending_facts
from mlbench_cli.agent.storage import SlowGroup
from mlbench_cli.agent.streams import ErrorPipe
from task_images.harness import cores

# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "files", "found"),
    [
        ("0,2", ["nvidia0"], ["0", "2"]),
        ("", ["nvidia0"], []),
        ("GPU-abc", [], ["GPU-abc"]),
        (None, ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"], ["2", "10"]),
        (None, ["kfd"], ["0", "1"]),
        (None, ["kfd", "nvidia0"], ["0"]),
        (None, ["null"], []),
    ],
)
def test_gpus_are_those_of_the_environment_or_of_the_kernel(
    tmp_path: Path, given: str | None, files: list[str], found: list[str]
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, gpu in enumerate(("0", "4098", "4099", "no number")):  # 0 is a CPU
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(gpu)
    (nodes / "9").mkdir()
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environ, str(tmp_path)) == found
    assert visible_gpus({}, str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    ("worker", "count", "devices"),
    [(0, 2, ["a", "b"]), (1, 2, ["c", "a"]), (2, 1, ["c"]), (3, 1, ["a"]), (0, 4, ["a", "b", "c"]), (0, 0, [])],
)
def test_workers_share_devices_if_there_are_too_few(worker: int, count: int, devices: list[str]) -> None:
    assert gpus_of_worker(worker, count, ["a", "b", "c"]) == devices


@pytest.mark.parametrize(
    ("before", "after", "which"),
    [
        ({}, {}, None),
        ({"cgroup": 1, "machine": 1}, {"cgroup": 1, "machine": 1}, None),
        ({"cgroup": 1, "machine": 1}, {"cgroup": 2, "machine": 2}, "cgroup"),
        ({"cgroup": 1, "machine": 1}, {"cgroup": 1, "machine": 2}, "machine"),
        ({}, {"machine": 1}, "machine"),
        ({"machine": 1}, {}, None),
    ],
)
def test_which_count_of_memory_kills_has_risen(
    before: dict[str, int], after: dict[str, int], which: str | None
) -> None:
    assert risen(before, after) == which


def test_a_rank_that_has_not_started_and_a_command_that_is_filled_in() -> None:
    facts = pending_facts(3)
    assert (facts["rank"], facts["phase"], facts["stopped"]) == (3, "pending", False)
    assert {value for key, value in facts.items() if key not in ("rank", "phase", "stopped")} == {None}
    assert fill_in(["{rank}", "{rank}-{x}{hosts}"], {"rank": "3", "hosts": "a,b"}) == ["3", "3-{x}a,b"]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_document_is_replaced_as_a_whole(tmp_path: Path, is_private: bool, mode: int) -> None:
    path = tmp_path / "state.json"
    replace_file(str(path), {"a": 1}, is_private=is_private)
    replace_file(str(path), {"a": 2}, is_private=is_private, is_durable=True)
    assert json.loads(path.read_text()) == {"a": 2}
    assert path.stat().st_mode & 0o777 == mode & ~current_umask()
    assert [item.name for item in tmp_path.iterdir()] == ["state.json"]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(("number", "found"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_full_disk_or_quota_is_told_from_other_errors(number: int, found: bool) -> None:
    assert is_full(OSError(number, "x")) is found


def test_standard_error_is_part_of_the_log_and_its_places_are_noted(tmp_path: Path) -> None:
    for name in ("logs", ".state"):
        (tmp_path / name).mkdir()
    log = tmp_path / "logs" / "rank-3.log"
    log.write_bytes(b"out\n")
    pipe = ErrorPipe(str(tmp_path), 3)
    assert pipe.copy()
    os.write(pipe.writer, b"error\n")
    assert pipe.copy()
    with open(log, "ab") as file:
        file.write(b"more\n")
    os.write(pipe.writer, b"last")
    pipe.begin()
    assert not pipe.copy()
    pipe.close()
    assert log.read_bytes() == b"out\nerror\nmore\nlast"
    assert (tmp_path / ".state" / "stderr-3").read_bytes() == b"4 6\n15 4\n"


# --- samples ---------------------------------------------------------------------------------------------------------


def test_the_last_sample_of_a_rank_has_all_its_time_and_never_less_than_before() -> None:
    sampler = Sampler()
    usage = SimpleNamespace(ru_utime=1.25, ru_stime=0.5, ru_maxrss=2048)
    line = sampler.last(3, usage)
    assert {key: line[key] for key in line if key != "time"} == {
        "rank": 3,
        "cpu_seconds": 1.75,
        "rss_bytes": 0,
        "peak_rss_bytes": 2048 * 1024,
    }
    less = SimpleNamespace(ru_utime=1.0, ru_stime=0.5, ru_maxrss=1)
    assert sampler.last(3, less)["cpu_seconds"] == 1.75
    assert sampler.last(4, less)["cpu_seconds"] == 1.5
    assert sampler.lines({}) == []


def test_waiting_for_a_cpu_does_not_put_off_the_next_look_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most half a percent of a core: after 10 ms of CPU time the next look comes after 2 s, and one that also waited
    for three seconds is no dearer."""
    clocks = {"monotonic": 100.0, "thread_time": 5.0}
    looks = []

    def look() -> dict[int, list[int]]:
        looks.append(clocks["monotonic"])
        clocks["monotonic"] += 3.0
        clocks["thread_time"] += 0.01
        return {}

    monkeypatch.setattr(
        machine, "time", SimpleNamespace(time=time.time, **{name: partial(clocks.get, name) for name in clocks})
    )
    monkeypatch.setattr(processes, "process_tree", look)
    sampler = Sampler()
    for later in (0.0, 1.9, 0.2, 0.0):
        clocks["monotonic"] += later
        sampler.lines({0: 1})
    sampler.lines({0: 1, 1: 1})  # another rank
    assert looks == [pytest.approx(moment) for moment in (100.0, 105.1, 108.1)]


# --- clocks ----------------------------------------------------------------------------------------------------------


class Clocks:
    """Two clocks. `gap`: how long a read of both takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ahead, self.gap = 1000.0, 500.0, 0.0
        monkeypatch.setattr(clock, "time", self)

    def monotonic(self) -> float:
        self.now += self.gap / 2
        return self.now

    def time(self) -> float:
        self.now += self.gap / 2
        return self.now + self.ahead


def test_steps_of_the_wall_clock_are_added_up_without_their_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    watch = ClockWatch()
    assert watch.check() == 0.0
    clocks.ahead += 2.0
    assert watch.check() == 2.0
    clocks.ahead -= 0.5
    assert (watch.check(), watch.check()) == (2.5, 2.5)


@pytest.mark.parametrize(
    ("seconds", "jump", "is_step"), [(0, 0.019, False), (0, 0.021, True), (100, 0.069, False), (100, 0.071, True)]
)
def test_what_ntp_may_slew_is_no_step(
    monkeypatch: pytest.MonkeyPatch, seconds: float, jump: float, is_step: bool
) -> None:
    """20 ms, and half a millisecond a second."""
    clocks = Clocks(monkeypatch)
    watch = ClockWatch()
    clocks.now += seconds
    clocks.ahead += jump
    assert (watch.check() > 0) is is_step


def test_clocks_are_read_with_their_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    clocks.gap = 0.004
    _, difference, error = read_clocks()
    assert difference == pytest.approx(500.0)
    assert error == pytest.approx(0.002)
    watch = ClockWatch()
    clocks.ahead += 0.0239  # 20 ms, and 2 ms for each of the two reads
    assert watch.check() == 0.0
    clocks.ahead += 0.03
    assert watch.check() == 0.03


# --- interfaces ------------------------------------------------------------------------------------------------------

OWN = [
    ("lo", "127.0.0.1", "255.0.0.0"),
    ("docker0", "172.17.0.1", "255.255.0.0"),
    ("eth0", "10.0.0.5", "255.255.255.0"),
    ("ib0", "10.1.0.5", "255.255.0.0"),
]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: OWN)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.5", "eth0"),
        ("10.0.0.9", "eth0"),
        ("10.1.9.9", "ib0"),
        ("172.17.0.1", "docker0"),
        ("127.0.0.9", "lo"),
        ("10.0.1.9", None),
    ],
)
def test_an_address_belongs_to_an_interface_or_to_its_network(address: str, name: str | None) -> None:
    assert find_interface(address) == name


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("10.1.0.5", ["10.1.0.5", "10.0.0.5", "127.0.0.1"]),
        ("127.0.1.1", ["10.0.0.5", "10.1.0.5", "127.0.1.1", "127.0.0.1"]),
        (None, ["10.0.0.5", "10.1.0.5", "127.0.0.1"]),
    ],
)
def test_addresses_that_others_may_reach_come_first(
    monkeypatch: pytest.MonkeyPatch, host: str | None, found: list[str]
) -> None:
    def look_up(name: str) -> str:
        if host is None:
            raise OSError("unknown")
        return host

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    assert list_addresses(None) == found
    assert list_addresses("ib0") == ["10.1.0.5"]
    assert list_addresses("eth9") == []


# --- slow storage ----------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the control groups of version 2."""
    monkeypatch.setattr(storage, "find_hierarchy", lambda: (2, str(tmp_path)))
    return tmp_path


def test_a_group_of_version_2_limits_reads_and_writes_of_a_disk(groups: Path) -> None:
    announced: list[str] = []
    group = SlowGroup("slow", ["8:0"], 5e6 + 0.4, announced.append)
    assert announced == [group.folder] == [str(groups / "slow")]
    assert (groups / "cgroup.subtree_control").read_text() == "+io"
    assert (groups / "slow" / "io.max").read_text() == "8:0 rbps=5000000 wbps=5000000"
    assert group.read_bytes() is None
    (groups / "slow" / "io.stat").write_text("8:0 rbytes=3 wbytes=4 rios=9\n8:16 rbytes=5 wbytes=0\n")
    assert group.read_bytes() == 12


def test_a_group_of_version_1_limits_reads_and_writes_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "find_hierarchy", lambda: (1, str(tmp_path)))
    group = SlowGroup("slow", ["8:0"], 5e6)
    for kind in ("read", "write"):
        assert (tmp_path / "slow" / f"blkio.throttle.{kind}_bps_device").read_text() == "8:0 5000000"
    (tmp_path / "slow" / "blkio.throttle.io_service_bytes_recursive").write_text("8:0 Read 3\n8:0 Total 12\nTotal 12\n")
    assert group.read_bytes() == 12
    assert not (tmp_path / "cgroup.subtree_control").exists()


def test_a_process_is_taken_in_and_its_group_remembered(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (groups / "user").mkdir()
    group = SlowGroup("slow", ["8:0"], 5e6)
    monkeypatch.setattr(group, "_group_of", lambda pid: str(groups / "user"))
    group.add(77)
    assert (groups / "slow" / "cgroup.procs").read_text() == "77"
    removed: list[Any] = []
    monkeypatch.setattr(storage, "remove_group", lambda *places: removed.append(places))
    group.remove()
    assert removed == [(str(groups / "slow"), str(groups / "user"))]


def test_a_disk_that_the_kernel_does_not_limit_leaves_no_group(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowGroup, "_limits", lambda self, disk, rate: [("no/such/file", "x")])
    with pytest.raises(OSError, match="no/such/file"):
        SlowGroup("slow", ["8:0"], 5e6)
    assert not (groups / "slow").exists()


@pytest.mark.parametrize(
    ("mounts", "controllers", "found"),
    [
        ("33 22 0:28 / {0}/blkio rw shared:9 - cgroup cgroup rw,blkio\n", None, (1, "blkio")),
        ("26 22 0:23 / {0}/unified rw - cgroup2 cgroup2 rw\n", "cpu io memory", (2, "unified")),
        ("26 22 0:23 / {0}/unified rw - cgroup2 cgroup2 rw\n", "cpu memory", None),
        (
            "26 22 0:23 / {0}/unified rw - cgroup2 cgroup2 rw\n33 22 0:28 / {0}/blkio rw - cgroup cgroup rw,blkio\n",
            "io",
            (1, "blkio"),
        ),
        ("30 22 0:26 / {0}/cpu rw - cgroup cgroup rw,cpu\n31 22 0:27 / {0} rw - tmpfs tmpfs rw,blkio\n", None, None),
    ],
)
def test_the_control_groups_that_can_limit_disks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mounts: str,
    controllers: str | None,
    found: tuple[int, str] | None,
) -> None:
    for name in ("blkio", "unified", "cpu"):
        (tmp_path / name).mkdir()
    if controllers is not None:
        (tmp_path / "unified" / "cgroup.controllers").write_text(controllers)
    (tmp_path / "mounts").write_text(mounts.format(tmp_path))
    read_lines = cores.read_lines

    def read_others(path: str) -> list[str]:
        return read_lines(str(tmp_path / "mounts") if path == "//proc/self/mountinfo" else path)

    monkeypatch.setattr(cores, "read_lines", read_others)
    if found is None:
        with pytest.raises(OSError, match="no control groups that limit disks"):
            storage.find_hierarchy()
        return
    version, name = found
    assert storage.find_hierarchy() == (version, str(tmp_path / name))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="the right to create control groups"):
        storage.find_hierarchy()


def test_memory_limits_and_kills_of_this_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "0::/a\n3:memory,x:/b\n4:cpu:/c\n",
        "/sys/fs/cgroup/a/memory.max": "max\n",
        "/sys/fs/cgroup/memory/b/memory.limit_in_bytes": "3000000\n",
        "/proc/meminfo": "MemTotal:       4000 kB\nMemFree:  1 kB\n",
        "/sys/fs/cgroup/memory/b/memory.oom_control": "under_oom 0\noom_kill 5\n",
        "/sys/fs/cgroup/memory/memory.oom_control": "oom_kill 9\n",
        "/proc/vmstat": "nr_free 3\noom_kill 7\n",
    }

    def open_other(path: str, **options: Any) -> Any:
        if path not in files:
            raise FileNotFoundError(path)
        place = tmp_path / path.replace("/", "_")
        place.write_text(files[path])
        return open(place, **options)

    monkeypatch.setattr(machine, "open", open_other, raising=False)
    assert machine.memory_limit() == 3_000_000
    assert machine.memory_kills() == {"cgroup": 5, "machine": 7}
    del files["/sys/fs/cgroup/memory/b/memory.limit_in_bytes"]
    assert machine.memory_limit() == 4000 * 1024
    files["/sys/fs/cgroup/a/memory.max"] = "2000\n"
    assert machine.memory_limit() == 2000
    files.clear()
    assert (machine.memory_limit(), machine.memory_kills()) == (None, {})
