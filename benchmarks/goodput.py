"""Goodput under random kills, predicted before the runs and then measured: two ranks of digits_resnet on this machine.

    .venv/bin/python benchmarks/goodput.py [--seconds 90] [--seeds 4,5,6] [--mtbf 15,40]

A first run measures what a checkpoint and a restart cost. From these, E[ETTR] (arXiv 2410.21680) and the replay predict
the productive share of runs with other faults: for the requested rate, and for the faults that happened. Shares
are of the time after start-up. The defaults take 14 minutes; two cores of the machine should be idle.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from recovery import run_with_faults

from mlbench_cli.simulator.faults import FaultRates, predict_faults

SETTINGS = ("--task", "digits_resnet", "--preset", "tiny", "--num-cpus", "1", "--set", "epochs=10000")
NO_GOAL = ("--set", "goal_full=100", "--set", "goal_light=100")
INTERVAL = 3.0  # seconds between checkpoints
FIRST = "every ~20s kill any rank; seed 2"


def main(arguments: list[str]) -> int:
    """Print a line for each run, and one for each rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--seeds", default="4,5,6")
    parser.add_argument("--mtbf", default="15,40")
    given = parser.parse_args(arguments)
    first = measure("goodput-first", FIRST, given.seconds)
    print(json.dumps({"run": FIRST, **shares(first)}), flush=True)
    checkpoint, restart = float(first["checkpoint_seconds"]), mean_cost(first)
    print(json.dumps({"checkpoint s": round(checkpoint, 3), "restart s": round(restart, 2)}), flush=True)
    for mtbf in map(float, given.mtbf.split(",")):
        measured, happened = [], []
        for seed in given.seeds.split(","):
            script = f"every ~{mtbf:g}s kill any rank; seed {seed}"
            facts = measure(f"goodput-{mtbf:g}-{seed}", script, given.seconds)
            found = shares(facts)
            rate = found["seconds"] / max(1, found["restarts"])
            found["predicted of its faults"] = predict(rate, checkpoint, restart)
            measured.append(found["measured"])
            happened.append(found["predicted of its faults"] - found["measured"])
            print(json.dumps({"run": script, **found}), flush=True)
        expected = predict(mtbf, checkpoint, restart)
        line = {
            "mtbf s": mtbf,
            "runs": len(measured),
            "predicted before": expected,
            "measured": round(statistics.fmean(measured), 3),
            "error": round(expected - statistics.fmean(measured), 3),
            "mean error given the faults": round(statistics.fmean(happened), 3),
            "worst error given the faults": max(happened, key=abs),
        }
        print(json.dumps(line), flush=True)
    return 0


def measure(name: str, script: str, seconds: int) -> dict[str, Any]:
    """The record of faults of one run."""
    budget = ("--budget", f"{seconds}s", "--timeout", "10m")
    faults = ("--faults", script, "--on-failure", "restart", "--checkpoint-every", f"{INTERVAL:g}s")
    return run_with_faults(name, *SETTINGS, *NO_GOAL, *budget, *faults)


def mean_cost(facts: dict[str, Any]) -> float:
    """Seconds from a fault until training continues, over the recoveries of a run."""
    if not facts["recoveries"]:
        raise SystemExit("The first run ended before its first kill: it needs more --seconds.")
    return statistics.fmean(each["detection"] + each["restart"] + each["loading"] for each in facts["recoveries"])


def shares(facts: dict[str, Any]) -> dict[str, Any]:
    """The measured productive share after start-up, and the seconds that it is of."""
    seconds = facts["wall_seconds"] - facts["seconds"]["startup"]
    return {
        "seconds": round(seconds, 1),
        "restarts": facts["attempts"] - 1,
        "measured": round(facts["seconds"]["useful"] / seconds, 3),
    }


def predict(mtbf: float, checkpoint: float, restart: float) -> float:
    """The replayed productive share at the benchmark's interval."""
    found = predict_faults(FaultRates(mtbf, checkpoint, restart, INTERVAL))
    return round(next(each.replayed for each in found if each.interval == INTERVAL), 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
