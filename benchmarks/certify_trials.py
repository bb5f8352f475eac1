"""Clusters with a known fault: who does certify name? `python benchmarks/certify_trials.py [FAULT ...] [--trials N]`.

Built from constructed samples of eight nodes (`certify_errors.Cluster`), sealed into an archive and judged from it:
library  one node has another version of a library: drift, and nobody is named
missing  one node never started: no_answer
bit      one node has a flipped bit in the digest of one product: wrong_result
matmul, memory, disk, node-network, link: one of them is slower by 1.5 times the fail margin
edited   all samples of one node in one test are changed in a sealed archive, with checksums that fit: verify refuses
copied   one node's log is another one's, with checksums that fit: verify refuses

With real workers of this machine, which take turns on its CPUs:
healthy  no fault: nobody is to be named
quota    a control group gives worker 1 a part of one CPU (root, cgroup v1): matmul_slow, sustained_slow, memory_slow
paused   worker 1's measuring process is stopped for a part of every 20 ms: as quota
hog      worker 1 shares one CPU with a program that copies memory (root, cgroup v1): as quota
slow-disk  worker 1 writes to a disk of 2 MB/s (root, loop device, cgroup v1): disk_slow
flapping   worker 1 has a part of a CPU for 10 of every 20 s of a soak: flapping, or as quota
silent   worker 1 is stopped for good once it has measured: no_answer
killed   worker 1 is killed: no_answer
network  worker 1's link has a part of the others' rate, in an emulated network: node_network_slow
lossy    a tenth of what workers 1 and 2 send each other is lost (root, iptables): link_slow, of both

Real trials use the preset tiny, which confirms within a minute and so promises no error rate: they prove that faults
get their reasons, while `certify_errors` counts wrong names. Every trial prints the machine's load.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from certify_errors import NODE_TESTS, Cluster

from mlbench_cli.model.network import worker_address
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.reseal import seal_anew
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.util.json_text import format_document
from task_images.certify.rules import DIGEST, PREFIX, TESTS

VICTIM, PEER = 1, 2
NODES = 8
MLBENCH = (sys.executable, "-m", "mlbench_cli")
SLOW = {"matmul": "matmul.burst", "memory": "memory", "disk": "disk.write", "node-network": "network", "link": "link"}
CONSTRUCTED = ("library", "missing", "bit", *SLOW, "edited", "copied")
_CPU = {"matmul_slow", "sustained_slow", "memory_slow"}
REASONS = {
    "quota": _CPU,
    "paused": _CPU,
    "hog": _CPU,
    "slow-disk": {"disk_slow"},
    "flapping": {"flapping", *_CPU},
    "silent": {"no_answer"},
    "killed": {"no_answer"},
    "network": {"node_network_slow"},
    "lossy": {"link_slow"},
}
FAULTS = (*CONSTRUCTED, "healthy", *REASONS)
_GROUP = Path(f"/sys/fs/cgroup/cpu/mlbench-certify-{os.getpid()}")
_LIMIT_SECONDS = 600.0
_MEGABITS = 50  # of the emulated network
_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_SLOW_DISK = 2_000_000  # bytes per second
_LOST = 0.1
_SOAK_SECONDS, _FLAP_SECONDS = 90.0, 10.0
# Right, nobody, another, not tested, contradiction, wrong reason or no certificate; and what was said.
Trial = tuple[str, str]


def judge_names(document: dict[str, Any], nodes: set[str], reasons: set[str], states: Sequence[str]) -> Trial:
    """Whether these nodes, and no others, are to be returned, or are in one of `states`, for one of the reasons."""
    bad = ("slow", "failed", "missing")
    said = "; ".join(f"{node['node']} {node['state']} {' '.join(node['reasons'])}" for node in document["nodes"])
    if document["contradictions"]:
        return "contradiction", "; ".join(document["contradictions"])
    if {node["node"] for node in document["nodes"] if node["state"] in bad} - nodes:
        return "another", said
    if any(node["state"] == "not_tested" for node in document["nodes"]):
        return "not tested", said
    found = [node for node in document["nodes"] if node["node"] in nodes and node["state"] in (*states, *bad)]
    if len(found) < len(nodes):
        return "nobody", said
    return ("right" if all(reasons & {*node["reasons"]} for node in found) else "wrong reason"), said


# --- constructed ----------------------------------------------------------------------------------------------------


def make_template(folder: Path) -> Archive:
    """An archive of a real run of certify, for everything but its samples."""
    words = [*MLBENCH, "run", "template", str(NODES), "--task", "certify", "--preset", "tiny", "--anonymous", "-c", "1"]
    words += ["--share-machine", "--yes", "--set", "stages=drift", "--set", "least_dip_seconds=300"]
    environment = {**os.environ, "MLBENCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, env=environment, check=True, capture_output=True)
    return Archive.open(next((folder / "home").glob("runs/*/certificate.json")).parent)


def construct(fault: str, seed: int, template: Archive, folder: Path) -> Trial:
    """Seal an archive of a cluster with this fault, and judge what it says."""
    where = SLOW.get(fault, "memory")
    margin = TESTS["network" if where == "link" else where].fail
    cluster = Cluster(NODES, "normal", seed, 1.5 * margin if fault in SLOW else 0.0, where=where, has_pairs=True)
    lines = write_lines(cluster, fault)
    target = folder / "trial.zip"

    def change(run: Path) -> None:
        for rank, own in enumerate(lines):
            log = run / f"logs/rank-{rank}.log"
            other = [line for line in log.read_text().splitlines() if not line.startswith(PREFIX)]
            log.write_text("\n".join([*other, *own, ""]))
        observation = json.loads((run / "observation.json").read_text())
        observation["seconds"] = _end_of(cluster)
        for worker in observation["workers"]:
            worker["seconds"] = observation["seconds"]
        if fault == "missing":
            observation["workers"][cluster.victim]["started"] = None
            del observation["workers"][cluster.victim]["seconds"]
            rows = (run / "resources.jsonl").read_text().splitlines(keepends=True)
            left = [row for row in rows if json.loads(row).get("rank") != cluster.victim]
            (run / "resources.jsonl").write_text("".join(left))
        (run / "observation.json").write_bytes(format_document(observation))

    seal_anew(template, target, change)
    with Archive.open(target) as archive:
        document = dict(archive.document("certificate.json"))
        if fault in ("edited", "copied"):
            return _lie(fault, archive, cluster, random.Random(seed), folder), ""
    name = f"worker-{cluster.victim}"
    if fault == "library":
        drift = [(row["key"], row["others"]) for row in document["drift"]]
        said = judge_names(document, set(), set(), ())
        return said if drift == [("nccl", {"2.21.5": [name]})] else ("wrong reason", str(drift))
    if fault == "link":
        ends = {f"worker-{node}" for node in cluster.slow_link}
        return judge_names(document, ends, {"link_slow"}, ["watch"])
    reason = {"missing": "no_answer", "bit": "wrong_result"}.get(fault) or TESTS[where].reason
    return judge_names(document, {name}, {reason}, [])


def write_lines(cluster: Cluster, fault: str) -> list[list[str]]:
    """The logs of the ranks of a cluster, with a fault of the victim."""
    evidence, victim = cluster.samples().evidence, cluster.victim
    lines: list[list[str]] = [[] for _ in range(NODES)]

    def say(rank: int, kind: str, **fields: Any) -> None:
        if fault != "missing" or rank != victim:
            lines[rank].append(PREFIX + json.dumps({"kind": kind, **fields}))

    say(0, "scope", turns=False, clocks={str(rank): 0.0 for rank in range(NODES)})
    for rank in range(NODES):
        say(
            rank,
            "inventory",
            keys={"cpu": "same", "nccl": "2.21.5" if (fault, rank) == ("library", victim) else "2.27"},
        )
    flipped = cluster.random.integers(3)
    for sample in cluster.taken:
        if fault == "missing" and victim in sample.unit:
            continue
        place = {name: value for name in ("round", "case", "moment") if (value := getattr(sample, name)) is not None}
        facts: dict[str, Any] = {"unit": sample.unit} if sample.test == "network" else {"digest": DIGEST}
        if sample.test.startswith("copy"):
            facts["counters"] = {"ecc_uncorrected": 0}
        if fault == "bit" and sample.unit == (victim,) and sample.round == flipped and sample.test == "memory":
            bit = 1 << int(cluster.random.integers(64))
            facts["digest"] = f"{int(DIGEST, 16) ^ bit:016x}"
        say(sample.unit[0], "rates", at=sample.at, values={sample.test: sample.rate}, **facts, **place)
    say(0, "screened", at=evidence.screened, cases=evidence.cases)
    ranks = [rank for rank in range(NODES) if fault != "missing" or rank != victim]
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        facts = {"operation": operation, "bytes": 1 << 20, "ranks": ranks, "right": True}
        say(0, "collective", times=[0.01] * 5, transport="TCP", **facts)
    say(0, "training", ranks=ranks, steps=[0.1] * 20, batch=8, wall=2.5, bytes=1000, write=0.1, read=0.1)
    say(0, "end", at=_end_of(cluster))
    return lines


def _end_of(cluster: Cluster) -> float:
    """Seconds from the start of a constructed run to its end."""
    return max(sample.at for sample in cluster.taken) + 1.0


def _lie(fault: str, archive: Archive, cluster: Cluster, chance: random.Random, folder: Path) -> str:
    run = folder / "lie"
    for name in archive.names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open_file(name) as file:
            path.write_bytes(file.read())
    name = f"logs/rank-{cluster.victim}.log"
    lines = (run / name).read_text().splitlines()
    if fault == "copied":
        lines = (run / f"logs/rank-{(cluster.victim + 1) % NODES}.log").read_text().splitlines()
    else:
        test = chance.choice(NODE_TESTS)
        factor = 1 - chance.choice((-1.5, 1.5)) * TESTS[test].fail
        for at, line in enumerate(lines):
            if line.startswith(PREFIX) and test in (row := json.loads(line.removeprefix(PREFIX))).get("values", {}):
                row["values"][test] *= factor
                lines[at] = PREFIX + json.dumps(row)
    (run / name).write_text("\n".join([*lines, ""]))
    digest = hashlib.sha256((run / name).read_bytes()).hexdigest()
    sums = (run / "SHA256SUMS").read_text().splitlines()
    sums = [f"{digest}  {name}" if line.endswith(f"  {name}") else line for line in sums]
    (run / "SHA256SUMS").write_text("\n".join([*sums, ""]))
    return "nobody" if verify(run).ok else "right"


# --- real -----------------------------------------------------------------------------------------------------------


def run_trial(fault: str, options: argparse.Namespace, folder: Path) -> Trial:
    """Whether the right worker, nobody, or another one was named, and what the certificate says."""
    words = [*MLBENCH, "run", "certify", str(options.workers), "--task", "certify", "--anonymous", "--timeout", "2h"]
    words += ["--share-machine", "--yes", "-c", "1", "--processes-per-worker", str(options.ranks), "--preset", "tiny"]
    words += ["--set", "limit_seconds=20", "--set", "confirm_seconds=400", "--set", "run.absent=15s"]
    if fault in ("network", "lossy"):
        words += ["--network", f"{_MEGABITS}mbit,1ms", "--set", "stages=drift,pairs"]
    if fault == "network":
        words += ["--faults", f"at 0s link {VICTIM} {_MEGABITS * options.share:g}mbit"]
    elif fault in ("quota", "paused", "hog", "slow-disk"):
        words += ["--set", "stages=drift,node"]
    elif fault == "flapping":
        words += ["--set", "stages=drift,node,soak", "--set", f"soak_hours={_SOAK_SECONDS / 3600:g}"]
    environment = {**os.environ, "MLBENCH_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with open(folder / "client.txt", "wb") as output:
        client = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        try:
            if fault in _HARMS:
                victim = _find_victim(folder, client, measured=fault in ("silent", "killed"))
                with nullcontext() if victim is None else _HARMS[fault](victim, options.share):
                    client.wait(_LIMIT_SECONDS)
            client.wait(_LIMIT_SECONDS)
        finally:
            client.kill()
    run = next((path.parent for path in folder.glob("runs/*/certificate.json")), None)
    if run is None:
        return "no certificate", (folder / "client.txt").read_text("utf-8", "replace")[-300:]
    document: dict[str, Any] = json.loads((run / "certificate.json").read_text())
    if not verify(run).ok:
        return "not verified", ""
    nodes = {"healthy": set(), "lossy": {f"worker-{VICTIM}", f"worker-{PEER}"}}.get(fault, {f"worker-{VICTIM}"})
    return judge_names(document, nodes, REASONS.get(fault, set()), ["watch"] if fault in ("flapping", "lossy") else [])


def _find_victim(folder: Path, client: "subprocess.Popen[bytes]", *, measured: bool) -> int | None:
    """The process of rank VICTIM, once it has said what it is, or has measured; None if the client ends before."""
    word = b'"kind":"rates"' if measured else b'"kind":"inventory"'
    end = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < end:
        has_ended = client.poll() is not None
        for log in folder.glob(f"runs/*/logs/rank-{VICTIM}.log"):
            if word in log.read_bytes():
                state = json.loads((log.parents[1] / ".state/state.json").read_text())
                return int(next(facts["pid"] for facts in state["ranks"] if facts["rank"] == VICTIM))
        if has_ended:
            return None
        time.sleep(0.1)
    raise TimeoutError("the worker said nothing")


@contextmanager
def _group(leader: int, share: float) -> Iterator[None]:
    """A control group with a share of one CPU, with a process and those that it has started in it."""
    _GROUP.mkdir(exist_ok=True)
    _set_share(share)
    for process in [leader, *_children(leader)]:
        for thread in Path(f"/proc/{process}/task").iterdir():
            (_GROUP / "tasks").write_text(thread.name)
    yield


def _set_share(share: float) -> None:
    (_GROUP / "cpu.cfs_period_us").write_text("10000")
    (_GROUP / "cpu.cfs_quota_us").write_text(str(max(1000, round(share * 10000))))


def _children(leader: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == leader:
                found.append(int(status.parent.name))
    return found


@contextmanager
def _alternating(change: Callable[[bool], object], bad: float, good: float) -> Iterator[None]:
    """Call `change` with True for `bad` seconds and with False for `good` seconds, in turn, and leave it at False."""
    ended = threading.Event()

    def alternate() -> None:
        with suppress(ProcessLookupError):
            while not ended.is_set():
                change(True)
                ended.wait(bad)
                change(False)
                ended.wait(good)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _paused(leader: int, share: float) -> Iterator[None]:
    while not (children := _children(leader)):
        time.sleep(0.1)

    def change(is_bad: bool) -> None:
        os.kill(children[0], signal.SIGSTOP if is_bad else signal.SIGCONT)

    with _alternating(change, 0.02 * (1 - share), 0.02 * share):
        yield


@contextmanager
def _flapping(leader: int, share: float) -> Iterator[None]:
    with (
        _group(leader, share),
        _alternating(lambda is_bad: _set_share(share if is_bad else os.cpu_count() or 1), _FLAP_SECONDS, _FLAP_SECONDS),
    ):
        yield


@contextmanager
def _hog(leader: int, _share: float) -> Iterator[None]:
    copying = "import torch\na = torch.ones(1 << 24)\nb = torch.empty_like(a)\nwhile True: b.copy_(a)"
    with _group(leader, 1.0), subprocess.Popen([sys.executable, "-c", copying]) as neighbor:
        try:
            (_GROUP / "cgroup.procs").write_text(str(neighbor.pid))
            yield
        finally:
            neighbor.kill()


@contextmanager
def _slow_disk(leader: int, _share: float) -> Iterator[None]:
    """Mount a disk over the output folder of a rank, and let the kernel slow down whatever is written to it."""
    output = _environment(leader)["MLBENCH_OUTPUT_DIR"]
    with tempfile.NamedTemporaryFile(suffix=".img") as image:
        image.truncate(64 << 20)
        _do("mkfs.ext4", "-q", "-O", "^has_journal", image.name)
        device = _do("losetup", "--find", "--show", image.name).strip()
        number = os.stat(device).st_rdev
        place = f"{os.major(number)}:{os.minor(number)}"
        try:
            _do("mount", device, output)
            os.rmdir(f"{output}/lost+found")
            _THROTTLE.write_text(f"{place} {_SLOW_DISK}")
            yield
        finally:
            _THROTTLE.write_text(f"{place} 0")
            _do("umount", output)
            _do("losetup", "--detach", device)


@contextmanager
def _lossy(leader: int, _share: float) -> Iterator[None]:
    for chain, end in (("INPUT", "-s"), ("OUTPUT", "-d")):
        rule = ["-A", chain, end, worker_address(PEER), "-m", "statistic", "--mode", "random"]
        rule += ["--probability", f"{_LOST:g}", "-j", "DROP"]
        _do("nsenter", f"--net=/proc/{leader}/ns/net", "iptables", *rule)
    yield


@contextmanager
def _signaled(leader: int, number: int) -> Iterator[None]:
    os.kill(leader, number)
    yield


def _environment(process: int) -> dict[str, str]:
    entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def _do(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


_HARMS: dict[str, Callable[[int, float], AbstractContextManager[None]]] = {
    "quota": _group,
    "paused": _paused,
    "hog": _hog,
    "slow-disk": _slow_disk,
    "flapping": _flapping,
    "lossy": _lossy,
    "silent": lambda leader, _share: _signaled(leader, signal.SIGSTOP),
    "killed": lambda leader, _share: _signaled(leader, signal.SIGKILL),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--workers", type=int, default=8, help="of real trials")
    parser.add_argument("--ranks", type=int, default=1, help="per worker")
    parser.add_argument("--share", type=float, default=0.7, help="of a CPU or of the rate that the slow worker gets")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        template = make_template(Path(home)) if {*(options.faults or FAULTS)} & {*CONSTRUCTED} else None
        for fault in options.faults or FAULTS:
            counts: Counter[str] = Counter()
            for number in range(options.trials):
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    begun = time.monotonic()
                    if fault in CONSTRUCTED:
                        assert template is not None
                        word, said = construct(fault, number, template, Path(folder))
                    else:
                        word, said = run_trial(fault, options, Path(folder))
                counts[word] += 1
                load, seconds = os.getloadavg()[0], time.monotonic() - begun
                if word != "right" or fault not in CONSTRUCTED:
                    print(f"{fault} {number + 1}: {word}, {seconds:.0f} s, load {load:.1f}; {said}", flush=True)
            print(f"{fault}: {dict(counts)} of {options.trials}", flush=True)
    with suppress(OSError):
        _GROUP.rmdir()


if __name__ == "__main__":
    main()
