"""Reports of the published archives, of two runs and of all: seconds of the command, bytes and nodes of the page.

    python benchmarks/report.py

Wanted: at most 250 kB for two runs, and 600 kB, 10,000 nodes and 2 s for all of them. Nodes are elements and texts.
"""

import os
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHIVES = sorted((ROOT / "results" / "archives").glob("*.zip"))
CODE = "import sys; from mlbench_cli.__main__ import main; sys.exit(main())"
ROUNDS = 3


class Counter(HTMLParser):
    """Counts elements and texts, as a browser makes nodes of them."""

    nodes = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.nodes += 1

    def handle_data(self, data: str) -> None:
        self.nodes += 1


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        environment = {**os.environ, "MLBENCH_HOME": folder, "PYTHONPATH": str(ROOT)}
        for archives in (ARCHIVES[::3][:2], ARCHIVES):
            took, used = [], []
            for _ in range(ROUNDS):
                begun, before = time.perf_counter(), os.times()
                words = [sys.executable, "-c", CODE, "report", str(page), *map(str, archives)]
                subprocess.run(words, env=environment, check=True, capture_output=True)
                after = os.times()
                took.append(time.perf_counter() - begun)
                used.append(after.children_user + after.children_system - before.children_user - before.children_system)
            counter = Counter()
            counter.feed(page.read_text("utf-8"))
            size = page.stat().st_size / 1e3
            print(
                f"report of {len(archives)} runs: {min(took):.2f} s, of CPU time {min(used):.2f} s, {size:.0f} kB, "
                f"{counter.nodes:,} nodes"
            )


if __name__ == "__main__":
    main()
