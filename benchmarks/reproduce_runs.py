"""Verdicts of `mlbench reproduce` on real runs: `python -m benchmarks.reproduce_runs [--times 20]`.

Runs an original of five repeats, then again and again: a reproduction by the same method, which should be *reproduced*,
with as many runs as `--repeat auto` chooses; and as many runs by another method, judged by `reproduce --with`, which
should be *different*. Both take turns, so that the machine is the same for both. The figure is the throughput of 30
updates on a modeled slow network, so that most of a run is waiting, which a busy machine hardly lengthens: times of a
second of pure computing vary by 10 % and more on a small machine. All is in a data folder of its own, which is deleted.
Prints one JSON line; exit code 1 if fewer than 95 % are reproduced, or not all others are different. About 20 minutes
on a quiet machine of two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900.0  # seconds of a command
SETTINGS = ("depth=8", "batch_size=64", "blocks_after=5", "blocks=5", "block_updates=5")
RUN = ("--task", "digits_resnet", "--preset", "throughput", *(word for each in SETTINGS for word in ("--set", each)))


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


def judge(home: str, within: str, *words: str) -> dict[str, Any]:
    """The receipt of a reproduction."""
    out = call(home, "reproduce", "original", "--within", within, "-o", "json", *words, codes=(0, 7, 9))  # of verdicts
    receipt: dict[str, Any] = json.loads(out[out.index("{") :])
    return receipt


def main() -> int:
    """Measure, print, and hold the shares against what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--repeat", default="auto", help="runs of each reproduction")
    parser.add_argument("--method", default="bsp")
    parser.add_argument("--other", default="eftopk", help="method that must be told from it")
    parser.add_argument("--network", default="model:20mbit")
    parser.add_argument("--within", default="10%")
    parser.add_argument("--share-machine", action="store_true", help="do not wait for runs of others")
    given = parser.parse_args()
    verdicts: dict[str, Counter[str]] = {"same": Counter(), "other": Counter()}
    ratios: dict[str, list[float]] = {"same": [], "other": []}
    runs = 0
    words = [*RUN, "--network", given.network, "--num-cpus", "1", "--yes", *["--share-machine"] * given.share_machine]
    with tempfile.TemporaryDirectory() as home:
        call(home, "run", "original", "2", *words, "--method", given.method, "--repeat", "5")
        for turn in range(given.times):
            same = judge(home, given.within, "--repeat", given.repeat, "--name", f"again{turn}")
            name, count = f"other{turn}", len(same["figures"][0]["reproduction"])
            call(home, "run", name, "2", *words, "--method", given.other, "--repeat", str(count))
            other = judge(home, given.within, *(w for n in range(count) for w in ("--with", f"{name}-2-r{n + 1}")))
            runs += 2 * count
            for side, receipt in (("same", same), ("other", other)):
                verdicts[side][receipt["verdict"]] += 1
                ratios[side].append(round(receipt["figures"][0]["ratio"], 3))
                print(f"{turn + 1} of {given.times}, {side}: {receipt['reason']}", file=sys.stderr, flush=True)
    print(json.dumps({**vars(given), "runs": runs, "verdicts": verdicts, "ratios": ratios}))
    is_right = verdicts["same"]["reproduced"] >= 0.95 * given.times and verdicts["other"]["different"] == given.times
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
