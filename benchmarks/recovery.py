"""Seconds until a training goes on after a rank was killed or stopped, by cluster: two ranks of digits_resnet that
write a checkpoint every five updates.

    python -m benchmarks.recovery [--clusters local] [--policies restart,replace] [--repeats 5]

Other clusters are those that are attached: `mlbench list-clusters`. Detection, restart (processes, imports, data) and
loading are those of result.json. A run takes about 20 s on an idle machine.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from mlbench_cli.config.settings import data_dir

FAULTS = {"kill": "at 2s kill rank 1", "stop": "at 2s stop rank 1"}
SETTINGS = ("--task", "digits_resnet", "--preset", "tiny", "--set", "goal_full=100", "--set", "epochs=1000", "--budget")
PARTS = ("detection", "restart", "loading", "lost", "seconds")


def main(arguments: list[str]) -> int:
    """Print a line for each cluster and fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clusters", default="local")
    parser.add_argument("--policies", default="restart,replace")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    for cluster in given.clusters.split(","):
        for policy, name in itertools.product(given.policies.split(","), FAULTS):
            names = [f"recovery-{cluster}-{policy}-{name}-{n}" for n in range(given.repeats)]
            found = [measure(cluster, each, FAULTS[name], policy) for each in names]
            medians = {part: round(statistics.median(each[part] for each in found), 3) for part in PARTS}
            facts = {"cluster": cluster, "policy": policy, "fault": name, "runs": len(found)}
            print(json.dumps({**facts, **medians}), flush=True)
    return 0


def measure(cluster: str, name: str, script: str, policy: str) -> dict[str, Any]:
    """The one recovery of a run."""
    faults = ("--faults", script, "--detect", "2s", "--on-failure", policy, "--checkpoint-every", "5")
    (recovery,) = run_with_faults(name, "--cluster", cluster, *SETTINGS, "8s", *faults)["recoveries"]
    return dict(recovery)


def run_with_faults(name: str, *options: str) -> dict[str, Any]:
    """`faults` of the result of a run on two workers, which is then deleted."""
    command = [sys.executable, "-m", "mlbench_cli"]
    words = [*command, "run", name, "2", *options, "--yes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    for path in data_dir().glob("runs/*/result.json"):
        result = json.loads(path.read_bytes())
        if result["run"] == f"{name}-2":
            subprocess.run([*command, "delete", f"{name}-2", "--yes"], capture_output=True, check=True)
            return dict(result["faults"])
    raise SystemExit(f"{name} has no result")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
