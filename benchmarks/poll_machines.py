"""CPU time of the client in one poll of a run on Slurm or hosts, with a head whose answers are made up here.

usage: python benchmarks/poll_machines.py [RANKS...]

Each node has 8 ranks, all running, and no new lines in their logs. Transport and JSON of the answers are not counted.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.agent.messages import SCHEMA_VERSION, pending_facts
from mlbench_cli.agent.processes import process_note
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines.details import HostsDetails
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.times import now

EACH = 8  # ranks of a node
POLLS = 3
LIMIT_SECONDS = 0.2  # at 10 000 ranks


class AnsweringChannel(Channel):
    """Answers "sync" with the state of running ranks."""

    def __init__(self) -> None:
        super().__init__(Target("m"))

    def exchange(self, do: str, data: bytes = b"", *, seconds: float = 0.0, **arguments: Any) -> tuple[Any, bytes]:
        nodes = {node: STATES[node] for node in arguments["nodes"]}
        return {"exists": True, "cancel": False, "nodes": nodes, "pieces": []}, b""


STATES: dict[str, Mapping[str, Any]] = {}


def state_of(node: int) -> dict[str, Any]:
    ranks = [
        {**pending_facts(rank), "phase": "running", "pid": 1000 + rank, "started": 1.0}
        for rank in range(node * EACH, (node + 1) * EACH)
    ]
    state = {
        **process_note(os.getpid()), "schema_version": SCHEMA_VERSION, "run_id": "r", "name": "r", "spec_hash": "",
        "master_port": 1, "started": 1.0, "finished": None, "seconds": None, "stepped_seconds": 0.0, "ended": None,
        "first": None, "first_failed": None, "disk_full": False, "start_problem": None, "network_problem": None,
        "ranks": ranks, "node": node, "node_name": f"m{node}",
    }  # fmt: skip
    return {"state": state, "alive": True}


def measure(engine: HostsEngine, ranks: int) -> float:
    """CPU seconds of the fastest of some polls."""
    spec = RunSpec(
        name="r", cluster="c", engine="hosts", task="custom", preset="custom", argv=("true",), backend="gloo",
        workers=ranks // EACH, processes_per_worker=EACH,
    )  # fmt: skip
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run("id", spec, Path(folder), now())
        for _ in range(POLLS):
            begun = time.process_time()
            observation = engine.look(run)
            seconds.append(time.process_time() - begun)
            assert len(observation.workers) == ranks
    return min(seconds)


def main(sizes: list[int]) -> None:
    print(f"CPU seconds of a poll; limit: {LIMIT_SECONDS} s at 10000 ranks")
    print(f"{'ranks':>6} {'nodes':>6} {'seconds':>7}")
    for size in sizes:
        nodes = size // EACH
        STATES.update({str(node): state_of(node) for node in range(nodes)})
        hosts = [
            HostRecord(name=f"m{node}", login=f"m{node}", slots=1, address="10.0.0.1", interface=None)
            for node in range(nodes)
        ]
        engine = HostsEngine(HostsDetails(folder="/f", hosts=hosts))
        engine._by_host = {host["name"]: AnsweringChannel() for host in hosts}
        print(f"{size:>6} {nodes:>6} {measure(engine, size):>7.3f}")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1000, 10000])
