"""Does an acceptance test take as long as its plan says? `certify_minutes.py [LEVEL ...] [--nodes N] [--hours H]`.

Runs `mlbench certify local` and prints the minutes planned and taken. Suspects, if there are any, take longer, as the
plan says, too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help="quick, standard or soak (default: quick)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--hours", help="of a soak")
    options = parser.parse_args(arguments)
    for level in options.levels or ["quick"]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print(take(level, options.nodes, options.hours, Path(folder)), flush=True)


def take(level: str, nodes: int, hours: str | None, folder: Path) -> str:
    """Make a certificate of this machine; what was planned and taken, in words."""
    words = [sys.executable, "-m", "mlbench_cli", "certify", "local", "--level", level, "--nodes", str(nodes)]
    words += ["--yes", "--to", str(folder / "certificate"), *(["--hours", hours] if level == "soak" and hours else [])]
    environment = {**os.environ, "MLBENCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    taken = (time.monotonic() - begun) / 60
    planned = re.search(r"\(minutes: ([^)]*)\)", done.stdout + done.stderr)
    certificate = folder / "certificate/certificate.json"
    if planned is None or not certificate.exists():
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    minutes = sum(float(stage.rpartition(" ")[2]) for stage in planned[1].split(", "))
    document = json.loads(certificate.read_text())
    states = "; ".join(" ".join([node["node"], node["state"], *node["reasons"]]) for node in document["nodes"])
    load = os.getloadavg()[0]
    return f"{level}, {nodes} nodes: planned {minutes:.1f} min, taken {taken:.1f}, load {load:.1f}; {states}"


if __name__ == "__main__":
    main()
