"""A second Slurm beside that of the fleet, with what that lacks: GPUs (null devices), switches, and memory limits."""

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
def second_slurm(folder: Path, offset: int = 200) -> Iterator[Path]:
    """Its configuration file; all of its daemons are gone afterwards. It uses the fleet's munge."""
    known = Path(os.environ["SLURM_CONF"])
    conf = _write_configuration(known, folder, offset)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    try:
        subprocess.run(["slurmctld"], env=environment, check=True, timeout=60)
        for number in range(1, NODES + 1):
            subprocess.run(["slurmd", "-N", f"n{number}"], env=environment, check=True, timeout=60)
        _await_nodes(environment)
        yield conf
    finally:
        for path in [folder / "controller.pid", *folder.glob("n*.pid")]:
            with suppress(OSError, ValueError):
                _stop(int(path.read_text()))


def _write_configuration(known: Path, folder: Path, offset: int) -> Path:
    for name in ("controller", "log", "dev", *(f"n{number}" for number in range(1, NODES + 1))):
        (folder / name).mkdir(parents=True)
    for number in range(GPUS):
        os.mknod(folder / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
    lines = []
    for line in known.read_text().replace(str(known.parent), str(folder)).splitlines():
        line = re.sub(r"(Port=)(\d+)", lambda found: f"{found[1]}{int(found[2]) + offset}", line)
        if line.startswith("NodeName="):
            line = re.sub(r"RealMemory=\d+", f"RealMemory={MEMORY}", line) + f" Gres=gpu:lab:{GPUS}"
            if int(line.split()[0].removeprefix("NodeName=n")) > NODES:
                continue
        lines.append(re.sub(r"n\[1-\d+\]", f"n[1-{NODES}]", line))
    lines += ["GresTypes=gpu", "TopologyPlugin=topology/tree", "SelectTypeParameters=CR_Core_Memory"]
    lines += [
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=1",
        "JobAcctGatherParams=OverMemoryKill",
    ]
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    (folder / "gres.conf").write_text(f"Name=gpu Type=lab File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
    switches = ["SwitchName=s1 Nodes=n[1-2]", "SwitchName=s2 Nodes=n3", "SwitchName=s0 Switches=s[1-2]"]
    (folder / "topology.conf").write_text("\n".join(switches) + "\n")
    return conf


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
