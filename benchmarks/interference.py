"""What two trainings on the same links cost each other, against a model of shared links, and how fair the links are.

    python -m benchmarks.interference [--network 50mbit,1ms] [--workers 4] [--updates 60] [--repeats 3]

Two jobs of the IETF draft (synthetic: C ms of sleep, then an all-reduce of S bytes), each with a rank on every worker
of one shaped network of this machine, run alone and together. The model: messages that are under way at the same time
share the links equally, so each takes as much longer as there are others. It takes from the measurement only how long
an all-reduce takes alone. Wanted: interference within 15 % of the model, fairness above 0.95. Takes about a minute.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.model.network import parse_network, worker_address

COMPUTE = (0.06, 0.02)  # seconds of each job
BYTES = 262144
PATIENCE = 300.0


def main(arguments: list[str]) -> int:
    """Print one line with the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", default="50mbit,1ms")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank:
        return serve()
    network = ShapedNetwork(parse_network(given.network), given.workers)
    try:
        rows = [measure(network, given.workers, given.updates, given.network) for _ in range(given.repeats)]
    finally:
        network.close()
    print(json.dumps({name: median([row[name] for row in rows]) for name in rows[0]}))
    return 0


def median(values: list[Any]) -> Any:
    """Of numbers, or of each place of lists."""
    if isinstance(values[0], list):
        return [round(statistics.median(column), 4) for column in zip(*values, strict=True)]
    return round(statistics.median(values), 4)


def measure(network: ShapedNetwork, workers: int, updates: int, shape: str) -> dict[str, Any]:
    """Seconds of both jobs alone and together, measured and by the model."""
    alone = [run(network, workers, updates, shape, [job])[0] for job in (0, 1)]
    together = run(network, workers, updates, shape, [0, 1])
    messages = [seconds / updates - compute for seconds, compute in zip(alone, COMPUTE, strict=True)]
    expected = share_links(COMPUTE, messages, updates)
    wire = 8 * BYTES * 2 * (workers - 1) / workers / parse_network(shape).rate
    shares = [one / both for one, both in zip(alone, together, strict=True)]
    return {
        "JCT ratio alone": [seconds / updates / (own + wire) for seconds, own in zip(alone, COMPUTE, strict=True)],
        "interference": [both / one for one, both in zip(alone, together, strict=True)],
        "interference by the model": [model / one for one, model in zip(alone, expected, strict=True)],
        "fairness": sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)),
    }


def share_links(compute: tuple[float, ...], messages: list[float], updates: int) -> list[float]:
    """When each job has done its updates: one message at a time has the links alone, two have half of them each."""
    left, is_sending = list(compute), [False] * len(compute)
    done, ended, now = [0] * len(compute), [0.0] * len(compute), 0.0
    while min(done) < updates:
        senders = sum(is_sending)
        speed = [1 / senders if sending else 1.0 for sending in is_sending]
        running = [job for job in range(len(left)) if done[job] < updates]
        step = min(left[job] / speed[job] for job in running)
        now += step
        for job in running:
            left[job] -= step * speed[job]
            if left[job] > 1e-12:
                continue
            if is_sending[job]:
                done[job] += 1
                ended[job] = now
            is_sending[job] = not is_sending[job] and done[job] < updates
            left[job] = messages[job] if is_sending[job] else compute[job]
    return ended


def run(network: ShapedNetwork, workers: int, updates: int, shape: str, jobs: list[int]) -> list[float]:
    """Seconds that each of these jobs takes, all started at the same moment."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(network, job, rank, workers, updates, shape, folder) for job in jobs for rank in range(workers)]
        try:
            for job in jobs:
                wait(Path(folder, f"ready-{job}"), ranks)
            Path(folder, "go").touch()
            return [float(wait(Path(folder, f"seconds-{job}"), ranks).read_text()) for job in jobs]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def wait(path: Path, ranks: "list[subprocess.Popen[bytes]]") -> Path:
    """The file, once it is there."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end or any(rank.poll() is not None for rank in ranks):
            raise SystemExit("a rank has ended, or takes too long")
        time.sleep(0.01)
    return path


def start(
    network: ShapedNetwork, job: int, rank: int, workers: int, updates: int, shape: str, folder: str
) -> "subprocess.Popen[bytes]":
    """A rank of a job in its worker's network."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "NODE_RANK": str(rank),
        "MASTER_ADDR": worker_address(0),
        "MASTER_PORT": str(29521 + job),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "JOB": str(job),
        "UPDATES": str(updates),
        "FOLDER": folder,
    }
    words = [sys.executable, "-m", "benchmarks.interference", "--rank"]
    return subprocess.Popen(words, env=environment, preexec_fn=lambda: network.enter_worker(rank))


def serve() -> int:
    """A rank: its updates, when the file that starts them is there."""
    import torch

    from task_images.contract import Contract
    from task_images.world import open_world

    world, folder, job = open_world(Contract()), os.environ["FOLDER"], int(os.environ["JOB"])
    buffer = torch.zeros(BYTES // 4)
    world.all_reduce(buffer)
    world.barrier()
    if world.is_first:
        Path(folder, f"ready-{job}").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.001)
    world.barrier()
    begin = time.perf_counter()
    for _ in range(int(os.environ["UPDATES"])):
        time.sleep(COMPUTE[job])
        world.all_reduce(buffer)
    seconds = time.perf_counter() - begin
    if world.is_first:
        part = Path(folder, f"part-{job}")
        part.write_text(str(seconds))
        part.rename(Path(folder, f"seconds-{job}"))
    time.sleep(PATIENCE)  # until it is killed: a rank that leaves would end the others
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
