"""Install the wheel by pip, pipx and uv, as README says: `python -m tools.check_installs`, or `make installs`.

The wheel is built from this tree. Each installer gets folders of its own, and the command that it has installed is
used: it says its version, lists clusters, runs a program on this machine, verifies the archive, and says how to install
an extra that is missing, which is done. Takes a few minutes and a package index; not part of the tests.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
HINTS = {"pip": "pip install", "pipx": "pipx install --force", "uv": "uv tool install"}


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = make_environment(folder / "tools")
        run([str(python), "-m", "pip", "install", "--quiet", "uv", "pipx"])
        run([str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
        (wheel,) = folder.glob("*.whl")
        for installer in HINTS:
            problem = check(installer, python.parent, wheel, folder / installer)
            print(f"{installer}: {problem or 'ok'}", flush=True)
            failed += problem is not None
    return 1 if failed else 0


def make_environment(folder: Path) -> Path:
    """Make a virtual environment; its Python."""
    run([sys.executable, "-m", "venv", str(folder)])
    return folder / "bin" / "python"


def check(installer: str, tools: Path, wheel: Path, folder: Path) -> str | None:
    """Install the wheel and use its command; what went wrong, or None."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MLBENCH_", "PYTHON"))},
        "PIPX_HOME": str(folder / "home"),
        "PIPX_BIN_DIR": str(folder / "bin"),
        "UV_TOOL_DIR": str(folder / "home"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "MLBENCH_HOME": str(folder / "data"),
        "PATH": os.pathsep.join((str(folder / "bin"), str(tools), os.environ["PATH"])),
    }
    hint = f"{HINTS[installer]} 'mlbench-cli[gke] @ {wheel.as_uri()}'"
    try:
        run(install_command(installer, tools, wheel, folder), environment)
        mlbench = str(folder / "bin" / "mlbench")
        archive = str(folder / "a.zip")
        for words in (
            ["--version"],
            ["list-clusters"],
            ["run", "a", "1", "--command", "true", "--yes"],
            ["download", "a-1", "--output", archive],
            ["verify", archive],
        ):
            run([mlbench, *words], environment)
        if hint not in (said := examine(mlbench, environment)):
            return f"the hint is not {hint}: {said[-500:]}"
        run(shlex.split(hint), environment)
        if hint in (said := examine(mlbench, environment)):
            return f"after {hint}: {said[-500:]}"
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(error.cmd)}: exit code {error.returncode}: {(error.stderr or error.stdout).strip()[-500:]}"
    return None


def examine(mlbench: str, environment: Mapping[str, str]) -> str:
    """What the command says about an extra; without credentials it fails at any rate."""
    done = subprocess.run([mlbench, "doctor", "gke"], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def install_command(installer: str, tools: Path, wheel: Path, folder: Path) -> list[str]:
    """The command that installs the wheel into `folder`, so that bin/mlbench is there."""
    if installer == "pip":
        return [str(make_environment(folder)), "-m", "pip", "install", "--quiet", str(wheel)]
    if installer == "pipx":
        return [str(tools / "pipx"), "install", "--python", sys.executable, str(wheel)]
    return [str(tools / "uv"), "tool", "install", "--quiet", "--python", sys.executable, str(wheel)]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command. Raises CalledProcessError with what it printed."""
    subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir())


if __name__ == "__main__":
    sys.exit(main())
