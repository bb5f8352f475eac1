"""Shared code of the commands for machines without Kubernetes: Slurm, and hosts over ssh."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.clusters.manage import require_free_name
from mlbench_cli.engines.machines.engine import MachinesEngine, Orphan
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.storage.store import Store

SshConfig = Annotated[str | None, typer.Option("--ssh-config", help="ssh configuration file; default: ~/.ssh/config")]


def find_ssh_config(text: str | None) -> str | None:
    """The absolute path of --ssh-config, since the record of a cluster outlives the current folder. Raises
    NotFoundError or UsageError."""
    if text is None:
        return None
    path = Path(os.path.expanduser(text)).absolute()
    read_text_file(path, "--ssh-config")
    return str(path)


def read_text_file(path: Path, option: str) -> str:
    """The text of a file that an option names, without a byte order mark. Raises NotFoundError, UsageError."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise NotFoundError(f"{option}: the file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{option} {str(path)!r}: it cannot be read as text: {error}.") from None


def record(cluster: Cluster) -> Cluster:
    """Store the cluster's record, replacing an older one of the same kind, and make it the default cluster."""
    store = Store(notice=console.note)
    require_free_name(store, cluster)
    kept = store.record_cluster(cluster)
    store.choose_cluster(kept)
    return kept


def find_orphans(store: Store, providers: Sequence[str] | None) -> list[Orphan]:
    """Processes of runs on attached machines without an agent. Warns about clusters that cannot be reached."""
    found = []
    for name, engine in _engines(store, providers):
        try:
            found += engine.list_orphans()
        except MlbenchError as error:
            console.warn(f"{name} was not searched: {error.message}")
    return found


def end_orphans(store: Store, providers: Sequence[str] | None) -> None:
    """End processes of runs whose agents have gone, on all attached machines of these providers (None: all)."""
    for _, engine in _engines(store, providers):
        engine.end_orphans()


def _engines(store: Store, providers: Sequence[str] | None) -> Iterator[tuple[str, MachinesEngine]]:
    for cluster in store.clusters():
        if cluster.engine in ("slurm", "hosts") and (not providers or cluster.provider in providers):
            engine = connect_engine(cluster)
            assert isinstance(engine, MachinesEngine)
            yield cluster.name, engine
