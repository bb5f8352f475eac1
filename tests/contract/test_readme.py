"""The README's section on a training of one's own, run as it stands: its script, its commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from mlbench_cli.store import Store

README = Path(__file__).parents[2] / "README.md"


def blocks(title: str, language: str) -> list[str]:
    """The code blocks of one section in one language."""
    section = re.split(r"^## ", README.read_text("utf-8"), flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{title}\n"))
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_bring_your_own_training(tmp_path: Path) -> None:
    (script,) = blocks("Bring your own training", "python")
    (commands,) = blocks("Bring your own training", "sh")
    (tmp_path / "train.py").write_text(script)
    home = tmp_path / "home"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "MLBENCH_HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {row.run.name: row.outcome for row in Store(home).runs()}
    assert outcomes == {"mine-2": "completed", "open-2": "goal_reached"}
    result = json.loads((Store(home).run("open-2").run.folder / "result.json").read_text())
    assert result["division"]["word"] == "open"
    assert result["goal"]["value"] >= result["goal"]["threshold"] == 90
