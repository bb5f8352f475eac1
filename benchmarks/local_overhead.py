"""What a local run costs over the task's own process: record, start, follow, seal. Budget: 0.3 s, all in all.

    python benchmarks/local_overhead.py [--repeats 15]

The task is a process that does nothing (`true`). Each repeat takes all ways by turns, so that whatever else the machine
does meets all of them; medians are compared. `python -c pass` tells how fast the machine is just now (10 ms on a quiet
one, which the budget means).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BUDGET = 0.3


def interpreter(number: int) -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def by_hand(number: int) -> None:
    subprocess.run(["true"], check=True)


def in_process(home: Path) -> Callable[[int], None]:
    """A client that is up already: engine and supervise alone."""
    from mlbench_cli.engines.local.engine import LocalEngine
    from mlbench_cli.model.spec import RunSpec
    from mlbench_cli.results.archive import seal  # noqa: F401  (its import is the command line's cost)
    from mlbench_cli.runs import supervise
    from mlbench_cli.storage.store import Store

    store, engine = Store(home), LocalEngine()

    def run(number: int) -> None:
        spec = RunSpec(f"engine-{number}", "local", "local", "custom", "custom", ("true",), "gloo", 1)
        recorded = store.record_run(spec)
        engine.submit(recorded, engine.render(spec))
        finished = supervise.follow(recorded, engine, store)
        if finished.outcome != "completed":
            raise SystemExit(f"the run is not completed but {finished.outcome}: {finished.summary}")

    return run


def command_line(home: Path) -> Callable[[int], None]:
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the first run compiles

    def run(number: int) -> None:
        words = [sys.executable, "-m", "mlbench_cli", "run", f"command-{number}", "1", "--command", "true", "--yes"]
        subprocess.run(words, check=True, env=environment, capture_output=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    # The last run's agent may still be ending when the folder is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        ways = {
            "python -c pass": interpreter,
            "by hand": by_hand,
            "engine + supervise": in_process(Path(home)),
            "mlbench run": command_line(Path(home)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(repeats + 1):
            for name, way in ways.items():
                begun = time.perf_counter()
                way(number)
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first one warms up
    unit = medians["python -c pass"]
    print(f"{'':20} {'median':>8} {'fastest':>8} {'overhead':>9}  of {BUDGET} s  of python -c pass")
    for name, median in medians.items():
        overhead = median - medians["by hand"]
        ratios = (
            f"{overhead / BUDGET:7.2f}x {overhead / unit:8.1f}x"
            if name in ("engine + supervise", "mlbench run")
            else ""
        )
        print(f"{name:20} {median:7.3f}s {min(seconds[name][1:]):7.3f}s {overhead:8.3f}s {ratios}")


if __name__ == "__main__":
    main()
