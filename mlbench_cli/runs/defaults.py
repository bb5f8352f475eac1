"""Defaults for options that were not given: from the environment and the config file, depending on the cluster."""

from pathlib import Path

from msgspec.structs import replace

from mlbench_cli.config.file import find_default
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store


def default_cluster(store: Store) -> Cluster:
    """The cluster of commands that name none: from MLBENCH_CLUSTER, the config file or set-cluster, else local."""
    default = find_default("cluster")
    if default is None:
        return store.current_cluster
    try:
        return store.cluster(default.value)
    except NotFoundError as error:
        raise NotFoundError(
            f"{default.origin}: {error.message}", hint="mlbench help defaults, or mlbench list-clusters"
        ) from None


def with_defaults(request: Request, cluster: Cluster) -> Request:
    """The request with missing options filled in from the environment and the config file. The data folder applies to
    this machine only; registry and namespace apply to Kubernetes clusters that do not set them."""
    open_keys = ["data-dir"] if cluster.engine == "local" else []
    if cluster.engine == "kubernetes":
        open_keys += [key for key in ("registry", "namespace") if not cluster.details.get(key)]
    changes: JsonObject = {}
    for key in (*open_keys, "timeout"):
        name = key.replace("-", "_")
        if getattr(request, name) is None and (default := find_default(key)) is not None:
            if key == "data-dir" and not Path(default.value).is_dir():
                raise NotFoundError(
                    f"{default.origin}: the folder {default.value} does not exist.",
                    hint="mlbench help defaults, or --data-dir DIR",
                )
            changes[name] = default.value
    return replace(request, **changes)
