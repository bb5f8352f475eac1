"""Samples of many ranks: bytes of an archive, and CPU seconds to seal, verify and report it. Wanted: a report in 10 s.

usage: python benchmarks/report_ranks.py [RANKS [SECONDS]]     (1024 ranks, 3600 s)

The run is written by hand: one sample of every rank a second, with the fields of the agent on Linux.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
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


def make(path: Path, ranks: int, seconds: int) -> None:
    sealed_run(path, workers=ranks, seconds=float(seconds), samples=sample_rows(ranks, seconds))


def main() -> None:
    ranks, seconds = [*map(int, sys.argv[1:]), *(1024, 3600)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        # In a process of its own: the memory of this one counts as that of the commands that it forks.
        maker = multiprocessing.Process(target=make, args=(path, ranks, seconds))
        maker.start()
        maker.join()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{ranks} ranks, {seconds} s; load of the machine {os.getloadavg()[0]:.1f}")
        size, rows = (path / "resources.jsonl").stat().st_size, ranks * seconds
        print(f"samples: {size / 1e6:.0f} MB, {size / rows:.0f} bytes each")
        print(f"made and sealed: {used.ru_utime + used.ru_stime:.1f} s of CPU time", flush=True)
        page = Path(folder) / "report.html"
        environment = {**os.environ, "MLBENCH_HOME": folder, "PYTHONPATH": str(ROOT)}
        for words in (["verify", str(path)], ["report", str(page), str(path)]):
            command = [sys.executable, "-c", CODE, *words]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            assert status == 0, words
            took = used.ru_utime + used.ru_stime
            print(f"{words[0]}: {took:.1f} s of CPU time, at most {used.ru_maxrss / 1024:.0f} MB", flush=True)
        print(f"page: {page.stat().st_size / 1e6:.1f} MB")
    sys.exit(took > WANTED_SECONDS)


if __name__ == "__main__":
    main()
