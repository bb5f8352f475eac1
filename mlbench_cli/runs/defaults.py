"""What holds for options that nobody gave: the environment's and the config file's word, per cluster."""

from dataclasses import replace
from pathlib import Path

from mlbench_cli.config.file import find_default
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store


def default_cluster(store: Store) -> Cluster:
    """The cluster of commands that name none: by MLBENCH_CLUSTER, by the config file, by set-cluster, else local."""
    default = find_default("cluster")
    if default is None:
        return store.current_cluster
    try:
        return store.cluster(default.value)
    except NotFoundError as error:
        raise NotFoundError(
            f"{default.origin}: {error.message}", hint="mlbench config, or mlbench list-clusters"
        ) from None


def with_defaults(request: Request, cluster: Cluster) -> Request:
    """The request with what environment and config file say of options that it leaves open, as far as they concern
    the cluster: the data folder is one of this machine, registry and namespace are for Kubernetes without its own."""
    is_local = cluster.provider == "local"
    is_kubernetes = cluster.provider not in ("local", "slurm", "hosts")
    open_keys = [key for key in ("data-dir",) if is_local]
    open_keys += [key for key in ("registry", "namespace") if is_kubernetes and not cluster.details.get(key)]
    changes: JsonObject = {}
    for key in (*open_keys, "timeout"):
        name = key.replace("-", "_")
        if getattr(request, name) is None and (default := find_default(key)) is not None:
            if key == "data-dir" and not Path(default.value).is_dir():
                raise NotFoundError(
                    f"{default.origin}: the folder {default.value} does not exist.",
                    hint="mlbench config, or --data-dir DIR",
                )
            changes[name] = default.value
    return replace(request, **changes)
