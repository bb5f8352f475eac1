"""results/places.sh: each place keeps the archives it has made, whatever becomes of the others."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Stands for Python: writes down its arguments, and fails as the runs at $FAILING do.
PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in *experiment-"$FAILING"*) exit 7 ;; esac
"""
# Stands for the script that starts hosts and Slurm; the shared folder is this one.
MACHINES = """#!/bin/sh
echo "machines $1" >> calls
[ "$1" != env ] || echo "MACHINES_HOSTS=h MACHINES_SSH_CONFIG=c MACHINES_SHARED=."
"""


def run_places(folder: Path, failing: str, *places: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    (folder / "results").mkdir()
    shutil.copy(ROOT / "results" / "places.sh", folder / "results")
    for name, text in (("python", PYTHON), ("machines", MACHINES)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    given = {**os.environ, "PYTHON": "python", "MACHINES": "./machines", "FAILING": failing}
    command = ["sh", str(folder / "results" / "places.sh"), *places]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=180, check=False)
    return done, (folder / "calls").read_text().splitlines()


def test_a_place_that_fails_costs_no_other_place_its_archives(tmp_path: Path) -> None:
    done, calls = run_places(tmp_path, "hosts", "network", "hosts", "slurm")
    assert (done.returncode, done.stderr) == (1, "places.sh: no new archives of hosts\n")
    kinds = [next(word for word in ("collect", "experiment", "machines", "attach") if word in call) for call in calls]
    hosts = ["machines", "machines", "attach", "experiment", "machines"]
    assert kinds == ["experiment", "collect", *hosts, *hosts[:-1], "collect", "machines"]
    assert [call for call in calls if "down" in call] == ["machines down"] * 2


def test_all_places_well_is_success(tmp_path: Path) -> None:
    done, calls = run_places(tmp_path, "nothing", "network", "slurm")
    assert (done.returncode, done.stderr) == (0, "")
    assert sum("collect" in call for call in calls) == 2
