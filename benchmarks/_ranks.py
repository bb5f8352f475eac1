"""A script started once more for each rank of a run on this machine. The underscore keeps it out of `make bench`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbench_cli.agent.machine import free_port

ROOT = Path(__file__).parents[1]


def is_rank() -> bool:
    """Whether this process is one of those that `start` has started."""
    return "RANK" in os.environ


def start(script: str, ranks: int, variables: Mapping[str, str] | None = None, *, arguments: Sequence[str] = ()) -> int:
    """Run `script` with `arguments` as every rank, with one thread each and `variables` on top; the worst exit code."""
    code, _ = _run([sys.executable, script, *arguments], ranks, variables or {}, None)
    return code


def read(command: Sequence[str], ranks: int, variables: Mapping[str, str]) -> str:
    """Run `command` as every rank, with one thread each and `variables` on top: what rank 0 prints.

    Raises SystemExit if a rank fails.
    """
    code, output = _run(command, ranks, variables, subprocess.PIPE)
    if code:
        raise SystemExit(f"{' '.join(command)} failed")
    return output


def _run(command: Sequence[str], ranks: int, variables: Mapping[str, str], out: int | None) -> tuple[int, str]:
    """The worst exit code and rank 0's output, if it goes to a pipe. What ranks leave in output folders is removed."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MLBENCH_OUTPUT_DIR": folder, **shared, **variables}
        started = [
            subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(rank)}, stdout=out, text=True)
            for rank in range(ranks)
        ]
        outputs = [rank.communicate()[0] for rank in started]
        return max(abs(rank.returncode) for rank in started), outputs[0]
