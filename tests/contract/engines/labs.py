"""A client of each engine that runs on this machine alone: processes, hosts behind a stand-in of ssh, Slurm's, pods.

Each host has a home folder of its own, so that its files are nowhere else.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlbench_cli.engines.base import Engine
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.engines.machines.details import HostsDetails, PartitionRecord, SlurmDetails
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.engines.slurm.engine import SlurmEngine
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Run
from tests.contract.local_runs import Lab, processes_below, until
from tests.fakes import slurm
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet

HOSTS = ("m0", "m1", "m2")
# OpenSSH hands the words behind the host to the login shell of the user there. The key of the host "stranger" is
# not known here: OpenSSH refuses it unless told otherwise (ssh_config(5), StrictHostKeyChecking).
SSH = """#!/bin/sh
case " $* " in
  *StrictHostKeyChecking=no* | *StrictHostKeyChecking=accept-new*) ;;
  *" stranger "*) echo "Host key verification failed." >&2; exit 255 ;;
esac
for word; do host=$command command=$word; done
if [ -e "$LAB_HOMES/$host.down" ]; then
  echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255
fi
export HOME="$LAB_HOMES/$host"
mkdir -p "$HOME"
exec sh -c "$command"
"""


class EngineLab(Lab):
    """A client of one engine; `far` is the folder that its first machine has for runs."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind = kind
        folders = [Path(os.environ["LAB_HOMES"], name, "far") for name in HOSTS] if kind == "hosts" else [home / "far"]
        self.far = folders[0]
        self._folders = folders
        super().__init__(home, make_engine(kind, self.far))

    def places(self, run: Run) -> list[Path]:
        """Where the run's ranks write, on each machine."""
        if self.kind == "local":
            return [run.folder / "output"]
        if self.kind == "kubernetes":
            return [pod_folder(run.name, unit) / "nodes" for unit in range(run.spec.workers)]
        return [folder / "runs" / run.name / "nodes" for folder in self._folders]

    def take_down(self, node: int) -> None:
        """A machine on which nothing starts."""
        if self.kind == "hosts":
            Path(os.environ["LAB_HOMES"]).mkdir(exist_ok=True)
            Path(os.environ["LAB_HOMES"], f"{HOSTS[node]}.down").touch()
        else:
            folder = os.environ["LAB_PODS"] if self.kind == "kubernetes" else Path(os.environ["SLURM_CONF"]).parent
            Path(folder).mkdir(exist_ok=True)
            Path(folder, "down").write_text(str(node))

    def processes(self, run: Run) -> list[int]:
        """Live processes of the run's ranks, by node."""
        return [pid for place in self.places(run) for pid in processes_below(str(place))]

    def agents(self, run: Run) -> list[int]:
        """The agents of the run, by node, once all of them are known."""
        return [json.loads(path.read_text())["pid"] for path in self.states(run)]

    def states(self, run: Run) -> list[Path]:
        """What the run's head has of each node's agent, once all of them are there."""
        states = [run.folder / ".state/state.json"]
        if self.kind != "local":  # the head has the states of all, and the last may still be on its way
            place = pod_folder(f"{run.name}-head") / "nodes" if self.kind == "kubernetes" else self.places(run)[0]
            until(lambda: len(list(place.glob("*/.state/state.json"))) == run.spec.workers)
            states = sorted(place.glob("*/.state/state.json"))
        return states


def pod_folder(job: str, index: int = 0) -> Path:
    """The folder of the run in a pod of this Job."""
    return Path(os.environ["LAB_PODS"], f"{job}-{index}-x", "results", "run")


@contextmanager
def start_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of the doubles; the variables by which clients find it."""
    with KubeApi() as server, Kubelet(server, folder):
        yield {"LAB_CLUSTER": server.url, "LAB_PODS": str(folder)}


def make_engine(kind: str, far: Path) -> Engine:
    if kind == "local":
        return LocalEngine()
    if kind == "kubernetes":
        return KubernetesEngine(Access(os.environ["LAB_CLUSTER"]))
    if kind == "slurm":
        partition = PartitionRecord(max_seconds=None, nodes=3, gpus_per_node=0, default=True)
        return SlurmEngine(
            SlurmDetails(
                folder=str(far),
                python=sys.executable,
                partitions={"all": partition},
                kill_wait=2,
                setup=os.environ.get("LAB_SETUP", ""),
            )
        )
    hosts = [HostRecord(name=name, login=name, slots=1, address="127.0.0.1", interface="lo") for name in HOSTS]
    return HostsEngine(HostsDetails(folder="~/far", python=sys.executable, hosts=hosts))


def install_commands(folder: Path) -> dict[str, str]:
    """The variables with which ssh and Slurm's commands are those of this folder."""
    slurm.install(folder / "bin")
    (folder / "bin" / "ssh").write_text(SSH)
    (folder / "bin" / "ssh").chmod(0o755)
    (folder / "slurm").mkdir()
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_CONF": str(folder / "slurm" / "slurm.conf"),
        "LAB_HOMES": str(folder / "homes"),
    }


def start_client(kind: str, home: Path, script: str) -> "subprocess.Popen[str]":
    """Another process of the same person: `script` finds `lab` in it."""
    prelude = (
        "import os, sys, time; from pathlib import Path; from mlbench_cli.runs import supervise\n"
        "from tests.contract.engines.labs import EngineLab; lab = EngineLab(sys.argv[1], Path(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", prelude + script, kind, str(home)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
