"""Discovery of runs that other machines start on the shown cluster."""

import time
from contextlib import suppress

from mlbench_cli.api import Client
from mlbench_cli.errors import MlbenchError
from mlbench_cli.server.config import ServerConfig

SECONDS = 30.0  # between two discoveries


def keep_discovering(config: ServerConfig) -> None:
    """Record new runs of the shown cluster periodically. Errors are shown on the pages of its runs."""
    assert config.cluster is not None
    while True:
        with suppress(MlbenchError, OSError), Client(config.home) as client:  # known runs are still shown
            client.discover(config.cluster)
        time.sleep(SECONDS)
