"""Real workers of this machine with faults: who does certify name? `python -m benchmarks.certify_trials [FAULT ...]`.

healthy  no fault: nobody is to be named
cpu      a control group gives worker 1 a part of one CPU: matmul_slow, sustained_slow or memory_slow (root, cgroup v1)
silent   worker 1 is stopped for good once it has measured: no_answer
killed   worker 1 is killed: no_answer
network  worker 1's link has 70 % of the others' rate, in an emulated network: node_network_slow
edited   as healthy; then a sample of worker 1 in the sealed archive is halved, with checksums that fit: verify refuses

Trials use the preset tiny, which confirms within a minute and so promises no error rate: they prove that faults get
their reasons, while `certify_errors` counts wrong names. Workers share the CPUs, and every trial prints their load.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

VICTIM = 1
MLBENCH = (sys.executable, "-m", "mlbench_cli")
REASONS = {
    "cpu": {"matmul_slow", "sustained_slow", "memory_slow"},
    "silent": {"no_answer"},
    "killed": {"no_answer"},
    "network": {"node_network_slow"},
}
FAULTS = ("healthy", *REASONS, "edited")
_GROUP = Path(f"/sys/fs/cgroup/cpu/mlbench-certify-{os.getpid()}")
_LIMIT_SECONDS = 600.0


def run_trial(fault: str, options: argparse.Namespace, folder: Path) -> tuple[str, str]:
    """Whether the right node, nobody, or another one was named, and what the certificate says of nodes."""
    words = [*MLBENCH, "run", "certify", str(options.workers), "--task", "certify", "--anonymous", "--timeout", "2h"]
    words += ["--share-machine", "--yes", "-c", "1", "--processes-per-worker", str(options.ranks)]
    words += [
        "--preset",
        "tiny",
        "--set",
        "limit_seconds=20",
        "--set",
        "confirm_seconds=400",
        "--set",
        "run.absent=15s",
    ]
    if fault == "network":
        words += ["--network", "50mbit,1ms", "--faults", f"at 0s link {VICTIM} {50 * options.share:g}mbit"]
        words += ["--set", "stages=drift,pairs"]
    environment = {**os.environ, "MLBENCH_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with open(folder / "client.txt", "wb") as output:
        client = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        try:
            if fault in ("cpu", "silent", "killed"):
                _harm(fault, folder, options.share)
            client.wait(_LIMIT_SECONDS)
        finally:
            client.kill()
    run = next(folder.glob("runs/*/certificate.json")).parent
    if fault == "edited":
        return ("right" if _is_edit_refused(run, environment) else "nobody"), ""
    document: dict[str, Any] = json.loads((run / "certificate.json").read_text())
    named = {
        str(node["node"]): set(node["reasons"])
        for node in document["nodes"]
        if node["state"] in ("slow", "failed", "missing")
    }
    said = "; ".join(
        f"{node['node']} {node['state']} {' '.join(node['reasons'])}".strip() for node in document["nodes"]
    )
    if named.keys() - ({f"worker-{VICTIM}"} if fault != "healthy" else set()):
        return "another", said
    if not named:
        return ("right" if fault == "healthy" else "nobody"), said
    return ("right" if named[f"worker-{VICTIM}"] & REASONS[fault] else "wrong reason"), said


def _harm(fault: str, folder: Path, share: float) -> None:
    """Do it as soon as worker VICTIM has said who it is, or for `silent` and `killed`, has measured."""
    word = b'"kind":"inventory"' if fault == "cpu" else b'"kind":"node"'
    end = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < end:
        for log in folder.glob(f"runs/*/logs/rank-{VICTIM}.log"):
            if word in log.read_bytes():
                state = json.loads((log.parents[1] / ".state/state.json").read_text())
                rank = next(facts["pid"] for facts in state["ranks"] if facts["rank"] == VICTIM)
                if fault == "cpu":
                    _throttle(rank, share)
                else:
                    os.kill(rank, signal.SIGSTOP if fault == "silent" else signal.SIGKILL)
                return
        time.sleep(0.1)


def _throttle(leader: int, share: float) -> None:
    """Give a process and those that it has started a share of one CPU."""
    _GROUP.mkdir(exist_ok=True)
    (_GROUP / "cpu.cfs_period_us").write_text("10000")
    (_GROUP / "cpu.cfs_quota_us").write_text(str(max(1000, round(share * 10000))))
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[2]) == leader:
                (_GROUP / "cgroup.procs").write_text(status.parent.name)


def _is_edit_refused(run: Path, environment: dict[str, str]) -> bool:
    log = run / f"logs/rank-{VICTIM}.log"
    text = re.sub(r'"memory":([0-9.]+)', lambda found: f'"memory":{float(found[1]) / 2}', log.read_text())
    log.write_text(text)
    sums = (run / "SHA256SUMS").read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    (run / "SHA256SUMS").write_text(re.sub(rf"[0-9a-f]{{64}}(?=  logs/rank-{VICTIM}\.log)", digest, sums))
    words = [*MLBENCH, "verify", str(run)]
    return subprocess.run(words, env=environment, capture_output=True, check=False).returncode != 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), choices=[*FAULTS, []])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="per worker")
    parser.add_argument("--share", type=float, default=0.7, help="of a CPU or of the rate that the slow worker gets")
    options = parser.parse_args(arguments)
    for fault in options.faults:
        counts: Counter[str] = Counter()
        for number in range(options.trials):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                begun = time.monotonic()
                word, said = run_trial(fault, options, Path(folder))
            counts[word] += 1
            load, seconds = os.getloadavg()[0], time.monotonic() - begun
            print(f"{fault} {number + 1}: {word}, {seconds:.0f} s, load {load:.1f}; {said}", flush=True)
        print(f"{fault}: {dict(counts)}", flush=True)
    with suppress(OSError):
        _GROUP.rmdir()


if __name__ == "__main__":
    main()
