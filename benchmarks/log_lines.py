"""200 000 log lines through a local run: every byte must arrive. Budget: 1 s from the run's start to its last line.

    python benchmarks/log_lines.py [--lines 200000] [--repeats 5]

Side by side in each repeat: the same program by hand with its output in a file; through agent and `engine.logs`,
followed while it writes; and `mlbench logs --raw` of the finished run. A few lines of a megabyte, some that are not
UTF-8 and some with carriage returns are among them, and the last has no end. `python -c pass` tells how fast the
machine is just now (10 ms on a quiet one, which the budget means).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUDGET = 1.0


def content(lines: int) -> bytes:
    """Short lines, and every 50 000th a nasty one."""
    nasty = [b"x" * (1 << 20), b"\xff\xfe\x00", b" 10%\r 50%\r100%\r", b"@mlbench {not an event"]
    parts = [
        b"line %d of the log" % number if number % 50_000 else nasty[number // 50_000 % 4] for number in range(lines)
    ]
    return b"\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    from mlbench_cli.engines.follow import read_log, watch
    from mlbench_cli.engines.local.engine import LocalEngine
    from mlbench_cli.model.spec import RunSpec
    from mlbench_cli.storage.store import Store

    ways = ("python -c pass", "by hand, to a file", "run, followed", "mlbench logs --raw")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as home:
        source = Path(home) / "content"
        source.write_bytes(expected := content(options.lines))
        argv = ("cat", str(source))
        store, engine = Store(Path(home)), LocalEngine()
        for number in range(options.repeats + 1):
            before = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            begun = time.perf_counter()
            with open(Path(home) / "by-hand", "wb") as file:
                subprocess.run(argv, stdout=file, check=True)
            by_hand = time.perf_counter()

            spec = RunSpec(f"log-{number}", "local", "local", "custom", "custom", argv, "gloo", 1)
            run = store.record_run(spec)
            engine.submit(run, engine.render(spec))
            received = [line.text for line in read_log(engine, run, 0, follow=True)]
            followed = time.perf_counter()
            (*_, last) = watch(engine, run)

            words = [sys.executable, "-m", "mlbench_cli", "logs", run.name, "--rank", "0", "--raw"]
            asked = time.perf_counter()
            printed = subprocess.run(words, env={**os.environ, "MLBENCH_HOME": home}, capture_output=True, check=True)
            answered = time.perf_counter()

            if last.ended != "exited" or b"".join(received) != expected or len(received) != options.lines:
                raise SystemExit("followed: the log is not what the program wrote")
            if printed.stdout != expected:
                raise SystemExit("mlbench logs: the output is not what the program wrote")
            for name, value in zip(
                ways, (begun - before, by_hand - begun, followed - by_hand, answered - asked), strict=True
            ):
                seconds[name].append(value)
    print(f"{options.lines} lines, {len(expected) / 1e6:.1f} MB, all exact")
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first one warms up
    unit = medians["python -c pass"]
    print(f"{'':20} {'median':>8} {'fastest':>8} {'lines/s':>10}  of {BUDGET:g} s  of python -c pass")
    for name, median in medians.items():
        ratios = f"{median / BUDGET:7.2f}x {median / unit:8.1f}x" if name in ways[2:] else ""
        rate = "" if name == ways[0] else f"{options.lines / median:.0f}"
        print(f"{name:20} {median:7.3f}s {min(seconds[name][1:]):7.3f}s {rate:>10} {ratios}")


if __name__ == "__main__":
    main()
