"""Slurm and hosts: how long until ranks run, what following costs, and whether logs are exact and in time.

    tests/e2e/machines/machines.sh up 8; eval "$(tests/e2e/machines/machines.sh env)"; python benchmarks/engines.py

MACHINES_SHARED, MACHINES_HOSTS and MACHINES_SSH_CONFIG name a Slurm cluster and hosts, as for tests/e2e/machines.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines.channel import Channel, Target
from mlbench_cli.engines.machines.details import HostRecord, HostsDetails, PartitionRecord, SlurmDetails
from mlbench_cli.engines.machines.engine import MachinesEngine
from mlbench_cli.engines.slurm import controller
from mlbench_cli.engines.slurm.engine import SlurmEngine
from mlbench_cli.model import Run
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.spec import RunSpec
from mlbench_cli.store import Store

ROUNDS = 8
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


def time_ranks(engine: MachinesEngine, store: Store, name: str, workers: int) -> float:
    """Seconds from the call of submit until the last rank has written its first line."""
    run = record(store, name, ("date", "+%s.%N"), workers)
    submission = engine.render(run.spec)
    time.sleep(PAUSE_SECONDS)
    begun = time.time()
    engine.submit(run, submission, detach=True)
    for observation in engine.watch(run):
        if observation.ended:
            break
    moments = [float((run.folder / f"logs/rank-{rank}.log").read_text()) for rank in range(workers)]
    engine.delete(run, force=True)
    return max(moments) - begun


def time_sbatch(shared: Path, workers: int) -> float:
    """The same of a plain batch script."""
    script = f"#!/bin/bash\n#SBATCH --nodes={workers} --exclusive --output={shared}/plain.log\nsrun date +%s.%N\n"
    time.sleep(PAUSE_SECONDS)
    begun = time.time()
    subprocess.run(["sbatch", "--wait"], input=script, text=True, check=True, stdout=subprocess.DEVNULL)
    lines = (shared / "plain.log").read_text().split()
    (shared / "plain.log").unlink()
    return max(map(float, lines)) - begun


def time_pair(engine: MachinesEngine, store: Store, shared: Path, number: int) -> tuple[float, float]:
    """Ours and a plain script's, one after the other, and which of them goes first alternates."""
    if number % 2:
        plain = time_sbatch(shared, 3)
        return time_ranks(engine, store, "slurm", 3), plain
    return time_ranks(engine, store, "slurm", 3), time_sbatch(shared, 3)


def find_address(host: str) -> str:
    """The address of a host in the configuration of ssh."""
    words = ["ssh", "-G", "-F", os.environ["MACHINES_SSH_CONFIG"], host]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line.removeprefix("hostname ") for line in lines if line.startswith("hostname "))


def follow_logs(engine: MachinesEngine, store: Store, name: str) -> str:
    """Whether LINES lines of three ranks arrive exactly, and how long after they were written."""
    run = record(store, name, (sys.executable, "-c", WRITER), 3)
    engine.submit(run, engine.render(run.spec), detach=True)
    delay = 0.0
    for rank in range(3):
        count = 0
        for line in engine.logs(run, rank, follow=True):
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
        for _ in range(ROUNDS):
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
        pairs = [time_pair(slurm, store, shared, number) for number in range(ROUNDS)]
        ours, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(one / other for one, other in pairs)
        print(
            f"submit to the last rank on 3 Slurm nodes: {ours:.2f} s, plain sbatch {plain:.2f} s, {ours / plain:.2f}x "
            f"(pairs {ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
        times = [time_ranks(hosts, store, "hosts", len(names)) for _ in range(ROUNDS)]
        print(f"submit to the last rank on {len(names)} hosts, connected: {statistics.median(times):.2f} s")
        print(f"Slurm: {follow_logs(slurm, store, 'slurm')}")
        print(f"hosts: {follow_logs(hosts, store, 'hosts')}")
        print(time_squeue())


if __name__ == "__main__":
    main()
