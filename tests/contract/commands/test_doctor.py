"""`mlbench doctor`: what it reports of this machine, with real programs on PATH."""

import json
import os
import subprocess
import sys
import time
import tomllib
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from tests.documentation import ROOT
from tests.fakes.clock_shift import ClockShift


def test_versions_whose_support_ends_soon_are_named_with_their_last_day(tmp_path: Path) -> None:
    """Of the versions that this mlbench pins, on days before and after the first of them ends."""
    support = tomllib.loads((ROOT / "providers" / "pins.toml").read_text("utf-8"))["support"]
    ends = {f"{group} {version}": day for group, days in support.items() for version, day in days.items()}
    first = min(ends.values())
    early, late = (_versions_on(first + timedelta(days=days), tmp_path) for days in (-90, -30))
    assert early["state"] == "ok"
    assert not any(name in early["found"] for name in ends)
    assert late["state"] == "old"
    assert "Update mlbench" in late["hint"]
    ending = {name for name, day in ends.items() if day <= first + timedelta(days=30)}
    assert ending != ends.keys()
    assert {name for name, day in ends.items() if f"{name} ({day})" in late["found"]} == ending


def _versions_on(day: date, folder: Path) -> dict[str, str]:
    """What `mlbench doctor` finds of the versions on a day."""
    (folder / str(day)).mkdir()
    clock = ClockShift(folder / str(day))
    clock.step(datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp() - time.time())
    environment = {**os.environ, **clock.variables, "MLBENCH_HOME": str(folder / "home")}
    words = [sys.executable, "-m", "mlbench_cli", "doctor", "-o", "json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    found: dict[str, str] = checks["versions"]
    return found
