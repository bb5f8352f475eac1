"""Samples of many ranks: bytes of an archive, and CPU seconds to seal, verify and report it. Wanted: a report in 10 s.

usage: python benchmarks/report_ranks.py [RANKS [SECONDS]]     (1024 ranks, 3600 s)

The run is written by hand: one sample of every rank a second, with the fields of the agent on Linux.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.results.runs import sealed_run  # noqa: E402

CODE = "import sys; from mlbench_cli.__main__ import main; sys.exit(main())"
WANTED_SECONDS = 10.0


def sample_rows(ranks: int, seconds: int) -> Iterator[dict[str, Any]]:
    for second in range(seconds):
        for rank in range(ranks):
            yield {
                "time": 1_760_000_000.0 + second + rank / 2e3,
                "rank": rank,
                "cpu_seconds": round(second * 0.97 + rank % 7 * 0.01, 2),
                "rss_bytes": 1_000_000_000 + rank * 4096 + second % 50 * 65_536,
                "read_bytes": 12_345_678 + second * 4096,
                "write_bytes": 345_678 + second * 512,
                "received_bytes": second * 1_234_567,
                "sent_bytes": second * 1_234_567,
                "log_bytes": second * 100,
            }


def main() -> None:
    ranks, seconds = [*map(int, sys.argv[1:]), *(1024, 3600)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        path = sealed_run(
            Path(folder) / "run", workers=ranks, seconds=float(seconds), samples=sample_rows(ranks, seconds)
        )
        print(f"{ranks} ranks, {seconds} s; load of the machine {os.getloadavg()[0]:.1f}")
        size, rows = (path / "resources.jsonl").stat().st_size, ranks * seconds
        print(f"samples: {size / 1e6:.0f} MB, {size / rows:.0f} bytes each")
        print(f"made and sealed: {time.process_time() - begun:.1f} s of CPU time")
        page = Path(folder) / "report.html"
        environment = {**os.environ, "MLBENCH_HOME": folder, "PYTHONPATH": str(ROOT)}
        for words in (["verify", str(path)], ["report", str(page), str(path)]):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", CODE, *words], env=environment, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{words[0]}: {took:.1f} s of CPU time, at most {after.ru_maxrss / 1024:.0f} MB")
        print(f"page: {page.stat().st_size / 1e6:.1f} MB")
    sys.exit(took > WANTED_SECONDS)


if __name__ == "__main__":
    main()
