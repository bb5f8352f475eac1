"""Every method on the digits' preset `tiny`: updates and seconds to the goal, and images per second, under delays.

    .venv/bin/python -m benchmarks.goals [--ranks 4] [--delay ALPHA,BETA ...] [--methods PRESET,...]
                                          [--record FILE] [--seconds 3600]
    .venv/bin/python -m benchmarks.goals --ranks 2 --delay none      # which presets reach the goal

All ranks and parameter servers are processes of this machine. Delays are what every message takes longer: none, that of
10 Gbit/s, that of 1 Gbit/s. The self-check took its seconds before the first training. Each training is one run; FILE
has one JSON line of each, and what is in there is not run again, so that the table can be made in pieces of --seconds.
It is printed at the end, in Markdown.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

# As a script the repository is not on the path; with -m it is.
sys.path.insert(0, str(Path(__file__).parents[1]))

from mlbench_cli.tasks.catalog import load_task
from task_images.comm.methods import Method, MethodError, check
from task_images.comm.presets import PRESETS, resolve
from tests.contract.task_images.ranks import RankServer

DELAYS = ("none", "0.0005,8e-10", "0.005,8e-9")
TASK = "task_images.digits_resnet"
UNCOUNTED = ("fsdp2", "hsdp")  # torch sends for them
RECORD = Path("build/goals.jsonl")
CHECK = re.compile(r"self-check passed in ([\d.]+) s")


class Row(TypedDict, total=False):
    """One training: what it was, and what became of it. `why` if it failed, the others if not."""

    method: str
    delay: str
    ranks: int
    outcome: str
    why: str
    value: float
    updates: float
    seconds: float
    images_per_second: float
    bytes_per_update: float
    check_seconds: float
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--delay", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--methods", metavar="PRESET,...", default=",".join(PRESETS))
    options = parser.parse_args()
    options.record.parent.mkdir(parents=True, exist_ok=True)
    known = read(options.record)
    end = time.monotonic() + options.seconds
    server = RankServer()
    for delay in options.delay or DELAYS:
        for method in list_methods(options.methods.split(","), options.ranks, delay):
            if (method.name, delay, options.ranks) in known or time.monotonic() > end:
                continue
            row = train(server, method, delay, options.ranks)
            with options.record.open("a") as file:
                file.write(json.dumps(row) + "\n")
    server.close()
    print_table([row for row in read(options.record).values() if row["ranks"] == options.ranks])


def list_methods(names: Sequence[str], ranks: int, delay: str) -> list[Method]:
    """Those of `names` that can be trained so."""
    found = []
    for name in names:
        method = resolve(name, {"delay": delay})
        try:
            check(method, ranks)
        except MethodError:
            continue  # torch's own engines know no delay
        found.append(method)
    return found


def train(server: RankServer, method: Method, delay: str, ranks: int) -> Row:
    """What became of one training."""
    row = Row(method=method.name, delay=delay, ranks=ranks, load=os.getloadavg()[0])
    variables = {"MLBENCH_METHOD": json.dumps(method.to_dict())}
    with tempfile.TemporaryDirectory() as folder:
        parameters = load_task("digits_resnet").resolve("tiny")
        started = server.start(TASK, ranks, Path(folder), parameters, variables, servers=method.server_count)
        ended = server.wait(started)
    if any(one.code for one in ended):
        return {**row, "outcome": "failed", "why": ended[0].stderr[-300:]}
    result = ended[0].result
    communication = result["details"]["communication"]
    return {
        **row,
        "outcome": result["outcome"],
        "value": result["goal"]["value"],
        "updates": result["updates"],
        "seconds": result["wall_seconds"],
        "images_per_second": result["samples"] / result["training_seconds"],
        "bytes_per_update": communication.get("bytes", 0.0) / max(1.0, communication.get("updates", 1.0)),
        "check_seconds": float(found[1]) if (found := CHECK.search(ended[0].stdout)) else 0.0,
    }


def read(path: Path) -> dict[tuple[str, str, int], Row]:
    """The rows of a file, by method, delay and ranks."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["method"], row["delay"], row["ranks"]): row for row in rows}


def print_table(rows: list[Row]) -> None:
    if not rows:
        return
    loads = sorted(row.get("load", 0.0) for row in rows)
    print(f"{rows[0]['ranks']} ranks, load of the machine when a training began: {loads[0]:.0f} to {loads[-1]:.0f}\n")
    delays = list(dict.fromkeys(row["delay"] for row in rows))
    heads = [
        "method",
        "self-check, s",
        "updates",
        "bytes per update",
        *(f"{delay}: s to goal, images/s" for delay in delays),
    ]
    print_row(heads)
    print_row(["---"] * len(heads))
    for name in dict.fromkeys(row["method"] for row in rows):
        own = {row["delay"]: row for row in rows if row["method"] == name}
        first = next(iter(own.values()))
        size = "not counted" if name in UNCOUNTED else f"{first.get('bytes_per_update', 0):,.0f}"
        cells = [f"`{name}`", f"{first.get('updates', 0):.0f}", size]
        cells.insert(1, f"{first.get('check_seconds', 0):.2f}")
        print_row([*cells, *(describe(own.get(delay)) for delay in delays)])


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")


def describe(row: Row | None) -> str:
    if row is None:
        return ""
    if row["outcome"] == "failed":
        return "failed"
    reached = f"{row['seconds']:.1f}" if row["outcome"] == "goal_reached" else f"missed ({row['value']:.0f} %)"
    return f"{reached}, {row['images_per_second']:,.0f}"


if __name__ == "__main__":
    main()
