"""A report of five runs: seconds of the whole command, and bytes of the page. Wanted: at most 3 s and 3 MB.

Five runs with 600 samples of every rank, written by hand and sealed. `python benchmarks/report.py`
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.results.runs import sealed_run  # noqa: E402

CODE = "import sys; from mlbench_cli.__main__ import main; sys.exit(main())"
ROUNDS = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        archives = []
        for workers, repeat in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)):
            samples = [
                {"time": 1_760_000_000.0 + second, "rank": rank, "cpu_seconds": second * 0.9, "rss_bytes": 1e9}
                for second in range(600)
                for rank in range(workers)
            ]
            path = Path(folder) / f"x-{workers}-r{repeat}"
            seconds = 600.0 / workers + repeat
            archives.append(str(sealed_run(path, workers=workers, seconds=seconds, samples=samples, name=path.name)))
        page = Path(folder) / "report.html"
        environment = {**os.environ, "MLBENCH_HOME": folder, "PYTHONPATH": str(ROOT)}
        took = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            words = [sys.executable, "-c", CODE, "report", str(page), *archives]
            subprocess.run(words, env=environment, check=True, capture_output=True)
            took.append(time.perf_counter() - begun)
        bare = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare = time.perf_counter() - bare
        size = page.stat().st_size
        print(f"report of 5 runs: {min(took):.2f} s (python -c pass: {bare:.2f} s), {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
