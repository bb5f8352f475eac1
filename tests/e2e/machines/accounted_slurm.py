"""A Slurm with a real accounting database, limits of accounts and QOS, preemption, and memory kept by cgroups."""

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.machines.second_slurm import MEMORY, NODES, add_lines, running_slurm, write_configuration

MACHINES = Path(__file__).with_name("machines.sh")
CGROUP = "CgroupPlugin={plugin}\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n{more}"
# Account "bench" is root's default; "full" may use no CPU; QOS "tight" gives one job at a time, and one node to a job.
ASSOCIATIONS = (
    *("add account bench", "add account full", "modify account full set GrpTRES=cpu=0"),
    "add qos tight MaxJobsPerUser=1 MaxTRESPerJob=node=1",
    *("add user root account=bench", "modify user root set defaultaccount=bench"),
    *("modify user root set qos=normal,tight defaultqos=normal", "add user root account=full"),
    "add user nobody account=bench",
)


@contextmanager
def accounted_slurm(folder: Path) -> Iterator[Path]:
    """Its configuration; partition "urgent" preempts jobs of "all". A job is forgotten two seconds after its end."""
    started = subprocess.run([MACHINES, "database"], capture_output=True, text=True, timeout=280, check=False)
    assert started.returncode == 0, started.stderr
    conf = write_configuration(folder, 400, MEMORY)
    add_lines(
        conf,
        *started.stdout.splitlines(),
        f"ClusterName=c{uuid.uuid4().hex[:8]}",
        "AccountingStorageEnforce=associations,limits,qos",
        *("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL", "MinJobAge=2"),
        *("ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup", "SelectTypeParameters=CR_Core_Memory"),
        *(f"PartitionName=urgent Nodes=n[1-{NODES}] MaxTime=INFINITE PriorityTier=9 State=UP",),
    )
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    more = "IgnoreSystemd=yes\n" if version_2 else ""
    (folder / "cgroup.conf").write_text(CGROUP.format(plugin="cgroup/v2" if version_2 else "cgroup/v1", more=more))
    try:
        add_associations(conf)
        with running_slurm(conf):
            yield conf
    finally:
        remove_cgroups()


def add_associations(conf: Path) -> None:
    """The cluster's accounts, as its administrators would add them."""
    cluster = next(line for line in conf.read_text().splitlines() if line.startswith("ClusterName="))
    for words in (f"add cluster {cluster.partition('=')[2]}", *ASSOCIATIONS):
        change_associations(conf, words)


def change_associations(conf: Path, words: str) -> None:
    """One change, by sacctmgr; one that changes nothing is no error."""
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    command = ["sacctmgr", "-i", *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 or "Nothing" in done.stdout + done.stderr, (words, done.stdout, done.stderr)


def remove_cgroups(seconds: float = 20.0) -> None:
    """What slurmd leaves in the hierarchies of cgroups when it ends; they are empty then."""
    end = time.monotonic() + seconds
    while found := [*Path("/sys/fs/cgroup").glob("*/slurm_n*"), *Path("/sys/fs/cgroup").glob("slurm_n*")]:
        for root in found:
            for path in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
                with suppress(OSError):
                    path.rmdir()
            with suppress(OSError):
                root.rmdir()
        if time.monotonic() > end:
            return
        time.sleep(0.2)
