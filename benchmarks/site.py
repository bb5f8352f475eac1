"""Build a results site of many archives, and open its largest pages: seconds, bytes, and the largest page.

    python -m benchmarks.site [--results 2000] [--repeats 1]

The archives are synthetic: hand-written logs, sealed by mlbench itself. Verifying them is part of what is timed.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.site.build import SiteOptions, build_site
from tests.unit.results.runs import sealed_run

TASKS = ("mnist", "digits_resnet", "cifar10_resnet20", "epsilon_logistic_regression")
METHODS = ("bsp", "wfbp", "ddp", "eftopk", "powersgd", "localsgd", "qsgd", "fp16")


def make(number: int, repeat: int, folder: str) -> None:
    """One archive of result `number`."""
    name = f"r{number}-{repeat}"
    place = Path(folder, "runs", name)
    sealed_run(
        place,
        name=name,
        task=TASKS[number % len(TASKS)],
        method={"name": METHODS[number // 4 % len(METHODS)]},
        workers=1 + number // 32 % 8,
        seconds=50.0 + number % 97 + repeat,
        seed=42 + repeat,
        backend=f"custom:{number // 256}",
    )
    pack(place, Path(folder, "archives", f"{name}.zip"))


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archives = Path(folder, "archives")
        archives.mkdir()
        work = [(number, repeat, folder) for number in range(given.results) for repeat in range(given.repeats)]
        with ProcessPoolExecutor() as pool:
            list(pool.map(make, *zip(*work, strict=True), chunksize=16))
        begun, used = time.perf_counter(), _cpu_seconds()
        summary = build_site([archives], Path(folder, "site"), SiteOptions(worker_hour=0.05))
        seconds = time.perf_counter() - begun
        size = sum(path.stat().st_size for path in Path(folder, "site").rglob("*") if path.is_file())
        print(
            json.dumps(
                {
                    "results": summary.claims,
                    "archives": summary.archives,
                    "seconds": round(seconds, 1),
                    "cpu_seconds": round(_cpu_seconds() - used, 1),
                    "bytes_of_site": size,
                    "largest_page_bytes": summary.largest_page,
                }
            )
        )


if __name__ == "__main__":
    main()
