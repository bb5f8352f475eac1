"""How surely the search among pairs of ranks finds a slow link, and how often it names one that is not: on shaped
networks of this machine, one link of 4 or 8 workers slowed to a quarter, or none.

    python -m benchmarks.bad_links [--workers 4,8] [--trials 50]

Wanted: every slow link found, no false alarm. Trials with and without a slow link take turns.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.model.network import parse_network, worker_address

NETWORK = "20mbit,2ms"
SLOWED = 5e6  # bits per second: a quarter
BYTES = 65536
PATIENCE = 300.0


def main(arguments: list[str]) -> int:
    """Print a line for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="4,8")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank:
        return serve()
    for workers in map(int, given.workers.split(",")):
        print(json.dumps(measure(workers, given.trials)), flush=True)
    return 0


def measure(workers: int, trials: int) -> dict[str, Any]:
    """Searches with a slow link and without one in turns; what was found."""
    network = ShapedNetwork(parse_network(NETWORK), workers)
    generator = random.Random(workers)
    found = {"workers": workers, "slow": 0, "found": 0, "named another": 0, "good": 0, "false alarms": 0, "unsure": 0}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(network, rank, workers, trials, folder) for rank in range(workers)]
        try:
            for trial in range(trials):
                bad = generator.randrange(workers) if trial % 2 == 0 else None
                if bad is not None:
                    network.change_link(bad, rate=SLOWED)
                Path(folder, f"go-{trial}").touch()
                verdict = wait(Path(folder, f"verdict-{trial}"), ranks)
                if bad is not None:
                    network.change_link(bad)
                count(found, bad, verdict)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            network.close()
    return found


def count(found: dict[str, Any], bad: int | None, verdict: dict[str, Any]) -> None:
    """Book one trial."""
    kind, ranks = verdict["kind"], verdict["ranks"]
    if bad is None:
        found["good"] += 1
        found["false alarms"] += kind not in ("none", "cannot_tell")
        found["unsure"] += kind == "cannot_tell"
        return
    found["slow"] += 1
    found["found"] += (kind, ranks) == ("node", [bad])
    found["named another"] += kind in ("node", "link") and bad not in ranks
    found["unsure"] += kind == "cannot_tell"


def wait(path: Path, ranks: "list[subprocess.Popen[bytes]]") -> dict[str, Any]:
    """The verdict, once it is there."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end or any(rank.poll() is not None for rank in ranks):
            raise SystemExit("a rank has ended, or takes too long")
        time.sleep(0.01)
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def start(network: ShapedNetwork, rank: int, workers: int, trials: int, folder: str) -> "subprocess.Popen[bytes]":
    """A rank in its worker's network."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "NODE_RANK": str(rank),
        "MASTER_ADDR": worker_address(0),
        "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MLBENCH_NETWORK": NETWORK,  # the ranks need not measure it
        "OMP_NUM_THREADS": "1",
        "TRIALS": str(trials),
        "FOLDER": folder,
    }
    words = [sys.executable, "-m", "benchmarks.bad_links", "--rank"]
    return subprocess.Popen(words, env=environment, preexec_fn=lambda: network.enter_worker(rank))


def serve() -> int:
    """A rank: search once for each trial, when the file that starts it is there."""
    from task_images.allreduce.search import search
    from task_images.contract import Contract
    from task_images.harness.distributed import open_world
    from task_images.harness.report import Reporter
    from task_images.harness.tracker import Tracker

    world = open_world(Contract())
    report, folder = Reporter(world, data=""), os.environ["FOLDER"]
    for trial in range(int(os.environ["TRIALS"])):
        if world.is_first:
            while not Path(folder, f"go-{trial}").exists():
                time.sleep(0.01)
        world.barrier()
        verdict = search(world, Tracker(), report, BYTES)["verdict"]
        if world.is_first:
            part = Path(folder, f"part-{trial}")
            part.write_text(json.dumps(verdict))
            part.rename(Path(folder, f"verdict-{trial}"))
    time.sleep(60)  # until it is killed: a rank that leaves would end the others
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
