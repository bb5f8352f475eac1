"""The agent of one pod of a run with faults, started by worker.sh in place of the rank, as `main(COMMAND...)`.

It is that of one machine of several, with the contract's variables in its environment. The pods share no folder, but
know node 0 by name; worker.sh keeps log, output and samples, and packs them with faults.json, which node 0 writes into
$MLBENCH_WORK_DIR. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys

from mlbench_cli.agent import machine, rendezvous
from mlbench_cli.agent.lock import NO_PROMISE
from mlbench_cli.agent.node import NodeAgent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlbench_cli.agent.agent import Rank
    from mlbench_cli.agent.messages import MachinesPlan, RankPlan

MEETING_SECONDS = 600.0  # as long as ranks without an agent wait for each other
GRACE_SECONDS = 5.0
EXIT_PEER_LOST = 75  # as of a rank whose peers did not come
# What worker.sh has set for a single rank, and every rank gets anew.
PASSED_ON = ("MLBENCH_PARAMETERS", "MLBENCH_BACKEND")


def main(command: list[str]) -> int:
    """Supervise the ranks of this pod, each of which runs `command`, to their end."""
    environ = os.environ
    node, work = int(environ["NODE_RANK"]), environ["MLBENCH_WORK_DIR"]
    machine.keep_only()
    plan = make_plan(environ, command)
    folder = f"{work}/agent"
    place = f"{folder}/nodes/{node}"
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(f"{place}/.state", mode=0o700)
    for entry in plan["nodes"][node]["ranks"]:
        os.makedirs(entry["environment"]["MLBENCH_OUTPUT_DIR"], exist_ok=True)
    if node:
        rendezvous.write_rendezvous(folder, [environ["MASTER_ADDR"]], plan["hub"]["port"], plan["hub"]["token"])
    return PodAgent(place, folder, node, plan).conduct()


def make_plan(environ: Mapping[str, str], command: list[str]) -> MachinesPlan:
    """What all agents of the run do, from the variables that worker.sh gives to a rank."""
    workers, local = int(environ["MLBENCH_WORKERS"]), int(environ["LOCAL_WORLD_SIZE"])
    output = f"{environ['MLBENCH_WORK_DIR']}/output"

    def plan_rank(rank: int) -> RankPlan:
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local),
            "NODE_RANK": str(rank // local),
            "MLBENCH_OUTPUT_DIR": output if local == 1 else f"{output}/rank-{rank}",
        }
        return {"rank": rank, "argv": command, "environment": own}

    return {
        "kind": "PodsRun",
        "schema_version": 1,
        "name": environ["MLBENCH_RUN_ID"],
        "spec_hash": "",
        "timeout": float(environ["MLBENCH_TIMEOUT"]),
        "gpus_per_worker": 0,  # a pod sees its own only
        "environment": {name: environ[name] for name in PASSED_ON if name in environ},
        "defaults": {},
        "faults": json.loads(environ["MLBENCH_FAULTS"]),
        "nodes": [
            {
                "name": host,
                "address": None,
                "workers": [worker],
                "ranks": [plan_rank(rank) for rank in range(worker * local, (worker + 1) * local)],
            }
            for worker, host in zip(range(workers), environ["MLBENCH_HOSTS"].split(","), strict=True)
        ],
        "python": sys.executable,
        "installed_code_only": False,  # the image's, by variables of the pod
        "launcher": [],
        "interface": None,
        "interface_variables": [],
        "meeting_seconds": MEETING_SECONDS,
        "lease_seconds": None,
        "grace": GRACE_SECONDS,
        "lock": NO_PROMISE,
        "hub": {"port": int(environ["MLBENCH_AGENT_PORT"]), "token": environ["MLBENCH_KEEPER_TOKEN"]},
    }


class PodAgent(NodeAgent):
    """The agent of one pod, which shares the fate of the run's other pods."""

    divides_streams = False
    outlives_nodes = False  # the Job fails with its first pod

    def conduct(self) -> int:
        """As on a machine; 0 if the run has ended well, although a rank that was killed may have been left out."""
        code = super().conduct()
        if problem := self.state["start_problem"]:
            os.write(2, f"mlbench: the ranks did not start: {problem}\n".encode())
            return EXIT_PEER_LOST
        return 0 if self.state["ended"] == "exited" else code or 1

    def _open_log(self, rank: Rank) -> int:
        return os.dup(1)

    def _pack(self) -> None:
        """worker.sh packs it."""
        if not self.node:
            os.replace(f"{self.folder}/faults.json", f"{os.environ['MLBENCH_WORK_DIR']}/faults.json")
