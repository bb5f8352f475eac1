"""How long the tool takes to start, as a ratio to `python -c pass`, measured side by side.

    python benchmarks/startup.py [ROUNDS]

Each round runs every command once, in another order, so that whatever the machine does, and what one command leaves
to the next, meets all of them alike. Figures are the median over rounds, and the minimum, which other work on the
machine disturbs least. The store holds 10 000 finished runs, and one that has really run; `status` goes through a pipe
and shows the newest 50. The tool's modules are compiled, as in an installation.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store

RUNS = 10_000
BARE = "python -c pass"
API = "the API"  # from mlbench_cli.api import Client, in a program; 150 ms at most
BUDGETS = {  # ratio that the command may take; None: reported only
    "--version": 2.0,
    "--help": 7.0,
    "run --help": None,
    "status": 9.0,
    "status real-1": 9.0,
    "list-clusters": 9.0,
    "tasks": None,
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as home:
        fill(Path(home))
        environment = {**os.environ, "MLBENCH_HOME": home}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the first round compiles
        tool = str(Path(sys.executable).with_name("mlbench"))
        subprocess.run(
            [tool, "run", "real", "1", "--command", "true"], env=environment, capture_output=True, check=True
        )
        commands = {
            BARE: [sys.executable, "-c", "pass"],
            API: [sys.executable, "-c", "from mlbench_cli.api import Client"],
            **{name: [tool, *name.split()] for name in BUDGETS},
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, command in random.sample(list(commands.items()), len(commands)):
                taken = measure(command, environment)
                if number:  # the first round warms the caches
                    seconds[name].append(taken)
    print(f"{'COMMAND':<16}{'MEDIAN MS':>10}{'RATIO':>8}{'LEAST MS':>10}{'RATIO':>8}{'BUDGET':>8}")
    for name, values in seconds.items():
        row = f"{name:<16}"
        for figure in (statistics.median, min):
            row += f"{figure(values) * 1000:>10.1f}{figure(values) / figure(seconds[BARE]):>8.2f}"
        print(f"{row}{BUDGETS.get(name) or '-':>8}")


def fill(home: Path) -> None:
    store = Store(home)
    for number in range(RUNS):
        spec = RunSpec(f"run-{number}", "local", "local", "custom", "custom", ("true",), "gloo", 1)
        run = store.record_run(spec)
        store.advance(run, RunState.FINISHED, Outcome.COMPLETED)
    store.close()


def measure(command: list[str], environment: dict[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
