"""The file `methods-on-cpu` from nothing to its table: how long it takes on this machine. Wanted: under 10 minutes.

    .venv/bin/python benchmarks/experiment_file.py [--docs]

--docs writes table and picture into the documentation, with the load of the machine before and after.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "methods-on-cpu"
PAGE = ROOT / "docs" / "explanation" / f"{NAME}.md"
PICTURE = ROOT / "docs" / "images" / f"{NAME}.png"
WANTED_SECONDS = 600.0
TEXT = """\
# Methods on two cores

The file `{name}`, which comes with mlbench, trains a tiny BERT with seven [methods](../how-to/methods.md) on
one machine and measures its [throughput](throughput.md). `noop` sends nothing, so the difference from it is the cost of
communication.

{table}

![Grouped bars: sentences per second of each method, 1 and 2 workers](../images/{name}.png)

The {runs} runs took {minutes:.1f} minutes on a machine with {cores} cores. The load was {before:.1f} at the start and
{after:.1f} at the end.{warning}

```text
python benchmarks/experiment_file.py --docs
```
"""
BUSY = """ Two ranks cause a load of 2; the rest came from other programs, so **do not compare methods by these rates**,
whose intervals are wide for the same reason."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlbench-experiment-") as folder:
        out = Path(folder) / "out"
        before, begin = os.getloadavg()[0], time.monotonic()
        command = [sys.executable, "-m", "mlbench_cli", "run", "-f", NAME, "--to", str(out)]
        environment = {**os.environ, "MLBENCH_HOME": str(Path(folder) / "home"), "PYTHONPATH": str(ROOT)}
        code = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False).returncode
        seconds, after = time.monotonic() - begin, os.getloadavg()[0]
        if code:
            sys.exit(code)
        table = (out / "table.md").read_text()
        runs = len(json.loads((out / "table.json").read_text())["runs"])
        print(table)
        limit, load = f"{WANTED_SECONDS / 60:g}", f"{before:.1f} to {after:.1f}"
        print(f"{runs} runs in {seconds / 60:.1f} minutes (wanted: under {limit}); load {load}")
        if options.docs:
            # Two ranks and mlbench itself cause a load of at most 3.
            warning = BUSY if max(before, after) > 3 else ""
            facts = {"name": NAME, "runs": runs, "minutes": seconds / 60, "cores": os.cpu_count(), "before": before}
            body = re.sub(r"^# .*\n+", "", table).strip()
            PAGE.write_text(TEXT.format(table=body, after=after, warning=warning, **facts))
            shutil.copy(out / "throughput.png", PICTURE)
    sys.exit(seconds > WANTED_SECONDS)


if __name__ == "__main__":
    main()
