"""What the commands about machines without Kubernetes share."""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store

SshConfig = Annotated[
    str | None, typer.Option("--ssh-config", help="configuration file of ssh; default: ssh's own (~/.ssh/config)")
]


def read_text_file(path: Path, option: str) -> str:
    """The text of a file that an option names. Raises NotFoundError, UsageError."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"{option}: there is no file {path}.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{option} {str(path)!r}: it cannot be read as text: {error}.") from None


def record(cluster: Cluster) -> Cluster:
    """Keep the cluster's record, in place of an older one of the same kind, and choose it for the next commands."""
    store = Store()
    for known in store.clusters():
        if known.name == cluster.name and known.provider != cluster.provider:
            raise UsageError(
                f'There is already a cluster "{cluster.name}", of {known.provider}.', hint="Choose another name."
            )
    kept = store.record_cluster(cluster)
    store.choose_cluster(kept)
    return kept
