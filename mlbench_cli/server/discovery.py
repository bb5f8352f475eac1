"""Runs that other machines start on the cluster that a dashboard shows."""

import time
from contextlib import suppress

from mlbench_cli.api import Client
from mlbench_cli.errors import MlbenchError
from mlbench_cli.server.config import ServerConfig

SECONDS = 30.0  # between two looks


def keep_discovering(config: ServerConfig) -> None:
    """Record runs of the shown cluster again and again; what the cluster refuses, its runs' own pages say."""
    assert config.cluster is not None
    while True:
        with suppress(MlbenchError, OSError), Client(config.home) as client:  # again later; known runs are shown
            client.discover(config.cluster)
        time.sleep(SECONDS)
