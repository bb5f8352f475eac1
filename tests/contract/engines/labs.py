"""A client of each engine that runs on this machine alone: processes, hosts behind a stand-in of ssh, and Slurm's."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.engines.machines.details import HostRecord, HostsDetails, PartitionRecord, SlurmDetails
from mlbench_cli.engines.slurm.engine import SlurmEngine
from mlbench_cli.model.run import Run
from tests.contract.local_runs import Lab, processes_below
from tests.fakes import slurm

HOSTS = ("m0", "m1", "m2")
# OpenSSH hands the words behind the host to the login shell of the user there. The key of the host "stranger" is
# not known here: OpenSSH refuses it unless told otherwise (ssh_config(5), StrictHostKeyChecking).
SSH = """#!/bin/sh
case " $* " in
  *StrictHostKeyChecking=no* | *StrictHostKeyChecking=accept-new*) ;;
  *" stranger "*) echo "Host key verification failed." >&2; exit 255 ;;
esac
for command; do :; done
exec sh -c "$command"
"""


class EngineLab(Lab):
    """A client of one engine, whose machines have their folders in `far`."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind = kind
        self.far = home / "far"
        super().__init__(home, make_engine(kind, self.far))

    def place(self, run: Run) -> Path:
        """Where the run's ranks write."""
        return run.folder / "output" if self.kind == "local" else self.far / "runs" / run.name / "nodes"

    def processes(self, run: Run) -> list[int]:
        """Live processes of the run's ranks."""
        return processes_below(str(self.place(run)))

    def agents(self, run: Run) -> list[int]:
        """The agents of the run, by node."""
        states = [run.folder / ".state/state.json"]
        if self.kind != "local":
            states = sorted(self.place(run).glob("*/.state/state.json"))
        return [json.loads(path.read_text())["pid"] for path in states]


def make_engine(kind: str, far: Path) -> Engine:
    if kind == "local":
        return LocalEngine()
    if kind == "slurm":
        partition = PartitionRecord(max_seconds=None, nodes=3, gpus_per_node=0, default=True)
        return SlurmEngine(
            SlurmDetails(folder=str(far), python=sys.executable, partitions={"all": partition}, kill_wait=2)
        )
    hosts = [HostRecord(name=name, login=name, slots=1, address="127.0.0.1", interface="lo") for name in HOSTS]
    return HostsEngine(HostsDetails(folder=str(far), python=sys.executable, hosts=hosts))


def install_commands(folder: Path) -> dict[str, str]:
    """The variables with which ssh and Slurm's commands are those of this folder."""
    slurm.install(folder / "bin")
    (folder / "bin" / "ssh").write_text(SSH)
    (folder / "bin" / "ssh").chmod(0o755)
    (folder / "slurm").mkdir()
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_CONF": str(folder / "slurm" / "slurm.conf")}


def start_client(kind: str, home: Path, script: str) -> "subprocess.Popen[str]":
    """Another process of the same person: `script` finds `lab` in it."""
    prelude = (
        "import os, sys, time; from pathlib import Path; from mlbench_cli.runs import supervise\n"
        "from tests.contract.engines.labs import EngineLab; lab = EngineLab(sys.argv[1], Path(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", prelude + script, kind, str(home)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
