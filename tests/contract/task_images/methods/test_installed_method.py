"""A method of an installed package: its wheel, pip, another environment, and a training there."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.documentation import ROOT, read_blocks

INFO = "other_averages-1.0.dist-info"


def build_wheel(folder: Path) -> Path:
    """The method of the how-to as the wheel of a package, with its entry point."""
    [block] = [block for block in read_blocks(ROOT / "docs" / "how-to" / "methods.md") if block.title]
    files = {
        "other_averages.py": block.text,
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: other-averages\nVersion: 1.0\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/entry_points.txt": "[mlbench.methods]\naverages = other_averages:Averages\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},"
        f"{len(text.encode())}\n"
        for name, text in files.items()
    )
    path = folder / "other_averages-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{INFO}/RECORD": f"{record}{INFO}/RECORD,,\n"}.items():
            wheel.writestr(name, text)
    return path


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_method_of_an_installed_package_is_listed_and_trains(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(fresh)})
    # mlbench and torch come from this environment, without a download.
    (Path(packages) / "mlbench.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    environment = {**os.environ, "MLBENCH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def mlbench(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), "-m", "mlbench_cli", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    assert mlbench("methods", "averages").returncode == 4
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(build_wheel(tmp_path))], check=True, capture_output=True, timeout=240)
    shown = mlbench("methods", "averages", "-o", "json")
    assert shown.returncode == 0, shown.stderr
    assert "this page" in shown.stdout
    trained = mlbench(
        "run",
        "own",
        "2",
        "--task",
        "digits_resnet",
        "--preset",
        "tiny",
        "--method",
        "averages",
        "--set",
        "comm.steps=5",
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    [result] = (tmp_path / "home").rglob("result.json")
    document = json.loads(result.read_text("utf-8"))
    assert document["method"] == "averages"
    assert "steps=2" in document["details"]["self_check"]["shortened"]
