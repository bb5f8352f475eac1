"""A script started once more for each rank of a run on this machine. The underscore keeps it out of `make bench`."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def is_rank() -> bool:
    """Whether this process is one of those that `start` has started."""
    return "RANK" in os.environ


def start(script: str, ranks: int, variables: Mapping[str, str] | None = None, *, arguments: Sequence[str] = ()) -> int:
    """Run `script` with `arguments` as every rank, with one thread each and `variables` on top; the worst exit code."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **shared, **(variables or {})}
    command = [sys.executable, script, *arguments]
    started = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(ranks)]
    return max(abs(rank.wait()) for rank in started)
