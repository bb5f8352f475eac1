"""What an agent reads of its machine: devices, memory, clocks, interfaces, streams and control groups."""

import errno
from pathlib import Path

import pytest

from mlbench_cli.agent import interfaces
from mlbench_cli.agent.interfaces import find_interface
from mlbench_cli.agent.machine import gpus_of_worker, is_full, risen, visible_gpus

# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "files", "found"),
    [
        ("0,2", ["nvidia0"], ["0", "2"]),
        ("", ["nvidia0"], []),
        ("GPU-abc", ["nvidia0"], ["GPU-abc"]),
        ("NoDevFiles", ["nvidia0"], []),
        ("0", [], []),
        ("1,-1,0", ["nvidia0", "nvidia1"], ["1"]),
        ("0", ["dxg"], ["0"]),
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


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "found"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_full_disk_or_quota_is_told_from_other_errors(number: int, found: bool) -> None:
    assert is_full(OSError(number, "x")) is found


# --- samples ---------------------------------------------------------------------------------------------------------


# --- clocks ----------------------------------------------------------------------------------------------------------


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


# --- slow storage ----------------------------------------------------------------------------------------------------
