"""Verdicts of `mlbench reproduce` on real runs: `python -m benchmarks.reproduce_runs [--times 20]`.

Runs an original of five repeats, then again and again: a reproduction by the same method, which should be *reproduced*,
and runs by another method, judged by `reproduce --with`, which should be *different*. Both take turns, so that the
machine is the same for both. All is in a data folder of its own, which is deleted. Prints one JSON line; exit code 1
if fewer than 95 % are reproduced, or not all others are different. About 15 minutes on a quiet machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900.0  # seconds of a command
RUN = ("--task", "digits_resnet", "--preset", "tiny", "--num-cpus", "1", "--yes")


def call(home: str, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a command of mlbench that ends with one of `codes`."""
    environment = {**os.environ, "MLBENCH_HOME": home, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mlbench_cli", *words],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode not in codes:
        told = (done.stdout + done.stderr)[-2000:]
        sys.exit(f"mlbench {' '.join(words)} ended with {done.returncode}:\n{told}")
    return done.stdout


def judge(home: str, metric: str, within: str, *words: str) -> str:
    """The verdict of a reproduction."""
    asked = ("--metric", metric, "--within", within, "-o", "json", *words)
    out = call(home, "reproduce", "original", *asked, codes=(0, 7, 9))  # of the verdicts
    return str(json.loads(out[out.index("{") :])["verdict"])


def main() -> int:
    """Measure, print, and hold the shares against what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each reproduction")
    parser.add_argument("--method", default="bsp")
    parser.add_argument("--other", default="qsgd", help="method that must be told from it")
    parser.add_argument("--metric", default="throughput", help="figure that is judged")
    parser.add_argument("--within", default="10%")
    given = parser.parse_args()
    repeat = str(given.repeat)
    same: Counter[str] = Counter()
    other: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        call(home, "run", "original", "2", *RUN, "--method", given.method, "--repeat", "5")
        for turn in range(given.times):
            same[judge(home, given.metric, given.within, "--repeat", repeat, "--name", f"again{turn}")] += 1
            name = f"other{turn}"
            call(home, "run", name, "2", *RUN, "--method", given.other, "--repeat", repeat)
            runs = [word for number in range(given.repeat) for word in ("--with", f"{name}-2-r{number + 1}")]
            other[judge(home, given.metric, given.within, *runs)] += 1
            print(f"{turn + 1} of {given.times}: {dict(same)}, other method: {dict(other)}", file=sys.stderr)
    print(json.dumps({**vars(given), "same": same, "other_method": other}))
    return 0 if same["reproduced"] >= 0.95 * given.times and other["different"] == given.times else 1


if __name__ == "__main__":
    sys.exit(main())
