"""Pyodide's npm package for tests of sites: what MLBENCH_PYODIDE names, or fetched once into build/."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mlbench_cli.results.site.bundle import PYODIDE

NAME = f"pyodide-{PYODIDE}.tgz"
MISSING = f"needs the npm package pyodide: npm pack pyodide@{PYODIDE}, and MLBENCH_PYODIDE={NAME}"


def find_pyodide() -> Path:
    """The package's file. Skips the test if there is none, and npm cannot fetch it."""
    given = os.environ.get("MLBENCH_PYODIDE")
    folder = Path(__file__).parents[1] / "build"
    path = Path(given) if given else folder / NAME
    if not path.is_file() and shutil.which("npm"):
        folder.mkdir(exist_ok=True)
        words = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
        subprocess.run(words, cwd=folder, capture_output=True, timeout=120, check=False)
    if not path.is_file():
        pytest.skip(MISSING)
    return path
