"""Ways of running the same training against the ordinary one, whole runs of `mlbench run` in turn, 2 ranks:

    pinned         ranks bound to CPUs of their own (--pin)
    2, 4 buckets   gradients in 2 or 4 messages that a communication thread sends during the backward pass, instead of
                   one message after it, as the task's own reduction has it

    python benchmarks/ways.py [--rounds 6] [digits_resnet] [cifar10_resnet20]

Every rate is the median of the blocks of the throughput protocol. A ratio is that of a way's rate to the ordinary run's
of the same round: above 1 the way is faster. The interval is Student's 95 % interval of the mean of their logarithms.
The load is that of the machine when a round began.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbench_cli.results.analysis.statistics import estimate

ROOT = Path(__file__).parents[1]
# The gradients of ResNet-20 are 1.1 MB.
WAYS: Mapping[str, Sequence[str]] = {
    "ordinary": (),
    "pinned": ("--pin",),
    "2 buckets": ("--method", "fusion", "--set", "comm.plan=threshold:600KiB"),
    "4 buckets": ("--method", "fusion", "--set", "comm.plan=threshold:300KiB"),
}
SETTINGS: Mapping[str, Sequence[str]] = {
    "digits_resnet": (),
    "cifar10_resnet20": ("batch_size=64", "training_images=4000", "blocks=6", "block_updates=4", "blocks_after=4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("tasks", nargs="*", default=list(SETTINGS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        for task in given.tasks:
            compare(Path(home), task, given.rounds)


def compare(home: Path, task: str, rounds: int) -> None:
    """Print the ratio of each way to the ordinary one."""
    ratios: dict[str, list[float]] = {way: [] for way in WAYS if way != "ordinary"}
    loads, rates = [], []
    for number in range(rounds):
        loads.append(os.getloadavg()[0])
        order = list(WAYS)[:: 1 if number % 2 == 0 else -1]
        found = {way: run(home, task, WAYS[way], f"{way.replace(' ', '-')}-{number}") for way in order}
        rates.append(found["ordinary"])
        for way, values in ratios.items():
            values.append(found[way] / found["ordinary"])
    print(f"{task}: {statistics.median(rates):.1f} images/s, load {min(loads):.1f} to {max(loads):.1f}")
    for way, values in ratios.items():
        mean = estimate([math.log(value) for value in values])
        interval = "" if mean.low is None else f", {math.exp(mean.low):.3f} to {math.exp(mean.high or 0.0):.3f}"
        print(f"    {way:<12} {math.exp(mean.mean):.3f} times as fast{interval} ({rounds} rounds)", flush=True)


def run(home: Path, task: str, options: Sequence[str], name: str) -> float:
    """Samples per second of one run."""
    name = f"way-{task.partition('_')[0]}-{name}"
    settings = [word for setting in SETTINGS[task] for word in ("--set", setting)]
    command = [sys.executable, "-m", "mlbench_cli", "run", name, "2", "--task", task, "--preset", "throughput"]
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    done = subprocess.run(
        [*command, *settings, *options, "--yes"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    result = max(home.rglob("result.json"), key=lambda path: path.stat().st_mtime)
    return float(json.loads(result.read_text())["details"]["throughput_protocol"]["summary"]["median"])


if __name__ == "__main__":
    main()
