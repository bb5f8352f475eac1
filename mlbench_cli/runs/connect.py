"""The engine that executes runs on a cluster."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mlbench_cli.model.run import Cluster

if TYPE_CHECKING:
    from mlbench_cli.engines.base import Engine
    from mlbench_cli.model.spec import RunSpec

FINALIZER = "mlbench_cli.runs.finalize"


def connect_engine(cluster: Cluster, report: Callable[[str], None] | None = None) -> "Engine":
    """The engine of `cluster`. Raises MlbenchError if the cluster gives no access; it is not asked for anything yet.

    `report` gets the sentences for a person who waits: for this machine, or for a cluster that is silent.
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
    from providers.base import RunsOnNodes

    provider = registry.load(cluster.provider)
    run_on_node = partial(provider.run_on_node, cluster) if isinstance(provider, RunsOnNodes) else None
    return KubernetesEngine(provider.connect(cluster), run_on_node, report)


def connect_renderer(cluster: Cluster, report: Callable[[str], None] | None = None) -> "Engine":
    """An engine that renders for `cluster` and reaches nothing: --dry-run needs no network and no credentials."""
    if cluster.provider in ("local", "attached", "slurm", "hosts"):  # an attached one's access is read from a file
        return connect_engine(cluster, report)
    from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
    from mlbench_cli.kube.access import Access

    return KubernetesEngine(Access("https://nowhere.invalid", cluster.details.get("namespace") or "default"))


def find_machine_holder(spec: "RunSpec") -> str | None:
    """Who has this machine, so that a local run has to wait; None if it can start, or runs elsewhere."""
    if spec.engine != "local" or spec.share_machine:
        return None
    from mlbench_cli.agent.lock import find_holder

    holder = find_holder()
    return None if holder is None else holder.phrase
