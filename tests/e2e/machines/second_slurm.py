"""More Slurms beside that of the fleet, with what it lacks: GPUs (null devices), switches, limits, and accounting."""

import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

GPUS, NODES, MEMORY = 4, 3, 400


@contextmanager
def second_slurm(folder: Path) -> Iterator[Path]:
    """The configuration of a Slurm with GPUs, switches and memory limits that it enforces by looking at its jobs."""
    conf = write_configuration(folder, 200, MEMORY, node_more=f" Gres=gpu:lab:{GPUS}")
    (folder / "dev").mkdir()
    for number in range(GPUS):
        os.mknod(folder / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
    add_lines(
        conf,
        *("GresTypes=gpu", "TopologyPlugin=topology/tree", "SelectTypeParameters=CR_Core_Memory"),
        *("JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=1", "JobAcctGatherParams=OverMemoryKill"),
    )
    (folder / "gres.conf").write_text(f"Name=gpu Type=lab File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
    switches = ["SwitchName=s1 Nodes=n[1-2]", "SwitchName=s2 Nodes=n3", "SwitchName=s0 Switches=s[1-2]"]
    (folder / "topology.conf").write_text("\n".join(switches) + "\n")
    with running_slurm(conf):
        yield conf


@contextmanager
def running_slurm(conf: Path) -> Iterator[None]:
    """Controller and node daemons of a configuration; all of them are gone afterwards. It uses the fleet's munge."""
    folder, environment = conf.parent, {**os.environ, "SLURM_CONF": str(conf)}
    try:
        subprocess.run(["slurmctld"], env=environment, check=True, timeout=60)
        for number in range(1, NODES + 1):
            subprocess.run(["slurmd", "-N", f"n{number}"], env=environment, check=True, timeout=60)
        _await_nodes(environment)
        yield
    finally:
        for path in [folder / "controller.pid", *folder.glob("n*.pid")]:
            with suppress(OSError, ValueError):
                _stop(int(path.read_text()))


def write_configuration(folder: Path, offset: int, memory: int, node_more: str = "") -> Path:
    """A copy of the fleet's configuration with other folders and ports, and nodes with this memory in MB."""
    known = Path(os.environ["SLURM_CONF"])
    for name in ("controller", "log", *(f"n{number}" for number in range(1, NODES + 1))):
        (folder / name).mkdir(parents=True)
    lines = []
    for line in known.read_text().replace(str(known.parent), str(folder)).splitlines():
        line = re.sub(r"(Port=)(\d+)", lambda found: f"{found[1]}{int(found[2]) + offset}", line)
        if line.startswith("NodeName="):
            line = re.sub(r"RealMemory=\d+", f"RealMemory={memory}", line) + node_more
            if int(line.split()[0].removeprefix("NodeName=n")) > NODES:
                continue
        lines.append(re.sub(r"n\[1-\d+\]", f"n[1-{NODES}]", line))
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    return conf


def add_lines(conf: Path, *lines: str) -> None:
    """Append lines; one that sets what the configuration has already set replaces it."""
    names = {line.partition("=")[0] for line in lines if not line.startswith(("PartitionName=", "NodeName="))}
    kept = [line for line in conf.read_text().splitlines() if line.partition("=")[0] not in names]
    conf.write_text("\n".join([*kept, *lines]) + "\n")


def _await_nodes(environment: Mapping[str, str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    words = ["sinfo", "-h", "-p", "all", "-t", "idle", "-o", "%D"]
    while subprocess.run(words, env=environment, capture_output=True, text=True).stdout.strip() != str(NODES):
        assert time.monotonic() < end, f"nodes are not idle within {seconds:g} s"
        time.sleep(0.2)


def _stop(pid: int, seconds: float = 20.0) -> None:
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
