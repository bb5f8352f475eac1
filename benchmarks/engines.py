"""Slurm and hosts: how long until ranks run, what following costs, and whether logs are exact and in time.

    tests/e2e/machines/machines.sh up 8; eval "$(tests/e2e/machines/machines.sh env)"; python benchmarks/engines.py

MACHINES_SHARED, MACHINES_HOSTS and MACHINES_SSH_CONFIG name a Slurm cluster and hosts, as for tests/e2e/machines.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.engines.follow import read_log, watch
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines.details import HostsDetails, PartitionRecord, SlurmDetails
from mlbench_cli.engines.machines.engine import MachinesEngine
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.engines.slurm import controller
from mlbench_cli.engines.slurm.engine import SlurmEngine
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.storage.store import Store

ROUNDS, HOST_ROUNDS, DRAWS = 12, 8, 4000
PAUSE_SECONDS = 4.0  # in which nodes are idle again, and the scheduler has no other request
JOBS = 1000
LINES = 200_000
WRITER = (
    "import sys, time; lines = b''.join(b'line %d of a rank\\n' % i for i in range(" + str(LINES // 3) + ")); "
    "sys.stdout.buffer.write(lines); sys.stdout.flush(); print(time.time())"
)


def record(store: Store, engine: str, argv: tuple[str, ...], workers: int) -> Run:
    spec = RunSpec(
        name=f"bench-{uuid.uuid4().hex[:8]}",
        cluster="c",
        engine=engine,
        task="custom",
        preset="custom",
        argv=argv,
        backend="gloo",
        workers=workers,
        timeout=600.0,
        share_machine=engine == "hosts",  # all hosts are this machine, and others may have its lock
    )
    run = store.record_run(spec)
    write_run_document(run)
    return run


@dataclass(frozen=True)
class Start:
    """Seconds of one submission: the client's call, Slurm's queue (None for hosts), and until the last rank's line."""

    client: float
    queue: float | None
    ranks: float

    @property
    def whole(self) -> float:
        """From the call until the last rank's line."""
        return self.client + (self.queue or 0.0) + self.ranks

    @property
    def own(self) -> float:
        """Without Slurm's queue, in which no submitted job can change anything."""
        return self.client + self.ranks


def time_ranks(engine: MachinesEngine, store: Store, name: str, workers: int, folder: str | None = None) -> Start:
    """From the call of submit until the last rank has written its first line. `folder` is the one that nodes share."""
    run = record(store, name, ("date", "+%s.%N"), workers)
    submission = engine.render(run.spec)
    time.sleep(PAUSE_SECONDS)
    begun = time.time()
    engine.submit(run, submission)
    submitted = time.time()
    for observation in watch(engine, run):
        if observation.ended:
            break
    moments = [float((run.folder / f"logs/rank-{rank}.log").read_text()) for rank in range(workers)]
    started = None
    if folder is not None:  # the script's first act is to write this file
        started = Path(folder, "runs", run.name, "started", "job").stat().st_mtime
    engine.delete(run, force=True)
    return make_start(begun, submitted, started, max(moments))


def time_sbatch(shared: Path, workers: int) -> Start:
    """The same of a plain batch script."""
    log, mark = shared / "plain.log", shared / "plain.start"
    script = f"#!/bin/bash\n#SBATCH --nodes={workers} --exclusive --output={log}\ndate >{mark}\nsrun date +%s.%N\n"
    time.sleep(PAUSE_SECONDS)
    begun = time.time()
    words = ["sbatch", "--parsable"]
    number = subprocess.run(words, input=script, text=True, check=True, capture_output=True).stdout.strip()
    submitted = time.time()
    while subprocess.run(["squeue", "-h", "-j", number], capture_output=True, text=True, check=False).stdout:
        time.sleep(0.5)
    lines = log.read_text().split()
    started = mark.stat().st_mtime
    log.unlink()
    mark.unlink()
    return make_start(begun, submitted, started, max(map(float, lines)))


def make_start(begun: float, submitted: float, started: float | None, last: float) -> Start:
    """The parts of one submission. A script that started before its submission was answered waited for nothing."""
    ready = submitted if started is None else max(submitted, started)
    return Start(submitted - begun, None if started is None else ready - submitted, last - ready)


def compare_starts(slurm: SlurmEngine, store: Store, folder: str, shared: Path) -> Iterator[str]:
    """Ours, a plain script and the same plain script again, ROUNDS times in an order that rotates.

    Slurm starts a job when its scheduler comes round to it, which scatters by seconds: the second plain script shows by
    how much a ratio differs from 1 for no reason.
    """
    arms: dict[str, list[Start]] = {"ours": [], "plain": [], "again": []}
    names = list(arms)
    for number in range(ROUNDS):
        for position in range(3):
            name = names[(number + position) % 3]
            is_ours = name == "ours"
            arms[name].append(time_ranks(slurm, store, "slurm", 3, folder) if is_ours else time_sbatch(shared, 3))
    for name, starts in arms.items():
        whole, client, queue, ranks = (
            statistics.median(times)
            for times in zip(*((s.whole, s.client, s.queue or 0.0, s.ranks) for s in starts), strict=True)
        )
        parts = f"client {client:.2f} s, queue {queue:.2f} s, script to last rank {ranks:.2f} s"
        yield f"submit to the last rank on 3 Slurm nodes, {name}: {whole:.2f} s ({parts})"
    for what in ("whole", "own"):
        ours, plain, again = ([getattr(start, what) for start in arms[name]] for name in names)
        yield (
            f"ratio of medians, {what}: ours to plain {describe_ratio(ours, plain)}, ours to both plain "
            f"{describe_ratio(ours, plain + again)}, plain to itself {describe_ratio(again, plain)}"
        )
    yield f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {ROUNDS} rounds"


def describe_ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    """The ratio of the medians with its 95 % interval by the bootstrap."""
    chance = random.Random(1)

    def ratio(some: Sequence[float], rest: Sequence[float]) -> float:
        return statistics.median(some) / statistics.median(rest)

    found = sorted(
        ratio(chance.choices(ones, k=len(ones)), chance.choices(others, k=len(others))) for _ in range(DRAWS)
    )
    return f"{ratio(ones, others):.2f} ({found[DRAWS // 40]:.2f} to {found[-DRAWS // 40]:.2f})"


def find_address(host: str) -> str:
    """The address of a host in the configuration of ssh."""
    words = ["ssh", "-G", "-F", os.environ["MACHINES_SSH_CONFIG"], host]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line.removeprefix("hostname ") for line in lines if line.startswith("hostname "))


def follow_logs(engine: MachinesEngine, store: Store, name: str) -> str:
    """Whether LINES lines of three ranks arrive exactly, and how long after they were written."""
    run = record(store, name, (sys.executable, "-c", WRITER), 3)
    engine.submit(run, engine.render(run.spec))
    delay = 0.0
    for rank in range(3):
        count = 0
        for line in read_log(engine, run, rank, follow=True):
            count += 1
            if rank == 0 and not line.text.startswith(b"line"):
                delay = time.time() - float(line.text)
        assert count == LINES // 3 + 1, f"rank {rank}: {count} lines"
        whole = b"".join(b"line %d of a rank\n" % number for number in range(LINES // 3))
        assert (run.folder / f"logs/rank-{rank}.log").read_bytes().startswith(whole)
    engine.delete(run, force=True)
    return f"{3 * (LINES // 3)} lines exact, the last {delay:.2f} s after it was written"


def time_squeue() -> str:
    """One poll with JOBS jobs of this user in the controller's memory."""
    channel = Channel(Target(None, sys.executable))
    script = "#!/bin/bash\ntrue\n"
    ids = []
    try:
        for _ in range(JOBS):
            words = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--job-name=mlbench-bench"]
            ids.append(subprocess.run(words, input=script, text=True, check=True, capture_output=True).stdout.strip())
        times = []
        for _ in range(HOST_ROUNDS):
            begun = time.perf_counter()
            jobs = controller.list_jobs(channel)
            times.append(time.perf_counter() - begun)
        assert set(ids) <= set(jobs)
        return f"{JOBS} jobs, one squeue a poll: {1000 * statistics.median(times):.0f} ms"
    finally:
        subprocess.run(["scancel", "--name=mlbench-bench"], check=False)
        channel.close()


def main() -> None:
    if "MACHINES_SHARED" not in os.environ:
        print("left out: no Slurm and no hosts here (MACHINES_SHARED)")
        return
    shared = Path(os.environ["MACHINES_SHARED"])
    with tempfile.TemporaryDirectory(prefix="mlbench-", dir=shared) as folder, tempfile.TemporaryDirectory() as home:
        store = Store(Path(home))
        partition = PartitionRecord(max_seconds=None, nodes=3, gpus_per_node=0, default=True)
        slurm = SlurmEngine(
            SlurmDetails(folder=folder, python=sys.executable, kill_wait=5, partitions={"all": partition})
        )
        names = os.environ["MACHINES_HOSTS"].split(",")
        hosts = HostsEngine(
            HostsDetails(
                folder=f"{home}/hosts",
                python=sys.executable,
                ssh_config=os.environ["MACHINES_SSH_CONFIG"],
                hosts=[
                    HostRecord(name=name, login=name, slots=1, address=find_address(name), interface="lo")
                    for name in names
                ],
            )
        )
        time_ranks(hosts, store, "hosts", len(names))  # copies the code, and connects
        time_ranks(slurm, store, "slurm", 3)
        for line in compare_starts(slurm, store, folder, shared):
            print(line, flush=True)
        times = [time_ranks(hosts, store, "hosts", len(names)).whole for _ in range(HOST_ROUNDS)]
        print(f"submit to the last rank on {len(names)} hosts, connected: {statistics.median(times):.2f} s")
        print(f"Slurm: {follow_logs(slurm, store, 'slurm')}")
        print(f"hosts: {follow_logs(hosts, store, 'hosts')}")
        print(time_squeue())


if __name__ == "__main__":
    main()
