"""What planning a large experiment file costs: the CPU time of `mlbench run -f FILE --dry-run`, and its memory.

    python benchmarks/planning.py [CELLS...]

A cell is one point of a matrix of batch sizes and numbers of epochs, with one run. Nothing is started. Wanted: 5,000
cells within 3 s of CPU time, and no more than linear growth. The exit code is 1 if 5,000 cells take longer.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WANTED_SECONDS = 3.0
EPOCHS = 50


def main(sizes: list[int]) -> int:
    """Plan files of these many cells. The first command, which is not counted, compiles the modules."""
    print(f"wanted: 5,000 cells in {WANTED_SECONDS:g} s of CPU time")
    print(f"{'cells':>6} {'CPU':>8} {'per cell':>10} {'memory':>9}")
    plan(1)
    code = 0
    for size in sizes:
        seconds, memory = plan(size)
        print(f"{size:>6} {seconds:>6.2f} s {1000 * seconds / size:>7.2f} ms {memory:>6.0f} MB", flush=True)
        code |= size == 5000 and seconds > WANTED_SECONDS
    return code


def plan(cells: int) -> tuple[float, float]:
    """CPU seconds and peak memory in MB of planning that many cells in a new data folder."""
    matrix: dict[str, Any] = {
        "set.batch_size": list(range(1, -(-cells // EPOCHS) + 1)),
        "set.epochs": list(range(1, min(cells, EPOCHS) + 1)),
    }
    file = {
        "task": "digits_resnet",
        "preset": "tiny",
        "num-cpus": 1,
        "workers": [1],
        "runs": [{"name": "cells", "matrix": matrix}],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "many.yaml")
        path.write_text(json.dumps(file))
        command = [sys.executable, "-m", "mlbench_cli", "run", "-f", str(path), "--dry-run", "-o", "json"]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "MLBENCH_HOME": str(Path(folder, "home"))}
        )
        assert child.stdout is not None
        document = json.loads(child.stdout.read())
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert document["runs"] == cells, document["runs"]
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or [100, 1000, 5000]))
