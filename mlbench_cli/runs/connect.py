"""The engine that executes runs on a cluster."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlbench_cli.model import Cluster

if TYPE_CHECKING:
    from mlbench_cli.engines.base import Engine

FINALIZER = "mlbench_cli.runs.finalize"


def connect_engine(cluster: Cluster, report: Callable[[str], None] | None = None) -> "Engine":
    """The engine of `cluster`. Raises MlbenchError if the cluster gives no access; it is not asked for anything yet.

    `report` gets the sentences for a person whose run waits for this machine.
    """
    if cluster.provider == "local":
        from mlbench_cli.engines.local.engine import LocalEngine

        return LocalEngine(finalizer=FINALIZER, report=report)
    if cluster.provider == "slurm":
        from mlbench_cli.engines.machines.details import SlurmDetails
        from mlbench_cli.engines.slurm.engine import SlurmEngine

        return SlurmEngine(SlurmDetails.of(cluster))
    if cluster.provider == "hosts":
        from mlbench_cli.engines.hosts.engine import HostsEngine
        from mlbench_cli.engines.machines.details import HostsDetails

        return HostsEngine(HostsDetails.of(cluster))
    from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
    from providers import registry

    return KubernetesEngine(registry.load(cluster.provider).connect(cluster))
