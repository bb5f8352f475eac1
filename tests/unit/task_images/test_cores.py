"""CPU quotas as the kernel shows them: both versions, nested groups, containers, and a real group if possible."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from task_images.cores import (
    PINNED_FROM,
    cpu_quota,
    effective_cores,
    pinned_cpus,
    read_throttling,
    share_cpus,
)
from task_images.facts import machine_facts

V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def system(folder: Path, groups: str, mounts: str, files: dict[str, str]) -> str:
    """A root with proc/ and sys/fs/cgroup/ in `folder`."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    (folder / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def v1(quota: int, period: int = 100000) -> dict[str, str]:
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}


def at(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


CASES = {
    "no quota, version 2": ("0::/a/b\n", V2.format(top="/"), {"a/b/cpu.max": "max 100000\n"}, None),
    "half a core, version 2": ("0::/a\n", V2.format(top="/"), {"a/cpu.max": "50000 100000\n"}, 0.5),
    "the smallest of nested groups, version 2": (
        *("0::/a/b/c\n", V2.format(top="/")),
        *({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "400000 100000\n", "a/b/c/cpu.max": "max 100000\n"}, 2.0),
    ),
    "a container with a group namespace, version 2": (
        *("0::/\n", V2.format(top="/"), {"cpu.max": "150000 100000\n"}, 1.5),
    ),
    "a process outside of its namespace's group, version 2": (
        *("0::/../other\n", V2.format(top="/"), {"cpu.max": "300000 100000\n"}, 3.0),
    ),
    "no quota, version 1": (
        *("4:cpu,cpuacct:/a\n", V1.format(top="/"), at("cpu,cpuacct/a", v1(-1)) | at("cpu,cpuacct", v1(-1)), None),
    ),
    "half a core, version 1": (
        *("9:memory:/x\n4:cpu,cpuacct:/a\n", V1.format(top="/"), at("cpu,cpuacct/a", v1(50000)), 0.5),
    ),
    "the smallest of nested groups, version 1": (
        *("4:cpu,cpuacct:/a/b\n", V1.format(top="/")),
        *(at("cpu,cpuacct/a", v1(20000, 10000)) | at("cpu,cpuacct/a/b", v1(800000)), 2.0),
    ),
    "docker without a group namespace, version 1": (
        *("4:cpu,cpuacct:/docker/0f1e\n", V1.format(top="/docker/0f1e"), at("cpu,cpuacct", v1(200000)), 2.0),
    ),
    "only cpuset and cpuacct have groups": (
        *("4:cpuset,cpuacct:/a\n", V1.format(top="/"), at("cpu,cpuacct/a", v1(50000)), None),
    ),
    "both versions mounted, the quota in version 1": (
        *("4:cpu:/a\n0::/\n", V1.format(top="/") + V2.format(top="/").replace("/cgroup ", "/cgroup/unified ")),
        *(at("cpu,cpuacct/a", v1(50000)), 0.5),
    ),
    "rubbish": ("x\n::\n4:cpu\n", "a - b\n - \n" + V2.format(top="/"), {"cpu.max": "soon\n"}, None),
    "a period of zero": ("0::/\n", V2.format(top="/"), {"cpu.max": "5 0\n"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_quota_is_found(tmp_path: Path, case: str) -> None:
    groups, mounts, files, quota = CASES[case]
    root = system(tmp_path, groups, mounts, files)
    assert cpu_quota(root) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (0.5, 1), (1.0, 1), (2.5, 2), (3.99, 3), (16.0, 4)])
def test_a_quota_counts_as_whole_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    text = "max 100000\n" if quota is None else f"{int(quota * 100000)} 100000\n"
    root = system(tmp_path, "0::/\n", V2.format(top="/"), {"cpu.max": text})
    assert effective_cores(root) == cores


def test_throttling_is_the_sum_over_the_nested_groups(tmp_path: Path) -> None:
    new = system(
        tmp_path / "new",
        *("0::/a\n", V2.format(top="/")),
        {"a/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n", "cpu.stat": "nr_throttled 1\n"},
    )
    old = system(
        tmp_path / "old",
        *("4:cpu,cpuacct:/a\n", V1.format(top="/")),
        {"cpu,cpuacct/a/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n"},
    )
    none = read_throttling(str(tmp_path / "none"))
    assert [(found.periods, found.seconds) for found in map(read_throttling, (new, old))] == [(4, 1.5), (3, 1.5)]
    assert (none.periods, none.seconds) == (0, 0.0)


@pytest.fixture
def tenth_of_a_core() -> Iterator[Path]:
    """A real control group with a tenth of a core, which a process also uses up on a busy machine.

    Needs root and a version 1 hierarchy, or a version 2 one with cpu.
    """
    parent = next(place for name in ("cpu", "cpu,cpuacct", "") if (place := Path("/sys/fs/cgroup", name)).is_dir())
    group = parent / f"mlbench-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("control groups cannot be made here")
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("10000 100000")
        elif (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            pytest.skip("control groups have no CPU quota here")
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def test_a_real_group_of_a_tenth_of_a_core(tenth_of_a_core: Path) -> None:
    script = (
        "import time; from task_images import cores\n"
        "before = cores.read_throttling().periods; end = time.monotonic() + 60\n"
        "while cores.read_throttling().periods == before and time.monotonic() < end: pass\n"
        "print(cores.cpu_quota(), cores.effective_cores(), cores.read_throttling().periods > before)"
    )
    join = f'echo $$ > "{tenth_of_a_core}/cgroup.procs"; exec "$0" -c "$1"'
    done = subprocess.run(["sh", "-c", join, sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.1", "1", "True"]


def topology(root: str, places: dict[int, tuple[int, int]]) -> None:
    for cpu, (socket, core) in places.items():
        folder = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology")
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")


def test_ranks_share_cpus_so_that_those_of_a_core_stay_together(tmp_path: Path) -> None:
    """Eight CPUs on two sockets of two cores each; the second CPU of a core comes four numbers later."""
    root = system(tmp_path, "0::/\n", V2.format(top="/"), {})
    topology(root, {cpu: (cpu % 4 // 2, cpu % 2) for cpu in range(8)})
    assert share_cpus(range(8), 4, root) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert share_cpus(range(8), 2, root) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert share_cpus(range(8), 3, root) == [[0, 4], [1, 5], [2, 6]]  # equally many, so two are left over
    assert share_cpus([1, 2, 5], 1, root) == [[1, 2, 5]]


def test_more_ranks_than_cpus_or_than_the_quota_pays_for_are_refused(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/a\n", V2.format(top="/"), {"a/cpu.max": "250000 100000\n"})
    assert share_cpus(range(8), 2, root) == [[0, 1, 2, 3], [4, 5, 6, 7]], "a quota is time, not a choice of CPUs"
    with pytest.raises(ValueError, match="3 processes cannot each have their own CPUs: only 2 are available"):
        share_cpus(range(8), 3, root)
    with pytest.raises(ValueError, match="2 processes cannot each have their own CPUs: only 1 are available"):
        share_cpus([5], 2, str(tmp_path / "nothing"))


def test_a_bound_rank_reports_its_machine_and_its_own_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pinned_cpus" not in machine_facts()
    assert pinned_cpus() is None
    monkeypatch.setenv(PINNED_FROM, "0,1,2,3,4,5")
    facts = machine_facts()
    assert facts["cores"] == effective_cores(str(tmp_path)) == 6
    assert facts["pinned_cpus"] == sorted(os.sched_getaffinity(0))
