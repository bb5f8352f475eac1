"""The engine that executes runs on a cluster."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlbench_cli.model.run import LOCAL, Cluster, Run
from mlbench_cli.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from mlbench_cli.engines.base import Engine
    from mlbench_cli.model.spec import RunSpec
    from mlbench_cli.storage.store import Store

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

    return KubernetesEngine(registry.load(cluster.provider).connect(cluster), report)


class EngineCache:
    """The engine of a run's cluster, made once for each cluster.

    For a sealed run the local one will do: all is in its folder, and no engine is asked.
    """

    def __init__(
        self,
        store: "Store",
        report: Callable[[str], None] | None = None,
        connect: "Callable[[Cluster], Engine] | None" = None,
    ) -> None:
        """`connect` makes the engine of a cluster; default: the one that executes runs there."""
        self._store = store
        self._report = report
        self._connect = connect or (lambda cluster: connect_engine(cluster, report))
        self._engines: dict[str, Engine] = {}

    def __call__(self, run: Run) -> "Engine":
        if RunFolder(run.folder).is_sealed:
            return connect_engine(LOCAL, self._report)
        return self.of_cluster(run.spec.cluster)

    def of_cluster(self, name: str) -> "Engine":
        """The engine of the cluster of that name. Raises NotFoundError."""
        if name not in self._engines:
            self._engines[name] = self._connect(self._store.cluster(name))
        return self._engines[name]


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
